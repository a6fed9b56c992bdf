//! A conversion that can be shown and run.

use std::path::Path;

use super::{Conversion, ConvertError, ConvertReport};
use crate::plan::LoadPlan;

/// One file of tensors that a conversion makes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlannedFile {
    /// Its path below the target.
    pub name: String,
    /// Its length in bytes, header included.
    pub file_bytes: u64,
    /// Number of its tensors.
    pub tensors: u64,
    /// The layers that it holds, or holds a part of.
    pub layers: Vec<String>,
    /// True if an earlier run has made it.
    pub is_done: bool,
}

/// A conversion that is planned; nothing has been written.
#[derive(Debug)]
pub struct PreparedConversion {}

/// Cancels a conversion from any thread.
#[derive(Clone, Debug)]
pub struct ConvertCancel {}

impl ConvertCancel {
    /// Cancels the conversion: it ends with [`LoadError::Cancelled`](crate::LoadError::Cancelled). Finished files stay.
    pub fn cancel(&self) {}
}

#[allow(unused_variables, clippy::unused_self, reason = "to be filled")]
impl PreparedConversion {
    pub(super) fn new(settings: Conversion, source: &Path, target: &Path) -> Result<Self, ConvertError> {
        Ok(Self {})
    }

    /// The files of tensors, in execution order; all of them, also those of other parts.
    #[must_use]
    pub fn files(&self) -> &[PlannedFile] {
        &[]
    }

    /// Side files that will be copied: their paths below the target and lengths in bytes.
    #[must_use]
    pub fn side_files(&self) -> Vec<(String, u64)> {
        Vec::new()
    }

    /// Tied weights that are left out: the name of each, and of the one that is kept.
    #[must_use]
    pub fn duplicates(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// What a person should know before it runs.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &[]
    }

    /// Every read, and every term of the memory.
    #[must_use]
    pub fn plan(&self) -> &LoadPlan {
        unimplemented!()
    }

    /// Bytes that this run has to write: files of its part that are not done, and side files.
    #[must_use]
    pub fn needed_bytes(&self) -> u64 {
        0
    }

    /// Bytes that are free in the target's file system.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        0
    }

    /// A handle that cancels the conversion from any thread.
    #[must_use]
    pub fn cancel_handle(&self) -> ConvertCancel {
        ConvertCancel {}
    }

    /// Converts. Of a part, only its files are made, and [`Self::finish`] is left to be called; else the target is complete
    /// when this returns.
    ///
    /// # Errors
    /// [`ConvertError`]. Files that are published stay.
    pub fn run(self) -> Result<ConvertReport, ConvertError> {
        unimplemented!()
    }

    /// Checks that every file of every part is there, and writes side files, index and manifest.
    ///
    /// # Errors
    /// [`ConvertError::Incomplete`] if parts are missing.
    pub fn finish(self) -> Result<ConvertReport, ConvertError> {
        unimplemented!()
    }
}
