//! The backend of a `VarBuilder`: finds a tensor, checks its shape, and chooses how to read it.

use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use onelayer::{Checkpoint, LoadError, TensorEntry, TensorReader};

use crate::error::AdapterError;
use crate::pieces;
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
        Ok(Pull::new(self, entry)?)
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
        pull.tensor(dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.pull(name)?.tensor(dtype, device)
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

/// One requested tensor.
pub(crate) struct Pull<'a> {
    backend: &'a CheckpointBackend,
    entry: TensorEntry<'a>,
    pub(crate) taken: Taken,
    pub(crate) shape: Shape,
    /// Number of elements.
    pub(crate) count: usize,
}

impl<'a> Pull<'a> {
    fn new(
        backend: &'a CheckpointBackend,
        entry: TensorEntry<'a>,
    ) -> std::result::Result<Self, AdapterError> {
        let (tensor, path) =
            (entry.name.to_owned(), backend.checkpoint.shards()[entry.shard.index()].path.clone());
        let Some(taken) = Taken::of(entry.dtype) else {
            let dtype = entry.dtype_name.to_owned();
            return Err(AdapterError::UnsupportedDType { tensor, path, dtype });
        };
        let dims: Option<Vec<usize>> =
            entry.shape.iter().map(|&elements| usize::try_from(elements).ok()).collect();
        let count = |dims: &[usize]| dims.iter().try_fold(1, |product: usize, &dim| product.checked_mul(dim));
        let Some((dims, count)) = dims.and_then(|dims| count(&dims).map(|count| (dims, count))) else {
            return Err(AdapterError::TooLarge { tensor, path });
        };
        Ok(Self { backend, entry, taken, shape: Shape::from(dims), count })
    }

    fn tensor(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.taken {
            Taken::Opaque(stored) => whole::read_opaque(self, stored, device)?.to_dtype(dtype),
            Taken::AsIs(stored) if stored == dtype && device.is_cpu() => match whole::read(self, dtype) {
                Some(tensor) => tensor,
                None => pieces::read(self, dtype, device),
            },
            Taken::AsIs(_) | Taken::WidenedU16 => pieces::read(self, dtype, device),
        }
    }

    /// Maximum host memory besides the tensor.
    pub(crate) fn staging_bytes(&self) -> u64 {
        self.backend.staging_bytes
    }

    /// Size of the tensor in its file.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.entry.extent.len_bytes()
    }

    /// Fills `target` with bytes of the tensor from `offset_bytes` on.
    pub(crate) fn read(&self, offset_bytes: u64, target: &mut [u8]) -> std::result::Result<(), AdapterError> {
        self.backend
            .reader
            .read(self.entry.id, offset_bytes, target)
            .map_err(|source| self.unreadable(source))
    }

    fn unreadable(&self, source: LoadError) -> AdapterError {
        let (tensor, path) = self.place();
        AdapterError::Read { tensor, path, source: Box::new(source) }
    }

    /// The error of a failed allocation.
    pub(crate) fn out_of_memory(&self, needed_bytes: u64) -> AdapterError {
        let (tensor, path) = self.place();
        AdapterError::OutOfMemory { tensor, path, needed_bytes }
    }

    fn place(&self) -> (String, std::path::PathBuf) {
        let path = self.backend.checkpoint.shards()[self.entry.shard.index()].path.clone();
        (self.entry.name.to_owned(), path)
    }
}
