//! Where every tensor lies in the arena of its layer.
//!
//! Tensors keep their file order, those aside that are moved once they have landed, and each starts
//! on 256 bytes. Neighbours in the file whose sizes are multiples of 256, which is nearly all of
//! them, thus stay neighbours in the arena and travel in one copy.

use std::cmp::Reverse;

use super::{
    Gather, Group, Landing, MoveOp, Placement, PlanError, PlanLimits, PlannedLayer, QuantisedPart, Transform,
    index_range, landing,
};
use crate::checkpoint::{Checkpoint, TensorId};
use crate::units::{Alignment, ByteRange};

/// All layers with their arenas laid out.
pub(super) struct Layout {
    /// Their reads are not known yet.
    pub(super) layers: Vec<PlannedLayer>,
    pub(super) placements: Vec<Placement>,
    pub(super) moves: Vec<MoveOp>,
}

/// Lays out every group that has a selected tensor. `stretch` says where in its file a tensor is,
/// and what of that is wanted.
pub(super) fn arrange<'a>(
    checkpoint: &Checkpoint,
    groups: impl ExactSizeIterator<Item = Group<'a>>,
    limits: &PlanLimits,
    mut select: impl FnMut(TensorId) -> bool,
    mut transform: impl FnMut(TensorId) -> Transform,
    stretch: &mut impl FnMut(TensorId) -> Result<(ByteRange, Option<Gather>), PlanError>,
) -> Result<Layout, PlanError> {
    let landing = limits.landing;
    // Where bytes are wanted in the order in which they lie, values and scales cannot come together.
    let parts = match landing == Landing::Packed || limits.options.hash {
        true => [QuantisedPart::Values, QuantisedPart::Scales],
        false => [QuantisedPart::ValuesWithScales, QuantisedPart::ScalesOfSame],
    };
    let halves = if limits.options.quantise.is_some() { parts.len() } else { 1 };
    let mut layout = Layout {
        layers: Vec::with_capacity(groups.len()),
        placements: Vec::with_capacity(halves * checkpoint.tensor_count()),
        moves: Vec::new(),
    };
    for group in groups {
        let overflow = |what| PlanError::Overflow { what, layer: group.id.to_string() };
        let first = layout.next_index().ok_or_else(|| overflow("the tensors"))?;
        for &tensor in group.tensors.iter().filter(|&&tensor| select(tensor)) {
            let (extent, gather) = stretch(tensor)?;
            let plain =
                Placement { tensor, extent, arena_offset_bytes: 0, cast: None, gather, quantised: None };
            match transform(tensor) {
                Transform::Keep => layout.placements.push(plain),
                // Sizes of placements are known to fit from here on.
                Transform::Cast(cast) if cast.checked_delivered_bytes(extent.len_bytes()).is_none() => {
                    return Err(overflow("the bytes"));
                }
                Transform::Cast(cast) => layout.placements.push(Placement { cast: Some(cast), ..plain }),
                Transform::Quantise(form) => {
                    let half = |part| Placement { quantised: Some(form.as_part(part)), ..plain };
                    layout.placements.extend(parts.map(half));
                }
            }
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
        let id = group.id.clone();
        // Where the tensors end, until the appendix is known.
        let arena_bytes = end;
        let planned = PlannedLayer {
            id,
            reads: 0..0,
            placements,
            moves: 0..0,
            is_kept: false,
            tensor_bytes,
            arena_bytes,
        };
        layout.layers.push(planned);
    }
    if landing != Landing::Packed {
        layout.append_moved()?;
    }
    Ok(layout)
}

/// Wider elements first, what has no bytes last: then each tensor begins at a multiple of its
/// element without gaps. Scales are wider than the values of any tensor.
fn sort_by_width(checkpoint: &Checkpoint, placements: &mut [Placement]) {
    placements.sort_by_key(|placement| {
        let dtype = placement.delivered_dtype(checkpoint.tensor(placement.tensor).dtype);
        (placement.len_bytes() == 0, Reverse(dtype.bits().unwrap_or(8)))
    });
}

/// Bytes of the arena for tensors that end at `end`: whole huge pages, or, where one would mostly
/// be padding, whole small pages. `None` on overflow.
fn arena_bytes(end: u64) -> Option<u64> {
    let unit = if end < Alignment::HUGE_PAGE.bytes() { Alignment::PAGE } else { Alignment::HUGE_PAGE };
    unit.up(end)
}

impl Layout {
    /// Gives what did not land in its place a place behind everything else, and each arena its
    /// size.
    fn append_moved(&mut self) -> Result<(), PlanError> {
        // Counted first: what a growing list leaves behind would not be what the plan counts.
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
