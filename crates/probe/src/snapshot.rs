//! Everything this stage can read about one process at one moment.

use serde::Serialize;

use super::measured::UnavailableList;
use super::{Activity, GroupMemory, Measured, MemoryGroup, Process, ProcessMemory, Reason, SmapsRollup};

/// Memory from both sources, that of the control group, and what the process did so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// From `status`: what the samples in between are compared with.
    pub memory: ProcessMemory,
    /// From `smaps_rollup`: exact; differs from `memory` by the lag of its counters.
    pub exact: SmapsRollup,
    /// Faults, reads and CPU time since the process started.
    pub activity: Activity,
    /// The control group the process is in: all of its processes, page cache included.
    pub cgroup: Measured<GroupMemory>,
}

impl Snapshot {
    /// Reads everything about `process` now. `group` is the process's own, found once, since
    /// finding it reads the mount table.
    #[must_use]
    pub fn take(process: &Process, group: &Result<MemoryGroup, Reason>) -> Self {
        Self {
            memory: process.memory(),
            exact: process.exact_memory(),
            activity: process.activity(),
            cgroup: match group {
                Ok(group) => Measured::Value(group.read()),
                Err(reason) => Measured::Unavailable(*reason),
            },
        }
    }

    pub(crate) fn note_unavailable(&self, prefix: &str, list: &mut UnavailableList) {
        self.memory.note_unavailable(prefix, list);
        self.exact.note_unavailable(&format!("{prefix}exact."), list);
        self.activity.note_unavailable(&format!("{prefix}activity."), list);
        match &self.cgroup {
            Measured::Value(group) => group.note_unavailable(&format!("{prefix}cgroup."), list),
            missing => list.note(prefix, "cgroup", missing),
        }
    }
}
