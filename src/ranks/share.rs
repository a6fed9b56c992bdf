//! Which rank reads each whole tensor, so that each is read once in all.
//!
//! Large tensors are assigned first, from the largest down, each to the rank with the fewest bytes.
//! The others follow layer by layer, each to the rank with the fewest bytes so far, where a rank's
//! large tensors count in proportion to the progress through the layers. So the shares are balanced
//! at the end and all the way:
//!
//! ```text
//! layers     embedding | 0       | 1       | 2       | 3       | head
//! rank 0     xxxxxxxxxx|x        |  x      |       x |x        |
//! rank 1               | xx x xx | xx  xx x| x x x x | xx  x xx|
//! rank 2               |  x x    |x  x x   |x x x  x |   xx x  | xxxxx
//! ```

use std::cmp::Reverse;

use super::Rank;
use crate::checkpoint::{Checkpoint, TensorId};
use crate::layers::Layers;
use crate::units::to_usize;

/// A tensor is large if it has more than this part of a rank's share.
const LARGE_PART: u64 = 32;
/// The tensor was not selected.
const NO_RANK: u32 = u32::MAX;

/// Which rank reads each tensor of a checkpoint, so that each is read once in all. It follows from
/// names, sizes and layers alone, so every rank computes the same.
///
/// # Example
/// ```
/// use onelayer::{Checkpoint, Layers, Share};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/checkpoints/llama");
/// let checkpoint = Checkpoint::open(path)?;
/// let share = Share::divide(&checkpoint, &Layers::group(&checkpoint)?, 4, |_| true);
/// for tensor in checkpoint.tensors() {
///     let rank = share.owner(tensor.id).expect("all of them are divided");
///     println!("rank {rank} reads {} and broadcasts it", tensor.name);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The rank of each tensor, or [`NO_RANK`].
    owners: Vec<u32>,
}

/// Bytes assigned so far.
struct Loads {
    /// Bytes of large tensors, per rank.
    large_bytes: Vec<u64>,
    /// Bytes of others.
    other_bytes: Vec<u64>,
}

impl Share {
    /// Divides the tensors for which `select` returns true among `world` ranks; zero counts as one.
    #[must_use]
    pub fn divide(
        checkpoint: &Checkpoint,
        layers: &Layers,
        world: u32,
        select: impl Fn(TensorId) -> bool,
    ) -> Self {
        let world = world.max(1);
        let bytes_of = |tensor: TensorId| checkpoint.tensor(tensor).len_bytes();
        let selected = || {
            let all = layers.as_slice().iter().flat_map(|layer| layer.tensors.iter().copied());
            all.filter(|&tensor| select(tensor))
        };
        let total_bytes: u64 = selected().map(bytes_of).sum();
        let is_large = |tensor: TensorId| bytes_of(tensor) > total_bytes / LARGE_PART / u64::from(world);
        let mut share = Self { owners: vec![NO_RANK; checkpoint.tensor_count()] };
        let none = vec![0; to_usize(u64::from(world))];
        let mut loads = Loads { large_bytes: none.clone(), other_bytes: none };

        let mut large: Vec<TensorId> = selected().filter(|&tensor| is_large(tensor)).collect();
        // Stable: among tensors of equal size, the first one used comes first.
        large.sort_by_key(|&tensor| Reverse(bytes_of(tensor)));
        for tensor in large {
            let rank = least(loads.large_bytes.iter().map(|&bytes| u128::from(bytes)));
            loads.large_bytes[rank] += bytes_of(tensor);
            share.give(tensor, rank);
        }

        let others_bytes: u64 = total_bytes - loads.large_bytes.iter().sum::<u64>();
        for layer in layers.as_slice() {
            let mut tensors: Vec<TensorId> = layer.tensors.iter().copied().collect();
            tensors.retain(|&tensor| select(tensor) && !is_large(tensor));
            tensors.sort_by_key(|&tensor| Reverse(bytes_of(tensor)));
            for tensor in tensors {
                let rank = loads.least_by_now(others_bytes);
                loads.other_bytes[rank] += bytes_of(tensor);
                share.give(tensor, rank);
            }
        }
        share
    }

    /// The number of the rank that reads a tensor; `None` for one that was not selected.
    ///
    /// # Panics
    /// If `tensor` comes from another checkpoint and is out of range.
    #[must_use]
    pub fn owner(&self, tensor: TensorId) -> Option<u32> {
        Some(self.owners[tensor.index()]).filter(|&owner| owner != NO_RANK)
    }

    /// True if this rank reads the tensor.
    ///
    /// # Panics
    /// If `tensor` comes from another checkpoint and is out of range.
    #[must_use]
    pub fn is_of(&self, rank: Rank, tensor: TensorId) -> bool {
        self.owner(tensor) == Some(rank.rank())
    }

    fn give(&mut self, tensor: TensorId, rank: usize) {
        self.owners[tensor.index()] = u32::try_from(rank).expect("ranks are counted with a u32");
    }
}

impl Loads {
    /// The rank with the fewest bytes so far. Large tensors count in proportion to the other bytes
    /// assigned so far.
    fn least_by_now(&self, others_bytes: u64) -> usize {
        let given: u128 = self.other_bytes.iter().map(|&bytes| u128::from(bytes)).sum();
        let all = u128::from(others_bytes.max(1));
        let by_now = self.large_bytes.iter().zip(&self.other_bytes);
        // No product overflows: both factors have 64 bits.
        least(by_now.map(|(&large, &other)| u128::from(large) * given / all + u128::from(other)))
    }
}

/// Index of the smallest load; the first one of equals.
fn least(loads: impl Iterator<Item = u128>) -> usize {
    loads.enumerate().min_by_key(|&(_, load)| load).map_or(0, |(rank, _)| rank)
}
