//! A conversion (its plan and its result) and a verification (its differences).

use serde::{Deserialize, Serialize};

use super::{MemoryTerm, QuantisedTensor};

/// A conversion.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Convert {
    /// The target, as on the command line.
    pub(crate) target: String,
    /// `--dry-run`: nothing was written.
    pub(crate) dry_run: bool,
    /// `--finish`: only index and manifest were to be written.
    pub(crate) finish: bool,
    /// `--part`, such as `1/8`; `null` is everything.
    pub(crate) part: Option<String>,
    /// Its settings.
    pub(crate) params: ConvertParams,
    /// The files of tensors in words: `24 layers of 29 MiB, lm_head`.
    pub(crate) summary: String,
    /// The files of tensors, in execution order, including those of other parts.
    pub(crate) files: Vec<ConvertFile>,
    /// Number of files for this part.
    pub(crate) part_files: u64,
    /// Other files that are copied.
    pub(crate) side_files: Vec<SideFile>,
    /// `config.json` describes the quantised weights to compressed-tensors.
    #[serde(default)]
    pub(crate) describes_quantisation: bool,
    /// Tied weights that are not written.
    pub(crate) duplicates: Vec<Duplicate>,
    /// Bytes that were left to write when it started.
    pub(crate) needed_bytes: u64,
    /// Free bytes in the target's file system.
    pub(crate) free_bytes: u64,
    /// Host memory that it needs; `null` if all of its files exist already.
    pub(crate) memory: Option<ConvertMemory>,
    /// `--dry-run`: the estimated time.
    pub(crate) estimate: Option<Estimate>,
    /// The result; `null` for a dry run.
    pub(crate) result: Option<Converted>,
}

/// Settings of a conversion.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct ConvertParams {
    /// Host budget.
    pub(crate) budget_bytes: u64,
    /// The way the source is read.
    pub(crate) io: String,
    /// `--jobs`: number of reading threads, and of writing threads.
    pub(crate) jobs: Option<u64>,
    /// Whether the result is compared with the source afterwards.
    pub(crate) verify: bool,
    /// Whether the kernel may copy or share unchanged bytes.
    pub(crate) kernel_copy: bool,
    /// All options that affect what is written, as in the manifest.
    pub(crate) options: Vec<String>,
}

/// A file of tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct ConvertFile {
    /// Its path below the target.
    pub(crate) name: String,
    /// Its length, header included.
    pub(crate) bytes: u64,
    /// Number of its tensors.
    pub(crate) tensors: u64,
    /// The layers that it holds, whole or in part.
    pub(crate) layers: Vec<String>,
    /// Whether it exists.
    pub(crate) state: FileState,
}

/// Whether a file of tensors exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum FileState {
    /// Not yet.
    Planned,
    /// Written by an earlier run, and kept.
    Kept,
    /// Written by this run.
    Written,
}

/// A file without tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct SideFile {
    /// Its path below the target.
    pub(crate) name: String,
    /// Its length.
    pub(crate) bytes: u64,
}

/// A tied weight that is not written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Duplicate {
    /// Its name.
    pub(crate) name: String,
    /// The tensor with the same bytes that is written.
    pub(crate) same_as: String,
}

/// Host memory of a conversion, derived from headers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct ConvertMemory {
    /// Always `derived`: nothing here was measured.
    pub(crate) source: String,
    /// The host budget's terms.
    pub(crate) terms: Vec<MemoryTerm>,
    /// Their sum.
    pub(crate) host_bytes: u64,
    /// The smallest budget that would be accepted.
    pub(crate) smallest_budget_bytes: u64,
    /// Slots of the ring.
    pub(crate) slots: u64,
    /// Bytes of one slot.
    pub(crate) slot_bytes: u64,
    /// Number of reading threads.
    pub(crate) readers: u64,
    /// Bytes that are read from the source.
    pub(crate) read_bytes: u64,
}

/// Estimated time of a conversion, from a short measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Estimate {
    /// Always `estimated`.
    pub(crate) source: String,
    /// The time; `null` if it could not be estimated.
    pub(crate) seconds: Option<f64>,
    /// Measured speed of reading the source with direct I/O.
    pub(crate) read_bytes_per_second: Option<u64>,
    /// Measured speed of writing and syncing random bytes where the target will be.
    pub(crate) write_bytes_per_second: Option<u64>,
    /// Time to sync a few bytes in the target. Each file is synced several times, while the next
    /// one is written.
    pub(crate) sync_seconds: Option<f64>,
    /// Whether source and target are on one device, so that reading and writing take turns.
    pub(crate) same_device: Option<bool>,
}

/// The result of a conversion; of one that ended early, the part that was done.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Converted {
    /// Index and manifest were written: nothing is left to do.
    pub(crate) complete: bool,
    /// Files of tensors that were written.
    pub(crate) files_written: u64,
    /// Files of tensors that an earlier run had written, and that were kept.
    pub(crate) files_kept: u64,
    /// Side files that were copied.
    pub(crate) side_files: u64,
    /// Bytes of the files of tensors that were written.
    pub(crate) written_bytes: u64,
    /// Bytes that were read from the source; `null` if it ended early.
    pub(crate) read_bytes: Option<u64>,
    /// Wall time, without `--verify`; `null` if it ended early.
    pub(crate) seconds: Option<f64>,
    /// `direct` (direct I/O) or `drop_behind`; `null` if nothing was written.
    pub(crate) write_mode: Option<String>,
    /// Why direct I/O was not used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) write_mode_reason: Option<String>,
    /// Bytes that share their blocks with the source (reflinks).
    pub(crate) cloned_bytes: u64,
    /// Bytes that the kernel copied.
    pub(crate) kernel_copied_bytes: u64,
    /// Why the kernel did not copy all unchanged bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) kernel_copy_reason: Option<String>,
    /// Files of the source that were not read as requested.
    pub(crate) read_fallbacks: Vec<ReadFallback>,
    /// Quantisation errors of each tensor in the files that were written.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) quantised: Vec<QuantisedTensor>,
}

/// A file of the source that was not read as requested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct ReadFallback {
    /// The file.
    pub(crate) file: String,
    /// The way that was requested.
    pub(crate) from: String,
    /// The way it was read.
    pub(crate) to: String,
    /// Why.
    pub(crate) reason: String,
}

/// A verification.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Verification {
    /// The checked directory, as on the command line.
    pub(crate) directory: String,
    /// The checkpoint it was compared with; `null` if only its manifest was used.
    pub(crate) against: Option<String>,
    /// Files of tensors whose hashes were compared.
    pub(crate) files: u64,
    /// Tensors whose bytes were compared.
    pub(crate) tensors: u64,
    /// Bytes that were compared.
    pub(crate) bytes: u64,
    /// Tensors that were cast, so that they are compared with the cast source.
    #[serde(default)]
    pub(crate) cast: u64,
    /// Tensors that were quantised, values and scales: they are compared with the quantised source.
    #[serde(default)]
    pub(crate) quantised: u64,
    /// Wall time; `null` for `convert --verify`, which includes it in the run's time.
    pub(crate) seconds: Option<f64>,
    /// Differences; empty if there are none.
    pub(crate) differences: Vec<Difference>,
}

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Difference {
    /// The file, or the tensor.
    pub(crate) place: String,
    /// How it differs.
    pub(crate) what: String,
}
