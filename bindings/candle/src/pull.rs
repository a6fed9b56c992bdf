//! One requested tensor: its shape and candle type, and reads of its bytes.

use candle_core::Shape;
use onelayer::{Checkpoint, LoadError, TensorEntry, TensorReader};

use crate::error::AdapterError;
use crate::types::Taken;

/// One requested tensor.
pub(crate) struct Pull<'a> {
    checkpoint: &'a Checkpoint,
    reader: &'a TensorReader,
    entry: TensorEntry<'a>,
    /// Maximum host memory besides the tensor.
    pub(crate) staging_bytes: u64,
    pub(crate) taken: Taken,
    pub(crate) shape: Shape,
    /// Number of elements.
    pub(crate) count: usize,
}

impl<'a> Pull<'a> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        reader: &'a TensorReader,
        entry: TensorEntry<'a>,
        staging_bytes: u64,
    ) -> Result<Self, AdapterError> {
        let (tensor, path) = (entry.name.to_owned(), checkpoint.shards()[entry.shard.index()].path.clone());
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
        Ok(Self { checkpoint, reader, entry, staging_bytes, taken, shape: Shape::from(dims), count })
    }

    /// Size of the tensor in its file.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.entry.len_bytes()
    }

    /// Fills `target` with bytes of the tensor from `offset_bytes` on.
    pub(crate) fn read(&self, offset_bytes: u64, target: &mut [u8]) -> Result<(), AdapterError> {
        self.reader.read(self.entry.id, offset_bytes, target).map_err(|source| self.unreadable(source))
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
        let path = self.checkpoint.shards()[self.entry.shard.index()].path.clone();
        (self.entry.name.to_owned(), path)
    }
}
