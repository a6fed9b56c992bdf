//! Control groups, versions 1 and 2: finds and reads those of a process, creates child groups.

mod child;
mod cpu;
mod locate;
mod memory;

pub use child::ChildGroup;
pub use cpu::CpuGroup;
pub use locate::CgroupVersion;
pub use memory::{GroupMemory, MemoryGroup};

use super::Reason;
use super::procfs::{CGROUP, MOUNTINFO, Process};
use locate::Location;

impl Process {
    /// The memory control group of the process.
    ///
    /// # Errors
    /// The reason that there is none or that it cannot be found.
    pub fn memory_group(&self) -> Result<MemoryGroup, Reason> {
        self.locate_group("memory").map(MemoryGroup::new)
    }

    /// The CPU control group of the process.
    ///
    /// # Errors
    /// The reason that there is none or that it cannot be found.
    pub fn cpu_group(&self) -> Result<CpuGroup, Reason> {
        self.locate_group("cpu").map(CpuGroup::new)
    }

    fn locate_group(&self, controller: &str) -> Result<Location, Reason> {
        locate::locate(&self.read(&CGROUP)?, &self.read(&MOUNTINFO)?, controller)
    }
}
