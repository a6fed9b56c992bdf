//! Plans too small to be made from a checkpoint: for tests of devices.

use super::PlannedLayer;
use crate::layers::LayerId;

impl PlannedLayer {
    /// A layer without tensors whose arena has so many bytes.
    pub(crate) fn of_bytes(arena_bytes: u64) -> Self {
        let id = LayerId::parse("layers.0").expect("a name");
        Self {
            id,
            reads: 0..0,
            placements: 0..0,
            moves: 0..0,
            is_kept: false,
            tensor_bytes: arena_bytes,
            arena_bytes,
        }
    }
}
