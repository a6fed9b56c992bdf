//! Axes: round ticks in a suitable unit, and their texts.

use crate::numbers::to_f64;

/// An axis from zero to `end`.
pub(super) struct Axis {
    /// Its end, in bytes or seconds.
    pub(super) end: f64,
    /// The unit of the texts.
    pub(super) unit: &'static str,
    /// Bytes or seconds of one unit.
    unit_size: f64,
    /// The distance of two ticks, in units.
    step: f64,
}

impl Axis {
    /// Up to `end` bytes.
    pub(super) fn bytes(end: f64, tick_count_max: u32) -> Self {
        const UNITS: [(&str, u64); 5] =
            [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];
        Self::with_units(end, UNITS.map(|(unit, size)| (unit, to_f64(size))), tick_count_max)
    }

    /// Up to `end` seconds.
    pub(super) fn seconds(end: f64, tick_count_max: u32) -> Self {
        Self::with_units(end, [("s", 1.0), ("ms", 1e-3)], tick_count_max)
    }

    fn with_units<const N: usize>(end: f64, units: [(&'static str, f64); N], tick_count_max: u32) -> Self {
        let (smallest, size) = units[N - 1];
        let end = if end.is_finite() && end > 0.0 { end } else { size };
        let (unit, unit_size) = units.into_iter().find(|(_, size)| end >= *size).unwrap_or((smallest, size));
        Self { end, unit, unit_size, step: round_step(end / unit_size, tick_count_max) }
    }

    /// A value in the unit of the axis, to about three digits: `445 MiB`, `1.04 GiB`. The script of
    /// the page does the same.
    pub(super) fn text(&self, value: f64) -> String {
        let value = value / self.unit_size;
        let digits = match value {
            value if value >= 100.0 => 0,
            value if value >= 10.0 => self.digits().min(1),
            // Little is not nothing.
            value if value > 0.0 && value < 0.1 && self.digits() > 0 => 3,
            _ => self.digits(),
        };
        let text = format!("{value:.digits$}");
        let text = if digits > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
        format!("{text} {}", self.unit)
    }

    /// Digits after the point, at most.
    pub(super) fn digits(&self) -> usize {
        match self.unit {
            "B" => 0,
            "KiB" | "MiB" | "ms" => 1,
            _ => 2,
        }
    }

    /// Bytes or seconds of one unit.
    pub(super) fn unit_size(&self) -> f64 {
        self.unit_size
    }

    /// The position of a value, from 0 to 1; values outside are at the nearest end.
    pub(super) fn share(&self, value: f64) -> f64 {
        (value / self.end).clamp(0.0, 1.0)
    }

    /// Every tick from zero: its value, in bytes or seconds, and its text.
    pub(super) fn ticks(&self) -> impl Iterator<Item = (f64, String)> + '_ {
        let decimals =
            (0..=9_usize).find(|decimals| is_whole(self.step * power_of_ten(*decimals))).unwrap_or(9);
        let end = self.end / self.unit_size * (1.0 + 1e-9);
        (0_u32..100)
            .map(move |index| f64::from(index) * self.step)
            .take_while(move |value| *value <= end)
            .map(move |value| (value * self.unit_size, format!("{value:.decimals$}")))
    }
}

/// 1, 2 or 5 times a power of ten, so that at most `count_max` of it reach `end`.
fn round_step(end: f64, count_max: u32) -> f64 {
    let least = end / f64::from(count_max.max(1));
    let power = 10_f64.powf(least.log10().floor());
    let rounded = [1.0, 2.0, 5.0].into_iter().map(|digit| digit * power);
    rounded.clone().find(|step| *step >= least * (1.0 - 1e-9)).unwrap_or(power * 10.0)
}

fn is_whole(value: f64) -> bool {
    (value - value.round()).abs() < 1e-6 * value.abs().max(1e-3)
}

fn power_of_ten(exponent: usize) -> f64 {
    i32::try_from(exponent).map_or(f64::INFINITY, |exponent| 10_f64.powi(exponent))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(axis: &Axis) -> (Vec<String>, &'static str) {
        (axis.ticks().map(|(_, text)| text).collect(), axis.unit)
    }

    fn own(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn ticks_are_round_in_the_unit_that_suits() {
        const MIB: f64 = 1_048_576.0;
        assert_eq!(texts(&Axis::bytes(151.0 * MIB, 6)), (own(&["0", "50", "100", "150"]), "MiB"));
        assert_eq!(texts(&Axis::bytes(1.3 * 1024.0 * MIB, 6)), (own(&["0.0", "0.5", "1.0"]), "GiB"));
        assert_eq!(texts(&Axis::bytes(700.0, 6)), (own(&["0", "200", "400", "600"]), "B"));
        assert_eq!(texts(&Axis::seconds(0.043, 5)), (own(&["0", "10", "20", "30", "40"]), "ms"));
        assert_eq!(texts(&Axis::seconds(1.0, 5)), (own(&["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]), "s"));
        assert_eq!(texts(&Axis::seconds(7300.0, 5)), (own(&["0", "2000", "4000", "6000"]), "s"));
    }

    #[test]
    fn values_have_the_unit_of_their_axis() {
        let axis = Axis::bytes(3.0 * 1_073_741_824.0, 6);
        assert_eq!(
            [1e6, 5e8, 1.2e9, 3e10].map(|value| axis.text(value)),
            ["0.001 GiB", "0.47 GiB", "1.12 GiB", "27.9 GiB"]
        );
        assert_eq!(Axis::seconds(0.4, 5).text(0.0123), "12.3 ms");
        assert_eq!(Axis::bytes(700.0, 5).text(3.0), "3 B");
    }

    #[test]
    fn nothing_makes_too_many_ticks_or_none() {
        for end in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-300, 1e-9, 1.0, 2.5, 9.99, 1e19, 1e300] {
            for count_max in [1, 5, 10] {
                for axis in [Axis::bytes(end, count_max), Axis::seconds(end, count_max)] {
                    let count = axis.ticks().count();
                    assert!((1..=12).contains(&count), "{count} ticks up to {end}, {count_max} at most");
                    assert!(
                        axis.share(axis.end) > 0.99 && axis.share(1e308) <= 1.0 && axis.share(-5.0) == 0.0
                    );
                }
            }
        }
    }
}
