//! Measures what a process or a process tree used: memory, control groups, faults, reads, page
//! cache, GPU memory. It observes and never enforces.
//!
//! | file | reads |
//! |---|---|
//! | `measured` | nothing: a number, or the reason there is none |
//! | `procfs` | files of one process, through a descriptor of its directory |
//! | `memory` | `status`: current and peak memory; resets the peak |
//! | `rollup` | `smaps_rollup`: exact, shared pages counted once |
//! | `activity` | `stat`, `io`: faults, reads, CPU time |
//! | `timeline`, `recorder` | nothing: bounded curve, peaks and their positions |
//! | `sampler` | the calling process over time |
//! | `slope` | nothing: how much memory grows from one cycle to the next |
//! | `tree` | a process and its descendants over time, from outside |
//! | `cgroup` | control groups, versions 1 and 2; creates child groups |
//! | `oom` | nothing: makes a command the first choice of the out-of-memory killer |
//! | `page_cache` | how much of a file is cached; drops cached pages |
//! | `host` | kernel, memory, CPU, kind of a file system |
//! | `nvml` | NVIDIA's management library: used memory of a GPU, whole or by process |
//!
//! ```
//! use onelayer_probe::{Sampler, SamplerOptions};
//!
//! let sampler = Sampler::start(&SamplerOptions::default())?;
//! sampler.marker().enter_layer("model.layers.0");
//! let weights = vec![1_u8; 8 << 20];
//! let summary = sampler.finish()?;
//! assert!(summary.host_growth_bytes().value().is_none_or(|bytes| bytes >= 8 << 20));
//! # drop(weights);
//! # Ok::<(), onelayer_probe::ProbeError>(())
//! ```

mod activity;
mod cgroup;
mod error;
mod host;
mod measured;
mod memory;
mod nvml;
mod oom;
mod page_cache;
mod procfs;
mod recorder;
mod rollup;
mod sampler;
mod slope;
mod snapshot;
mod timeline;
mod tree;

pub use activity::Activity;
pub use cgroup::{CgroupVersion, ChildGroup, CpuGroup, GroupMemory, MemoryGroup};
pub use error::ProbeError;
pub use host::{Host, file_system_of, file_system_of_file};
pub use measured::{Measured, Reason, Unavailable};
pub use memory::{PeakReset, ProcessMemory};
pub use nvml::{GpuMemory, NvmlError};
pub use onelayer_system::file_system::FileSystem;
pub use oom::prefer_for_oom_kill;
pub use page_cache::{CacheDrop, Residency, ResidencyMethod, drop_cache, residency};
pub use procfs::{Process, Procfs};
pub use recorder::{LABEL_BYTES_MAX, LoadPosition, Peak, Peaks, Recorder, RssPeakMethod};
pub use rollup::SmapsRollup;
pub use sampler::{
    INTERVAL_DEFAULT, INTERVAL_MAX, INTERVAL_MIN, Marker, PeakResetOutcome, Sampler, SamplerOptions, Summary,
};
pub use slope::{Level, SLOPE_CONFIDENCE, SLOPE_POINTS_MIN, Slope, SlopeLimit, slope};
pub use snapshot::Snapshot;
pub use timeline::{TIMELINE_ROWS_DEFAULT, Timeline, TimelineRow};
pub use tree::{ProcessRecord, TreeMethod, TreeOptions, TreePeak, TreeSampler, TreeSummary};
