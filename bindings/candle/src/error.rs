//! Errors of the adapter, and their conversion to candle's errors.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use onelayer::{CheckpointError, LoadError};

/// An error between a checkpoint and candle.
///
/// Candle's traits return candle's errors, so this error is wrapped in one, with the text of all
/// its causes.
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
        /// The tensor.
        tensor: String,
        /// Its file.
        path: PathBuf,
        /// The cause.
        source: Box<LoadError>,
    },
    /// Candle has no such element type.
    #[error("tensor {tensor:?} of {} is {dtype}, a type that candle does not have", path.display())]
    UnsupportedDType {
        /// The tensor.
        tensor: String,
        /// Its file.
        path: PathBuf,
        /// Its type, as spelled in the file.
        dtype: String,
    },
    /// The shape has too many elements for this machine.
    #[error("tensor {tensor:?} of {} has a shape that this machine cannot hold", path.display())]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// Its file.
        path: PathBuf,
    },
    /// Not enough host memory for a tensor.
    #[error("no host memory for tensor {tensor:?} of {}: {needed_bytes} bytes are needed", path.display())]
    OutOfMemory {
        /// The tensor.
        tensor: String,
        /// Its file.
        path: PathBuf,
        /// The requested bytes.
        needed_bytes: u64,
    },
    /// Arenas need a CUDA device.
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
        // Candle drops the causes of a wrapped error, so its text must contain all of them.
        Self::wrap(WithCauses(error))
    }
}

/// Formats an error and its causes in one line.
struct WithCauses(AdapterError);

impl fmt::Display for WithCauses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut told = self.0.to_string();
        f.write_str(&told)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            let text = error.to_string();
            // A transparent error has the same text as its source.
            if text != told {
                write!(f, ": {text}")?;
            }
            told = text;
            cause = error.source();
        }
        Ok(())
    }
}
