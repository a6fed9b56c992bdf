//! Files on disk -> a checked description: tensors, dtypes, shapes, byte extents, shards.
//!
//! Only headers are read. After [`Checkpoint::open`] returned, every structural promise of the format has
//! been checked for every shard; no tensor byte has been touched.

use std::path::Path;
use std::sync::Arc;

pub use self::dtype::{DType, UnknownDType};
pub use self::error::CheckpointError;
pub use self::identity::{FileIdentity, FileKind};
#[allow(unused_imports, reason = "the readers of the source stage reopen files with these")]
pub(crate) use self::identity::{OpenFault, open_regular, open_regular_with};
pub use self::options::OpenOptions;
pub use self::tensor::{Shard, ShardId, TensorEntry, TensorId};

mod dtype;
mod error;
mod identity;
mod options;
mod tensor;

use self::tensor::TensorTable;

/// A checked description of a checkpoint: what lies where in which file. Cheap to clone, `Send + Sync`.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    table: TensorTable,
    shards: Vec<Shard>,
    notes: Vec<String>,
}

impl Checkpoint {
    /// Opens a checkpoint with the default [`OpenOptions`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        OpenOptions::new().open(path)
    }

    /// All tensors, sorted by shard, then by offset in the shard, then by name. `TensorId`s count in this order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorEntry<'_>> {
        self.inner.table.iter()
    }

    /// Number of tensors.
    #[must_use]
    pub fn tensor_count(&self) -> usize {
        self.inner.table.len()
    }

    /// One tensor.
    ///
    /// # Panics
    /// If `id` comes from another checkpoint and is out of range.
    #[must_use]
    pub fn tensor(&self, id: TensorId) -> TensorEntry<'_> {
        self.inner.table.entry(id)
    }

    /// The tensor of that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<TensorEntry<'_>> {
        self.inner.table.find(name).map(|id| self.tensor(id))
    }

    /// The files, in the order of their ids.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.inner.shards
    }

    /// One file.
    ///
    /// # Panics
    /// If `id` comes from another checkpoint and is out of range.
    #[must_use]
    pub fn shard(&self, id: ShardId) -> &Shard {
        &self.inner.shards[id.index()]
    }

    /// Bytes of all tensors together.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors().map(|tensor| tensor.extent.len_bytes()).sum()
    }

    /// Host memory that this description holds, in bytes. Part of every host budget.
    #[must_use]
    pub fn metadata_bytes(&self) -> u64 {
        self.inner.table.heap_bytes()
    }

    /// Choices made while opening that a person should know: "index wins over model.safetensors", ...
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.inner.notes
    }
}
