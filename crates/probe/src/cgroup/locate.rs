//! Finds the directory of a process's control group.
//!
//! `/proc/<pid>/cgroup` has the group's path within its hierarchy. `/proc/<pid>/mountinfo` says
//! which part of each hierarchy is mounted where. Both are needed: a container may see its group as
//! `/` (a cgroup namespace), a host path with only its own subtree mounted, a hybrid of versions 1
//! and 2, or nothing.
//!
//! | memberships | mounts | result |
//! |---|---|---|
//! | `4:memory:/a/b` | `cgroup` with `memory`, root `/` | version 1, `MOUNT/a/b` |
//! | `4:memory:/docker/x` | the same, root `/docker/x` | version 1, `MOUNT` |
//! | `0::/user.slice/y` only | `cgroup2`, root `/` | version 2, `MOUNT/user.slice/y` |
//! | `4:memory:/a`, `0::/` (hybrid) | both | version 1 for this controller |
//! | `0::/../z` | any | outside the mounted part: not visible |
//!
//! Formats: `cgroups(7)`, `proc_pid_mountinfo(5)`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use serde::{Serialize, Serializer};

use crate::Reason;

/// The control group version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupVersion {
    /// One hierarchy per controller.
    V1,
    /// The unified hierarchy.
    V2,
}

/// As `1` or `2`.
impl Serialize for CgroupVersion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(match self {
            Self::V1 => 1,
            Self::V2 => 2,
        })
    }
}

/// A group's directory and those of its ancestors that are mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) version: CgroupVersion,
    /// From the group itself up to the mount point; never empty.
    pub(crate) directories: Vec<PathBuf>,
    /// False if the group's directory does not exist here; the first entry is then its nearest
    /// existing ancestor.
    pub(crate) is_own: bool,
}

/// A possible directory of a group: the mount point, and the path below it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate {
    mount_point: PathBuf,
    below: PathBuf,
}

/// Finds the process's group for `controller`.
pub(crate) fn locate(cgroup: &[u8], mountinfo: &[u8], controller: &str) -> Result<Location, Reason> {
    let (version, candidates) = candidates(cgroup, mountinfo, controller)?;
    let own = candidates.iter().find(|candidate| candidate.mount_point.join(&candidate.below).is_dir());
    let (candidate, is_own) = match own.or(candidates.first()) {
        Some(candidate) => (candidate, own.is_some()),
        None => {
            return Err(Reason::NotHere("the control group is outside the mounted part of its hierarchy"));
        }
    };
    let mut directories: Vec<PathBuf> = candidate
        .below
        .ancestors()
        .map(|below| candidate.mount_point.join(below))
        .filter(|directory| directory.is_dir())
        .collect();
    // `join("")` leaves a trailing slash on the mount point itself.
    if let Some(last) = directories.last_mut() {
        last.clone_from(&candidate.mount_point);
    }
    if directories.is_empty() {
        return Err(Reason::NotHere("the control group hierarchy is mounted and cannot be entered"));
    }
    if version == CgroupVersion::V2 && !offers(&directories, controller) {
        return Err(Reason::NotHere("no hierarchy of control groups offers this controller"));
    }
    Ok(Location { version, directories, is_own })
}

/// True if any visible level of a version 2 hierarchy has the controller.
fn offers(directories: &[PathBuf], controller: &str) -> bool {
    directories.iter().any(|directory| {
        std::fs::read_to_string(directory.join("cgroup.controllers"))
            .is_ok_and(|list| list.split_ascii_whitespace().any(|name| name == controller))
    })
}

/// The version and the possible directories, the widest view of the hierarchy first. Reads no
/// files.
fn candidates(
    cgroup: &[u8],
    mountinfo: &[u8],
    controller: &str,
) -> Result<(CgroupVersion, Vec<Candidate>), Reason> {
    let (version, path) = membership(cgroup, controller)
        .ok_or(Reason::NotHere("the process is in no control group of this kind"))?;
    let mut mounts: Vec<Mount> = mountinfo
        .split(|&byte| byte == b'\n')
        .filter_map(Mount::parse)
        .filter(|mount| mount.holds(version, controller))
        .collect();
    if mounts.is_empty() {
        return Err(Reason::NotHere("the hierarchy of control groups is not mounted"));
    }
    mounts.sort_by_key(|mount| mount.root.components().count());
    let candidates = mounts
        .into_iter()
        .filter_map(|mount| {
            let below = path.strip_prefix(&mount.root).ok()?;
            let stays_below = below.components().all(|part| matches!(part, Component::Normal(_)));
            stays_below.then(|| Candidate { mount_point: mount.point, below: below.to_path_buf() })
        })
        .collect();
    Ok((version, candidates))
}

/// The version and path from the line of `controller`: its version 1 line, or else the version 2
/// line.
fn membership(cgroup: &[u8], controller: &str) -> Option<(CgroupVersion, PathBuf)> {
    let mut unified = None;
    for line in cgroup.split(|&byte| byte == b'\n') {
        let mut parts = line.splitn(3, |&byte| byte == b':');
        let (Some(id), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let path = PathBuf::from(OsString::from_vec(path.to_vec()));
        if controllers.split(|&byte| byte == b',').any(|name| name == controller.as_bytes()) {
            return Some((CgroupVersion::V1, path));
        }
        if id == b"0" && controllers.is_empty() {
            unified = Some((CgroupVersion::V2, path));
        }
    }
    unified
}

/// The needed fields of a line of `mountinfo`.
struct Mount {
    root: PathBuf,
    point: PathBuf,
    kind: Vec<u8>,
    options: Vec<u8>,
}

impl Mount {
    /// `36 35 98:0 ROOT POINT OPTIONS [TAGS] - TYPE SOURCE SUPER_OPTIONS`
    fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|&byte| byte == b' ');
        let root = unescape(fields.nth(3)?);
        let point = unescape(fields.next()?);
        let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
        let kind = fields.next()?.to_vec();
        let options = fields.nth(1)?.to_vec();
        Some(Self { root, point, kind, options })
    }

    fn holds(&self, version: CgroupVersion, controller: &str) -> bool {
        match version {
            CgroupVersion::V1 => {
                let mut options = self.options.split(|&byte| byte == b',');
                self.kind == b"cgroup" && options.any(|option| option == controller.as_bytes())
            }
            CgroupVersion::V2 => self.kind == b"cgroup2",
        }
    }
}

/// Undoes the kernel's octal escapes (`\040` for a space).
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.get(..3).filter(|_| first == b'\\');
        let code = digits
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            None => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    Path::new(&OsString::from_vec(bytes)).to_path_buf()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &[u8] = b"9:name=systemd:/\n4:memory:/jobs/7\n2:cpu,cpuacct:/jobs/8\n0::/unified\n";
    const HYBRID_MOUNTS: &[u8] = b"31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
        32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:5 - cgroup cgroup rw,cpu,cpuacct\n\
        35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n";

    fn one(cgroup: &[u8], mounts: &[u8], controller: &str) -> (CgroupVersion, String, String) {
        let (version, found) = candidates(cgroup, mounts, controller).unwrap();
        let first = found.first().expect("a candidate");
        (version, first.mount_point.display().to_string(), first.below.display().to_string())
    }

    #[test]
    fn a_hybrid_takes_version_1_where_the_controller_has_it() {
        let memory = one(HYBRID, HYBRID_MOUNTS, "memory");
        assert_eq!(memory, (CgroupVersion::V1, "/sys/fs/cgroup/memory".into(), "jobs/7".into()));
        let cpu = one(HYBRID, HYBRID_MOUNTS, "cpu");
        assert_eq!(cpu, (CgroupVersion::V1, "/sys/fs/cgroup/cpu,cpuacct".into(), "jobs/8".into()));
        let io = one(HYBRID, HYBRID_MOUNTS, "io");
        assert_eq!(io, (CgroupVersion::V2, "/sys/fs/cgroup/unified".into(), "unified".into()));
    }

    #[test]
    fn version_2_alone() {
        let cgroup = b"0::/user.slice/user-1000.slice/app:1.scope\n";
        let mounts = b"35 25 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n";
        let found = one(cgroup, mounts, "memory");
        let below = "user.slice/user-1000.slice/app:1.scope".to_string();
        assert_eq!(found, (CgroupVersion::V2, "/sys/fs/cgroup".into(), below));
    }

    #[test]
    fn a_container_that_sees_the_hosts_path_and_mounts_only_its_own_group() {
        let cgroup = b"5:memory:/docker/abc/inner\n";
        let mounts =
            b"700 690 0:32 /docker/abc /sys/fs/cgroup/memory ro master:14 - cgroup cgroup rw,memory\n";
        let found = one(cgroup, mounts, "memory");
        assert_eq!(found, (CgroupVersion::V1, "/sys/fs/cgroup/memory".into(), "inner".into()));
        let elsewhere = candidates(b"5:memory:/docker/abcdef\n", mounts, "memory").unwrap().1;
        assert_eq!(elsewhere, [], "a path is a prefix by whole components only");
    }

    #[test]
    fn a_namespace_that_does_not_reach_the_group() {
        let mounts = b"35 25 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let reason = locate(b"0::/../outside\n", mounts, "memory").unwrap_err();
        assert!(matches!(reason, Reason::NotHere(text) if text.contains("outside")), "{reason}");
    }

    #[test]
    fn nothing_mounted_and_no_membership_say_so() {
        let unmounted = locate(b"4:memory:/\n", b"1 0 8:1 / / rw - ext4 /dev/a rw\n", "memory").unwrap_err();
        assert!(unmounted.to_string().contains("not mounted"), "{unmounted}");
        let none = locate(b"", HYBRID_MOUNTS, "memory").unwrap_err();
        assert!(none.to_string().contains("no control group"), "{none}");
    }

    #[test]
    fn the_widest_view_comes_first() {
        let mounts = b"1 0 0:32 /a /narrow rw - cgroup cgroup rw,memory\n2 0 0:32 / /wide rw - cgroup cgroup rw,memory\n";
        let (_, found) = candidates(b"4:memory:/a/b\n", mounts, "memory").unwrap();
        let points: Vec<_> = found.iter().map(|candidate| candidate.mount_point.to_str().unwrap()).collect();
        assert_eq!(points, ["/wide", "/narrow"]);
    }

    #[test]
    fn escaped_spaces_and_odd_lines_survive() {
        assert_eq!(unescape(br"/with\040space\134x"), Path::new(r"/with space\x"));
        assert_eq!(unescape(br"/cut\04"), Path::new(r"/cut\04"));
        assert!(Mount::parse(b"").is_none() && Mount::parse(b"1 2 3 /").is_none());
        assert!(membership(b"garbage\n::\n", "memory").is_none());
    }

    #[test]
    fn directories_lead_from_the_group_to_the_mount_point() {
        let root = tempfile::tempdir().unwrap();
        let point = root.path().join("memory");
        std::fs::create_dir_all(point.join("a/b")).unwrap();
        let mounts = format!("1 0 0:32 / {} rw - cgroup cgroup rw,memory\n", point.display());
        let found = locate(b"4:memory:/a/b\n", mounts.as_bytes(), "memory").unwrap();
        assert_eq!(found.directories, [point.join("a/b"), point.join("a"), point.clone()]);
        assert!(found.is_own);
        let gone = locate(b"4:memory:/a/gone\n", mounts.as_bytes(), "memory").unwrap();
        assert_eq!((gone.directories, gone.is_own), (vec![point.join("a"), point], false));
    }
}
