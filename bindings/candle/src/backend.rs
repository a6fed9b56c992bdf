//! The backend of a `VarBuilder`: finds a tensor, checks its shape, and chooses how to read it.

use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use onelayer::{Checkpoint, TensorReader};

use crate::error::AdapterError;
use crate::pieces;
use crate::pull::Pull;
use crate::types::Taken;
use crate::whole;

/// The default staging memory for a tensor that is cast or goes to a device, in bytes.
pub const DEFAULT_STAGING_BYTES: u64 = 16 << 20;

/// Serves tensors of a checkpoint to candle and reads each one on request. Several threads may
/// request tensors at once; each uses separate staging memory.
///
/// A tensor for the CPU in its stored type is read directly into its final memory. A tensor that is
/// cast or goes to another device passes through [staging](Self::staging) in pieces: read, cast on
/// the host, copied to its place.
///
/// Errors are those of candle's backends, `CannotFindTensor` and `UnexpectedShape` (before any byte
/// is read), or an [`AdapterError`].
///
/// # Example
/// ```
/// use candle_core::{DType, Device};
/// use onelayer::Checkpoint;
/// use onelayer_candle::CheckpointBackend;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/checkpoints/llama");
/// let checkpoint = Checkpoint::open(path)?;
/// let backend = CheckpointBackend::new(&checkpoint)?.staging(4 << 20);
/// let weights = backend.into_var_builder(DType::F32, &Device::Cpu);
/// assert!(weights.contains_tensor("model.norm.weight"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct CheckpointBackend {
    checkpoint: Checkpoint,
    reader: TensorReader,
    staging_bytes: u64,
}

impl CheckpointBackend {
    /// Serves the tensors of `checkpoint`.
    ///
    /// # Errors
    /// [`AdapterError::Load`] if a file is missing or has changed since it was checked.
    pub fn new(checkpoint: &Checkpoint) -> std::result::Result<Self, AdapterError> {
        let reader = TensorReader::open(checkpoint)?;
        Ok(Self { checkpoint: checkpoint.clone(), reader, staging_bytes: DEFAULT_STAGING_BYTES })
    }

    /// Sets the maximum host memory, in bytes, for reading a tensor, besides its final memory:
    /// stored and cast pieces of all threads that work on it. Default: 16 MiB; minimum: 64 KiB.
    #[must_use]
    pub fn staging(mut self, bytes: u64) -> Self {
        self.staging_bytes = bytes;
        self
    }

    /// A `VarBuilder` with this backend, for tensors of `dtype` on `device`.
    #[must_use]
    pub fn into_var_builder(self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self), dtype, device.clone())
    }

    fn pull(&self, name: &str) -> Result<Pull<'_>> {
        let Some(entry) = self.checkpoint.find(name) else {
            return Err(Error::CannotFindTensor { path: name.to_owned() }.bt());
        };
        Ok(Pull::new(&self.checkpoint, &self.reader, entry, self.staging_bytes)?)
    }
}

impl SimpleBackend for CheckpointBackend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let pull = self.pull(name)?;
        check_shape(name, shape, &pull.shape)?;
        read(&pull, dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        read(&self.pull(name)?, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.checkpoint.find(name).is_some()
    }
}

/// Refuses an unexpected shape, with the text of candle's backends.
pub(crate) fn check_shape(name: &str, expected: Shape, got: &Shape) -> Result<()> {
    if expected == *got {
        return Ok(());
    }
    let msg = format!("shape mismatch for {name}");
    Err(Error::UnexpectedShape { msg, expected, got: got.clone() }.bt())
}

fn read(pull: &Pull<'_>, dtype: DType, device: &Device) -> Result<Tensor> {
    match pull.taken {
        Taken::Opaque(stored) => whole::read_opaque(pull, stored, device)?.to_dtype(dtype),
        Taken::AsIs(stored) if stored == dtype && device.is_cpu() => match whole::read(pull, dtype) {
            Some(tensor) => tensor,
            None => pieces::read(pull, dtype, device),
        },
        Taken::AsIs(_) | Taken::WidenedU16 => pieces::read(pull, dtype, device),
    }
}
