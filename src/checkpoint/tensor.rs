//! The table of tensors: names, dtypes, shapes and extents in a few flat arrays.
//!
//! A checkpoint may have a million tensors, so nothing is allocated per tensor.

use std::path::PathBuf;

use super::{DType, FileIdentity};
use crate::units::{ByteRange, to_usize};

/// Index of a file in its checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardId(pub(crate) u32);

impl ShardId {
    /// Position in [`Checkpoint::shards`](super::Checkpoint::shards).
    #[must_use]
    pub fn index(self) -> usize {
        to_usize(u64::from(self.0))
    }
}

/// Index of a tensor in its checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub(crate) u32);

impl TensorId {
    /// Position in [`Checkpoint::tensors`](super::Checkpoint::tensors).
    #[must_use]
    pub fn index(self) -> usize {
        to_usize(u64::from(self.0))
    }
}

/// One tensor, borrowed from its checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorEntry<'a> {
    /// Index in the checkpoint.
    pub id: TensorId,
    /// Name as the file spells it; in a diffusers directory prefixed by `component/`.
    pub name: &'a str,
    /// Element type.
    pub dtype: DType,
    /// Element type as the file spells it; tells opaque types apart.
    pub dtype_name: &'a str,
    /// Elements per dimension, outermost first; empty for a scalar.
    pub shape: &'a [u64],
    /// The file that holds it.
    pub shard: ShardId,
    /// Where its bytes are, counted from the start of the file.
    pub extent: ByteRange,
}

/// One checked file.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Shard {
    /// The path it was opened by.
    pub path: PathBuf,
    /// What it was when it was checked.
    pub identity: FileIdentity,
    /// Where its tensor bytes are, counted from the start of the file.
    pub data: ByteRange,
}

/// Flat storage of all tensors.
#[derive(Debug, Default)]
pub(crate) struct TensorTable {}

impl TensorTable {
    pub(crate) fn len(&self) -> usize {
        0
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = TensorEntry<'_>> {
        std::iter::empty()
    }

    pub(crate) fn entry(&self, _id: TensorId) -> TensorEntry<'_> {
        unimplemented!()
    }

    pub(crate) fn find(&self, _name: &str) -> Option<TensorId> {
        None
    }

    pub(crate) fn heap_bytes(&self) -> u64 {
        0
    }
}
