//! What the processes hold that this program has started and that still live.

use onelayer_probe::{Procfs, Reason};

use super::held::Held;
use crate::family::descendants;

/// What they hold, each page counted once for each process that maps it, and how many they are.
pub(super) struct Family {
    /// The sum.
    pub(super) held: Held,
    /// Shared memory among it.
    pub(super) shared_bytes: Option<u64>,
    /// Their numbers.
    pub(super) pids: Vec<u32>,
}

/// Looks at them now.
pub(super) fn family() -> Family {
    let procfs = Procfs::default();
    let none = Some(0);
    let nothing =
        Held { host_bytes: none, rss_bytes: none, file_bytes: none, pinned_bytes: none, ..Held::default() };
    let mut family = Family { held: nothing, shared_bytes: none, pids: Vec::new() };
    for pid in descendants() {
        let Ok(pid) = u32::try_from(pid.as_raw_nonzero().get()) else { continue };
        let memory = procfs.process(pid).memory();
        if memory.rss_bytes.reason() == Some(Reason::ProcessEnded) {
            continue;
        }
        family.held = family.held.and(Held::of(&memory));
        family.shared_bytes =
            family.shared_bytes.zip(memory.shmem_bytes.value()).map(|(sum, more)| sum + more);
        family.pids.push(pid);
    }
    family
}
