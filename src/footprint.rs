//! Memory of lists and tables as the system allocator accounts for it, and the peak while a result
//! is computed.
//!
//! The guarantee is about resident pages. So the overhead of the allocator counts, and the peak
//! counts instead of the final size. The stages before the load add up the capacities of their
//! lists here; a test compares the sums with a counting allocator.

use crate::units::{KIB, to_u64};

/// Blocks of this size or more are separate mappings of whole pages.
const MAPPED_BYTES_MIN: u64 = 128 * KIB;
const PAGE_BYTES: u64 = 4 * KIB;
/// Each block stores its length. The smallest block holds the links of a freed one.
const HEADER_BYTES: u64 = 8;
const BLOCK_BYTES_MIN: u64 = 32;

/// Memory of one block, by the rule of glibc on 64 bits: the most wasteful of the usual allocators.
/// An empty block takes nothing.
pub(crate) fn block_bytes(bytes: u64) -> u64 {
    match bytes {
        0 => 0,
        MAPPED_BYTES_MIN.. => (bytes.saturating_add(2 * HEADER_BYTES)).next_multiple_of(PAGE_BYTES),
        _ => (bytes + HEADER_BYTES).next_multiple_of(16).max(BLOCK_BYTES_MIN),
    }
}

/// Memory of a list, spare capacity included.
pub(crate) fn list_bytes<T>(list: &Vec<T>) -> u64 {
    items_bytes::<T>(list.capacity())
}

/// Memory of a block of `count` items.
pub(crate) fn items_bytes<T>(count: usize) -> u64 {
    block_bytes(to_u64(count).saturating_mul(to_u64(size_of::<T>())))
}

/// A sum of blocks that are held at once.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Held {
    bytes: u64,
    /// The largest block that grew by doubling.
    grown_bytes: u64,
}

impl Held {
    /// Adds bytes.
    pub(crate) fn and(self, bytes: u64) -> Self {
        Self { bytes: self.bytes.saturating_add(bytes), ..self }
    }

    /// Adds a list that was allocated once.
    pub(crate) fn list<T>(self, list: &Vec<T>) -> Self {
        self.and(list_bytes(list))
    }

    /// Adds a list that grew.
    pub(crate) fn grown_list<T>(self, list: &Vec<T>) -> Self {
        self.grown(list_bytes(list))
    }

    /// Adds a block that grew by doubling.
    pub(crate) fn grown(self, bytes: u64) -> Self {
        Self { grown_bytes: self.grown_bytes.max(bytes), ..self.and(bytes) }
    }

    /// The sum.
    pub(crate) fn bytes(self) -> u64 {
        self.bytes
    }

    /// The peak while the blocks were built: the largest block that grew was beside its old half
    /// for a moment.
    pub(crate) fn peak_bytes(self) -> u64 {
        self.bytes.saturating_add(self.grown_bytes / 2)
    }
}

/// Bytes that a computation holds now, and their peak.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PeakMeter {
    held_bytes: u64,
    peak_bytes: u64,
}

impl PeakMeter {
    /// Counts memory that is held for a moment, beside everything that is kept.
    pub(crate) fn note(&mut self, scratch: Held) {
        self.peak_bytes = self.peak_bytes.max(self.held_bytes.saturating_add(scratch.peak_bytes()));
    }

    /// Counts memory that is held from now on.
    pub(crate) fn keep(&mut self, held: Held) {
        self.note(held);
        self.held_bytes = self.held_bytes.saturating_add(held.bytes());
    }

    /// Subtracts memory that was freed.
    pub(crate) fn release(&mut self, bytes: u64) {
        self.held_bytes = self.held_bytes.saturating_sub(bytes);
    }

    /// The peak.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_blocks_cost_more_than_they_hold() {
        let cases = [(0, 0), (1, 32), (24, 32), (25, 48), (40, 48), (41, 64), (131_071, 131_088)];
        for (asked, taken) in cases {
            assert_eq!(block_bytes(asked), taken, "{asked}");
        }
        assert_eq!((block_bytes(131_072), block_bytes(u64::MAX - 8192) > 0), (135_168, true));
        assert_eq!(list_bytes(&Vec::<u64>::with_capacity(3)), 32);
    }

    #[test]
    fn the_peak_is_of_what_is_held_together() {
        let mut meter = PeakMeter::default();
        meter.keep(Held::default().and(100));
        meter.note(Held::default().and(10).grown(40));
        meter.release(100);
        meter.keep(Held::default().and(120));
        assert_eq!((meter.peak_bytes(), meter.held_bytes), (170, 120));
    }
}
