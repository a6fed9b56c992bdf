//! Repeated loads: how each kind of memory grew from cycle to cycle.

use serde::{Deserialize, Serialize};

/// The result of `leak`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Leak {
    /// Where cycles ran, which decides what is measured after each of them.
    pub(crate) mode: LeakMode,
    /// Requested cycles, without warm-up.
    pub(crate) cycles: u64,
    /// Warm-up cycles, which are not counted.
    pub(crate) warmup: u64,
    /// Cycles that were counted: fewer if it ended early.
    pub(crate) counted: u64,
    /// The loads of each cycle, in order; empty for a command.
    pub(crate) loads: Vec<CycledLoad>,
    /// The words of the command; `null` if this program loads.
    pub(crate) command: Option<Vec<String>>,
    /// Length of a cycle of a process that runs already; `null` for cycles of their own length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cycle_seconds: Option<f64>,
    /// Confidence level of `low` and `high` of every slope.
    pub(crate) confidence: f64,
    /// The growth of each kind of memory.
    pub(crate) slopes: Vec<KindSlope>,
    /// Processes of the command that still ran at the end; `null` without a command.
    pub(crate) left_behind: Option<u64>,
}

/// Where cycles run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum LeakMode {
    /// In one process, which measures itself after each unload.
    #[default]
    Process,
    /// Each in a new process: the memory that is left on the machine after its end is measured.
    Isolated,
    /// Each is a run of the command: the memory that is left on the machine after its end is
    /// measured.
    Command,
    /// Each is a line of the command's output: the memory of its processes at that time is
    /// measured.
    Lines,
    /// Each is a span of time: the memory of a process that runs already, and of its descendants,
    /// is measured at its end.
    Times,
}

/// One load of each cycle.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct CycledLoad {
    /// The source, and its component if one was selected.
    pub(crate) name: String,
    /// Bytes of its delivered tensors.
    pub(crate) tensor_bytes: u64,
    /// The most bytes of its layers that are resident at once.
    pub(crate) resident_bytes: Option<u64>,
    /// The promised limit on the growth of the process: resident layers in host memory, the budget,
    /// and 16 MiB. In a cycle of several loads the largest limit counts, not the sum.
    pub(crate) promised_bytes: Option<u64>,
}

/// Growth of one kind of memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct KindSlope {
    /// `host`, `rss`, `file`, `pinned` or `vram`, as in `limits`; `live` is the library's own count
    /// of its allocations.
    pub(crate) kind: String,
    /// Before the first load.
    pub(crate) floor_bytes: Option<u64>,
    /// After the last warm-up cycle, or `floor_bytes` without warm-up.
    pub(crate) start_bytes: Option<u64>,
    /// After each counted cycle for which it could be measured.
    pub(crate) points_bytes: Vec<u64>,
    /// The largest of these minus the start.
    pub(crate) most_growth_bytes: u64,
    /// Growth per cycle: the median of the slopes between pairs of points, without the pairs across
    /// the largest rise from one cycle to the next. Negative if memory shrinks.
    pub(crate) bytes_per_cycle: Option<f64>,
    /// Lower end of its confidence interval; `null` with too few points.
    pub(crate) low_bytes_per_cycle: Option<f64>,
    /// Upper end of its confidence interval.
    pub(crate) high_bytes_per_cycle: Option<f64>,
    /// Median distance of the points from the line, with one line on each side of that rise.
    pub(crate) spread_bytes: Option<f64>,
    /// The largest growth per cycle that is allowed.
    pub(crate) max_bytes_per_cycle: u64,
    /// The verdict.
    pub(crate) verdict: SlopeVerdict,
}

/// Verdict on a slope.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum SlopeVerdict {
    /// The whole confidence interval is within the limit.
    Flat,
    /// The limit is inside the confidence interval: more cycles would decide.
    Unclear,
    /// The whole confidence interval is above the limit.
    Leak,
    /// Too few cycles.
    #[default]
    Unknown,
}
