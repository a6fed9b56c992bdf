//! What is reported of a comparison: one row for each way of loading, over all of its runs.

use serde::{Deserialize, Serialize};

use super::Outcome;

/// A row of a comparison.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Compared {
    /// What it is called; `runs[].strategy` has the same.
    pub(crate) strategy: String,
    /// The words of the command; `null` for what this program does itself.
    pub(crate) command: Option<Vec<String>>,
    /// How its runs ended: `completed` if all did, else how the first other one did.
    pub(crate) outcome: Outcome,
    /// Why, where it did not complete.
    pub(crate) reason: Option<String>,
    /// Runs that were begun, without warm-ups. A row whose run does not complete is not run again.
    pub(crate) runs: u64,
    /// Of these, runs that completed: time is theirs alone.
    pub(crate) completed: u64,
    /// Of these, runs before which the page cache was not as it was asked for, or could not be
    /// looked at.
    pub(crate) cache_not_as_asked: u64,
    /// Wall time.
    pub(crate) seconds: Option<Spread>,
    /// Bytes of the tensors that are loaded, over the median time.
    pub(crate) bytes_per_second: Option<u64>,
    /// CPU time, the median.
    pub(crate) cpu_seconds: Option<f64>,
    /// The highest memory of any run; of a run that did not complete, what was seen of it.
    pub(crate) peak: ComparedPeak,
    /// Time over that of the fastest row, round by round: the median.
    pub(crate) time_ratio: Option<f64>,
    /// Host peak over the smallest of all rows that own what they load; `null` for those that map
    /// it.
    pub(crate) host_ratio: Option<f64>,
    /// What a person should know about the row.
    pub(crate) note: Option<String>,
}

/// A measured quantity over several runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Spread {
    /// The value in the middle; the mean of the two in the middle of an even number.
    pub(crate) median: f64,
    /// The smallest.
    pub(crate) min: f64,
    /// The largest.
    pub(crate) max: f64,
    /// The median of the distances from the median.
    pub(crate) deviation: f64,
}

/// The highest memory over the runs of a row; `null` is "not measured".
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct ComparedPeak {
    /// What the kernel cannot take back.
    pub(crate) host_bytes: Option<u64>,
    /// The same over its start, in the run where that was most; `null` for commands.
    pub(crate) host_growth_bytes: Option<u64>,
    /// All resident pages.
    pub(crate) rss_bytes: Option<u64>,
    /// The same over its start, in the run where that was most; `null` for commands.
    pub(crate) rss_growth_bytes: Option<u64>,
    /// Mapped file pages.
    pub(crate) file_bytes: Option<u64>,
    /// The memory cgroup's peak, page cache included.
    pub(crate) cgroup_bytes: Option<u64>,
    /// Page-locked memory.
    pub(crate) pinned_bytes: Option<u64>,
    /// Device memory.
    pub(crate) vram_bytes: Option<u64>,
}
