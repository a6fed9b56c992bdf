//! What is reported of reading: how each file is read and why, and what was moved which way.

use serde::{Deserialize, Serialize};

/// How one file is read where the choice is the loader's (`--io auto`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct FileReading {
    /// The file.
    pub(crate) file: String,
    /// Its length.
    pub(crate) bytes: u64,
    /// `direct` or `buffered`; of a file that is partly in the page cache, how most of it is read.
    pub(crate) mode: String,
    /// Why, in a word: `cold`, `resident`, `partly_resident`, `memory`, `small`, `network`,
    /// `program`, `no_direct_io` or `residency_unknown`.
    pub(crate) reason: String,
    /// The same for people.
    pub(crate) why: String,
    /// What holds it; `null` if the system does not say.
    pub(crate) file_system: Option<String>,
    /// Share of it that was in the page cache when it was decided, 0 to 1, from samples; `null`
    /// where nobody tells or it does not matter.
    pub(crate) resident_share: Option<f64>,
    /// Who told: `cachestat`, `mincore` or `read_nowait`.
    pub(crate) residency_by: Option<String>,
    /// What becomes of pages that are brought into the page cache: `untouched` (there are none),
    /// `uncached` (the kernel forgets them), `dropped_behind` or `kept`.
    pub(crate) new_pages: String,
}

/// What was read.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct IoCounters {
    /// Bytes that were delivered from files.
    pub(crate) read_bytes: Option<u64>,
    /// Of these, bytes that no device had to read.
    pub(crate) from_cache_bytes: Option<u64>,
    /// Page faults that waited for a device.
    pub(crate) major_faults: Option<u64>,
    /// Bytes of the tensors in their files, of those that arrived.
    pub(crate) wanted_bytes: Option<u64>,
    /// `read_bytes` by `wanted_bytes`: what alignment and gaps add.
    pub(crate) read_amplification: Option<f64>,
    /// Bytes that were read past the page cache.
    pub(crate) direct_bytes: Option<u64>,
    /// Bytes that were read through the page cache.
    pub(crate) buffered_bytes: Option<u64>,
    /// Bytes that were copied out of mappings.
    pub(crate) mapped_bytes: Option<u64>,
    /// `--io auto`: bytes that were read another way than was decided beforehand, since the page
    /// cache had changed.
    pub(crate) corrected_bytes: Option<u64>,
    /// Bytes of the page cache that were dropped behind reads.
    pub(crate) dropped_behind_bytes: Option<u64>,
    /// `--io auto`: how each file was to be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) files: Vec<FileReading>,
}
