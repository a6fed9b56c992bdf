//! How a checkpoint is opened.

use std::path::Path;

use super::{Checkpoint, CheckpointError};

/// How a checkpoint is opened.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct OpenOptions {}

impl OpenOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens and checks.
    pub fn open(&self, _path: impl AsRef<Path>) -> Result<Checkpoint, CheckpointError> {
        Err(CheckpointError::NotImplemented)
    }
}
