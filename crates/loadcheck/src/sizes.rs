//! Sizes and durations as people write them, turned into whole numbers without a float on the way.
//!
//! `512Mi`, `10GiB` and `1024B` are bytes; `G` is 10⁹, as in Kubernetes. `80%`, `2x-layer` and
//! `1.1x-largest-tensor` relate to something that only the run knows: [`Size::resolve`] takes it
//! then. Fractions of a byte are dropped: a size is never more than what was written.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use onelayer::units::HumanBytes;
use serde::{Deserialize, Serialize};

use crate::problem::{Code, Problem};

/// The accepted forms, for error messages.
pub(crate) const ACCEPTED_SIZES: &str =
    "512Mi, 10GiB, 10G (10^9), 1024B, 80%, 2x-layer or 1.1x-largest-tensor";

/// Suffixes and their bytes. `m` is left out on purpose: it is a mebibyte to Docker and a
/// thousandth to Kubernetes.
const UNITS: [(&str, u64); 25] = [
    ("B", 1),
    ("k", 1_000),
    ("K", 1_000),
    ("kB", 1_000),
    ("KB", 1_000),
    ("Ki", 1 << 10),
    ("KiB", 1 << 10),
    ("M", 1_000_000),
    ("MB", 1_000_000),
    ("Mi", 1 << 20),
    ("MiB", 1 << 20),
    ("G", 1_000_000_000),
    ("GB", 1_000_000_000),
    ("Gi", 1 << 30),
    ("GiB", 1 << 30),
    ("T", 1_000_000_000_000),
    ("TB", 1_000_000_000_000),
    ("Ti", 1 << 40),
    ("TiB", 1 << 40),
    ("P", 1_000_000_000_000_000),
    ("PB", 1_000_000_000_000_000),
    ("Pi", 1 << 50),
    ("PiB", 1 << 50),
    ("b", 0),
    ("m", 0),
];

/// A decimal number, exactly: `digits / 10^scale`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Decimal {
    digits: u64,
    scale: u32,
}

impl Decimal {
    /// Splits `text` into a number and the rest; `None` if it does not start with a number that
    /// fits.
    fn split(text: &str) -> Option<(Self, &str)> {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, rest) = text.split_at(end);
        let (whole, fraction) = match number.split_once('.') {
            None => (number, ""),
            // `1.` and `.5` and `1.2.3` are slips, not sizes
            Some((whole, fraction))
                if !whole.is_empty() && !fraction.is_empty() && !fraction.contains('.') =>
            {
                (whole, fraction.trim_end_matches('0'))
            }
            Some(_) => return None,
        };
        let scale = u32::try_from(fraction.len()).ok().filter(|scale| *scale <= 18)?;
        let digits = format!("{whole}{fraction}").parse().ok()?;
        Some((Self { digits, scale }, rest))
    }

    /// `self * unit`, rounded down.
    fn times(self, unit: u64) -> Option<u64> {
        let product = u128::from(self.digits) * u128::from(unit);
        u64::try_from(product / 10_u128.pow(self.scale)).ok()
    }

    /// True if `self > whole`.
    fn exceeds(self, whole: u64) -> bool {
        u128::from(self.digits) > u128::from(whole) * 10_u128.pow(self.scale)
    }

    fn is_zero(self) -> bool {
        self.digits == 0
    }
}

impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let divisor = 10_u64.pow(self.scale);
        write!(f, "{}", self.digits / divisor)?;
        if self.scale > 0 {
            let width = usize::try_from(self.scale).unwrap_or(18);
            write!(f, ".{:0width$}", self.digits % divisor)?;
        }
        Ok(())
    }
}

/// A size as it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Size {
    /// So many bytes.
    Bytes(u64),
    /// Per cent of the memory limit: the smaller of the cgroup's limit and the machine's memory.
    PercentOfLimit(Decimal),
    /// A multiple of the largest layer.
    Layers(Decimal),
    /// A multiple of the largest tensor.
    LargestTensors(Decimal),
}

/// The quantities that relative sizes refer to, in bytes. `None` is "not known here".
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct SizeContext {
    /// The smaller of the cgroup's limit and the machine's memory.
    pub(crate) limit_bytes: Option<u64>,
    /// The largest layer.
    pub(crate) layer_bytes: Option<u64>,
    /// The largest tensor.
    pub(crate) tensor_bytes: Option<u64>,
    /// The memory of the device, if it has its own.
    pub(crate) device_bytes: Option<u64>,
}

impl SizeContext {
    /// The same for sizes of device memory: per cent are of the device.
    pub(crate) fn of_device(&self) -> Self {
        Self { limit_bytes: self.device_bytes, ..*self }
    }

    /// The value of a flag in bytes.
    ///
    /// # Errors
    /// The size relates to something that is not known.
    pub(crate) fn resolve(&self, flag: &str, size: Size) -> Result<u64, Problem> {
        size.resolve(self).map_err(|error| {
            Problem::new(Code::SizeUnresolved, error.to_string()).at(format!("{flag} {size}"))
        })
    }
}

/// A size or duration that is not understood, or that cannot be resolved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SizeError {
    /// Not a size at all.
    #[error("write a size such as {ACCEPTED_SIZES}")]
    NotASize,
    /// A suffix with two readings.
    #[error("`{suffix}` is ambiguous: write `Mi` (2^20 bytes), `M` (10^6 bytes) or `B` (bytes)")]
    Ambiguous {
        /// The suffix.
        suffix: String,
    },
    /// A number alone: of bytes, or of gigabytes?
    #[error("{number} of what? write {number}GB, {number}MiB or {number}B (bytes)")]
    NoUnit {
        /// The number.
        number: String,
    },
    /// More than 2^64 bytes.
    #[error("more than 16 EiB")]
    TooLarge,
    /// More than all of it.
    #[error("a share of the memory limit lies above 0% and is at most 100%")]
    NotAShare,
    /// A relative size with nothing to relate to.
    #[error("`{size}` cannot be resolved: {what} is not known here")]
    Unknown {
        /// As asked for.
        size: String,
        /// The missing quantity.
        what: &'static str,
    },
    /// Not a duration.
    #[error("write a duration such as 500ms, 30s, 1.5m or 1h")]
    NotADuration,
}

impl Size {
    /// The size in bytes, rounded down.
    ///
    /// # Errors
    /// [`SizeError::Unknown`] if `context` lacks what the size relates to, [`SizeError::TooLarge`]
    /// on overflow.
    pub(crate) fn resolve(self, context: &SizeContext) -> Result<u64, SizeError> {
        let unknown = |what| SizeError::Unknown { size: self.to_string(), what };
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            Self::PercentOfLimit(percent) => {
                let limit_bytes = context.limit_bytes.ok_or_else(|| unknown("the memory limit"))?;
                percent.times(limit_bytes).map(|hundredfold| hundredfold / 100).ok_or(SizeError::TooLarge)
            }
            Self::Layers(factor) => {
                let layer_bytes = context.layer_bytes.ok_or_else(|| unknown("the largest layer"))?;
                factor.times(layer_bytes).ok_or(SizeError::TooLarge)
            }
            Self::LargestTensors(factor) => {
                let tensor_bytes = context.tensor_bytes.ok_or_else(|| unknown("the largest tensor"))?;
                factor.times(tensor_bytes).ok_or(SizeError::TooLarge)
            }
        }
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let (number, suffix) = Decimal::split(text.trim()).ok_or(SizeError::NotASize)?;
        match suffix.trim_start() {
            "%" if number.is_zero() || number.exceeds(100) => Err(SizeError::NotAShare),
            "%" => Ok(Self::PercentOfLimit(number)),
            "" if number.is_zero() => Ok(Self::Bytes(0)),
            "" => Err(SizeError::NoUnit { number: number.to_string() }),
            "x-layer" => Ok(Self::Layers(number)),
            "x-largest-tensor" => Ok(Self::LargestTensors(number)),
            suffix => match UNITS.iter().find(|(name, _)| *name == suffix) {
                Some((_, 0)) => Err(SizeError::Ambiguous { suffix: suffix.to_owned() }),
                Some((_, unit)) => number.times(*unit).map(Self::Bytes).ok_or(SizeError::TooLarge),
                None => Err(SizeError::NotASize),
            },
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => HumanBytes(*bytes).fmt(f),
            Self::PercentOfLimit(percent) => write!(f, "{percent}%"),
            Self::Layers(factor) => write!(f, "{factor}x-layer"),
            Self::LargestTensors(factor) => write!(f, "{factor}x-largest-tensor"),
        }
    }
}

/// Parses `500ms`, `30s`, `1.5m`, `1h`.
///
/// # Errors
/// [`SizeError::NotADuration`].
pub(crate) fn parse_duration(text: &str) -> Result<Duration, SizeError> {
    let (number, suffix) = Decimal::split(text.trim()).ok_or(SizeError::NotADuration)?;
    let unit_ns = match suffix.trim_start() {
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" | "min" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return Err(SizeError::NotADuration),
    };
    number.times(unit_ns).map(Duration::from_nanos).ok_or(SizeError::NotADuration)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Result<u64, SizeError> {
        text.parse::<Size>()?.resolve(&SizeContext::default())
    }

    #[test]
    fn units_are_what_kubernetes_means() {
        for (text, expected) in [
            ("1024B", 1024),
            ("0", 0),
            ("7B", 7),
            ("512Mi", 512 << 20),
            ("10Gi", 10 << 30),
            ("10GiB", 10 << 30),
            ("10 GiB", 10 << 30),
            ("10G", 10_000_000_000),
            ("10GB", 10_000_000_000),
            ("1k", 1000),
            ("1.5GiB", 3 << 29),
            ("0.1KiB", 102),
            ("18446744073709551615B", u64::MAX),
            // a float would make 1152921504606846976 of it
            ("1152921504606846977B", 1_152_921_504_606_846_977),
        ] {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn slips_are_refused() {
        for text in
            ["", "MiB", "-1", "1.", ".5", "1.2.3", "1e3", "0x10", "1_000", "5q", "1 0", "2x", "x-layer", "٣"]
        {
            assert_eq!(bytes(text), Err(SizeError::NotASize), "{text}");
        }
        for text in ["512m", "512b"] {
            assert!(matches!(bytes(text), Err(SizeError::Ambiguous { .. })), "{text}");
        }
        for text in ["8", "1024", "1.5"] {
            assert_eq!(bytes(text), Err(SizeError::NoUnit { number: text.to_owned() }));
        }
        for text in ["18446744073709551616B", "16384Pi"] {
            assert!(bytes(text).is_err(), "{text}");
        }
        for text in ["0%", "100.000001%", "101%", "18446744073709551615%"] {
            assert_eq!(text.parse::<Size>(), Err(SizeError::NotAShare), "{text}");
        }
    }

    #[test]
    fn relative_sizes_wait_for_their_context() {
        let context = SizeContext {
            limit_bytes: Some(1000),
            layer_bytes: Some(30),
            tensor_bytes: Some(u64::MAX),
            device_bytes: Some(400),
        };
        assert_eq!("25%".parse::<Size>().unwrap().resolve(&context.of_device()), Ok(100));
        let resolve = |text: &str| text.parse::<Size>().unwrap().resolve(&context);
        assert_eq!(resolve("80%"), Ok(800));
        assert_eq!(resolve("12.5%"), Ok(125));
        assert_eq!(resolve("100%"), Ok(1000));
        assert_eq!(resolve("2x-layer"), Ok(60));
        assert_eq!(resolve("0.5x-layer"), Ok(15));
        assert_eq!(resolve("1x-largest-tensor"), Ok(u64::MAX));
        assert_eq!(resolve("1.1x-largest-tensor"), Err(SizeError::TooLarge));
        let unknown = "2x-layer".parse::<Size>().unwrap().resolve(&SizeContext::default());
        assert!(unknown.unwrap_err().to_string().contains("the largest layer"));
    }

    #[test]
    fn relative_sizes_print_as_they_were_written() {
        for text in ["80%", "12.5%", "2x-layer", "1.1x-largest-tensor", "0.05x-layer"] {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn durations() {
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("2h"), Ok(Duration::from_secs(7200)));
        for text in ["30", "s", "-1s", "1d", ""] {
            assert_eq!(parse_duration(text), Err(SizeError::NotADuration), "{text}");
        }
    }
}
