//! Control groups of a process, versions 1 and 2: where they are, what they say, and one of our
//! own.

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
    /// The control group that its memory is charged to.
    ///
    /// # Errors
    /// The reason there is none, or that it cannot be found from here.
    pub fn memory_group(&self) -> Result<MemoryGroup, Reason> {
        self.locate_group("memory").map(MemoryGroup::new)
    }

    /// The control group that bounds its CPU time.
    ///
    /// # Errors
    /// The reason there is none, or that it cannot be found from here.
    pub fn cpu_group(&self) -> Result<CpuGroup, Reason> {
        self.locate_group("cpu").map(CpuGroup::new)
    }

    fn locate_group(&self, controller: &str) -> Result<Location, Reason> {
        locate::locate(&self.read(&CGROUP)?, &self.read(&MOUNTINFO)?, controller)
    }
}
