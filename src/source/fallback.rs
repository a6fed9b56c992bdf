//! Which files are read in another way than asked for, and why. Written once per file, read on
//! every read.

use std::sync::OnceLock;

use crate::checkpoint::ShardId;

use super::{Fallback, IoMode};

/// The fallbacks of one source, all of them to [`IoMode::Buffered`].
pub(super) struct Fallbacks {
    from: IoMode,
    reasons: Box<[OnceLock<String>]>,
}

impl Fallbacks {
    /// None yet, for `shard_count` files.
    pub(super) fn new(from: IoMode, shard_count: usize) -> Self {
        Self { from, reasons: (0..shard_count).map(|_| OnceLock::new()).collect() }
    }

    /// True if this file is read buffered.
    pub(super) fn contains(&self, shard: ShardId) -> bool {
        self.reasons[shard.index()].get().is_some()
    }

    /// From now on this file is read buffered. The first reason stays.
    pub(super) fn record(&self, shard: ShardId, reason: String) {
        // Two readers may be refused at once; either reason is true.
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
