//! Where every tensor lies in the arena of its layer.
//!
//! Tensors keep their file order and each starts on 256 bytes. Neighbours in the file whose sizes are
//! multiples of 256, which is nearly all of them, thus stay neighbours in the arena and travel in one copy.

use super::{MoveOp, Placement, PlanError, PlannedLayer};
use crate::checkpoint::{Checkpoint, TensorId};
use crate::layers::Layers;
use crate::units::Alignment;

/// All layers with their arenas laid out.
pub(super) struct Layout {
    /// Their reads are not known yet.
    pub(super) layers: Vec<PlannedLayer>,
    pub(super) placements: Vec<Placement>,
    pub(super) moves: Vec<MoveOp>,
}

/// Lays out every layer that has a selected tensor.
pub(super) fn arrange(
    checkpoint: &Checkpoint,
    layers: &Layers,
    select: &mut impl FnMut(TensorId) -> bool,
) -> Result<Layout, PlanError> {
    let mut layout = Layout {
        layers: Vec::with_capacity(layers.as_slice().len()),
        placements: Vec::with_capacity(checkpoint.tensor_count()),
        moves: Vec::new(),
    };
    for layer in layers.as_slice() {
        let overflow = |what| PlanError::Overflow { what, layer: layer.id.to_string() };
        let first = layout.next_index().ok_or_else(|| overflow("the tensors"))?;
        let (mut end, mut tensor_bytes) = (0_u64, 0_u64);
        for &tensor in layer.tensors.iter().filter(|&&tensor| select(tensor)) {
            let extent = checkpoint.tensor(tensor).extent;
            let start = Alignment::TENSOR.up(end).ok_or_else(|| overflow("the bytes"))?;
            layout.placements.push(Placement { tensor, extent, arena_offset_bytes: start, narrowing: None });
            end = start.checked_add(extent.len_bytes()).ok_or_else(|| overflow("the bytes"))?;
            tensor_bytes += extent.len_bytes(); // cannot overflow: never above `end`
        }
        let placements = first..layout.next_index().ok_or_else(|| overflow("the tensors"))?;
        if placements.is_empty() {
            continue;
        }
        let arena_bytes = arena_bytes(end).ok_or_else(|| overflow("the bytes"))?;
        let id = layer.id.clone();
        layout.layers.push(PlannedLayer {
            id,
            reads: 0..0,
            placements,
            moves: 0..0,
            tensor_bytes,
            arena_bytes,
        });
    }
    Ok(layout)
}

/// Bytes of the arena for tensors that end at `end`: whole huge pages, or, where one would mostly be padding, whole
/// small pages. `None` on overflow.
fn arena_bytes(end: u64) -> Option<u64> {
    let unit = if end < Alignment::HUGE_PAGE.bytes() { Alignment::PAGE } else { Alignment::HUGE_PAGE };
    unit.up(end)
}

impl Layout {
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
