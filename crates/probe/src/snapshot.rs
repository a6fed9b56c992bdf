//! All metrics of one process at one moment.

use serde::Serialize;

use super::measured::UnavailableList;
use super::{Activity, GroupMemory, Measured, MemoryGroup, Process, ProcessMemory, Reason, SmapsRollup};

/// Memory, control group and activity of one process.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// From `status`, like the samples during a run.
    pub memory: ProcessMemory,
    /// From `smaps_rollup`: exact. Differs from `memory` by the lag of the kernel's counters.
    pub exact: SmapsRollup,
    /// Faults, reads and CPU time since the process started.
    pub activity: Activity,
    /// The control group of the process: all processes in it, page cache included.
    pub cgroup: Measured<GroupMemory>,
}

impl Snapshot {
    /// Reads all metrics of `process` now. `group` is the process's control group. The caller
    /// looks it up once, since that reads the mount table.
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
