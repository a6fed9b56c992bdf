//! What a conversion did, once it is over.

use std::time::Duration;

use super::VerifyReport;
use crate::load::QuantisationError;
use crate::source::Fallback;

/// How files were written.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WriteMode {
    /// Past the page cache (`O_DIRECT`).
    Direct,
    /// Through the page cache, which is dropped behind the cursor.
    DropBehind {
        /// Why not directly.
        reason: String,
    },
}

/// What the kernel copied instead of us.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelCopied {
    /// Bytes that share their blocks with the source.
    pub cloned_bytes: u64,
    /// Bytes that `copy_file_range` copied.
    pub copied_bytes: u64,
    /// Why not all that stays as it is, if so.
    pub fallback: Option<String>,
}

/// What a conversion did.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConvertReport {
    /// From the call to its return, verification aside.
    pub elapsed: Duration,
    /// Files of tensors that were written.
    pub files_written: u64,
    /// Files of tensors that an earlier run had written.
    pub files_kept: u64,
    /// Bytes of files that were written, side files, index and manifest aside.
    pub written_bytes: u64,
    /// Bytes that were read from the source.
    pub read_bytes: u64,
    /// Side files that were copied.
    pub side_files: u64,
    /// True if index and manifest are there: nothing is left to do.
    pub is_complete: bool,
    /// How files were written; `None` if none was.
    pub write_mode: Option<WriteMode>,
    /// What the kernel copied.
    pub kernel_copied: KernelCopied,
    /// Files of the source that were not read the way that was asked for.
    pub fallbacks: Vec<Fallback>,
    /// What a person should know.
    pub notes: Vec<String>,
    /// What quantising has lost, with the names of the tensors, of the files that were written.
    /// Nothing is known of files that an earlier run had written.
    pub quantisation: Vec<(String, QuantisationError)>,
    /// What the verification found, if one was asked for.
    pub verification: Option<VerifyReport>,
}
