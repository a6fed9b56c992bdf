//! Memory at one moment, by kind.

use onelayer_probe::ProcessMemory;
use serde::{Deserialize, Serialize};

use crate::args::MemoryKind;

/// Bytes of each kind; `None` is "not measured".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Held {
    pub(crate) host_bytes: Option<u64>,
    pub(crate) rss_bytes: Option<u64>,
    pub(crate) file_bytes: Option<u64>,
    pub(crate) pinned_bytes: Option<u64>,
    pub(crate) vram_bytes: Option<u64>,
    pub(crate) live_bytes: Option<u64>,
}

impl Held {
    /// Of one process, without its device memory. Page-locked is what it has locked itself
    /// (`VmLck`) and what the kernel has pinned for devices (`VmPin`); what a driver pins on
    /// its own account shows in neither.
    pub(crate) fn of(memory: &ProcessMemory) -> Self {
        Self {
            host_bytes: memory.host_bytes.value(),
            rss_bytes: memory.rss_bytes.value(),
            file_bytes: memory.file_bytes.value(),
            pinned_bytes: memory.locked_bytes.plus(memory.pinned_bytes).value(),
            ..Self::default()
        }
    }

    /// Bytes of one kind.
    pub(crate) fn get(&self, kind: MemoryKind) -> Option<u64> {
        match kind {
            MemoryKind::Host => self.host_bytes,
            MemoryKind::Rss => self.rss_bytes,
            MemoryKind::File => self.file_bytes,
            MemoryKind::Pinned => self.pinned_bytes,
            MemoryKind::Vram => self.vram_bytes,
            MemoryKind::Live => self.live_bytes,
        }
    }

    /// Both together; what one of them lacks is lacking.
    pub(crate) fn and(self, other: Self) -> Self {
        let sum = |one: Option<u64>, two: Option<u64>| one?.checked_add(two?);
        Self {
            host_bytes: sum(self.host_bytes, other.host_bytes),
            rss_bytes: sum(self.rss_bytes, other.rss_bytes),
            file_bytes: sum(self.file_bytes, other.file_bytes),
            pinned_bytes: sum(self.pinned_bytes, other.pinned_bytes),
            vram_bytes: sum(self.vram_bytes, other.vram_bytes),
            live_bytes: sum(self.live_bytes, other.live_bytes),
        }
    }
}

/// Memory after a cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CyclePoint {
    /// Its number, from 1, those to warm up first; 0 is before the first.
    pub(crate) number: u64,
    /// Memory.
    pub(crate) held: Held,
}
