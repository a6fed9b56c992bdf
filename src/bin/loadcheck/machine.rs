//! What the machine offers: kernel, memory, and the memory limit that applies to this process.

use onelayer::probe::{CgroupVersion, Procfs};

use crate::report::{Cgroup, Host};

/// The machine, as a report has it.
pub(crate) fn host() -> Host {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok();
    let group = Procfs::default().myself().memory_group().ok();
    Host {
        kernel: kernel.map(|text| text.trim().to_owned()),
        ram_bytes: ram_bytes(),
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

/// `MemTotal` of `/proc/meminfo`.
fn ram_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_known_here() {
        let limit_bytes = memory_limit_bytes().expect("/proc/meminfo is readable here");
        assert!(limit_bytes > 1 << 20 && Some(limit_bytes) <= ram_bytes());
        assert!(host().kernel.is_some_and(|kernel| !kernel.contains('\n')));
    }
}
