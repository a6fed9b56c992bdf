//! What the machine offers: kernel, memory, and the memory limit that applies to this process.

use onelayer_probe::{CgroupVersion, Procfs};

use crate::report::{Cgroup, Host};

/// The machine, as a report has it.
pub(crate) fn host() -> Host {
    let procfs = Procfs::default();
    let machine = onelayer_probe::Host::read(&procfs);
    let group = procfs.myself().memory_group().ok();
    Host {
        kernel: machine.kernel.value().map(Into::into),
        ram_bytes: machine.ram_bytes.value(),
        cgroup: group.map(|group| Cgroup {
            version: if group.version() == CgroupVersion::V1 { 1 } else { 2 },
            limit_bytes: group.limit_bytes().value().flatten(),
        }),
        gpus: Vec::new(),
        unified_memory: false,
    }
}

/// The smaller of the cgroup's limit and the machine's memory.
pub(crate) fn memory_limit_bytes() -> Option<u64> {
    let host = host();
    let group_bytes = host.cgroup.and_then(|group| group.limit_bytes);
    match (group_bytes, host.ram_bytes) {
        (Some(group_bytes), Some(ram_bytes)) => Some(group_bytes.min(ram_bytes)),
        (group_bytes, ram_bytes) => group_bytes.or(ram_bytes),
    }
}

/// What a process can still take before the machine or its cgroup runs out: page cache that can be
/// dropped counts as free. `None` where neither says.
pub(crate) fn memory_available_bytes() -> Option<u64> {
    let procfs = Procfs::default();
    let machine_bytes = onelayer_probe::Host::read(&procfs).ram_available_bytes.value();
    let group_bytes =
        procfs.myself().memory_group().ok().and_then(|group| group.headroom_bytes().value().flatten());
    match (machine_bytes, group_bytes) {
        (Some(machine_bytes), Some(group_bytes)) => Some(machine_bytes.min(group_bytes)),
        (machine_bytes, group_bytes) => machine_bytes.or(group_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_known_here() {
        let limit_bytes = memory_limit_bytes().expect("/proc/meminfo is readable here");
        assert!(limit_bytes > 1 << 20 && Some(limit_bytes) <= host().ram_bytes);
        let available_bytes = memory_available_bytes().expect("/proc/meminfo is readable here");
        assert!(available_bytes > 0 && available_bytes <= limit_bytes);
        assert!(host().kernel.is_some_and(|kernel| !kernel.contains('\n')));
    }
}
