//! Events and reports of a conversion and of a verification.

use std::time::Duration;

use crate::load::QuantisationError;
use crate::source::Fallback;

/// Something that happened while a conversion or a verification runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConvertEvent<'a> {
    /// Bytes of tensors that this run has read. Several times a second.
    Progress {
        /// So far.
        done_bytes: u64,
        /// In all.
        total_bytes: u64,
    },
    /// An earlier run made this file; it is kept.
    FileKept {
        /// Its path below the target.
        file: &'a str,
        /// Its length.
        bytes: u64,
    },
    /// A file of tensors is complete, on the disk, and has its final name.
    FilePublished {
        /// Its path below the target.
        file: &'a str,
        /// Its length.
        bytes: u64,
    },
    /// A side file was copied.
    SideFile {
        /// Its path below the target.
        file: &'a str,
        /// Its length.
        bytes: u64,
    },
    /// Index and manifest are written: the target is complete.
    Finished,
    /// Bytes of tensors that the verification has compared.
    Verifying {
        /// So far.
        done_bytes: u64,
        /// In all.
        total_bytes: u64,
    },
}

/// How files were written.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WriteMode {
    /// Past the page cache (`O_DIRECT`).
    Direct,
    /// Through the page cache; written pages are flushed and dropped on the way.
    DropBehind {
        /// Why not directly.
        reason: String,
    },
}

/// Bytes that the kernel copied, so that they were not written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelCopied {
    /// Bytes that share their blocks with the source.
    pub cloned_bytes: u64,
    /// Bytes that `copy_file_range` copied.
    pub copied_bytes: u64,
    /// Why some unchanged bytes were written instead, if so.
    pub fallback: Option<String>,
}

/// The outcome of a conversion.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConvertReport {
    /// From the call to its return, without the verification.
    pub elapsed: Duration,
    /// Files of tensors that this run wrote.
    pub files_written: u64,
    /// Files of tensors that an earlier run wrote.
    pub files_kept: u64,
    /// Bytes of the files of tensors that this run wrote.
    pub written_bytes: u64,
    /// Bytes that were read from the source.
    pub read_bytes: u64,
    /// Side files that were copied.
    pub side_files: u64,
    /// True if the target has its index and manifest: nothing is left to do.
    pub is_complete: bool,
    /// How files were written; `None` if none was.
    pub write_mode: Option<WriteMode>,
    /// Bytes that the kernel copied.
    pub kernel_copied: KernelCopied,
    /// Files of the source that were not read in the mode that was asked for.
    pub fallbacks: Vec<Fallback>,
    /// Notes for a person.
    pub notes: Vec<String>,
    /// The errors of quantising, by name of the tensor, in the files that this run wrote. Nothing
    /// is known of files that an earlier run wrote.
    pub quantisation: Vec<(String, QuantisationError)>,
    /// The result of the verification, if one was asked for.
    pub verification: Option<VerifyReport>,
}

/// One thing that is wrong with a target.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Difference {
    /// The file, or the tensor.
    pub place: String,
    /// The fault: both sides of the comparison, in words.
    pub what: String,
}

/// The outcome of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Files of tensors whose hashes were compared.
    pub files: u64,
    /// Tensors whose bytes were compared.
    pub tensors: u64,
    /// Bytes of those tensors.
    pub bytes: u64,
    /// Those of them that the conversion cast to another type, by its manifest.
    pub cast: u64,
    /// Those of them that it quantised, values and scales, by its manifest.
    pub quantised: u64,
    /// Every fault; empty if all is well. After a thousand, one entry says how many more there are.
    pub differences: Vec<Difference>,
    /// Notes for a person: a manifest is missing, tensors were left out on purpose.
    pub notes: Vec<String>,
}
