//! Facts about single tensors that placements do not hold: parts of ranks, and the names and shapes
//! of quantised tensors.

use super::quantise::SCALE_SUFFIX;
use super::{Placement, Quantisation};
use crate::checkpoint::{Checkpoint, TensorId};
use crate::ranks::{Rank, RankPart};
use crate::units::to_u64;

/// The rank, and the tensors of which it has a part.
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

    /// Host memory of the list, in bytes with the allocator's overhead.
    pub(super) fn held_bytes(&self) -> u64 {
        let shape_bytes = |part: &RankPart| to_u64(size_of_val(&*part.shape).next_multiple_of(16) + 16);
        let shapes: u64 = self.list.iter().map(|(_, part)| shape_bytes(part)).sum();
        to_u64(self.list.capacity() * size_of::<(TensorId, RankPart)>()) + shapes
    }
}

/// Names and shapes of one quantised tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuantisedTensor {
    /// The tensor.
    pub tensor: TensorId,
    /// The target form.
    pub to: Quantisation,
    /// Name of the tensor of scales.
    pub scale_name: Box<str>,
    /// Shape of the values: the tensor's, or half as many bytes in the last dimension.
    pub value_shape: Box<[u64]>,
    /// Shape of the scales: the tensor's, with the scales of one row as the last dimension.
    pub scale_shape: Box<[u64]>,
}

/// Bytes for summing up the quantisation error of one tensor, with its entry in a tree.
const ERROR_BYTES: u64 = 128;

/// The quantised tensors of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct QuantisedTensors {
    /// Ascending.
    list: Vec<QuantisedTensor>,
}

impl QuantisedTensors {
    pub(super) fn of(checkpoint: &Checkpoint, placements: &[Placement]) -> Self {
        let values = placements.iter().filter_map(|placement| {
            let form = placement.quantised.filter(|form| !form.is_scales())?;
            let entry = checkpoint.tensor(placement.tensor);
            let [value_shape, scale_shape] = form.shapes(entry.shape);
            Some(QuantisedTensor {
                tensor: placement.tensor,
                to: form.to(),
                scale_name: format!("{}{SCALE_SUFFIX}", entry.name).into(),
                value_shape,
                scale_shape,
            })
        });
        let mut list: Vec<_> = values.collect();
        list.sort_unstable_by_key(|quantised| quantised.tensor);
        list.shrink_to_fit();
        Self { list }
    }

    pub(super) fn as_slice(&self) -> &[QuantisedTensor] {
        &self.list
    }

    pub(super) fn find(&self, tensor: TensorId) -> Option<&QuantisedTensor> {
        let index = self.list.binary_search_by_key(&tensor, |quantised| quantised.tensor).ok()?;
        Some(&self.list[index])
    }

    /// Host memory of the list and of the sums of quantisation errors, in bytes with the
    /// allocator's overhead.
    pub(super) fn held_bytes(&self) -> u64 {
        let item_bytes = |len: usize| to_u64(len.next_multiple_of(16) + 16);
        let texts = |quantised: &QuantisedTensor| {
            item_bytes(quantised.scale_name.len())
                + item_bytes(size_of_val(&*quantised.value_shape))
                + item_bytes(size_of_val(&*quantised.scale_shape))
                + ERROR_BYTES
        };
        let items: u64 = self.list.iter().map(texts).sum();
        to_u64(self.list.capacity() * size_of::<QuantisedTensor>()) + items
    }
}
