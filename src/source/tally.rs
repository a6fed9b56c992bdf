//! Bytes by the way they were read, counted by each source for itself and read by anybody at any
//! time.

use std::sync::atomic::{AtomicU64, Ordering};

use super::IoWays;

/// The counters of one source. They only grow.
#[derive(Default)]
pub(super) struct Tally {
    direct_bytes: AtomicU64,
    buffered_bytes: AtomicU64,
    mapped_bytes: AtomicU64,
    corrected_bytes: AtomicU64,
    dropped_behind_bytes: AtomicU64,
}

impl Tally {
    /// Counts a read past the page cache; returns its bytes, as the others do.
    pub(super) fn direct(&self, bytes: u64) -> u64 {
        count(&self.direct_bytes, bytes)
    }

    /// Counts a read through the page cache.
    pub(super) fn buffered(&self, bytes: u64) -> u64 {
        count(&self.buffered_bytes, bytes)
    }

    /// Counts a copy out of a mapping.
    pub(super) fn mapped(&self, bytes: u64) -> u64 {
        count(&self.mapped_bytes, bytes)
    }

    /// Counts bytes, which the others have counted too, that did not go the way that was planned.
    pub(super) fn corrected(&self, bytes: u64) {
        count(&self.corrected_bytes, bytes);
    }

    /// Counts bytes that were dropped from the page cache.
    pub(super) fn dropped_behind(&self, bytes: u64) {
        count(&self.dropped_behind_bytes, bytes);
    }

    /// What was counted so far.
    pub(super) fn ways(&self) -> IoWays {
        let now = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        IoWays {
            direct_bytes: now(&self.direct_bytes),
            buffered_bytes: now(&self.buffered_bytes),
            mapped_bytes: now(&self.mapped_bytes),
            corrected_bytes: now(&self.corrected_bytes),
            dropped_behind_bytes: now(&self.dropped_behind_bytes),
        }
    }
}

fn count(counter: &AtomicU64, bytes: u64) -> u64 {
    counter.fetch_add(bytes, Ordering::Relaxed);
    bytes
}
