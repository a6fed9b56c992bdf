//! A plot on a page: a line with the values at its peak, which the script replaces by those under
//! the crosshair; the drawing for wide and for narrow screens; and the samples for the script.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::axis::Axis;
use super::drawing::{Shape, inline, limit_facts};
use super::frame::Frame;
use super::keys::{Key, keys};
use super::panel::{Dot, Panel};
use super::plot::Plot;
use super::{shown, xml};
use crate::numbers::{to_f64, whole};

/// Writes the figure of each plot, at one scale. `wide` and `narrow` have the same panels.
pub(super) fn figures(wide: &[Plot<'_>], narrow: &[Plot<'_>], page: &mut String) {
    let count = wide.len();
    for (plot, small) in wide.iter().zip(narrow) {
        let panel = plot.panel;
        page.push_str("<figure>\n");
        if !panel.heading.is_empty() {
            let _ = writeln!(page, "<figcaption>{}</figcaption>", xml(&panel.heading));
        }
        if panel.dots.is_empty() {
            page.push_str(
                "<p class=\"soft\">No samples: the run ended before it could report them, or none were kept.</p>\n",
            );
        } else {
            readout(plot, page);
            let label = label(panel);
            page.push_str("<div class=\"stage\">\n");
            page.push_str(&inline(plot, Shape::Wide, count, &label));
            page.push_str(&inline(small, Shape::Narrow, count, &label));
            page.push_str("</div>\n");
            let facts: Vec<String> = limit_facts(plot).iter().map(|fact| xml(fact)).collect();
            if !facts.is_empty() {
                let _ = writeln!(page, "<p class=\"soft\">{}.</p>", facts.join("; "));
            }
            let _ = writeln!(page, "<script type=\"application/json\">{}</script>", for_script(&data(plot)));
        }
        page.push_str("</figure>\n");
    }
}

/// The drawing in words.
fn label(panel: &Panel<'_>) -> String {
    let names = panel.before.as_ref().map(|before| &before.names);
    let earlier = panel.before.as_ref().and_then(|before| before.host_peak.as_ref());
    let marks = earlier.into_iter().chain(&panel.host_peak).chain(&panel.rss_peak);
    let marks: Vec<String> = marks.map(|mark| mark.long.clone()).collect();
    let of = names.map(|[one, other]| format!(" of {one} and {other}")).unwrap_or_default();
    format!("Memory over time{of}: {}. The numbers are in the tables.", marks.join("; "))
}

/// The keys with the values at the peak: what the page says without a script.
fn readout(plot: &Plot<'_>, page: &mut String) {
    let peak = peak_of(&plot.dots);
    let (at, time, layer) = match (peak, &plot.panel.before) {
        (Some(peak), None) => ("At the peak", plot.time.text(peak.seconds), layer_at(plot, peak.seconds)),
        _ => ("At their peaks", String::new(), String::new()),
    };
    let _ = writeln!(
        page,
        "<div class=\"readout\">\n<p><span class=\"at\">{at}</span> <b class=\"time\">{time}</b> \
         <span class=\"layer\">{}</span></p>\n<ul>",
        xml(&layer)
    );
    let own = std::slice::from_ref(plot);
    for key in keys(own) {
        let dots = if key == Key::Before { &plot.before } else { &plot.dots };
        let value = peak_of(dots).filter(|_| key.is_series()).map(|dot| {
            let value = value_of(key, dot).map(|bytes| axis_of(plot, key).text(bytes));
            format!(" <b>{}</b>", value.unwrap_or_else(|| "-".to_owned()))
        });
        let class = if key.is_series() { "" } else { " class=\"soft\"" };
        let _ = writeln!(
            page,
            "<li{class}><svg class=\"plot mark\" viewBox=\"0 -12 18 15\" aria-hidden=\"true\">{}</svg>{}{}</li>",
            key.mark(),
            xml(&key.text(own)),
            value.unwrap_or_default()
        );
    }
    page.push_str("</ul>\n</div>\n");
}

fn peak_of(dots: &[Dot]) -> Option<&Dot> {
    let height = |dot: &Dot| dot.host.or(dot.edges()[2]).unwrap_or(0.0);
    dots.iter().reduce(|highest, dot| if height(dot) > height(highest) { dot } else { highest })
}

fn value_of(key: Key, dot: &Dot) -> Option<f64> {
    match key {
        Key::Kind(0) => dot.anon,
        Key::Kind(1) => dot.shmem,
        Key::Kind(_) => dot.file,
        Key::Vram => dot.vram,
        _ => dot.host,
    }
}

fn axis_of<'a>(plot: &'a Plot<'_>, key: Key) -> &'a Axis {
    match &plot.vram {
        Some(axis) if key == Key::Vram => axis,
        _ => &plot.memory,
    }
}

/// The layer that was waited for at a time.
fn layer_at(plot: &Plot<'_>, seconds: f64) -> String {
    let cells = plot.cells(&plot.panel.ends, &UNIT);
    cells.iter().find(|cell| cell.seconds >= seconds).map(|cell| cell.name()).unwrap_or_default()
}

/// A frame whose only purpose is to share cells as in the wide drawing.
const UNIT: Frame = Frame { left: 0.0, top: 0.0, width: 884.0, height: 1.0 };

/// Samples, layers and units for the script. Sizes are in KiB, times in microseconds.
fn data(plot: &Plot<'_>) -> Value {
    let unit = |axis: &Axis| json!({ "unit": axis.unit, "size": axis.unit_size(), "digits": axis.digits() });
    let curve = |dots: &[Dot], ends: &[super::panel::LayerEnd]| {
        let times: Vec<u64> = dots.iter().map(|dot| whole(dot.seconds * 1e6)).collect();
        let cells = plot.cells(ends, &UNIT);
        let layers: Vec<Value> =
            cells.iter().map(|cell| json!([whole(cell.seconds * 1e6), shown(&cell.name())])).collect();
        json!({ "us": times, "layers": layers })
    };
    let before = plot.panel.before.as_ref();
    let curves: Vec<Value> = before
        .map(|before| curve(&plot.before, &before.ends))
        .into_iter()
        .chain([curve(&plot.dots, &plot.panel.ends)])
        .collect();
    let series = |key: Key| {
        let dots = if key == Key::Before { &plot.before } else { &plot.dots };
        let kib: Vec<Option<u64>> =
            dots.iter().map(|dot| value_of(key, dot).map(|bytes| whole(bytes / to_f64(1024)))).collect();
        json!({
            "curve": usize::from(before.is_some() && key != Key::Before),
            "axis": if key == Key::Vram { "vram" } else { "memory" },
            "is_line": matches!(key, Key::Host | Key::Before),
            "kib": kib,
        })
    };
    let all: Vec<Value> =
        keys(std::slice::from_ref(plot)).into_iter().filter(|key| key.is_series()).map(series).collect();
    json!({
        "end_us": whole(plot.time.end * 1e6),
        "end_kib": whole(plot.memory.end / 1024.0),
        "time": unit(&plot.time),
        "memory": unit(&plot.memory),
        "vram": plot.vram.as_ref().map(unit),
        "curves": curves,
        "series": all,
    })
}

/// JSON that cannot end the element it is in.
fn for_script(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c")
}
