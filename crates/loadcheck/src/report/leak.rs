//! What is reported of repeated loads: how each kind of memory grew from cycle to cycle.

use serde::{Deserialize, Serialize};

/// What `leak` did and found.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Leak {
    /// Where the cycles ran, and so what was measured after each of them.
    pub(crate) mode: LeakMode,
    /// Cycles that were asked for, without those to warm up.
    pub(crate) cycles: u64,
    /// Cycles before, which are not counted.
    pub(crate) warmup: u64,
    /// Cycles that were counted: fewer where it ended early.
    pub(crate) counted: u64,
    /// What a cycle loads, uses and unloads, one after the other; empty for a command.
    pub(crate) loads: Vec<CycledLoad>,
    /// The words of the command; `null` for loads of this program's.
    pub(crate) command: Option<Vec<String>>,
    /// The level of `low` and `high` of every slope.
    pub(crate) confidence: f64,
    /// What grew how much.
    pub(crate) slopes: Vec<KindSlope>,
    /// Processes that the command had left behind at the end; `null` where that is no question.
    pub(crate) left_behind: Option<u64>,
}

/// Where cycles run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum LeakMode {
    /// All in one process, which measures itself after each unload.
    #[default]
    Process,
    /// Each in a process of its own: what stays on the machine after its end.
    Isolated,
    /// Each is a run of the command: what stays on the machine after its end.
    Command,
    /// A line of the command's output: what its processes hold then.
    Lines,
}

/// Something that each cycle loads.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct CycledLoad {
    /// The source, and its component if one was asked for.
    pub(crate) name: String,
    /// Bytes of its tensors, as delivered.
    pub(crate) tensor_bytes: u64,
    /// The most bytes of its layers that are resident at once.
    pub(crate) resident_bytes: Option<u64>,
    /// The most that the process may grow while it is loaded: its resident layers on the host, the
    /// budget, and 16 MiB. In a cycle of several loads that of the largest counts, never the
    /// sum.
    pub(crate) promised_bytes: Option<u64>,
}

/// How much one kind of memory grew.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct KindSlope {
    /// `host`, `rss`, `file`, `pinned` and `vram`, as in `limits`; `live` is what this library says
    /// it has allocated.
    pub(crate) kind: String,
    /// Before the first load.
    pub(crate) floor_bytes: Option<u64>,
    /// After the last cycle to warm up, or the floor without one.
    pub(crate) start_bytes: Option<u64>,
    /// After each counted cycle, those left out after which it could not be measured.
    pub(crate) points_bytes: Vec<u64>,
    /// The most that any of them is above the start.
    pub(crate) most_growth_bytes: u64,
    /// Growth a cycle: the median of the slopes between pairs of points, those across the largest
    /// rise from one cycle to the next left out. Below zero it shrinks.
    pub(crate) bytes_per_cycle: Option<f64>,
    /// The lower end of its confidence; `null` with too few points.
    pub(crate) low_bytes_per_cycle: Option<f64>,
    /// The upper end.
    pub(crate) high_bytes_per_cycle: Option<f64>,
    /// How far a point lies from that line, one on each side of that rise: the median.
    pub(crate) spread_bytes: Option<f64>,
    /// The most it may grow.
    pub(crate) max_bytes_per_cycle: u64,
    /// What follows.
    pub(crate) verdict: SlopeVerdict,
}

/// What a slope says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum SlopeVerdict {
    /// The whole confidence is within the limit.
    Flat,
    /// The limit is inside the confidence: more cycles would tell.
    Unclear,
    /// The whole confidence is above the limit.
    Leak,
    /// Too few cycles to tell.
    #[default]
    Unknown,
}
