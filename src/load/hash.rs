//! BLAKE3 of every tensor of a layer, from slots that arrive in plan order.
//!
//! Used for targets that keep no bytes. Where bytes are kept, [`LoadedTensor::hash`](super::LoadedTensor::hash)
//! hashes what was delivered.

use blake3::{Hash, Hasher};

use crate::checkpoint::Checkpoint;
use crate::plan::{LoadPlan, Placement, PlannedLayer, ReadOp};
use crate::staging::{Filled, Slot};

/// From here on a tensor's bytes are worth splitting over several cores.
const PARALLEL_BYTES_MIN: usize = 256 << 10;

/// Hashes the tensors of one layer. Reads must come in the order of the plan.
#[derive(Debug)]
pub(super) struct LayerHasher {
    /// Placements of the layer in file order; those before `next` are complete.
    next: usize,
    open: Hasher,
    hashes: Vec<Hash>,
}

impl LayerHasher {
    pub(super) fn new(tensors: usize) -> Self {
        Self { next: 0, open: Hasher::new(), hashes: Vec::with_capacity(tensors) }
    }

    /// Adds the bytes of one read.
    pub(super) fn update(
        &mut self,
        checkpoint: &Checkpoint,
        placements: &[Placement],
        read: &ReadOp,
        slot: &Slot<Filled>,
    ) {
        let request = &read.request;
        while let Some(placement) = placements.get(self.next) {
            let tensor = checkpoint.tensor(placement.tensor);
            if tensor.extent.is_empty() {
                self.close();
                continue;
            }
            let piece = tensor.extent.intersect(request.payload).filter(|_| tensor.shard == request.shard);
            let Some(piece) = piece else { return };
            update(&mut self.open, slot.part(piece.start() - request.extent.start(), piece.len_bytes()));
            if tensor.extent.end() > request.payload.end() {
                return;
            }
            self.close();
        }
    }

    /// The hashes, in the order of the placements. Tensors without bytes that no read reached are closed here.
    pub(super) fn finish(mut self, placements: &[Placement]) -> Vec<Hash> {
        while self.next < placements.len() {
            self.close();
        }
        self.hashes
    }

    fn close(&mut self) {
        self.hashes.push(self.open.finalize());
        self.open.reset();
        self.next += 1;
    }
}

/// The hasher of a layer of a plan.
pub(super) fn of_layer(plan: &LoadPlan, layer: &PlannedLayer) -> LayerHasher {
    LayerHasher::new(plan.placements(layer).len())
}

/// BLAKE3 of bytes in memory, on several cores if there are many.
pub(super) fn of_bytes(bytes: &[u8]) -> Hash {
    let mut hasher = Hasher::new();
    update(&mut hasher, bytes);
    hasher.finalize()
}

fn update(hasher: &mut Hasher, bytes: &[u8]) {
    if bytes.len() >= PARALLEL_BYTES_MIN {
        hasher.update_rayon(bytes);
    } else {
        hasher.update(bytes);
    }
}
