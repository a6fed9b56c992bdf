//! The memory of a control group: usage, peak, effective limit, reclaimable page cache.
//!
//! | field | version 1 | version 2 |
//! |---|---|---|
//! | `usage_bytes` | `memory.usage_in_bytes` | `memory.current` |
//! | `peak_bytes` | `memory.max_usage_in_bytes` | `memory.peak` (since 5.19, not in the root group) |
//! | `limit_bytes` | `memory.limit_in_bytes`, `hierarchical_memory_limit` | `memory.max` |
//! | `high_bytes` | - | `memory.high` |
//! | `anon_bytes` … | `total_rss` … of `memory.stat` | `anon` … of `memory.stat` |
//! | `kernel_bytes` | `memory.kmem.usage_in_bytes` | `kernel` of `memory.stat` (since 5.18) |
//! | `limit_hit_count` | `memory.failcnt` (not for a limit on memory and swap together) | `max` of `memory.events` |
//! | `oom_kill_count` | `oom_kill` of `memory.oom_control` (since 4.13) | `oom_kill` of `memory.events` |
//! | `file_refault_count` | `total_workingset_refault_file` of `memory.stat` | `workingset_refault_file` (since 5.9) |
//!
//! Usage and peak include the page cache, which grows up to the limit, and count since the group
//! was created. Neither is the memory that a program needs. The limits of all ancestors apply, so
//! the smallest one counts; limits above the mount point are not visible in version 2. Sources:
//! `Documentation/admin-guide/cgroup-v1/memory.rst` and `cgroup-v2.rst` of the kernel.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::locate::{CgroupVersion, Location};
use crate::measured::UnavailableList;
use crate::{Measured, Reason};

/// The name of a group's directory in reasons.
const DIRECTORY: &str = "the control group";

/// Numbers from here on mean "no limit": version 1 prints `i64::MAX` rounded down to a page of at
/// most 64 KiB.
const UNLIMITED_FROM_BYTES: u64 = (1 << 63) - (64 << 10);

/// A memory control group and its visible ancestors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryGroup {
    location: Location,
}

/// The memory of a group, in bytes. See the table in the module docs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GroupMemory {
    /// The control group version.
    pub version: CgroupVersion,
    /// Current usage, page cache included.
    pub usage_bytes: Measured<u64>,
    /// Peak usage since the group was created, page cache included.
    pub peak_bytes: Measured<u64>,
    /// The smallest limit of the group and its visible ancestors; `Value(None)`: no limit.
    pub limit_bytes: Measured<Option<u64>>,
    /// The smallest `memory.high`, above which the kernel throttles the group; `Value(None)`: none,
    /// as always in version 1.
    pub high_bytes: Measured<Option<u64>>,
    /// Anonymous memory.
    pub anon_bytes: Measured<u64>,
    /// Page cache, shared memory included.
    pub file_bytes: Measured<u64>,
    /// Shared memory: part of `file_bytes`, not reclaimable without swap.
    pub shmem_bytes: Measured<u64>,
    /// Page cache that was used repeatedly of late.
    pub active_file_bytes: Measured<u64>,
    /// Page cache that is reclaimed first.
    pub inactive_file_bytes: Measured<u64>,
    /// Kernel memory charged to the group: slab, stacks, page tables.
    pub kernel_bytes: Measured<u64>,
    /// How often usage hit the limit.
    pub limit_hit_count: Measured<u64>,
    /// How many processes were killed because of the limit.
    pub oom_kill_count: Measured<u64>,
    /// File pages that were read again after the kernel had reclaimed them: the cost of a tight
    /// limit.
    pub file_refault_count: Measured<u64>,
}

impl GroupMemory {
    pub(crate) fn note_unavailable(&self, prefix: &str, list: &mut UnavailableList) {
        for (name, measured) in [
            ("usage_bytes", self.usage_bytes),
            ("peak_bytes", self.peak_bytes),
            ("anon_bytes", self.anon_bytes),
            ("file_bytes", self.file_bytes),
            ("shmem_bytes", self.shmem_bytes),
            ("active_file_bytes", self.active_file_bytes),
            ("inactive_file_bytes", self.inactive_file_bytes),
            ("kernel_bytes", self.kernel_bytes),
            ("limit_hit_count", self.limit_hit_count),
            ("oom_kill_count", self.oom_kill_count),
            ("file_refault_count", self.file_refault_count),
        ] {
            list.note(prefix, name, &measured);
        }
        list.note(prefix, "limit_bytes", &self.limit_bytes);
        list.note(prefix, "high_bytes", &self.high_bytes);
    }
}

impl MemoryGroup {
    pub(crate) fn new(location: Location) -> Self {
        Self { location }
    }

    /// A child of this group, in the same hierarchy.
    pub(crate) fn child(&self, directory: PathBuf) -> Self {
        let mut location = self.location.clone();
        location.directories.insert(0, directory);
        location.is_own = true;
        Self { location }
    }

    /// The control group version.
    #[must_use]
    pub fn version(&self) -> CgroupVersion {
        self.location.version
    }

    /// The group's directory, or the nearest visible ancestor's if the group is not visible.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.location.directories.first().expect("a location has a directory")
    }

    /// True if the group's directory is visible, not only an ancestor's.
    #[must_use]
    pub fn is_visible(&self) -> bool {
        self.location.is_own
    }

    /// Reads all current numbers of the group.
    #[must_use]
    pub fn read(&self) -> GroupMemory {
        let names = Names::of(self.version());
        if !self.is_visible() {
            let reason = Reason::NotHere("the control group itself is not visible, only an ancestor");
            return GroupMemory {
                limit_bytes: self.limit_bytes(),
                ..Self::unavailable(self.version(), reason)
            };
        }
        let directory = self.directory();
        let stat = read_text(directory, "memory.stat");
        let from_stat = |field: &'static str| keyed_number(&stat, "memory.stat", field);
        GroupMemory {
            version: self.version(),
            usage_bytes: number(directory, names.usage),
            peak_bytes: number(directory, names.peak),
            limit_bytes: self.limit_bytes(),
            high_bytes: match self.version() {
                CgroupVersion::V1 => Measured::Value(None),
                CgroupVersion::V2 => self.smallest("memory.high"),
            },
            anon_bytes: from_stat(names.anon),
            file_bytes: from_stat(names.file),
            shmem_bytes: from_stat(names.shmem),
            active_file_bytes: from_stat(names.active_file),
            inactive_file_bytes: from_stat(names.inactive_file),
            kernel_bytes: match self.version() {
                CgroupVersion::V1 => number(directory, "memory.kmem.usage_in_bytes"),
                CgroupVersion::V2 => from_stat("kernel"),
            },
            limit_hit_count: match self.version() {
                CgroupVersion::V1 => number(directory, "memory.failcnt"),
                CgroupVersion::V2 => {
                    keyed_number(&read_text(directory, "memory.events"), "memory.events", "max")
                }
            },
            oom_kill_count: keyed_number(&read_text(directory, names.events), names.events, "oom_kill"),
            file_refault_count: from_stat(names.file_refaults),
        }
    }

    /// The smallest limit of the group and its visible ancestors; `Value(None)`: no limit.
    #[must_use]
    pub fn limit_bytes(&self) -> Measured<Option<u64>> {
        match self.version() {
            CgroupVersion::V2 => self.smallest("memory.max"),
            CgroupVersion::V1 => {
                let seen = self.smallest("memory.limit_in_bytes");
                // Includes ancestors that are not mounted here.
                let stat = read_text(self.directory(), "memory.stat");
                let whole = keyed_number(&stat, "memory.stat", "hierarchical_memory_limit").map(limit_from);
                match (seen, whole) {
                    (Measured::Value(seen), Measured::Value(whole)) => Measured::Value(smaller(seen, whole)),
                    (Measured::Unavailable(_), Measured::Value(_)) => whole,
                    _ => seen,
                }
            }
        }
    }

    /// The memory left below the limit: the smallest `limit - (usage - reclaimable page cache)` of
    /// the group and its visible ancestors. Shared memory counts as used. `Value(None)`: no limit.
    #[must_use]
    pub fn headroom_bytes(&self) -> Measured<Option<u64>> {
        let names = Names::of(self.version());
        let mut smallest = None;
        for directory in &self.location.directories {
            let limit = match limit_of(directory, names.limit) {
                Some(Measured::Value(Some(limit))) => limit,
                Some(Measured::Unavailable(reason)) => return Measured::Unavailable(reason),
                Some(Measured::Value(None)) | None => continue,
            };
            let stat = read_text(directory, "memory.stat");
            let droppable = keyed_number(&stat, "memory.stat", names.active_file).plus(keyed_number(
                &stat,
                "memory.stat",
                names.inactive_file,
            ));
            let used = number(directory, names.usage).combine(droppable, u64::saturating_sub);
            match used {
                Measured::Value(used) => smallest = smaller(smallest, Some(limit.saturating_sub(used))),
                Measured::Unavailable(reason) => return Measured::Unavailable(reason),
            }
        }
        Measured::Value(smallest)
    }

    /// The smallest value of a limit file over the group and its visible ancestors.
    fn smallest(&self, file: &'static str) -> Measured<Option<u64>> {
        let mut smallest = None;
        for directory in &self.location.directories {
            match limit_of(directory, file) {
                Some(Measured::Value(limit)) => smallest = smaller(smallest, limit),
                Some(Measured::Unavailable(reason)) => return Measured::Unavailable(reason),
                // The root group has no limits, nor has a level without the memory controller.
                None => {}
            }
        }
        Measured::Value(smallest)
    }

    fn unavailable(version: CgroupVersion, reason: Reason) -> GroupMemory {
        let missing = Measured::Unavailable(reason);
        GroupMemory {
            version,
            usage_bytes: missing,
            peak_bytes: missing,
            limit_bytes: Measured::Unavailable(reason),
            high_bytes: Measured::Unavailable(reason),
            anon_bytes: missing,
            file_bytes: missing,
            shmem_bytes: missing,
            active_file_bytes: missing,
            inactive_file_bytes: missing,
            kernel_bytes: missing,
            limit_hit_count: missing,
            oom_kill_count: missing,
            file_refault_count: missing,
        }
    }
}

/// The file and field names of a version.
struct Names {
    usage: &'static str,
    peak: &'static str,
    limit: &'static str,
    events: &'static str,
    anon: &'static str,
    file: &'static str,
    shmem: &'static str,
    active_file: &'static str,
    inactive_file: &'static str,
    file_refaults: &'static str,
}

impl Names {
    const fn of(version: CgroupVersion) -> Self {
        match version {
            CgroupVersion::V1 => Self {
                usage: "memory.usage_in_bytes",
                peak: "memory.max_usage_in_bytes",
                limit: "memory.limit_in_bytes",
                events: "memory.oom_control",
                anon: "total_rss",
                file: "total_cache",
                shmem: "total_shmem",
                active_file: "total_active_file",
                inactive_file: "total_inactive_file",
                file_refaults: "total_workingset_refault_file",
            },
            CgroupVersion::V2 => Self {
                usage: "memory.current",
                peak: "memory.peak",
                limit: "memory.max",
                events: "memory.events",
                anon: "anon",
                file: "file",
                shmem: "shmem",
                active_file: "active_file",
                inactive_file: "inactive_file",
                file_refaults: "workingset_refault_file",
            },
        }
    }
}

fn smaller(left: Option<u64>, right: Option<u64>) -> Option<u64> {
    match (left, right) {
        (Some(left), Some(right)) => Some(left.min(right)),
        (known, None) | (None, known) => known,
    }
}

fn limit_from(bytes: u64) -> Option<u64> {
    (bytes < UNLIMITED_FROM_BYTES).then_some(bytes)
}

/// The limit in a file, or `None` if there is no such file.
fn limit_of(directory: &Path, file: &'static str) -> Option<Measured<Option<u64>>> {
    match read_text(directory, file) {
        Ok(text) if text.trim() == "max" => Some(Measured::Value(None)),
        Ok(text) => Some(
            text.trim()
                .parse()
                .map(limit_from)
                .map_err(|_| Reason::Malformed { file: DIRECTORY, field: file })
                .into(),
        ),
        Err(Reason::FieldMissing { .. }) => None,
        Err(reason) => Some(Measured::Unavailable(reason)),
    }
}

fn number(directory: &Path, file: &'static str) -> Measured<u64> {
    read_text(directory, file)
        .and_then(|text| text.trim().parse().map_err(|_| Reason::Malformed { file: DIRECTORY, field: file }))
        .into()
}

pub(super) fn read_text(directory: &Path, file: &'static str) -> Result<String, Reason> {
    fs::read_to_string(directory.join(file)).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Reason::FieldMissing { file: DIRECTORY, field: file },
        _ => Reason::unreadable(file, &error),
    })
}

/// The number behind `field` in a text of `key number` lines.
fn keyed_number(text: &Result<String, Reason>, file: &'static str, field: &'static str) -> Measured<u64> {
    let text = match text {
        Ok(text) => text,
        Err(reason) => return Measured::Unavailable(*reason),
    };
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(key, _)| *key == field)
        .ok_or(Reason::FieldMissing { file, field })
        .and_then(|(_, value)| value.trim().parse().map_err(|_| Reason::Malformed { file, field }))
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fake hierarchy: `levels` from the mount point down, each a list of files.
    struct Imitation {
        _root: tempfile::TempDir,
        group: MemoryGroup,
    }

    fn imitate(version: CgroupVersion, levels: &[&[(&str, &str)]]) -> Imitation {
        let root = tempfile::tempdir().unwrap();
        let mut directory = root.path().join("mount");
        let mut directories = Vec::new();
        for files in levels {
            fs::create_dir(&directory).unwrap();
            for (name, text) in *files {
                fs::write(directory.join(name), text).unwrap();
            }
            directories.insert(0, directory.clone());
            directory = directory.join("below");
        }
        let group = MemoryGroup::new(Location { version, directories, is_own: true });
        Imitation { _root: root, group }
    }

    const V1_STAT: &str = "cache 1\nrss 2\nhierarchical_memory_limit 900000\ntotal_cache 5000\ntotal_rss 7000\n\
        shmem 3\ntotal_shmem 100\ntotal_inactive_file 3000\ntotal_active_file 1900\ntotal_workingset_refault_file 11\n";
    const V2_STAT: &str = "anon 7000\nfile 5000\nkernel 300\nshmem 100\ninactive_file 3000\nactive_file 1900\nslab 250\nworkingset_refault_file 12\n";

    #[test]
    fn version_1_is_read_whole() {
        let own = [
            ("memory.usage_in_bytes", "12345\n"),
            ("memory.max_usage_in_bytes", "23456\n"),
            ("memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory.stat", V1_STAT),
            ("memory.failcnt", "4\n"),
            ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        ];
        let root = [("memory.limit_in_bytes", "9223372036854771712\n")];
        let memory = imitate(CgroupVersion::V1, &[&root, &own]).group.read();
        assert_eq!(memory.usage_bytes, Measured::Value(12345));
        assert_eq!(memory.peak_bytes, Measured::Value(23456));
        assert_eq!(
            memory.limit_bytes,
            Measured::Value(Some(900_000)),
            "an ancestor that is not mounted here"
        );
        assert_eq!((memory.anon_bytes, memory.file_bytes), (Measured::Value(7000), Measured::Value(5000)));
        assert_eq!(memory.shmem_bytes, Measured::Value(100));
        assert_eq!(memory.inactive_file_bytes.plus(memory.active_file_bytes), Measured::Value(4900));
        assert_eq!(memory.limit_hit_count, Measured::Value(4));
        assert_eq!(memory.oom_kill_count, Measured::Value(2));
        assert_eq!(memory.file_refault_count, Measured::Value(11));
        let reason = Reason::FieldMissing { file: DIRECTORY, field: "memory.kmem.usage_in_bytes" };
        assert_eq!(memory.kernel_bytes, Measured::Unavailable(reason));
    }

    #[test]
    fn version_2_is_read_whole() {
        let own = [
            ("memory.current", "12345\n"),
            ("memory.peak", "23456\n"),
            ("memory.max", "max\n"),
            ("memory.high", "800000\n"),
            ("memory.stat", V2_STAT),
            ("memory.events", "low 0\nhigh 0\nmax 4\noom 3\noom_kill 2\noom_group_kill 0\n"),
        ];
        let parent = [("memory.max", "700000\n"), ("memory.high", "max\n")];
        let memory = imitate(CgroupVersion::V2, &[&[], &parent, &own]).group.read();
        assert_eq!(memory.limit_bytes, Measured::Value(Some(700_000)), "the parent's");
        assert_eq!(memory.high_bytes, Measured::Value(Some(800_000)));
        assert_eq!(memory.peak_bytes, Measured::Value(23456));
        assert_eq!((memory.limit_hit_count, memory.oom_kill_count), (Measured::Value(4), Measured::Value(2)));
        assert_eq!(memory.kernel_bytes, Measured::Value(300));
        assert_eq!(memory.file_refault_count, Measured::Value(12));
    }

    #[test]
    fn no_limit_is_not_a_missing_limit() {
        let own = [("memory.limit_in_bytes", "9223372036854771712\n"), ("memory.stat", "")];
        assert_eq!(imitate(CgroupVersion::V1, &[&own]).group.limit_bytes(), Measured::Value(None));
        let big_pages = [("memory.limit_in_bytes", "9223372036854710272\n"), ("memory.stat", "")];
        assert_eq!(imitate(CgroupVersion::V1, &[&big_pages]).group.limit_bytes(), Measured::Value(None));
        assert_eq!(imitate(CgroupVersion::V2, &[&[], &[]]).group.limit_bytes(), Measured::Value(None));
        let broken = imitate(CgroupVersion::V2, &[&[("memory.max", "many")]]).group.limit_bytes();
        assert!(matches!(broken, Measured::Unavailable(Reason::Malformed { .. })), "{broken:?}");
    }

    #[test]
    fn a_group_without_the_files_is_missing_not_zero() {
        let memory = imitate(CgroupVersion::V2, &[&[]]).group.read();
        let missing = |field| Measured::Unavailable(Reason::FieldMissing { file: DIRECTORY, field });
        assert_eq!(memory.usage_bytes, missing("memory.current"));
        assert_eq!(memory.peak_bytes, missing("memory.peak"));
        assert!(memory.anon_bytes.value().is_none() && memory.oom_kill_count.value().is_none());
    }

    #[test]
    fn headroom_forgives_page_cache_at_every_level() {
        let own = [("memory.current", "12000\n"), ("memory.max", "20000\n"), ("memory.stat", V2_STAT)];
        let tight = [("memory.current", "15000\n"), ("memory.max", "16000\n"), ("memory.stat", V2_STAT)];
        let alone = imitate(CgroupVersion::V2, &[&own]);
        assert_eq!(alone.group.headroom_bytes(), Measured::Value(Some(20_000 - (12_000 - 4900))));
        let nested = imitate(CgroupVersion::V2, &[&tight, &own]);
        assert_eq!(nested.group.headroom_bytes(), Measured::Value(Some(16_000 - (15_000 - 4900))));
        assert_eq!(imitate(CgroupVersion::V2, &[&[]]).group.headroom_bytes(), Measured::Value(None));
    }

    #[test]
    fn an_invisible_group_keeps_only_the_limits_of_its_ancestors() {
        let mut imitation = imitate(
            CgroupVersion::V2,
            &[&[("memory.max", "5000\n"), ("memory.current", "1\n"), ("memory.stat", V2_STAT)]],
        );
        imitation.group.location.is_own = false;
        let memory = imitation.group.read();
        assert_eq!(memory.limit_bytes, Measured::Value(Some(5000)));
        assert!(memory.usage_bytes.value().is_none(), "an ancestor's usage is not ours");
    }
}
