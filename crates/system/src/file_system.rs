//! The kind of file system that holds a file: the number of `statfs`, and a table of names.
//!
//! The loader uses it to decide how to read (files in memory, files behind a network), the probe
//! for its reports.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use serde::{Serialize, Serializer};

/// The kind of a file system, by the number `statfs` gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileSystem {
    magic: u64,
}

/// Where the bytes of a file come from if they are not in the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Storage {
    /// A device of this machine.
    Local,
    /// Memory: there is no other copy.
    Memory,
    /// A network.
    Network,
    /// A program on this machine.
    Program,
}

/// `linux/magic.h` and the file systems' own sources.
const FILE_SYSTEMS: [(u64, &str, Storage); 36] = [
    (0xEF53, "ext4", Storage::Local), // ext2 and ext3 have the same number and the same driver
    (0x5846_5342, "xfs", Storage::Local),
    (0x9123_683E, "btrfs", Storage::Local),
    (0x0102_1994, "tmpfs", Storage::Memory),
    (0x8584_58F6, "ramfs", Storage::Memory),
    (0x9584_58F6, "hugetlbfs", Storage::Memory),
    (OVERLAY, "overlayfs", Storage::Local),
    (0x6573_5546, "fuse", Storage::Program),
    (0x2FC1_2FC1, "zfs", Storage::Local),
    (0xF2F5_2010, "f2fs", Storage::Local),
    (0xCA45_1A4E, "bcachefs", Storage::Local),
    (0x7371_7368, "squashfs", Storage::Local),
    (0xE0F5_E1E2, "erofs", Storage::Local),
    (0x4D44, "vfat", Storage::Local),
    (0x2011_BAB0, "exfat", Storage::Local),
    (0x5346_544E, "ntfs", Storage::Local),
    (0x7366_746E, "ntfs3", Storage::Local),
    (0x9660, "iso9660", Storage::Local),
    (0x5265_4973, "reiserfs", Storage::Local),
    (0x3153_464A, "jfs", Storage::Local),
    (0x9FA0, "proc", Storage::Local),
    (0x6265_6572, "sysfs", Storage::Local),
    (0x786F_4256, "vboxsf", Storage::Program),
    (0xBACB_ACBC, "vmhgfs", Storage::Program),
    (0x6969, "nfs", Storage::Network),
    (0xFF53_4D42, "cifs", Storage::Network),
    (0xFE53_4D42, "smb2", Storage::Network),
    (0x517B, "smb", Storage::Network),
    (0x00C3_6400, "ceph", Storage::Network),
    (0x0BD0_0BD0, "lustre", Storage::Network),
    (0x4750_4653, "gpfs", Storage::Network),
    (0x1983_0326, "beegfs", Storage::Network),
    (0x0102_1997, "9p", Storage::Network),
    (0x5346_414F, "afs", Storage::Network),
    (0x7375_7245, "coda", Storage::Network),
    (0x2003_0528, "orangefs", Storage::Network),
];

const OVERLAY: u64 = 0x794C_7630;

impl FileSystem {
    /// The file system of an open file.
    pub fn holding(file: &File) -> io::Result<Self> {
        Ok(Self::from_raw(rustix::fs::fstatfs(file.as_fd())?.f_type))
    }

    /// The kind with the number `raw`. `statfs` returns 32 or 64 bits, signed or not, depending on
    /// the architecture; the number itself has 32 bits.
    pub fn from_raw(raw: impl Into<i128>) -> Self {
        let bits = raw.into() & i128::from(u32::MAX);
        Self { magic: u64::try_from(bits).expect("32 bits fit in 64") }
    }

    /// The number of `statfs`.
    #[must_use]
    pub fn magic(self) -> u64 {
        self.magic
    }

    /// Its name, or `None` if it is not in the table.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        self.entry().map(|(_, name, _)| *name)
    }

    /// True if its bytes come over a network. False for FUSE, which may do anything.
    #[must_use]
    pub fn is_network(self) -> bool {
        self.has(Storage::Network)
    }

    /// True if its files are in memory only.
    #[must_use]
    pub fn is_memory(self) -> bool {
        self.has(Storage::Memory)
    }

    /// True if a program delivers the bytes: FUSE, and shared folders of virtual machines.
    #[must_use]
    pub fn is_program(self) -> bool {
        self.has(Storage::Program)
    }

    /// True for an overlay, which forwards calls to other file systems.
    #[must_use]
    pub fn is_overlay(self) -> bool {
        self.magic == OVERLAY
    }

    fn has(self, storage: Storage) -> bool {
        self.entry().is_some_and(|(_, _, found)| *found == storage)
    }

    fn entry(self) -> Option<&'static (u64, &'static str, Storage)> {
        FILE_SYSTEMS.iter().find(|(magic, ..)| *magic == self.magic)
    }
}

/// Its name, or its number as `0x…`.
impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.pad(name),
            None => f.pad(&format!("{:#x}", self.magic)),
        }
    }
}

/// Serializes its name, or its number as `0x…`.
impl Serialize for FileSystem {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_have_names() {
        let proc = FileSystem::holding(&File::open("/proc/self/stat").unwrap()).unwrap();
        assert_eq!(proc.to_string(), "proc");
        let unknown = FileSystem::from_raw(0x1234_5678_i64);
        assert_eq!((unknown.name(), unknown.to_string()), (None, "0x12345678".to_owned()));
        assert!(!unknown.is_network() && !unknown.is_memory() && !unknown.is_program());
        let btrfs = FileSystem::from_raw(-1_859_950_530_i64);
        assert_eq!(btrfs.name(), Some("btrfs"), "sign-extended on 32 bits");
    }

    #[test]
    fn each_is_at_one_place() {
        let named = |wanted: &str| {
            let (magic, ..) = FILE_SYSTEMS.iter().find(|(_, name, _)| *name == wanted).unwrap();
            FileSystem::from_raw(i128::from(*magic))
        };
        for (name, network, memory, program) in [
            ("ext4", false, false, false),
            ("overlayfs", false, false, false),
            ("tmpfs", false, true, false),
            ("hugetlbfs", false, true, false),
            ("nfs", true, false, false),
            ("lustre", true, false, false),
            ("fuse", false, false, true),
        ] {
            let kind = named(name);
            assert_eq!(
                (kind.is_network(), kind.is_memory(), kind.is_program()),
                (network, memory, program),
                "{name}"
            );
        }
        assert!(named("overlayfs").is_overlay() && !named("ext4").is_overlay());
    }
}
