//! Everything this stage can read about the calling process at one moment.

use serde::Serialize;

use super::measured::UnavailableList;
use super::{Activity, Process, ProcessMemory, SmapsRollup};

/// Memory from both sources, and what the process did so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Snapshot {
    /// From `status`: what the samples in between are compared with.
    pub memory: ProcessMemory,
    /// From `smaps_rollup`: exact; differs from `memory` by the lag of its counters.
    pub exact: SmapsRollup,
    /// Faults, reads and CPU time since the process started.
    pub activity: Activity,
}

impl Snapshot {
    /// Reads everything about `process` now.
    #[must_use]
    pub fn take(process: &Process) -> Self {
        Self { memory: process.memory(), exact: process.exact_memory(), activity: process.activity() }
    }

    pub(crate) fn note_unavailable(&self, prefix: &str, list: &mut UnavailableList) {
        self.memory.note_unavailable(prefix, list);
        self.exact.note_unavailable(&format!("{prefix}exact."), list);
        self.activity.note_unavailable(&format!("{prefix}activity."), list);
    }
}
