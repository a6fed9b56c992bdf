//! What a plan for one of several ranks knows of its tensors: which are parts, and of what shape.

use crate::checkpoint::TensorId;
use crate::ranks::{Rank, RankPart};
use crate::units::to_u64;

/// The rank, and the tensors that it has a part of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    pub(super) rank: Rank,
    /// Ascending.
    list: Vec<(TensorId, RankPart)>,
}

impl Parts {
    pub(super) fn new(rank: Rank, mut list: Vec<(TensorId, RankPart)>) -> Self {
        list.sort_unstable_by_key(|&(tensor, _)| tensor);
        list.shrink_to_fit();
        Self { rank, list }
    }

    pub(super) fn find(&self, tensor: TensorId) -> Option<&RankPart> {
        let index = self.list.binary_search_by_key(&tensor, |&(id, _)| id).ok()?;
        Some(&self.list[index].1)
    }

    pub(super) fn count(&self) -> usize {
        self.list.len()
    }

    /// Host memory that the list holds, in bytes as the allocator takes them.
    pub(super) fn held_bytes(&self) -> u64 {
        let shape_bytes = |part: &RankPart| to_u64(size_of_val(&*part.shape).next_multiple_of(16) + 16);
        let shapes: u64 = self.list.iter().map(|(_, part)| shape_bytes(part)).sum();
        to_u64(self.list.capacity() * size_of::<(TensorId, RankPart)>()) + shapes
    }
}
