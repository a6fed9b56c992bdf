//! What machine this is: kernel, memory, CPU, and the kind of a file system.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::Path;

use serde::Serialize;

use super::measured::UnavailableList;
use super::procfs::{self, Procfs};
use super::{Measured, Reason};

/// The machine, as far as a report names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Host {
    /// Such as `6.18.44`.
    pub kernel: Measured<Box<str>>,
    /// All memory that the kernel manages.
    pub ram_bytes: Measured<u64>,
    /// What the kernel believes could be used without swapping; a container's limit is not in it.
    pub ram_available_bytes: Measured<u64>,
    /// The name the processor gives itself; not every architecture has one.
    pub cpu_model: Measured<Box<str>>,
    /// Threads that can run at once, by affinity and by quota.
    pub cpu_count: Measured<usize>,
    /// Bytes in a small page.
    pub page_bytes: u64,
}

impl Host {
    /// Reads it from `procfs`.
    #[must_use]
    pub fn read(procfs: &Procfs) -> Self {
        let read = |path: &str, name: &'static str| {
            fs::read_to_string(procfs.root().join(path)).map_err(|error| Reason::unreadable(name, &error))
        };
        let meminfo = read("meminfo", "/proc/meminfo");
        let cpus = procfs.myself().cpu_group().ok().and_then(|group| group.parallelism());
        let cpus = cpus.or_else(|| std::thread::available_parallelism().ok());
        Self {
            kernel: read("sys/kernel/osrelease", "/proc/sys/kernel/osrelease")
                .map(|text| text.trim().into())
                .into(),
            ram_bytes: meminfo_bytes(&meminfo, "MemTotal"),
            ram_available_bytes: meminfo_bytes(&meminfo, "MemAvailable"),
            cpu_model: read("cpuinfo", "/proc/cpuinfo").and_then(|text| cpu_model(&text)).into(),
            cpu_count: cpus
                .map(std::num::NonZeroUsize::get)
                .ok_or(Reason::NotHere("the CPUs of this process cannot be counted"))
                .into(),
            page_bytes: crate::units::to_u64(rustix::param::page_size()),
        }
    }

    /// What could not be read, for a report's list.
    #[must_use]
    pub fn unavailable(&self) -> Vec<super::Unavailable> {
        let mut list = UnavailableList::default();
        list.note("host.", "kernel", &self.kernel);
        list.note("host.", "ram_bytes", &self.ram_bytes);
        list.note("host.", "ram_available_bytes", &self.ram_available_bytes);
        list.note("host.", "cpu_model", &self.cpu_model);
        list.note("host.", "cpu_count", &self.cpu_count);
        list.into_vec()
    }
}

fn meminfo_bytes(text: &Result<String, Reason>, field: &'static str) -> Measured<u64> {
    const FILE: &str = "/proc/meminfo";
    let text = match text {
        Ok(text) => text,
        Err(reason) => return Measured::Unavailable(*reason),
    };
    procfs::keyed_lines(text.as_bytes())
        .find(|(key, _)| *key == field.as_bytes())
        .ok_or(Reason::FieldMissing { file: FILE, field })
        .and_then(|(_, value)| procfs::kib_field(value).ok_or(Reason::Malformed { file: FILE, field }))
        .into()
}

/// `model name` on x86, `Processor` or `cpu model` on some others.
fn cpu_model(text: &str) -> Result<Box<str>, Reason> {
    ["model name", "Processor", "cpu model", "cpu"]
        .iter()
        .find_map(|wanted| {
            let pairs = text.lines().filter_map(|line| line.split_once(':'));
            pairs.map(|(key, value)| (key.trim(), value.trim())).find(|(key, _)| key == wanted)
        })
        .map(|(_, value)| value.into())
        .ok_or(Reason::FieldMissing { file: "/proc/cpuinfo", field: "model name" })
}

/// The kind of a file system, by the number `statfs` gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem {
    magic: u64,
}

/// `linux/magic.h` and the file systems' own sources; the flag tells those whose bytes come over a network.
const FILE_SYSTEMS: [(u64, &str, bool); 34] = [
    (0xEF53, "ext4", false), // ext2 and ext3 have the same number and the same driver
    (0x5846_5342, "xfs", false),
    (0x9123_683E, "btrfs", false),
    (0x0102_1994, "tmpfs", false),
    (0x8584_58F6, "ramfs", false),
    (0x794C_7630, "overlayfs", false),
    (0x6573_5546, "fuse", false),
    (0x2FC1_2FC1, "zfs", false),
    (0xF2F5_2010, "f2fs", false),
    (0xCA45_1A4E, "bcachefs", false),
    (0x7371_7368, "squashfs", false),
    (0xE0F5_E1E2, "erofs", false),
    (0x4D44, "vfat", false),
    (0x2011_BAB0, "exfat", false),
    (0x5346_544E, "ntfs", false),
    (0x7366_746E, "ntfs3", false),
    (0x9660, "iso9660", false),
    (0x5265_4973, "reiserfs", false),
    (0x3153_464A, "jfs", false),
    (0x9FA0, "proc", false),
    (0x6265_6572, "sysfs", false),
    (0x9584_58F6, "hugetlbfs", false),
    (0x786F_4256, "vboxsf", false),
    (0xBACB_ACBC, "vmhgfs", false),
    (0x6969, "nfs", true),
    (0xFF53_4D42, "cifs", true),
    (0xFE53_4D42, "smb2", true),
    (0x517B, "smb", true),
    (0x00C3_6400, "ceph", true),
    (0x0BD0_0BD0, "lustre", true),
    (0x4750_4653, "gpfs", true),
    (0x1983_0326, "beegfs", true),
    (0x0102_1997, "9p", true),
    (0x5346_414F, "afs", true),
];

const OVERLAY: u64 = 0x794C_7630;

impl FileSystem {
    /// The one that holds `path`.
    ///
    /// # Errors
    /// The reason it cannot be told.
    pub fn of(path: &Path) -> Result<Self, Reason> {
        rustix::fs::statfs(path)
            .map(|statfs| Self::from_raw(statfs.f_type))
            .map_err(|errno| Reason::unreadable("the path", &errno.into()))
    }

    /// The one that holds an open file.
    ///
    /// # Errors
    /// The reason it cannot be told.
    pub fn of_file(file: &File) -> Result<Self, Reason> {
        rustix::fs::fstatfs(file.as_fd())
            .map(|statfs| Self::from_raw(statfs.f_type))
            .map_err(|errno| Reason::unreadable("the file", &errno.into()))
    }

    /// The word is 32 or 64 bits wide, signed or not, by architecture; the number itself has 32 bits.
    fn from_raw(raw: impl Into<i128>) -> Self {
        let bits = raw.into() & i128::from(u32::MAX);
        Self { magic: u64::try_from(bits).expect("32 bits fit in 64") }
    }

    /// The number `statfs` gives.
    #[must_use]
    pub fn magic(self) -> u64 {
        self.magic
    }

    /// Its name, or `None` for one that is not in the table.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        FILE_SYSTEMS.iter().find(|(magic, ..)| *magic == self.magic).map(|(_, name, _)| *name)
    }

    /// True if its bytes are known to come over a network. FUSE may do anything and counts as local here.
    #[must_use]
    pub fn is_network(self) -> bool {
        FILE_SYSTEMS.iter().any(|(magic, _, is_network)| *magic == self.magic && *is_network)
    }

    pub(crate) fn is_overlay(self) -> bool {
        self.magic == OVERLAY
    }
}

/// Its name, or its number as `0x…`.
impl std::fmt::Display for FileSystem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.name() {
            Some(name) => f.pad(name),
            None => f.pad(&format!("{:#x}", self.magic)),
        }
    }
}

/// As its name, or its number as `0x…`.
impl Serialize for FileSystem {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_known() {
        let host = Host::read(&Procfs::default());
        assert!(host.ram_bytes.value().unwrap() > 64 << 20);
        assert!(host.kernel.clone().value().unwrap().contains('.'));
        assert!(host.cpu_count.value().unwrap() >= 1);
        let missing = Host::read(&Procfs::at("/nonexistent"));
        assert!(missing.ram_bytes.value().is_none() && missing.kernel.value().is_none());
    }

    #[test]
    fn cpu_names_of_several_architectures() {
        assert_eq!(&*cpu_model("processor\t: 0\nmodel name\t: A: B CPU\n").unwrap(), "A: B CPU");
        assert_eq!(
            &*cpu_model("processor : 0\ncpu : POWER9, altivec supported\n").unwrap(),
            "POWER9, altivec supported"
        );
        assert!(cpu_model("processor : 0\nBogoMIPS : 50\n").is_err());
    }

    #[test]
    fn file_systems_have_names() {
        assert_eq!(FileSystem::of(Path::new("/proc")).unwrap().to_string(), "proc");
        let unknown = FileSystem::from_raw(0x1234_5678_i64);
        assert_eq!((unknown.name(), unknown.to_string()), (None, "0x12345678".to_owned()));
        assert_eq!(
            FileSystem::from_raw(-1_859_950_530_i64).name(),
            Some("btrfs"),
            "sign-extended on 32 bits"
        );
        assert!(FileSystem::from_raw(0x6969_i64).is_network());
        assert!(FileSystem::of(Path::new("/nonexistent")).is_err());
    }
}
