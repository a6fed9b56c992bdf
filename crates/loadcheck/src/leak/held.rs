//! What is held at one moment, by kind of memory.

use serde::{Deserialize, Serialize};

use onelayer_probe::ProcessMemory;

/// A kind of memory, as in a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// What the kernel cannot take back.
    Host,
    /// All resident pages.
    Rss,
    /// Mapped pages of files.
    File,
    /// Page-locked memory.
    Pinned,
    /// Device memory.
    Vram,
    /// What this library says it has allocated, wherever it is.
    Live,
}

impl Kind {
    /// All of them, as they are spelt, in the order of a table.
    pub(crate) const ALL: [(Self, &'static str); 6] = [
        (Self::Host, "host"),
        (Self::Rss, "rss"),
        (Self::File, "file"),
        (Self::Pinned, "pinned"),
        (Self::Vram, "vram"),
        (Self::Live, "live"),
    ];

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("", |(_, name)| name)
    }
}

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
    pub(crate) fn get(&self, kind: Kind) -> Option<u64> {
        match kind {
            Kind::Host => self.host_bytes,
            Kind::Rss => self.rss_bytes,
            Kind::File => self.file_bytes,
            Kind::Pinned => self.pinned_bytes,
            Kind::Vram => self.vram_bytes,
            Kind::Live => self.live_bytes,
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

/// What was held after a cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CyclePoint {
    /// Its number, from 1, those to warm up first; 0 is before the first.
    pub(crate) number: u64,
    /// What was held.
    pub(crate) held: Held,
}
