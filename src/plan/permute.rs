//! Tensors whose dimensions lie in another order in the file: transposed weights, channels last.
//!
//! Such a tensor is delivered row-major. It falls into units, which lie in the file in the order in
//! which they are delivered, and are permuted within themselves:
//!
//! ```text
//! shape [O, I, 3, 3], channels last     unit: one of the O blocks      file: unit 0, unit 1, ...
//! shape [R, C], transposed              unit: the whole tensor
//! heads of alternating halves           unit: the rows of a head
//! ```
//!
//! Reads hold whole units. Each unit is permuted in the slot, with the free end of the slot as
//! scratch. So a slot has to be about four units long, or two that were widened, and the plan
//! chooses it so.

use std::num::NonZeroU32;

use super::{Gather, Placement, PlanError};
use crate::checkpoint::{Checkpoint, TensorEntry, TensorId};
use crate::slices::Runs;
use crate::units::{Alignment, ByteRange, to_u64};

/// How the elements of one tensor lie in its units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permutation {
    unit_bytes: NonZeroU32,
    /// The runs of a unit, in the order of delivery.
    runs: Runs,
}

impl Permutation {
    /// Bytes of a unit, which a read must not cut.
    #[must_use]
    pub fn unit_bytes(&self) -> u64 {
        u64::from(self.unit_bytes.get())
    }

    pub(super) fn unit(&self) -> NonZeroU32 {
        self.unit_bytes
    }

    /// The runs of a unit, in the order of delivery.
    pub(crate) fn runs(&self) -> &Runs {
        &self.runs
    }

    /// The permutation of a tensor that takes all bytes of its extent; `None` if it leaves gaps,
    /// or if a unit is longer than 4 GiB.
    fn of(tensor: &TensorEntry<'_>) -> Option<Self> {
        let (element_bytes, steps) = tensor.steps();
        let dims: Vec<(u64, u64)> = steps.filter(|&(len, _)| len > 1).collect();
        let mut by_stride = dims.clone();
        by_stride.sort_unstable_by_key(|&(_, stride)| stride);
        let filled = by_stride.iter().try_fold(element_bytes, |inner, &(len, stride)| {
            (inner == stride).then(|| inner.checked_mul(len)).flatten()
        });
        if filled? != tensor.extent.len_bytes() {
            return None;
        }
        // The outer dimensions whose index is the number of a unit.
        let is_outer = |place: usize| dims[place + 1..].iter().all(|&(_, inner)| inner < dims[place].1);
        let outer = (0..dims.len()).take_while(|&place| is_outer(place)).count();
        let inner = &dims[outer..];
        let unit_bytes = inner.iter().map(|&(len, _)| len).product::<u64>() * element_bytes;
        let runs = Runs::of_loops(0, element_bytes, inner.iter().rev().copied());
        Some(Self { unit_bytes: NonZeroU32::new(u32::try_from(unit_bytes).ok()?)?, runs })
    }
}

/// One stretch of a slot that is permuted in place, unit by unit, before casts and copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermuteOp<'a> {
    /// The tensor.
    pub tensor: TensorId,
    /// Where the stretch starts in the slot.
    pub slot_offset_bytes: u64,
    /// Its length: whole units.
    pub len_bytes: u64,
    /// Where the slot has room for one unit.
    pub scratch_offset_bytes: u64,
    /// The order within a unit.
    pub permutation: &'a Permutation,
}

/// What of a tensor's extent is wanted, and in which order.
#[derive(Clone, Debug)]
pub(super) enum Wanted {
    /// All of it, or runs at equal distances, as they come.
    InOrder(ByteRange, Option<Gather>),
    /// All of it, permuted.
    Permuted(ByteRange, Permutation),
}

/// The whole tensor.
pub(super) fn wanted(checkpoint: &Checkpoint, tensor: TensorId) -> Result<Wanted, PlanError> {
    let extent = checkpoint.extent_of(tensor);
    if checkpoint.strides_of(tensor).is_empty() {
        return Ok(Wanted::InOrder(extent, None));
    }
    let entry = checkpoint.tensor(tensor);
    if let Some(permutation) = Permutation::of(&entry) {
        return Ok(Wanted::Permuted(extent, permutation));
    }
    let strided = Runs::of_slice(&entry, &[]).ok().and_then(|runs| runs.strided());
    let gathered = strided.and_then(|strided| Gather::of(extent.start(), strided));
    let (stretch, gather) = gathered.ok_or_else(|| scattered(&entry))?;
    Ok(Wanted::InOrder(stretch, gather))
}

/// The error for a tensor that cannot be put in order on the way.
pub(super) fn scattered(tensor: &TensorEntry<'_>) -> PlanError {
    PlanError::Scattered {
        tensor: tensor.name.to_owned(),
        shape: tensor.shape.into(),
        strides: tensor.strides.into(),
    }
}

/// Bytes of the blocks that hold one unit, at most; 0 without permuted tensors.
pub(super) fn unit_blocks(placements: &[Placement], alignment: Alignment) -> u64 {
    longest_unit(placements).map_or(0, |(bytes, _)| alignment.up(bytes).unwrap_or(u64::MAX))
}

/// The longest unit: its bytes, and its tensor.
fn longest_unit(placements: &[Placement]) -> Option<(u64, TensorId)> {
    let units = placements
        .iter()
        .filter_map(|placement| Some((u64::from(placement.permuted_unit_bytes?.get()), placement.tensor)));
    units.max_by_key(|&(bytes, _)| bytes)
}

/// What a permuted tensor asks of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnitNeed {
    pub(super) slot_bytes: u64,
    pub(super) unit_bytes: u64,
    pub(super) tensor: TensorId,
}

/// The largest slot that a permuted tensor needs: a read may begin up to a unit early and has at
/// least one, another unit is scratch. A widened read has no more than these two.
pub(super) fn largest_need(placements: &[Placement], alignment: Alignment) -> Option<UnitNeed> {
    let needs = placements.iter().filter_map(|placement| {
        let unit_bytes = u64::from(placement.permuted_unit_bytes?.get());
        let unit = alignment.up(unit_bytes)?;
        let widened = placement.cast.map_or(0, |cast| {
            let two = (2 * unit + alignment.bytes()).div_ceil(cast.source_unit_bytes());
            (two + 1).saturating_mul(cast.target_unit_bytes())
        });
        let slot_bytes = (4 * unit).max(widened).saturating_add(alignment.bytes());
        Some(UnitNeed { slot_bytes, unit_bytes, tensor: placement.tensor })
    });
    needs.max_by_key(|need| need.slot_bytes)
}

/// The permuted tensors of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Permutations {
    /// Ascending.
    list: Vec<(TensorId, Permutation)>,
}

impl Permutations {
    pub(super) fn new(mut list: Vec<(TensorId, Permutation)>) -> Self {
        list.sort_unstable_by_key(|&(tensor, _)| tensor);
        list.shrink_to_fit();
        Self { list }
    }

    pub(super) fn find(&self, tensor: TensorId) -> Option<&Permutation> {
        let index = self.list.binary_search_by_key(&tensor, |&(id, _)| id).ok()?;
        Some(&self.list[index].1)
    }

    /// Host memory of the list, in bytes with the allocator's overhead.
    pub(super) fn held_bytes(&self) -> u64 {
        let loops: u64 = self.list.iter().map(|(_, permutation)| permutation.runs.held_bytes()).sum();
        to_u64(self.list.capacity() * size_of::<(TensorId, Permutation)>()) + loops
    }
}
