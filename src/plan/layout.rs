//! The place of every tensor in the arena of its layer.
//!
//! Tensors keep their file order, except those that are moved after the copies, and each starts on
//! a multiple of 256 bytes. Neighbours in the file whose sizes are multiples of 256 (nearly all
//! are) stay neighbours in the arena and share one copy.

use std::cmp::Reverse;

use super::permute::{Permutation, Wanted};
use super::{
    Group, Landing, MoveOp, Placement, PlanError, PlanLimits, PlannedLayer, QuantisedPart, Transform,
    index_range, landing,
};
use crate::checkpoint::{Checkpoint, TensorId};
use crate::units::Alignment;

/// All layers with their arenas.
pub(super) struct Layout {
    /// Their reads are not set yet.
    pub(super) layers: Vec<PlannedLayer>,
    pub(super) placements: Vec<Placement>,
    pub(super) moves: Vec<MoveOp>,
    /// Of tensors that are not row-major in their files, in any order.
    pub(super) permutations: Vec<(TensorId, Permutation)>,
}

/// Lays out every group that has a selected tensor. `wanted` returns a tensor's bytes in its file,
/// and which of them are wanted.
pub(super) fn arrange<'a>(
    checkpoint: &Checkpoint,
    groups: impl ExactSizeIterator<Item = Group<'a>>,
    limits: &PlanLimits,
    mut select: impl FnMut(TensorId) -> bool,
    mut transform: impl FnMut(TensorId) -> Transform,
    wanted: &mut impl FnMut(TensorId) -> Result<Wanted, PlanError>,
) -> Result<Layout, PlanError> {
    let landing = limits.landing;
    // Where bytes must arrive in the order of the target, values and scales cannot share a read.
    let parts = match landing == Landing::Packed || limits.options.hash {
        true => [QuantisedPart::Values, QuantisedPart::Scales],
        false => [QuantisedPart::ValuesWithScales, QuantisedPart::ScalesOfSame],
    };
    let halves = if limits.options.quantise.is_some() { parts.len() } else { 1 };
    let mut layout = Layout {
        layers: Vec::with_capacity(groups.len()),
        placements: Vec::with_capacity(halves * checkpoint.tensor_count()),
        moves: Vec::new(),
        permutations: Vec::new(),
    };
    for group in groups {
        let overflow = |what| PlanError::Overflow { what, layer: group.id.to_string() };
        let first = layout.next_index().ok_or_else(|| overflow("the tensors"))?;
        for &tensor in group.tensors.iter().filter(|&&tensor| select(tensor)) {
            layout
                .place(tensor, wanted(tensor)?, transform(tensor), parts)
                .ok_or_else(|| overflow("the bytes"))?;
        }
        let placements = first..layout.next_index().ok_or_else(|| overflow("the tensors"))?;
        if placements.is_empty() {
            continue;
        }
        let landed = &mut layout.placements[index_range(&placements)];
        if landing == Landing::Packed && landed.iter().any(|placement| placement.quantised.is_some()) {
            sort_by_width(checkpoint, landed);
        }
        let end = match landing {
            Landing::Exact => landing::exact(landed),
            Landing::InPhase => landing::in_phase(checkpoint, landed),
            Landing::Packed => landing::packed(landed),
        };
        let end = end.ok_or_else(|| overflow("the bytes"))?;
        // Cannot overflow: never above `end`.
        let tensor_bytes = landed.iter().map(Placement::len_bytes).sum();
        layout.layers.push(PlannedLayer {
            id: group.id.clone(),
            reads: 0..0,
            placements,
            moves: 0..0,
            is_kept: false,
            tensor_bytes,
            // Until the appendix is added.
            arena_bytes: end,
        });
    }
    if landing != Landing::Packed {
        layout.append_moved()?;
    }
    Ok(layout)
}

/// Wider elements first, empty tensors last: then each tensor is aligned to its element without
/// gaps. Scales are wider than any values.
fn sort_by_width(checkpoint: &Checkpoint, placements: &mut [Placement]) {
    placements.sort_by_key(|placement| {
        let dtype = placement.delivered_dtype(checkpoint.tensor(placement.tensor).dtype);
        (placement.len_bytes() == 0, Reverse(dtype.bits().unwrap_or(8)))
    });
}

/// Bytes of an arena whose tensors end at `end`: whole huge pages, or whole small pages below one
/// huge page. `None` on overflow.
fn arena_bytes(end: u64) -> Option<u64> {
    let unit = if end < Alignment::HUGE_PAGE.bytes() { Alignment::PAGE } else { Alignment::HUGE_PAGE };
    unit.up(end)
}

impl Layout {
    /// Adds a tensor: one placement, or one for each part of a quantised tensor. `None` on
    /// overflow.
    fn place(
        &mut self,
        tensor: TensorId,
        wanted: Wanted,
        transform: Transform,
        parts: [QuantisedPart; 2],
    ) -> Option<()> {
        let (extent, gather, permuted_unit_bytes) = match wanted {
            Wanted::InOrder(extent, gather) => (extent, gather, None),
            Wanted::Permuted(extent, permutation) => {
                let unit_bytes = permutation.unit();
                self.permutations.push((tensor, permutation));
                (extent, None, Some(unit_bytes))
            }
        };
        let plain = Placement {
            tensor,
            extent,
            arena_offset_bytes: 0,
            cast: None,
            gather,
            permuted_unit_bytes,
            quantised: None,
        };
        match transform {
            Transform::Keep => self.placements.push(plain),
            Transform::Cast(cast) => {
                // From here on, sizes of placements cannot overflow.
                cast.checked_delivered_bytes(extent.len_bytes())?;
                self.placements.push(Placement { cast: Some(cast), ..plain });
            }
            Transform::Quantise(form) => {
                let half = |part| Placement { quantised: Some(form.as_part(part)), ..plain };
                self.placements.extend(parts.map(half));
            }
        }
        Some(())
    }

    /// Adds the appendix of moved tensors to each arena, and rounds its size up.
    fn append_moved(&mut self) -> Result<(), PlanError> {
        // Counted first: a growing list would leave more memory than the plan counts.
        self.moves.reserve_exact(landing::moved(&self.placements).count());
        for layer in &mut self.layers {
            let overflow = |what| PlanError::Overflow { what, layer: layer.id.to_string() };
            let index = |moves: &Vec<MoveOp>| u32::try_from(moves.len()).map_err(|_| overflow("the moves"));
            let first = index(&self.moves)?;
            let placements = &mut self.placements[index_range(&layer.placements)];
            let end = landing::append(placements, layer.arena_bytes, &mut self.moves);
            let arena_bytes = arena_bytes(end).ok_or_else(|| overflow("the bytes"))?;
            let moves = first..index(&self.moves)?;
            (layer.moves, layer.arena_bytes) = (moves, arena_bytes);
        }
        Ok(())
    }

    /// True if any tensor is quantised.
    pub(super) fn has_quantised(&self) -> bool {
        self.placements.iter().any(|placement| placement.quantised.is_some())
    }

    fn next_index(&self) -> Option<u32> {
        u32::try_from(self.placements.len()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{KIB, MIB};

    #[test]
    fn small_arenas_are_rounded_to_small_pages() {
        let rounded = [
            (0, 0),
            (1, 4 * KIB),
            (4 * KIB, 4 * KIB),
            (2 * MIB - 4 * KIB, 2 * MIB - 4 * KIB),
            (2 * MIB - 1, 2 * MIB),
            (2 * MIB, 2 * MIB),
            (2 * MIB + 1, 4 * MIB),
        ];
        for (end, expected) in rounded {
            assert_eq!(arena_bytes(end), Some(expected), "{end}");
        }
        assert_eq!(arena_bytes(u64::MAX), None);
    }
}
