//! What the operating system says was used: memory of a process or of a process tree, control
//! groups, faults, reads, page cache. It observes and never enforces; no other stage depends on its
//! answers to work.
//!
//! | file | reads |
//! |---|---|
//! | `measured` | nothing: a number, or the reason there is none |
//! | `procfs` | a process pinned by a descriptor of its directory |
//! | `memory` | `status`: memory now and at most; resets the peak |
//! | `rollup` | `smaps_rollup`: exact, shared pages counted once |
//! | `activity` | `stat`, `io`: faults, reads, CPU time |
//! | `timeline`, `recorder` | nothing: bounded curve, peaks and where they happened |
//! | `sampler` | the calling process over time |
//! | `tree` | a process and all of its descendants over time, from outside |
//! | `cgroup` | control groups, versions 1 and 2; makes one of our own |
//! | `page_cache` | how much of a file is cached; drops it |
//! | `host` | kernel, memory, CPU, kind of a file system |
//! | `nvml` | NVIDIA's management library: memory of a GPU, of all and of one process |
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
mod page_cache;
mod procfs;
mod recorder;
mod rollup;
mod sampler;
mod snapshot;
mod timeline;
mod tree;
mod victim;

pub use activity::Activity;
pub use cgroup::{CgroupVersion, ChildGroup, CpuGroup, GroupMemory, MemoryGroup};
pub use error::ProbeError;
pub use host::{Host, file_system_of, file_system_of_file};
pub use measured::{Measured, Reason, Unavailable};
pub use memory::{PeakReset, ProcessMemory};
pub use nvml::{GpuMemory, NvmlError};
pub use onelayer_system::file_system::FileSystem;
pub use page_cache::{CacheDrop, Residency, ResidencyMethod, drop_cache, residency};
pub use procfs::{Process, Procfs};
pub use recorder::{At, LABEL_BYTES_MAX, Peak, Peaks, Recorder, RssPeakMethod};
pub use rollup::SmapsRollup;
pub use sampler::{
    INTERVAL_DEFAULT, INTERVAL_MAX, INTERVAL_MIN, Marker, PeakResetOutcome, Sampler, SamplerOptions, Summary,
};
pub use snapshot::Snapshot;
pub use timeline::{TIMELINE_ROWS_DEFAULT, Timeline, TimelineRow};
pub use tree::{ProcessRecord, TreeMethod, TreeOptions, TreePeak, TreeSampler, TreeSummary};
pub use victim::goes_first;
