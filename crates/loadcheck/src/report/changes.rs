//! Two saved reports, compared.

use serde::{Deserialize, Serialize};

/// What changed from one report to another of the same command. `runs` has two runs for each row:
/// of either report the one with the highest peak of unreclaimable memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Changes {
    /// The files of the reports, the earlier one first.
    pub(crate) files: [String; 2],
    /// Memory, time and rate: all that either report has, changed or not.
    pub(crate) metrics: Vec<Change>,
    /// Settings and circumstances that differ.
    pub(crate) settings: Vec<ChangedSetting>,
}

/// A metric in both reports; `null` where one does not have it. Each has one unit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Change {
    /// The row of a comparison. Absent for other commands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) strategy: Option<String>,
    /// `host`, `rss`, `pinned` or `vram` (the highest of all runs), `after` (RSS once everything was
    /// freed), `read` (bytes from files), `time` (mean of the runs, in a comparison the median),
    /// `cpu` or `rate` (read bytes by time).
    pub(crate) metric: String,
    /// Before, if it is a size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) before_bytes: Option<u64>,
    /// After, if it is a size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) after_bytes: Option<u64>,
    /// Before, if it is a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) before_seconds: Option<f64>,
    /// After, if it is a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) after_seconds: Option<f64>,
    /// Before, if it is a rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) before_bytes_per_second: Option<f64>,
    /// After, if it is a rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) after_bytes_per_second: Option<f64>,
}

/// A setting that differs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct ChangedSetting {
    /// `budget`, `window`, `device`, `loadcheck`, ...
    pub(crate) setting: String,
    /// As people read it; `null` if the report does not have it.
    pub(crate) before: Option<String>,
    /// As people read it; `null` if the report does not have it.
    pub(crate) after: Option<String>,
}

impl Change {
    /// Both values as numbers of one unit.
    pub(crate) fn both(&self) -> (Option<f64>, Option<f64>) {
        let bytes = |value: Option<u64>| value.map(crate::numbers::to_f64);
        let pick = |size: Option<u64>, time: Option<f64>, rate: Option<f64>| bytes(size).or(time).or(rate);
        (
            pick(self.before_bytes, self.before_seconds, self.before_bytes_per_second),
            pick(self.after_bytes, self.after_seconds, self.after_bytes_per_second),
        )
    }

    /// The new value divided by the old one, if both are known.
    pub(crate) fn ratio(&self) -> Option<f64> {
        let (before, after) = self.both();
        before.zip(after).filter(|(before, _)| *before > 0.0).map(|(before, after)| after / before)
    }
}
