//! Files on disk -> a checked description: tensors, dtypes, shapes, byte extents, shards.
//!
//! Only headers are read. After [`Checkpoint::open`] returned, every structural promise of the
//! format has been checked for every shard; no tensor byte has been touched.

use std::path::Path;
use std::sync::Arc;

pub use self::dtype::{DType, UnknownDType};
pub use self::error::{CheckpointError, JsonSection};
pub use self::hub::{CacheVariables, HubCache};
pub use self::identity::{FileIdentity, FileKind};
#[allow(unused_imports, reason = "the readers of the source stage reopen files with these")]
pub(crate) use self::identity::{OpenFault, open_regular, open_regular_with};
pub use self::metadata::FileMetadata;
pub use self::options::OpenOptions;
#[allow(unused_imports, reason = "used by the converter, which can be left out")]
pub(crate) use self::path_rule::relative as relative_name;
pub use self::tensor::{Shard, ShardId, TensorEntry, TensorId};

mod directory;
mod dtype;
mod error;
mod file;
mod header;
mod hub;
mod identity;
mod index;
mod json;
mod metadata;
mod open;
mod options;
mod path_rule;
mod pipeline;
mod tensor;
mod text_sort;

use self::tensor::{TensorTable, text_bytes};
use crate::units::{ByteRange, to_u64};

/// A checked description of a checkpoint: what lies where in which file. Cheap to clone, `Send +
/// Sync`.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    table: TensorTable,
    shards: Vec<Shard>,
    notes: Vec<String>,
    tensor_bytes: u64,
    opening_bytes: u64,
}

impl OpenOptions {
    /// Opens and checks what `path` names; see [`Checkpoint::open`] for the forms it may take.
    ///
    /// # Errors
    /// [`CheckpointError`], as for [`Checkpoint::open`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Checkpoint, CheckpointError> {
        open::open(path.as_ref(), self)
    }
}

impl Checkpoint {
    /// Opens a checkpoint with the default [`OpenOptions`]. `path` may be
    ///
    /// - one safetensors file, whatever its name;
    /// - an index (a name that ends in `.json`): exactly the files it lists;
    /// - a directory with an index, with one file, with a numbered set or with several files;
    /// - a directory with a `model_index.json`, or that file: a pipeline. Each component is such a
    ///   directory, and its tensors are named `component/tensor`.
    ///
    /// Where a directory holds several copies, one is taken and [`Self::notes`] says which: an
    /// index before `model.safetensors` before a numbered set before variants such as
    /// `model.fp16.safetensors`; without a variant before with one. Sets are never mixed.
    ///
    /// # Errors
    /// [`CheckpointError`]. All problems of a set are found in one call, as far as that is
    /// sensible.
    ///
    /// # Example
    /// ```no_run
    /// use onelayer::checkpoint::Checkpoint;
    ///
    /// # fn main() -> Result<(), onelayer::checkpoint::CheckpointError> {
    /// let checkpoint = Checkpoint::open("gemma-7b")?;
    /// for tensor in checkpoint.tensors() {
    ///     assert!(checkpoint.shard(tensor.shard).data.contains(tensor.extent));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        OpenOptions::new().open(path)
    }

    /// All tensors, sorted by shard, then by offset in the shard, then by name. `TensorId`s count
    /// in this order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorEntry<'_>> {
        self.inner.table.iter()
    }

    /// True if both are clones of one.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
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

    /// A tensor's name alone: cheaper than the whole entry.
    pub(crate) fn name_of(&self, id: TensorId) -> &str {
        self.inner.table.name_of(id.0)
    }

    /// A tensor's shape alone.
    pub(crate) fn shape_of(&self, id: TensorId) -> &[u64] {
        self.inner.table.shape(self.inner.table.records[id.index()].shape)
    }

    /// A tensor's bytes in its file alone.
    pub(crate) fn extent_of(&self, id: TensorId) -> ByteRange {
        self.inner.table.extent_of(id)
    }

    /// A tensor's file alone.
    pub(crate) fn shard_of(&self, id: TensorId) -> ShardId {
        self.inner.table.shard_of(id)
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
        self.inner.tensor_bytes
    }

    /// Host memory that this description holds, in bytes. Part of every host budget.
    #[must_use]
    pub fn metadata_bytes(&self) -> u64 {
        let shards = self.inner.shards.iter().map(Shard::heap_bytes).sum::<u64>();
        let notes = self.inner.notes.iter().map(|note| text_bytes(note.capacity())).sum::<u64>();
        let lists = self.inner.shards.capacity() * size_of::<Shard>()
            + self.inner.notes.capacity() * size_of::<String>();
        self.inner.table.heap_bytes() + shards + notes + to_u64(lists)
    }

    /// The most host memory that opening held at once, in bytes: the description before what is
    /// left over was given back, and what led to it. It is free again.
    pub(crate) fn opening_bytes(&self) -> u64 {
        self.inner.opening_bytes
    }

    /// Choices made while opening that a person should know: "index wins over model.safetensors",
    /// ...
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.inner.notes
    }
}
