//! The names and shapes that are grouped.

use super::positions::{index32, slot};
use crate::checkpoint::{Checkpoint, TensorId};

/// The input of the rule for one tensor: its name, and its shape if it is known (an index has
/// none).
#[derive(Clone, Copy, Debug)]
pub struct NamedShape<'a> {
    /// Full name.
    pub name: &'a str,
    /// Elements per dimension.
    pub shape: Option<&'a [u64]>,
}

/// Names and shapes by tensor. Those of a checkpoint are not copied: a list would take 32 bytes
/// each.
#[derive(Clone, Copy, Debug)]
pub(super) enum Names<'a> {
    /// The tensors of a checkpoint.
    Opened(&'a Checkpoint),
    /// A caller's list.
    Listed(&'a [NamedShape<'a>]),
}

impl<'a> Names<'a> {
    /// Number of tensors.
    pub(super) fn count(self) -> usize {
        match self {
            Self::Opened(checkpoint) => checkpoint.tensor_count(),
            Self::Listed(names) => names.len(),
        }
    }

    /// The tensors.
    pub(super) fn tensors(self) -> impl Iterator<Item = u32> + Clone {
        0..index32(self.count())
    }

    /// A tensor's name.
    pub(super) fn name(self, tensor: u32) -> &'a str {
        match self {
            Self::Opened(checkpoint) => checkpoint.name_of(TensorId(tensor)),
            Self::Listed(names) => names[slot(tensor)].name,
        }
    }

    /// A tensor's shape, if it is known.
    pub(super) fn shape(self, tensor: u32) -> Option<&'a [u64]> {
        match self {
            Self::Opened(checkpoint) => Some(checkpoint.shape_of(TensorId(tensor))),
            Self::Listed(names) => names[slot(tensor)].shape,
        }
    }

    /// The file of a tensor; 0 if files are unknown.
    pub(super) fn shard(self, tensor: u32) -> u32 {
        match self {
            Self::Opened(checkpoint) => checkpoint.shard_of(TensorId(tensor)).0,
            Self::Listed(_) => 0,
        }
    }
}
