//! What can go wrong beside candle's own errors, and how it becomes one of those.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use onelayer::{CheckpointError, LoadError};

/// What can go wrong between a checkpoint and candle.
///
/// Candle's traits return candle's errors, so this arrives inside one of them, shown with all its causes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// The checkpoint cannot be opened.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The files cannot be opened, or a load failed as a whole.
    #[error(transparent)]
    Load(Box<LoadError>),
    /// The bytes of a tensor cannot be read.
    #[error("tensor {tensor:?} of {} cannot be read", path.display())]
    Read {
        /// Its name.
        tensor: String,
        /// The file that holds it.
        path: PathBuf,
        /// Why not.
        source: Box<LoadError>,
    },
    /// Candle has no such element type.
    #[error("tensor {tensor:?} of {} is {dtype}, a type that candle does not have", path.display())]
    UnsupportedDType {
        /// Its name.
        tensor: String,
        /// The file that holds it.
        path: PathBuf,
        /// Its type, as the file spells it.
        dtype: String,
    },
    /// More elements than this machine can count.
    #[error("tensor {tensor:?} of {} has a shape that this machine cannot hold", path.display())]
    TooLarge {
        /// Its name.
        tensor: String,
        /// The file that holds it.
        path: PathBuf,
    },
    /// The host has no room for a tensor.
    #[error("no host memory for tensor {tensor:?} of {}: {needed_bytes} bytes are needed", path.display())]
    OutOfMemory {
        /// Its name.
        tensor: String,
        /// The file that holds it.
        path: PathBuf,
        /// Bytes that were asked for.
        needed_bytes: u64,
    },
    /// Arenas are for CUDA devices.
    #[error("arenas are for CUDA devices, not for {found}; `CheckpointBackend` serves every device")]
    NotCuda {
        /// The device.
        found: String,
    },
}

impl From<LoadError> for AdapterError {
    fn from(error: LoadError) -> Self {
        Self::Load(Box::new(error))
    }
}

impl From<AdapterError> for candle_core::Error {
    fn from(error: AdapterError) -> Self {
        // Candle shows what it wraps and forgets its causes, so all of them are told at once.
        Self::wrap(WithCauses(error))
    }
}

/// Shows an error and its causes in one line.
struct WithCauses(AdapterError);

impl fmt::Display for WithCauses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut told = self.0.to_string();
        f.write_str(&told)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            let text = error.to_string();
            // A transparent layer says what the one below says.
            if text != told {
                write!(f, ": {text}")?;
            }
            told = text;
            cause = error.source();
        }
        Ok(())
    }
}
