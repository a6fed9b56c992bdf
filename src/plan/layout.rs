//! Where every tensor lies in the arena of its layer.
//!
//! Tensors keep their file order and each starts on 256 bytes. Neighbours in the file whose sizes are
//! multiples of 256, which is nearly all of them, thus stay neighbours in the arena and travel in one copy.

use std::ops::Range;

use super::{Placement, PlanError};
use crate::checkpoint::{Checkpoint, TensorId};
use crate::layers::{LayerId, Layers};
use crate::units::Alignment;

/// A layer with its arena laid out.
pub(super) struct LaidOutLayer {
    pub(super) id: LayerId,
    pub(super) placements: Range<u32>,
    pub(super) tensor_bytes: u64,
    pub(super) arena_bytes: u64,
}

/// All layers with their arenas laid out.
pub(super) struct Layout {
    pub(super) layers: Vec<LaidOutLayer>,
    pub(super) placements: Vec<Placement>,
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
    };
    for layer in layers.as_slice() {
        let overflow = |what| PlanError::Overflow { what, layer: layer.id.to_string() };
        let first = layout.next_index().ok_or_else(|| overflow("the tensors"))?;
        let (mut end, mut tensor_bytes) = (0_u64, 0_u64);
        for &tensor in layer.tensors.iter().filter(|&&tensor| select(tensor)) {
            let extent = checkpoint.tensor(tensor).extent;
            let start = Alignment::TENSOR.up(end).ok_or_else(|| overflow("the bytes"))?;
            layout.placements.push(Placement { tensor, extent, arena_offset_bytes: start });
            end = start.checked_add(extent.len_bytes()).ok_or_else(|| overflow("the bytes"))?;
            tensor_bytes += extent.len_bytes(); // cannot overflow: never above `end`
        }
        let placements = first..layout.next_index().ok_or_else(|| overflow("the tensors"))?;
        if placements.is_empty() {
            continue;
        }
        let arena_bytes = Alignment::HUGE_PAGE.up(end).ok_or_else(|| overflow("the bytes"))?;
        layout.layers.push(LaidOutLayer { id: layer.id.clone(), placements, tensor_bytes, arena_bytes });
    }
    Ok(layout)
}

impl Layout {
    fn next_index(&self) -> Option<u32> {
        u32::try_from(self.placements.len()).ok()
    }
}
