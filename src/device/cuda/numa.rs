//! NUMA: the memory that is near a device. A ring on another node would be read across the link
//! between processors.
#![allow(unsafe_code, reason = "a system call without a wrapper; the block says why its arguments are valid")]

use std::fs;
use std::path::Path;
use std::ptr::NonNull;

/// `MPOL_PREFERRED` of linux/mempolicy.h: pages come from this node while it has free ones.
const MPOL_PREFERRED: libc::c_int = 1;

/// The NUMA node of a PCI device, if the machine has several nodes and reports it. `pci_bus_id` is
/// the driver's spelling, `sys` the root of sysfs.
pub(super) fn node_of(pci_bus_id: &str, sys: &Path) -> Option<u32> {
    let text = |path: &str| fs::read_to_string(sys.join(path)).ok();
    // A list such as `0-1` or `0,2`; a single number is a single node.
    let online = text("devices/system/node/online")?;
    if online.trim().parse::<u32>().is_ok() {
        return None;
    }
    let node = text(&format!("bus/pci/devices/{}/numa_node", pci_bus_id.to_ascii_lowercase()))?;
    // -1 means no node.
    node.trim().parse().ok()
}

/// Makes untouched memory come from a node. A refusal only costs speed, so it is not reported.
///
/// # Safety
/// `len_bytes` bytes from `start` are a mapping of this process, `start` on a page.
pub(super) unsafe fn prefer(node: u32, start: NonNull<u8>, len_bytes: usize) {
    let Some(mask) = 1_u64.checked_shl(node) else { return };
    // SAFETY: sets a policy for a mapping of this process (the caller's promise) and changes no
    // byte; the mask has 64 bits.
    unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start.as_ptr(),
            len_bytes,
            MPOL_PREFERRED,
            &raw const mask,
            64_usize,
            0,
        )
    };
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::staging::memory::AnonymousMemory;
    use crate::units::to_usize;

    #[test]
    fn a_node_is_told_only_where_there_are_several() {
        let sys = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(node_of("0000:3B:00.0", sys.path()), None, "no sysfs");
        write("bus/pci/devices/0000:3b:00.0/numa_node", "1\n");
        for (online, expected) in [("0\n", None), ("0-1\n", Some(1)), ("0,2\n", Some(1))] {
            write("devices/system/node/online", online);
            assert_eq!(node_of("0000:3B:00.0", sys.path()), expected, "{online}");
        }
        assert_eq!(node_of("0000:af:00.0", sys.path()), None, "no such device");
        write("bus/pci/devices/0000:3b:00.0/numa_node", "-1\n");
        assert_eq!(node_of("0000:3B:00.0", sys.path()), None);
    }

    #[test]
    #[cfg(not(miri))]
    fn the_kernel_takes_the_policy() {
        let memory = AnonymousMemory::new(4 << 20).unwrap();
        let start = memory.pointer_to(0, 4 << 20);
        let Ok(before) = fs::read_to_string("/proc/self/numa_maps") else {
            onelayer_testing::skipped("this kernel tells nothing of NUMA");
            return;
        };
        let policy = |text: &str| {
            let prefix = format!("{:x} ", start.as_ptr().addr());
            text.lines().find_map(|line| line.strip_prefix(&prefix)?.split(' ').next().map(str::to_owned))
        };
        assert_ne!(policy(&before).as_deref(), Some("prefer:0"));
        // SAFETY: the whole mapping, on a page.
        unsafe { prefer(0, start, to_usize(memory.len_bytes())) };
        let after = fs::read_to_string("/proc/self/numa_maps").unwrap();
        // SAFETY: the only reference to the mapping, gone at the end of the statement.
        unsafe { memory.part_mut(0, 1) }.fill(1);
        assert!(policy(&after).is_some_and(|policy| policy.starts_with("prefer")), "{:?}", policy(&after));
    }
}
