//! Text about a load by a device map: a line for each place.

use crate::numbers::{bytes, count, rate, seconds};
use crate::report::PlaceShare;

/// `place     GPU 0: 12 layers, 3.1 GiB; 1.2 s, 2.6 GiB/s`
pub(super) fn lines(places: &[PlaceShare]) -> Vec<String> {
    places.iter().map(line).collect()
}

fn line(place: &PlaceShare) -> String {
    let name = match place.tier.as_str() {
        "cpu" => "host".to_owned(),
        "disk" => "disk".to_owned(),
        gpu => format!("GPU {gpu}"),
    };
    let what =
        format!("place     {name}: {}, {}", count(place.layers, "layer"), bytes(Some(place.tensor_bytes)));
    let Some(took) = place.seconds else { return format!("{what}; not read") };
    let speed = rate(place.read_bytes, took).map(|rate| format!(", {rate}")).unwrap_or_default();
    let back = place.vram.first().and_then(|vram| {
        let more = u64::try_from(vram.after_unload_growth_bytes?).unwrap_or(0);
        Some(match more {
            0 => "; all of it back after unload".to_owned(),
            more => format!("; {} more than at the start after unload", bytes(Some(more))),
        })
    });
    format!("{what}; {}{speed}{}", seconds(took), back.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Vram;

    #[test]
    fn each_place_has_a_line() {
        let gpu = PlaceShare {
            tier: "1".to_owned(),
            layers: 2,
            tensor_bytes: 3 << 20,
            resident_bytes: 4 << 20,
            read_bytes: 3 << 20,
            seconds: Some(1.0),
            vram: vec![Vram { after_unload_growth_bytes: Some(0), ..Vram::default() }],
        };
        let left = PlaceShare {
            vram: vec![Vram { after_unload_growth_bytes: Some(1 << 20), ..Vram::default() }],
            ..gpu.clone()
        };
        let disk =
            PlaceShare { tier: "disk".to_owned(), layers: 1, tensor_bytes: 5, ..PlaceShare::default() };
        let lines = lines(&[gpu, left, disk]);
        assert!(lines[0].starts_with("place     GPU 1: 2 layers, 3 MiB; 1"), "{lines:?}");
        assert!(lines[0].ends_with("; all of it back after unload"), "{lines:?}");
        assert!(lines[1].ends_with("; 1 MiB more than at the start after unload"), "{lines:?}");
        assert_eq!(lines[2], "place     disk: 1 layer, 5 B; not read");
    }
}
