//! Numbers: the one place where sizes, times and rates are formatted ([`HumanBytes`] is the base of
//! every size), averages, and the two conversions between whole numbers and floats.

use onelayer::units::{GIB, HumanBytes, MIB};

/// `742 MiB`; `-` if it was not measured.
pub(crate) fn bytes(value: impl Into<Option<u64>>) -> String {
    value.into().map_or_else(|| "-".to_owned(), |value| HumanBytes(value).to_string())
}

/// As [`bytes`], but `1 062 MiB` from 1 to 100 GiB: tenths of a gibibyte are too coarse to show the
/// distance from a limit.
pub(crate) fn bytes_fine(value: impl Into<Option<u64>>) -> String {
    match value.into() {
        Some(value) if (GIB..100 * GIB).contains(&value) => {
            format!("{} MiB", grouped((value + MIB / 2) / MIB))
        }
        value => bytes(value),
    }
}

/// A limit in mebibytes, never rounded to another one: `2 418 MiB`, `35.06 MiB`.
pub(crate) fn limit_bytes(limit: u64) -> String {
    if limit.is_multiple_of(MIB) {
        format!("{} MiB", grouped(limit / MIB))
    } else {
        format!("{:.2} MiB", to_f64(limit) / to_f64(MIB))
    }
}

/// A size as it was stated: `8 GB` stays what it is, where binary units would round it.
pub(crate) fn stated(value: u64) -> String {
    const DECIMAL: [(u64, &str); 3] = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1000, "kB")];
    let is_binary = value.is_multiple_of(MIB) || value < MIB && value.is_multiple_of(1024);
    let unit = DECIMAL.into_iter().find(|(unit, _)| value >= *unit && value.is_multiple_of(unit / 10));
    match unit.filter(|_| !is_binary) {
        Some((unit, name)) if value.is_multiple_of(unit) => format!("{} {name}", value / unit),
        Some((unit, name)) => format!("{}.{} {name}", value / unit, value % unit / (unit / 10)),
        None => bytes(value),
    }
}

/// The sum, which a saved report may make larger than any number is: then the largest.
pub(crate) fn sum(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::saturating_add)
}

/// `1.4x`, `250x`.
pub(crate) fn ratio(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}x") } else { format!("{value:.1}x") }
}

/// `value` less `start`: `-2 MiB` if it is below. Empty if there is no start.
pub(crate) fn growth(value: Option<u64>, start: Option<u64>) -> String {
    match (value, start) {
        (Some(value), Some(start)) if value < start => format!("-{}", HumanBytes(start - value)),
        (Some(value), Some(start)) => HumanBytes(value - start).to_string(),
        (None, Some(_)) => "-".to_owned(),
        (_, None) => String::new(),
    }
}

/// `6.12 s`, `812 ms`.
pub(crate) fn seconds(value: f64) -> String {
    match value {
        value if value < 0.001 => "< 1 ms".to_owned(),
        value if value < 1.0 => format!("{:.0} ms", value * 1e3),
        value if value < 100.0 => format!("{} s", format!("{value:.2}").trim_end_matches(".00")),
        value => format!("{value:.0} s"),
    }
}

/// `+17 %`, `-44 %`, `2.3x`: a new value divided by the old one.
pub(crate) fn ratio_change(ratio: f64) -> String {
    match ratio {
        more if more >= 2.0 => self::ratio(more),
        other => format!("{:+.0} %", 100.0 * (other - 1.0)).replace("-0 %", "+0 %"),
    }
}

/// `52 %`, of a share from 0 to 1.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// `2.46 GiB/s`; `None` if the time is too short to divide by.
pub(crate) fn rate(moved_bytes: u64, seconds: f64) -> Option<String> {
    let per_second = to_f64(moved_bytes) / seconds;
    let (gib, mib) = (per_second / to_f64(GIB), per_second / to_f64(MIB));
    match seconds {
        seconds if seconds < 0.001 => None,
        _ if gib >= 1.0 => Some(format!("{gib:.2} GiB/s")),
        _ => Some(format!("{mib:.0} MiB/s")),
    }
}

/// Request and limit of a container whose peak is `peak_bytes`: the limit is a quarter above the
/// request. Both are rounded up to 64 MiB and written as Kubernetes quantities (`768Mi`).
pub(crate) fn container(peak_bytes: u64) -> (String, String) {
    let steps = |bytes: u64| bytes.div_ceil(64 * MIB).max(1).saturating_mul(64);
    let request = steps(peak_bytes);
    let request_bytes = request.saturating_mul(MIB);
    let limit = steps(request_bytes.saturating_add(request_bytes / 4));
    (format!("{request}Mi"), format!("{limit}Mi"))
}

/// Digits in groups of three: `217 054 208`.
pub(crate) fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// `1 file`, `2 files`.
pub(crate) fn count(value: u64, noun: &str) -> String {
    format!("{} {noun}{}", grouped(value), if value == 1 { "" } else { "s" })
}

/// Bytes that may be negative, rounded: `-2 MiB`.
pub(crate) fn signed(value: f64) -> String {
    let text = HumanBytes(whole(value.abs())).to_string();
    if value <= -0.5 { format!("-{text}") } else { text }
}

/// The mean; 0 for an empty list.
pub(crate) fn mean(values: &[f64]) -> f64 {
    let count = f64::from(u32::try_from(values.len()).unwrap_or(u32::MAX));
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / count }
}

/// The median; 0 for an empty list.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        count if count.is_multiple_of(2) => f64::midpoint(sorted[middle - 1], sorted[middle]),
        _ => sorted[middle],
    }
}

/// The nearest whole number; 0 for a negative one.
#[expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "such a cast saturates, and only fractions of a byte are lost"
)]
pub(crate) fn whole(value: f64) -> u64 {
    value.round() as u64
}

/// For rates and percentages: exact below 2^53.
#[expect(
    clippy::as_conversions,
    clippy::cast_precision_loss,
    reason = "a rate for people needs no more digits"
)]
pub(crate) fn to_f64(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_read_well() {
        assert_eq!(bytes(None::<u64>), "-");
        assert_eq!(bytes_fine(GIB + 38 * MIB), "1 062 MiB");
        assert_eq!((bytes_fine(100 * GIB), bytes_fine(MIB)), ("100 GiB".into(), "1 MiB".into()));
        assert_eq!(growth(Some(MIB), Some(3 * MIB)), "-2 MiB");
        assert_eq!(growth(Some(3 * MIB), Some(MIB)), "2 MiB");
        assert_eq!(
            (seconds(0.8123), seconds(6.123), seconds(0.0)),
            ("812 ms".into(), "6.12 s".into(), "< 1 ms".into())
        );
        assert_eq!(rate(3 * GIB, 2.0).as_deref(), Some("1.50 GiB/s"));
        assert_eq!(rate(3 * MIB, 2.0).as_deref(), Some("2 MiB/s"));
        assert_eq!(rate(3, 0.0), None);
        assert_eq!(
            (signed(-2.0 * to_f64(MIB)), signed(-0.4), signed(1536.0)),
            ("-2 MiB".into(), "0 B".into(), "1.5 KiB".into())
        );
        assert_eq!((whole(-3.0), whole(2.6), whole(f64::MAX)), (0, 3, u64::MAX));
        assert_eq!(
            (grouped(217_054_208), grouped(12), grouped(0)),
            ("217 054 208".into(), "12".into(), "0".into())
        );
        assert_eq!((count(1, "file"), count(4, "file")), ("1 file".into(), "4 files".into()));
    }

    #[test]
    fn stated_sizes_stay_as_they_are() {
        for (value, expected) in [
            (8_000_000_000, "8 GB"),
            (1_500_000_000, "1.5 GB"),
            (8 * GIB, "8 GiB"),
            (512 * MIB, "512 MiB"),
            (250_000_000, "250 MB"),
            (1024, "1 KiB"),
            (0, "0 B"),
            (1_234_567, "1.2 MiB"),
        ] {
            assert_eq!(stated(value), expected);
        }
    }

    #[test]
    fn medians() {
        assert_eq!(
            (median(&[]), median(&[3.0]), median(&[4.0, 1.0]), median(&[9.0, 1.0, 2.0])),
            (0.0, 3.0, 2.5, 2.0)
        );
    }

    #[test]
    fn neighbouring_limits_differ() {
        assert_eq!(
            (limit_bytes(2418 * MIB), limit_bytes(35 * MIB)),
            ("2 418 MiB".to_owned(), "35 MiB".to_owned())
        );
        assert_eq!(limit_bytes(35 * MIB + (64 << 10)), "35.06 MiB");
    }

    #[test]
    fn containers_hold_the_peak() {
        assert_eq!(container(742 * MIB), ("768Mi".to_owned(), "960Mi".to_owned()));
        assert_eq!(container(64 * MIB), ("64Mi".to_owned(), "128Mi".to_owned()));
        assert_eq!(container(0), ("64Mi".to_owned(), "128Mi".to_owned()));
    }
}
