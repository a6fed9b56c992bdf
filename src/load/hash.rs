//! BLAKE3 of every tensor of a layer, from slots that arrive in plan order.
//!
//! Of the bytes that are delivered: narrowed where they are. Used for targets that keep no bytes. Where bytes are kept, [`LoadedTensor::hash`](super::LoadedTensor::hash)
//! hashes what was delivered.

use std::fmt;

use blake3::Hasher;

use crate::checkpoint::Checkpoint;
use crate::plan::{Placement, ReadOp};
use crate::staging::{Filled, Slot};

/// From here on a tensor's bytes are worth splitting over several cores.
const PARALLEL_BYTES_MIN: usize = 256 << 10;

/// BLAKE3 of a tensor's bytes. Shown as 64 hexadecimal digits, as `b3sum` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorHash([u8; 32]);

impl TensorHash {
    /// The 32 bytes of the hash.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The hash as 64 lower-case hexadecimal digits.
    #[must_use]
    pub fn to_hex(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for TensorHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

/// Hashes the tensors of one layer after the other. Reads must come in the order of the plan.
#[derive(Debug, Default)]
pub(super) struct LayerHasher {
    open: Hasher,
    /// Of the layer's first placements, in file order; the rest is to come.
    hashes: Vec<TensorHash>,
}

impl LayerHasher {
    /// Adds the bytes of one read of the layer with these placements.
    pub(super) fn update(
        &mut self,
        checkpoint: &Checkpoint,
        placements: &[Placement],
        read: &ReadOp,
        slot: &Slot<Filled>,
    ) {
        let request = &read.request;
        while let Some(placement) = placements.get(self.hashes.len()) {
            if placement.extent.is_empty() {
                self.close(placements);
                continue;
            }
            let shard = checkpoint.tensor(placement.tensor).shard;
            let piece = placement.extent.intersect(request.payload).filter(|_| shard == request.shard);
            let Some(piece) = piece else { return };
            // What is narrowed begins where its elements began, and it is hashed as it is delivered.
            let len_bytes = placement.delivered_bytes(piece.len_bytes());
            update(&mut self.open, slot.part(piece.start() - request.extent.start(), len_bytes));
            if placement.extent.end() > request.payload.end() {
                return;
            }
            self.close(placements);
        }
    }

    /// The hashes of the layer, in the order of the placements. Tensors without bytes that no read reached are closed
    /// here. The next read may be of the next layer.
    pub(super) fn finish_layer(&mut self, placements: &[Placement]) -> Vec<TensorHash> {
        while self.hashes.len() < placements.len() {
            self.close(placements);
        }
        std::mem::take(&mut self.hashes)
    }

    fn close(&mut self, placements: &[Placement]) {
        // One allocation for a layer: what a vector doubles would not be what the plan counts.
        self.hashes.reserve_exact(placements.len() - self.hashes.len());
        self.hashes.push(TensorHash(*self.open.finalize().as_bytes()));
        self.open.reset();
    }
}

/// BLAKE3 of bytes in memory, on several cores if there are many.
pub(super) fn of_bytes(bytes: &[u8]) -> TensorHash {
    let mut hasher = Hasher::new();
    update(&mut hasher, bytes);
    TensorHash(*hasher.finalize().as_bytes())
}

/// BLAKE3 of bytes that come piece by piece.
#[derive(Default)]
pub(super) struct PieceHasher(Hasher);

impl PieceHasher {
    pub(super) fn update(&mut self, piece: &[u8]) {
        update(&mut self.0, piece);
    }

    pub(super) fn finish(&self) -> TensorHash {
        TensorHash(*self.0.finalize().as_bytes())
    }
}

fn update(hasher: &mut Hasher, bytes: &[u8]) {
    if bytes.len() >= PARALLEL_BYTES_MIN {
        hasher.update_rayon(bytes);
    } else {
        hasher.update(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_reads_as_b3sum_writes_it() {
        // The test vector of the algorithm for an empty input.
        let empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        let hash = of_bytes(b"");
        assert_eq!((hash.to_string().as_str(), hash.to_hex().as_str()), (empty, empty));
        assert_eq!(hash.as_bytes()[0], 0xaf);
    }

    #[test]
    fn large_inputs_hash_alike_on_all_cores() {
        let bytes = vec![3; PARALLEL_BYTES_MIN];
        assert_eq!(of_bytes(&bytes).as_bytes(), blake3::hash(&bytes).as_bytes());
    }
}
