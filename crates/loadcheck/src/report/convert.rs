//! What is reported of a conversion and of a verification: what is planned, what it did, what
//! differs.

use serde::{Deserialize, Serialize};

use super::{MemoryTerm, QuantisedTensor};

/// A conversion: what it makes, and what it did.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Convert {
    /// Where to, as on the command line.
    pub(crate) target: String,
    /// `--dry-run`: nothing was written.
    pub(crate) dry_run: bool,
    /// `--finish`: only index and manifest were to be written.
    pub(crate) finish: bool,
    /// `--part`, such as `1/8`; `null` is all of it.
    pub(crate) part: Option<String>,
    /// What it ran with.
    pub(crate) params: ConvertParams,
    /// The files of tensors in words: `24 layers of 29 MiB, lm_head`.
    pub(crate) summary: String,
    /// The files of tensors, in execution order; those of other parts too.
    pub(crate) files: Vec<ConvertFile>,
    /// How many of them are for this part.
    pub(crate) part_files: u64,
    /// What is copied beside them.
    pub(crate) side_files: Vec<SideFile>,
    /// Tied weights that are left out.
    pub(crate) duplicates: Vec<Duplicate>,
    /// Bytes that were still to be written when it began.
    pub(crate) needed_bytes: u64,
    /// Bytes that were free in the target's file system.
    pub(crate) free_bytes: u64,
    /// What it holds in host memory; `null` if all of its files are there already.
    pub(crate) memory: Option<ConvertMemory>,
    /// `--dry-run`: how long it will take.
    pub(crate) estimate: Option<Estimate>,
    /// What it did; `null` for a dry run.
    pub(crate) result: Option<Converted>,
}

/// What a conversion ran with.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct ConvertParams {
    /// Host budget.
    pub(crate) budget_bytes: u64,
    /// How the source is read.
    pub(crate) io: String,
    /// Threads that read, and as many that write, if that was asked for.
    pub(crate) jobs: Option<u64>,
    /// Whether all is compared afterwards.
    pub(crate) verify: bool,
    /// Whether the kernel may copy or share what stays as it is.
    pub(crate) kernel_copy: bool,
    /// Everything that decides about what is written, as the manifest has it.
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
    /// The layers that it holds, or holds a part of.
    pub(crate) layers: Vec<String>,
    /// Whether it is there.
    pub(crate) state: FileState,
}

/// Whether a file of tensors is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum FileState {
    /// Not yet.
    Planned,
    /// An earlier run has made it, and it was kept.
    Kept,
    /// This run has made it.
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

/// A tied weight that is left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Duplicate {
    /// Its name.
    pub(crate) name: String,
    /// The tensor with the same bytes that is written.
    pub(crate) same_as: String,
}

/// What a conversion holds in host memory, derived from headers.
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
    /// Threads that read.
    pub(crate) readers: u64,
    /// Bytes that are read from the source.
    pub(crate) read_bytes: u64,
}

/// How long a conversion will take, from a short measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Estimate {
    /// Always `estimated`.
    pub(crate) source: String,
    /// The time; `null` if it could not be estimated.
    pub(crate) seconds: Option<f64>,
    /// How fast the source was read, past the page cache.
    pub(crate) read_bytes_per_second: Option<u64>,
    /// How fast random bytes were written where the target will be, and synced.
    pub(crate) write_bytes_per_second: Option<u64>,
    /// How long the target takes to sync a few bytes. Each file is synced several times, while the
    /// next one is written.
    pub(crate) sync_seconds: Option<f64>,
    /// Source and target are on one device, so that reading and writing take turns.
    pub(crate) same_device: Option<bool>,
}

/// What a conversion did. Of one that ended early, what it had done by then.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Converted {
    /// Index and manifest are there: nothing is left to do.
    pub(crate) complete: bool,
    /// Files of tensors that were written.
    pub(crate) files_written: u64,
    /// Files of tensors that an earlier run had written.
    pub(crate) files_kept: u64,
    /// Side files that were copied.
    pub(crate) side_files: u64,
    /// Bytes of the files of tensors that were written.
    pub(crate) written_bytes: u64,
    /// Bytes that were read from the source; `null` if it ended early.
    pub(crate) read_bytes: Option<u64>,
    /// Wall time, without `--verify`; `null` if it ended early.
    pub(crate) seconds: Option<f64>,
    /// `direct` (past the page cache) or `drop_behind`; `null` if nothing was written.
    pub(crate) write_mode: Option<String>,
    /// Why not directly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) write_mode_reason: Option<String>,
    /// Bytes that share their blocks with the source.
    pub(crate) cloned_bytes: u64,
    /// Bytes that the kernel copied.
    pub(crate) kernel_copied_bytes: u64,
    /// Why the kernel did not copy all that stays as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) kernel_copy_reason: Option<String>,
    /// Files of the source that were not read the way that was asked for.
    pub(crate) read_fallbacks: Vec<ReadFallback>,
    /// What quantising lost, tensor by tensor of the files that were written.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) quantised: Vec<QuantisedTensor>,
}

/// A file of the source that was not read the way that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct ReadFallback {
    /// The file.
    pub(crate) file: String,
    /// What was asked for.
    pub(crate) from: String,
    /// What was done.
    pub(crate) to: String,
    /// Why.
    pub(crate) reason: String,
}

/// A verification: what was compared, and what differs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Verification {
    /// What was checked, as on the command line.
    pub(crate) directory: String,
    /// What it was compared with; `null` if only its manifest counted.
    pub(crate) against: Option<String>,
    /// Files of tensors whose hashes were compared.
    pub(crate) files: u64,
    /// Tensors whose bytes were compared.
    pub(crate) tensors: u64,
    /// Bytes that were compared.
    pub(crate) bytes: u64,
    /// Wall time; `null` for `convert --verify`, where it is part of the run's.
    pub(crate) seconds: Option<f64>,
    /// What is not as it should be; empty if all is well.
    pub(crate) differences: Vec<Difference>,
}

/// One thing that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Difference {
    /// The file, or the tensor.
    pub(crate) place: String,
    /// What is wrong with it.
    pub(crate) what: String,
}
