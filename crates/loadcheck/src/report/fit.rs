//! What is reported of a search for a memory limit: every limit that was tried, and what follows
//! from them.

use serde::{Deserialize, Serialize};

use crate::args::CacheArg;

/// A search for the smallest memory limit.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Fit {
    /// State of the page cache that is brought about before every try; `null` before the search
    /// began.
    pub(crate) cache: Option<CacheArg>,
    /// Runs at a limit before it counts as one that works.
    pub(crate) runs: u64,
    /// One entry for each loader.
    pub(crate) loaders: Vec<Fitted>,
    /// `--emit`: for what.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) emit: Option<String>,
    /// `--emit`: the lines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) emitted: Vec<String>,
    /// Per cent that `emitted` adds to what is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) headroom_percent: Option<u64>,
}

/// A loader and the limits that it was run under.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Fitted {
    /// `stream` is ours, `mmap`, `read`, `pread` and `direct` are habits of others; of a command,
    /// what was put in for `{strategy}`, or `command`.
    pub(crate) strategy: String,
    /// The command; `null` for ours.
    pub(crate) command: Option<Vec<String>>,
    /// The smallest limit that was to be tried.
    pub(crate) lo_bytes: Option<u64>,
    /// The largest limit that was to be tried.
    pub(crate) hi_bytes: Option<u64>,
    /// How far the answers may be above the true ones.
    pub(crate) precision_bytes: Option<u64>,
    /// Time without a limit, median.
    pub(crate) unlimited_seconds: Option<f64>,
    /// Host memory without a limit, at most.
    pub(crate) unlimited_host_bytes: Option<u64>,
    /// The smallest limit under which every run worked; `null` if none did.
    pub(crate) smallest_bytes: Option<u64>,
    /// The smallest limit under which a run takes at most 1.1 times as long as without one (and 20
    /// ms); `null` if there is none, or it was not looked for.
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
    /// The limit of its memory; `null` is none.
    pub(crate) limit_bytes: Option<u64>,
    /// How it ended.
    pub(crate) outcome: TryOutcome,
    /// How long it took: the load alone for ours, the whole command for others.
    pub(crate) seconds: Option<f64>,
    /// `seconds` in relation to the time without a limit; of runs that worked.
    pub(crate) slowdown: Option<f64>,
    /// Memory that the kernel cannot take back, at most. Sampled.
    pub(crate) peak_host_bytes: Option<u64>,
    /// The group's peak, page cache included.
    pub(crate) peak_cgroup_bytes: Option<u64>,
    /// How often memory ran into the limit, and something had to be taken back.
    pub(crate) limit_hits: Option<u64>,
    /// Bytes of files that were read again because they had been taken back.
    pub(crate) refault_bytes: Option<u64>,
    /// Share of the source that was cached when it began, 0 to 1; `null` is unchecked.
    pub(crate) cached_share: Option<f64>,
}

/// How a run under a limit ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum TryOutcome {
    /// Everything was loaded.
    Ok,
    /// The kernel killed it, or a part of it, at the limit.
    Killed,
    /// It said itself that the limit is too small.
    Refused,
    /// It was stopped: it took too many times as long as without a limit.
    TooSlow,
    /// It failed for another reason. This ends the search.
    #[default]
    Failed,
    /// Ctrl-C or SIGTERM.
    Interrupted,
}
