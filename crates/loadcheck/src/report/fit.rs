//! A search for a memory limit: every limit that was tried, and the smallest that work.

use serde::{Deserialize, Serialize};

use crate::args::CacheArg;

/// A search for the smallest memory limit.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Fit {
    /// State of the page cache before every try; `null` if the search did not start.
    pub(crate) cache: Option<CacheArg>,
    /// Runs that have to succeed before a limit counts as working.
    pub(crate) runs: u64,
    /// Each loader.
    pub(crate) loaders: Vec<Fitted>,
    /// `--emit`: the format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) emit: Option<String>,
    /// `--emit`: the lines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) emitted: Vec<String>,
    /// Headroom in `emitted`, in per cent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) headroom_percent: Option<u64>,
}

/// A loader, and the limits it was run under.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Fitted {
    /// `stream` for this library; `mmap`, `read`, `pread` or `direct` for a way that other loaders
    /// read; for a command, the value of `{strategy}`, or `command`.
    pub(crate) strategy: String,
    /// The command; `null` if this program loads.
    pub(crate) command: Option<Vec<String>>,
    /// The lower end of the search.
    pub(crate) lo_bytes: Option<u64>,
    /// The upper end of the search.
    pub(crate) hi_bytes: Option<u64>,
    /// How far the results may be above the exact values.
    pub(crate) precision_bytes: Option<u64>,
    /// Median time without a limit.
    pub(crate) unlimited_seconds: Option<f64>,
    /// Highest host memory without a limit.
    pub(crate) unlimited_host_bytes: Option<u64>,
    /// The smallest limit under which every run worked; `null` if there is none.
    pub(crate) smallest_bytes: Option<u64>,
    /// The smallest limit under which a run takes at most 1.1 times as long as without a limit,
    /// plus 20 ms; `null` if there is none or it was not searched for.
    pub(crate) comfortable_bytes: Option<u64>,
    /// Limits under which some runs worked and others did not.
    pub(crate) flaky_bytes: Vec<u64>,
    /// Every run, in order.
    pub(crate) tries: Vec<Try>,
}

/// One run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Try {
    /// Its memory limit; `null` is no limit.
    pub(crate) limit_bytes: Option<u64>,
    /// The outcome.
    pub(crate) outcome: TryOutcome,
    /// Wall time: of the load if this program loads, otherwise of the whole command.
    pub(crate) seconds: Option<f64>,
    /// `seconds` divided by the time without a limit, for runs that worked.
    pub(crate) slowdown: Option<f64>,
    /// Highest memory that the kernel cannot reclaim. Sampled.
    pub(crate) peak_host_bytes: Option<u64>,
    /// The cgroup's peak, page cache included.
    pub(crate) peak_cgroup_bytes: Option<u64>,
    /// How often memory reached the limit and the kernel had to reclaim some.
    pub(crate) limit_hits: Option<u64>,
    /// Bytes of files that were read again after they had been reclaimed.
    pub(crate) refault_bytes: Option<u64>,
    /// Share of the source that was cached when it started, 0 to 1; `null` is unchecked.
    pub(crate) cached_share: Option<f64>,
}

/// Outcome of a run under a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum TryOutcome {
    /// Everything was loaded.
    Ok,
    /// The kernel killed it, or one of its processes, at the limit.
    Killed,
    /// It reported that the limit is too small.
    Refused,
    /// It was stopped because it took too long compared with a run without a limit.
    TooSlow,
    /// It failed for another reason, which ends the search.
    #[default]
    Failed,
    /// Ctrl-C or SIGTERM.
    Interrupted,
}
