//! Files on disk -> a checked description of a checkpoint: tensors, dtypes, shapes, byte ranges,
//! shards.
//!
//! Only headers and indices are read. When [`Checkpoint::open`] returns, every rule of the format
//! has been checked for every shard, and no tensor byte has been read.
//!
//! A file here uses only files further down this list, and this one:
//!
//! | file | does |
//! |---|---|
//! | `hub` | the local cache of the Hugging Face hub -> a directory |
//! | `open` | opens all files of a checkpoint and compares them with each other |
//! | `directory`, `index`, `pipeline` | which files: by name, by an index, per component |
//! | `file` | one file: its format, its length, its layout |
//! | `header`, `torch`, `gguf` | the header of each format |
//! | `format` | what every format gives |
//! | `tensor`, `metadata` | the table of tensors; the free text of a header |
//! | `json` | a strict, streaming JSON reader |
//! | `error`, `file_format`, `identity`, `dtype`, `block_type`, `options`, `path_rule`, `text_sort` | used by the files above |

use std::path::Path;
use std::sync::Arc;

pub use self::block_type::BlockType;
pub use self::dtype::{DType, UnknownDType};
pub use self::error::{CheckpointError, JsonSection};
pub use self::file_format::FileFormat;
pub use self::hub::{CacheVariables, HubCache};
pub use self::identity::{FileIdentity, FileKind};
#[allow(unused_imports, reason = "the readers of the source stage reopen files with these")]
pub(crate) use self::identity::{OpenFault, open_regular, open_regular_with};
pub use self::metadata::FileMetadata;
pub use self::options::{OpenOptions, TensorNames};
#[allow(unused_imports, reason = "used by the converter, which can be left out")]
pub(crate) use self::path_rule::relative as relative_name;
pub use self::tensor::{Shard, ShardId, TensorEntry, TensorId};

mod block_type;
mod directory;
mod dtype;
mod error;
mod file;
mod file_format;
#[cfg(test)]
pub(crate) mod for_tests;
mod format;
mod gguf;
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
mod torch;

use self::tensor::{TensorTable, text_bytes};
use crate::units::{ByteRange, to_u64};

/// A checked description of a checkpoint: its files, and the place of every tensor in them. Cheap
/// to clone, `Send + Sync`.
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
    /// - one safetensors, PyTorch or GGUF file of any name: its content tells the format. A file of
    ///   a GGUF set stands for the whole set;
    /// - an index (a name that ends in `.json`): exactly the files it lists;
    /// - a directory with an index, with one file, with a numbered set or with several files;
    /// - a directory with a `model_index.json`, or that file: a pipeline. Each component is such a
    ///   directory, and its tensors are named `component/tensor`.
    ///
    /// A directory may hold several copies. One is chosen, and [`Self::notes`] says which:
    /// safetensors before PyTorch before GGUF. Among them, an index comes before
    /// `model.safetensors`, then a numbered set, then variants such as `model.fp16.safetensors`.
    /// Sets without a variant come before those with one. Sets are never mixed, and several PyTorch
    /// or GGUF files without a rule are refused by name.
    ///
    /// # Errors
    /// [`CheckpointError`]. One call reports the problems of all files of a set, up to 32.
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

    /// All tensors, sorted by shard, then by offset in the shard, then by name. A `TensorId` is a
    /// position in this order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorEntry<'_>> {
        self.inner.table.iter()
    }

    /// True if both are clones of the same description.
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

    /// A tensor's strides in its file alone; empty if it is row-major.
    pub(crate) fn strides_of(&self, id: TensorId) -> &[u64] {
        self.inner.table.strides_of(id)
    }

    /// Bytes of a tensor's elements alone.
    pub(crate) fn bytes_of(&self, id: TensorId) -> u64 {
        match self.strides_of(id) {
            [] => self.extent_of(id).len_bytes(),
            _ => self.tensor(id).len_bytes(),
        }
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

    /// Further names of tensors, sorted, each with its tensor: tied weights, which are read once.
    /// [`Self::find`] knows them too. Only PyTorch files have them.
    pub fn aliases(&self) -> impl ExactSizeIterator<Item = (&str, TensorId)> {
        self.inner.table.aliases()
    }

    /// The files. A [`ShardId`] is a position in this list.
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

    /// Host memory of this description, in bytes. It counts against every host budget.
    #[must_use]
    pub fn metadata_bytes(&self) -> u64 {
        let shards = self.inner.shards.iter().map(Shard::heap_bytes).sum::<u64>();
        let notes = self.inner.notes.iter().map(|note| text_bytes(note.capacity())).sum::<u64>();
        let lists = self.inner.shards.capacity() * size_of::<Shard>()
            + self.inner.notes.capacity() * size_of::<String>();
        self.inner.table.heap_bytes() + shards + notes + to_u64(lists)
    }

    /// The peak of host memory while opening, in bytes: the description before spare capacity was
    /// given back, and temporary tables. They are freed by now.
    pub(crate) fn opening_bytes(&self) -> u64 {
        self.inner.opening_bytes
    }

    /// Choices that were made while opening, as sentences for people: "index wins over
    /// model.safetensors", ...
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.inner.notes
    }
}
