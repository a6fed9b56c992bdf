//! A measurement that may be missing, and why.
//!
//! Every number of this crate is a [`Measured`]: a value, or the reason there is none. A missing
//! number never becomes 0. A sum with a missing term is missing. In a report it is `null`, and a
//! list of [`Unavailable`] next to it has the reason. Reasons are `Copy` and hold no heap memory,
//! so a sampler can store them without changing the memory that it measures.

use std::io;

use serde::{Serialize, Serializer};

/// Why a number is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The kernel refused to open or read the file.
    #[error("cannot read {file}: {}", io::Error::from_raw_os_error(*errno))]
    Unreadable {
        /// The file, as a pattern such as `/proc/<pid>/status`.
        file: &'static str,
        /// The error number of the system call.
        errno: i32,
    },
    /// The file is there, the line is not: another kernel version or configuration.
    #[error("{file} has no `{field}` here")]
    FieldMissing {
        /// The file, as a pattern.
        file: &'static str,
        /// The missing line or file name.
        field: &'static str,
    },
    /// The line is there, but is not a number of the expected form.
    #[error("{file}: `{field}` is not a number of the expected form")]
    Malformed {
        /// The file, as a pattern.
        file: &'static str,
        /// The name of the line.
        field: &'static str,
    },
    /// The process has ended or is a zombie: it holds no memory.
    #[error("the process has ended")]
    ProcessEnded,
    /// The source of the number does not exist on this machine.
    #[error("{0}")]
    NotHere(&'static str),
}

impl Reason {
    /// The reason for a failed read of `file`.
    pub(crate) fn unreadable(file: &'static str, error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(errno) if errno == libc::ESRCH => Self::ProcessEnded,
            Some(errno) => Self::Unreadable { file, errno },
            None => Self::NotHere("the read ended early without an error number"),
        }
    }
}

/// A number that was measured, or the reason it was not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measured<T> {
    /// The measurement; 0 means a measured zero.
    Value(T),
    /// Nothing was measured.
    Unavailable(Reason),
}

impl<T> Measured<T> {
    /// The value, or `None`.
    pub fn value(self) -> Option<T> {
        match self {
            Self::Value(value) => Some(value),
            Self::Unavailable(_) => None,
        }
    }

    /// Why there is no value, or `None` if there is one.
    #[must_use]
    pub const fn reason(&self) -> Option<Reason> {
        match self {
            Self::Value(_) => None,
            Self::Unavailable(reason) => Some(*reason),
        }
    }

    /// Applies `change` to the value.
    pub fn map<U>(self, change: impl FnOnce(T) -> U) -> Measured<U> {
        match self {
            Self::Value(value) => Measured::Value(change(value)),
            Self::Unavailable(reason) => Measured::Unavailable(reason),
        }
    }

    /// Both values combined; missing if either is.
    pub fn combine<U, V>(self, other: Measured<U>, join: impl FnOnce(T, U) -> V) -> Measured<V> {
        match (self, other) {
            (Self::Value(left), Measured::Value(right)) => Measured::Value(join(left, right)),
            (Self::Unavailable(reason), _) | (_, Measured::Unavailable(reason)) => {
                Measured::Unavailable(reason)
            }
        }
    }

    /// The value as a `Result`, for `?`.
    ///
    /// # Errors
    /// The reason there is no value.
    pub fn ok(self) -> Result<T, Reason> {
        match self {
            Self::Value(value) => Ok(value),
            Self::Unavailable(reason) => Err(reason),
        }
    }
}

impl Measured<u64> {
    /// The sum; missing if either term is. Saturates.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        self.combine(other, u64::saturating_add)
    }

    /// The growth since `earlier`, at least 0; missing if either is.
    #[must_use]
    pub fn growth_since(self, earlier: Self) -> Self {
        self.combine(earlier, u64::saturating_sub)
    }

    /// The larger of the two; missing only if both are.
    #[must_use]
    pub fn larger_known(self, other: Self) -> Self {
        match (self, other) {
            (Self::Value(left), Self::Value(right)) => Self::Value(left.max(right)),
            (Self::Unavailable(_), Self::Value(_)) => other,
            _ => self,
        }
    }
}

impl<T> From<Result<T, Reason>> for Measured<T> {
    fn from(result: Result<T, Reason>) -> Self {
        match result {
            Ok(value) => Self::Value(value),
            Err(reason) => Self::Unavailable(reason),
        }
    }
}

/// As the value, or `null`.
impl<T: Serialize> Serialize for Measured<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Value(value) => serializer.serialize_some(value),
            Self::Unavailable(_) => serializer.serialize_none(),
        }
    }
}

/// One entry of a report's list of missing measurements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unavailable {
    /// The field's name in the report, such as `host_bytes` or `cgroup.peak_bytes`.
    pub metric: String,
    /// The reason, as text.
    pub reason: String,
}

/// Collects missing metrics, each one once.
#[derive(Debug, Default)]
pub(crate) struct UnavailableList(Vec<Unavailable>);

impl UnavailableList {
    pub(crate) fn note<T>(&mut self, prefix: &str, metric: &str, measured: &Measured<T>) {
        let Some(reason) = measured.reason() else { return };
        let metric = format!("{prefix}{metric}");
        if self.0.iter().all(|known| known.metric != metric) {
            self.0.push(Unavailable { metric, reason: reason.to_string() });
        }
    }

    pub(crate) fn into_vec(self) -> Vec<Unavailable> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REASON: Reason = Reason::FieldMissing { file: "/proc/<pid>/status", field: "RssAnon" };

    #[test]
    fn a_missing_term_makes_the_sum_missing() {
        let missing = Measured::Unavailable(REASON);
        assert_eq!(Measured::Value(3).plus(Measured::Value(4)), Measured::Value(7));
        assert_eq!(Measured::Value(3).plus(missing), missing);
        assert_eq!(missing.growth_since(Measured::Value(3)), missing);
        assert_eq!(Measured::Value(3).growth_since(Measured::Value(5)), Measured::Value(0));
        assert_eq!(missing.larger_known(Measured::Value(3)), Measured::Value(3));
        assert_eq!(missing.larger_known(missing), missing);
    }

    #[test]
    fn missing_is_null_and_zero_is_zero() {
        let text = serde_json::to_string(&[Measured::Value(0_u64), Measured::Unavailable(REASON)]).unwrap();
        assert_eq!(text, "[0,null]");
    }

    #[test]
    fn a_list_names_each_metric_once() {
        let mut list = UnavailableList::default();
        list.note("baseline.", "anon_bytes", &Measured::<u64>::Unavailable(REASON));
        list.note("baseline.", "anon_bytes", &Measured::<u64>::Unavailable(Reason::ProcessEnded));
        list.note("baseline.", "file_bytes", &Measured::Value(0_u64));
        let list = list.into_vec();
        assert_eq!(list.len(), 1);
        assert_eq!(list[0].metric, "baseline.anon_bytes");
        assert_eq!(list[0].reason, "/proc/<pid>/status has no `RssAnon` here");
    }
}
