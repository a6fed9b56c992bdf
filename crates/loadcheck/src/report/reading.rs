//! How each file is read and why, and the bytes that were read in each way.

use serde::{Deserialize, Serialize};

/// How one file is read with `--io auto`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct FileReading {
    /// The file.
    pub(crate) file: String,
    /// Its length.
    pub(crate) bytes: u64,
    /// `direct` or `buffered`; for a file that is partly cached, how most of it is read.
    pub(crate) mode: String,
    /// Why, as a code: `cold`, `resident`, `partly_resident`, `memory`, `small`, `network`,
    /// `program`, `no_direct_io` or `residency_unknown`.
    pub(crate) reason: String,
    /// The reason in words.
    pub(crate) why: String,
    /// Its file system; `null` if unknown.
    pub(crate) file_system: Option<String>,
    /// Share of it that was cached when this was decided, 0 to 1, from samples; `null` if unknown
    /// or irrelevant.
    pub(crate) resident_share: Option<f64>,
    /// How that was found out: `cachestat`, `mincore` or `read_nowait`.
    pub(crate) residency_by: Option<String>,
    /// Pages that reading adds to the page cache: `untouched` (none), `uncached` (the kernel drops
    /// them), `dropped_behind` (the loader drops them) or `kept`.
    pub(crate) new_pages: String,
}

/// Bytes that were read.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct IoCounters {
    /// Bytes that were read from files.
    pub(crate) read_bytes: Option<u64>,
    /// Bytes that came from the page cache.
    pub(crate) from_cache_bytes: Option<u64>,
    /// Page faults that waited for a disk.
    pub(crate) major_faults: Option<u64>,
    /// Bytes in files of the tensors that were delivered.
    pub(crate) wanted_bytes: Option<u64>,
    /// `read_bytes` divided by `wanted_bytes`: the cost of alignment and gaps.
    pub(crate) read_amplification: Option<f64>,
    /// Bytes that were read with direct I/O.
    pub(crate) direct_bytes: Option<u64>,
    /// Bytes that were read through the page cache.
    pub(crate) buffered_bytes: Option<u64>,
    /// Bytes that were copied from mapped files.
    pub(crate) mapped_bytes: Option<u64>,
    /// `--io auto`: bytes that were read in another way than planned, since the page cache had
    /// changed.
    pub(crate) corrected_bytes: Option<u64>,
    /// Bytes that were dropped from the page cache after they were read.
    pub(crate) dropped_behind_bytes: Option<u64>,
    /// `--io auto`: how each file was planned to be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) files: Vec<FileReading>,
}
