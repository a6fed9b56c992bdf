//! Reports of a source: bytes by the way they were read, and files that are read in another mode
//! than requested.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Fallback, IoMode, IoWays};
use crate::checkpoint::ShardId;

/// Byte counters of one source. They only grow.
#[derive(Default)]
pub(super) struct ByteCounters {
    direct_bytes: AtomicU64,
    buffered_bytes: AtomicU64,
    mapped_bytes: AtomicU64,
    corrected_bytes: AtomicU64,
    dropped_behind_bytes: AtomicU64,
}

impl ByteCounters {
    /// Counts a direct read. Returns its bytes, as the methods below do.
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

    /// Counts bytes that were read in another way than planned. The other counters count them too.
    pub(super) fn corrected(&self, bytes: u64) {
        count(&self.corrected_bytes, bytes);
    }

    /// Counts bytes that were dropped from the page cache.
    pub(super) fn dropped_behind(&self, bytes: u64) {
        count(&self.dropped_behind_bytes, bytes);
    }

    /// The counts so far.
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

/// The fallbacks of one source, all of them to [`IoMode::Buffered`].
pub(super) struct Fallbacks {
    from: IoMode,
    reasons: Box<[OnceLock<String>]>,
}

impl Fallbacks {
    /// No fallbacks yet, for `shard_count` files.
    pub(super) fn new(from: IoMode, shard_count: usize) -> Self {
        Self { from, reasons: (0..shard_count).map(|_| OnceLock::new()).collect() }
    }

    /// True if this file is read buffered.
    pub(super) fn contains(&self, shard: ShardId) -> bool {
        self.reasons[shard.index()].get().is_some()
    }

    /// From now on this file is read buffered. The first reason stays.
    pub(super) fn record(&self, shard: ShardId, reason: String) {
        // If two readers are refused at once, either reason is right.
        let _ = self.reasons[shard.index()].set(reason);
    }

    /// All of them, in the order of the shards.
    pub(super) fn list(&self) -> Vec<Fallback> {
        let entry = |(index, reason): (usize, &OnceLock<String>)| {
            let shard = ShardId(u32::try_from(index).expect("a checkpoint numbers its shards with a u32"));
            let reason = reason.get()?.clone();
            Some(Fallback { shard, from: self.from, to: IoMode::Buffered, reason })
        };
        self.reasons.iter().enumerate().filter_map(entry).collect()
    }
}
