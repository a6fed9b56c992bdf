//! A comparison: one row for each way of loading, over all of its runs.

use serde::{Deserialize, Serialize};

use super::Outcome;

/// A row of a comparison.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Compared {
    /// Its name, as in `runs[].strategy`.
    pub(crate) strategy: String,
    /// The words of the command; `null` if this program loads.
    pub(crate) command: Option<Vec<String>>,
    /// `completed` if every run did, otherwise the outcome of the first other run.
    pub(crate) outcome: Outcome,
    /// Why it did not complete.
    pub(crate) reason: Option<String>,
    /// Runs that were started, without warm-ups. After a run that does not complete, the row is not
    /// run again.
    pub(crate) runs: u64,
    /// Runs that completed. Times are of these alone.
    pub(crate) completed: u64,
    /// Completed runs before which the page cache was not in the requested state, or could not be
    /// checked.
    pub(crate) cache_not_as_asked: u64,
    /// Wall time.
    pub(crate) seconds: Option<Spread>,
    /// Bytes of the loaded tensors, divided by the median time.
    pub(crate) bytes_per_second: Option<u64>,
    /// CPU time, the median.
    pub(crate) cpu_seconds: Option<f64>,
    /// The highest memory of any run, until its end if it did not complete.
    pub(crate) peak: ComparedPeak,
    /// Time divided by that of the fastest row, in each round: the median.
    pub(crate) time_ratio: Option<f64>,
    /// Host peak divided by the smallest one of the rows that own what they load; `null` for rows
    /// that map it.
    pub(crate) host_ratio: Option<f64>,
    /// A remark for people.
    pub(crate) note: Option<String>,
}

/// A measured quantity over several runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Spread {
    /// The median.
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
    /// Memory that the kernel cannot reclaim.
    pub(crate) host_bytes: Option<u64>,
    /// Its growth since the start, in the run with the largest growth; `null` for commands.
    pub(crate) host_growth_bytes: Option<u64>,
    /// All resident pages.
    pub(crate) rss_bytes: Option<u64>,
    /// Its growth since the start, in the run with the largest growth; `null` for commands.
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
