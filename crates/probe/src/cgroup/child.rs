//! Creates a control group for one measured run, with a fresh kernel peak and an optional limit.
//!
//! It is a child of the caller's group, so existing limits still apply, and it is removed on drop.
//! A killed process drops nothing; its group is removed when the next one is created beside it.
//!
//! ```text
//! version 1:  parent ── onelayer-<pid>-<n>          any process may stay in the parent
//! version 2:  parent ── onelayer-<pid>-<n>          only if the parent enables `memory` for its children,
//!               │                                   or the caller is its only process and moves to:
//!               └────── onelayer-<pid>-<n>-caller   until the drop moves it back
//! ```
//!
//! Version 2 enables a controller only for children of a group without processes ("no internal
//! processes", `cgroup-v2.rst`). A process that is alone in a delegated scope can move itself to a
//! child group. If the group holds other processes, creation is refused: they are never moved.
//!
//! Memory charged before a process enters stays with its old group, so let a command enter before
//! it runs ([`ChildGroup::enter_on_spawn`]).
#![allow(unsafe_code, reason = "entering a group between fork and exec needs Command::pre_exec")]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::{CgroupVersion, GroupMemory, MemoryGroup};
use crate::{ProbeError, Procfs};

const CONTROLLER: &str = "memory";
const PROCS: &str = "cgroup.procs";

/// How long a drop waits for the kernel to remove processes that have just ended.
const REMOVE_PATIENCE: Duration = Duration::from_millis(500);

/// [`sweep`] keeps groups younger than this: a process of another process-id namespace may be about
/// to enter them. The kernel counts from its last new lookup of the directory, so a sweep may come
/// late.
const STALE_AGE: Duration = Duration::from_secs(10);

/// The start of the names of created groups; the process id follows.
const NAME_PREFIX: &str = "onelayer-";

/// A memory control group below the caller's own, removed on drop.
#[derive(Debug)]
pub struct ChildGroup {
    group: MemoryGroup,
    parent: PathBuf,
    limit_bytes: Option<u64>,
    moved_caller: Option<MovedCaller>,
}

impl ChildGroup {
    /// Creates a group below the caller's. `limit_bytes` (rounded down to pages by the kernel)
    /// limits its memory and disables swapping.
    ///
    /// # Errors
    /// [`ProbeError::GroupNotHere`], [`ProbeError::GroupNotPermitted`],
    /// [`ProbeError::GroupNotDelegated`] or [`ProbeError::GroupHoldsProcesses`] if no group can be
    /// created here; [`ProbeError::Group`] if the limit is refused. Nothing is left behind then.
    pub fn create(limit_bytes: Option<u64>) -> Result<Self, ProbeError> {
        let parent = Procfs::default()
            .myself()
            .memory_group()
            .map_err(|reason| ProbeError::GroupNotHere { reason })?;
        Self::create_under(&parent, limit_bytes)
    }

    /// Creates a group below `parent`, which should be the caller's group.
    ///
    /// # Errors
    /// As [`ChildGroup::create`].
    pub fn create_under(parent: &MemoryGroup, limit_bytes: Option<u64>) -> Result<Self, ProbeError> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        if !parent.is_visible() {
            let reason = crate::Reason::NotHere("the group this process is in is not visible here");
            return Err(ProbeError::GroupNotHere { reason });
        }
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let name = format!("{NAME_PREFIX}{}-{serial}", std::process::id());
        let parent_directory = parent.directory().to_path_buf();
        sweep(&parent_directory);
        let moved_caller = match parent.version() {
            CgroupVersion::V1 => None,
            CgroupVersion::V2 => delegate(&parent_directory, &name)?,
        };
        let directory = parent_directory.join(name);
        fs::create_dir(&directory)
            .map_err(|source| refused("make", &directory, &parent_directory, source))?;
        // From here on, drop cleans up.
        let group =
            Self { group: parent.child(directory), parent: parent_directory, limit_bytes, moved_caller };
        if let Some(limit_bytes) = limit_bytes {
            group.set_limit(limit_bytes)?;
        }
        Ok(group)
    }

    fn set_limit(&self, limit_bytes: u64) -> Result<(), ProbeError> {
        // Not `memory.memsw.limit_in_bytes` in version 1: no counter shows hits of that limit
        // (observed on 6.18).
        let (limit, swap) = match self.group.version() {
            CgroupVersion::V1 => ("memory.limit_in_bytes", "memory.swappiness"),
            CgroupVersion::V2 => ("memory.max", "memory.swap.max"),
        };
        let path = self.directory().join(limit);
        write_existing(&path, &limit_bytes.to_string()).map_err(|source| ProbeError::Group {
            action: "set the limit in",
            path,
            source,
        })?;
        let path = self.directory().join(swap);
        match write_existing(&path, "0") {
            // The kernel was built without swap or swap accounting.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result.map_err(|source| ProbeError::Group {
                action: "keep from swapping through",
                path,
                source,
            }),
        }?;
        if self.group.version() == CgroupVersion::V2 {
            // The kernel then kills all processes of the group together, as container runtimes
            // configure it. Before 4.19, or if refused, it kills them one by one.
            let _ = write_existing(&self.directory().join("memory.oom.group"), "1");
        }
        Ok(())
    }

    /// The group's directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.group.directory()
    }

    /// The limit set at creation.
    #[must_use]
    pub fn limit_bytes(&self) -> Option<u64> {
        self.limit_bytes
    }

    /// Current memory; the peak counts since the group was created.
    #[must_use]
    pub fn memory(&self) -> GroupMemory {
        self.group.read()
    }

    /// The ids of the processes in the group.
    ///
    /// # Errors
    /// [`ProbeError::Group`] if the list cannot be read.
    pub fn pids(&self) -> Result<Vec<u32>, ProbeError> {
        let path = self.directory().join(PROCS);
        read_pids(&path).map_err(|source| ProbeError::Group { action: "list", path, source })
    }

    /// Moves a process into the group. Memory it already holds stays charged to its old group.
    ///
    /// # Errors
    /// [`ProbeError::Group`] if the kernel refuses, such as for a process that has ended.
    pub fn add(&self, pid: u32) -> Result<(), ProbeError> {
        move_process(pid, self.directory())
    }

    /// Kills every process in the group, including ones started meanwhile.
    ///
    /// # Errors
    /// [`ProbeError::Group`] if the list cannot be read.
    pub fn kill(&self) -> Result<(), ProbeError> {
        let start = std::time::Instant::now();
        loop {
            let pids = self.pids()?;
            let living = pids.iter().filter_map(|pid| Pid::from_raw(i32::try_from(*pid).ok()?));
            // A process of an invisible namespace has the id 0 and is skipped.
            let killed = living.filter(|pid| kill_process(*pid, Signal::KILL).is_ok()).count();
            if killed == 0 || start.elapsed() >= REMOVE_PATIENCE {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Makes `command` enter the group when it is spawned, before it runs.
    ///
    /// # Errors
    /// [`ProbeError::Group`] if the group's list of processes cannot be opened. If entering fails
    /// later, `spawn` fails.
    pub fn enter_on_spawn(&self, command: &mut Command) -> Result<(), ProbeError> {
        let path = self.directory().join(PROCS);
        let procs = OpenOptions::new().write(true).open(&path).map_err(|source| ProbeError::Group {
            action: "open",
            path,
            source,
        })?;
        let enter = move || enter_group(&procs);
        // SAFETY: between fork and exec the closure calls `write` once on a descriptor it owns and
        // reads
        // `errno`. It takes no lock and allocates nothing, so it is async-signal-safe, which pre_exec
        // requires.
        unsafe { command.pre_exec(enter) };
        Ok(())
    }

    /// Removes the group now and reports failures. Processes still in it move to the parent group.
    ///
    /// # Errors
    /// [`ProbeError::Group`] if the group still exists afterwards.
    pub fn remove(self) -> Result<(), ProbeError> {
        self.remove_directory()
    }

    fn remove_directory(&self) -> Result<(), ProbeError> {
        let directory = self.directory();
        let start = std::time::Instant::now();
        loop {
            for pid in read_pids(&directory.join(PROCS)).unwrap_or_default() {
                // Fails for processes that have just ended, which is harmless.
                let _ = move_process(pid, &self.parent);
            }
            match fs::remove_dir(directory) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(error)
                    if error.raw_os_error() == Some(libc::EBUSY) && start.elapsed() < REMOVE_PATIENCE =>
                {
                    std::thread::sleep(Duration::from_millis(1));
                }
                result => {
                    let path = directory.to_path_buf();
                    return result.map_err(|source| ProbeError::Group { action: "remove", path, source });
                }
            }
        }
    }
}

impl Drop for ChildGroup {
    fn drop(&mut self) {
        // Only `remove` reports failures.
        let _ = self.remove_directory();
        drop(self.moved_caller.take());
    }
}

/// Removes groups below `parent` whose creators no longer run. The kernel refuses to remove a group
/// in use.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| name.strip_prefix(NAME_PREFIX)).and_then(|rest| {
            let (pid, _) = rest.split_once('-')?;
            pid.parse::<u32>().ok()
        });
        let Some(pid) = maker else { continue };
        let made = entry.metadata().and_then(|metadata| metadata.modified());
        let is_old = made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age >= STALE_AGE));
        if is_old && !Path::new("/proc").join(pid.to_string()).exists() {
            // Another process may have removed it first.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// The caller, moved into a leaf group so that its own group may enable controllers. Drop moves it
/// back.
#[derive(Debug)]
struct MovedCaller {
    parent: PathBuf,
    leaf: PathBuf,
}

impl Drop for MovedCaller {
    fn drop(&mut self) {
        let is_last = fs::read_dir(&self.parent).is_ok_and(|entries| {
            let mut groups =
                entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            groups.all(|entry| entry.path() == self.leaf)
        });
        if !is_last {
            // Another group needs the controller. The caller stays in the leaf, under the same
            // limits.
            return;
        }
        // In this order: a group that enables controllers must hold no process.
        let _ = write_existing(&self.parent.join("cgroup.subtree_control"), &format!("-{CONTROLLER}"));
        let _ = move_process(std::process::id(), &self.parent);
        let _ = fs::remove_dir(&self.leaf);
    }
}

/// Enables the memory controller for children of `parent` (version 2).
fn delegate(parent: &Path, name: &str) -> Result<Option<MovedCaller>, ProbeError> {
    let read = |file: &'static str| super::memory::read_text(parent, file);
    let holds = |list: &str| list.split_ascii_whitespace().any(|controller| controller == CONTROLLER);
    let available = read("cgroup.controllers").map_err(|reason| ProbeError::GroupNotHere { reason })?;
    if !holds(&available) {
        let found = available.trim().to_owned();
        return Err(ProbeError::GroupNotDelegated { parent: parent.to_path_buf(), found });
    }
    let enabled = read("cgroup.subtree_control").map_err(|reason| ProbeError::GroupNotHere { reason })?;
    if holds(&enabled) {
        return Ok(None);
    }
    let control = parent.join("cgroup.subtree_control");
    let enable = format!("+{CONTROLLER}");
    match write_existing(&control, &enable) {
        Ok(()) => return Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
        Err(source) => return Err(refused("write", &control, parent, source)),
    }
    let pids = read_pids(&parent.join(PROCS)).unwrap_or_default();
    if pids != [std::process::id()] {
        return Err(ProbeError::GroupHoldsProcesses {
            parent: parent.to_path_buf(),
            process_count: pids.len(),
        });
    }
    let leaf = parent.join(format!("{name}-caller"));
    fs::create_dir(&leaf).map_err(|source| refused("make", &leaf, parent, source))?;
    let moved_caller = MovedCaller { parent: parent.to_path_buf(), leaf };
    move_process(std::process::id(), &moved_caller.leaf)?;
    write_existing(&control, &enable).map_err(|source| refused("write", &control, parent, source))?;
    Ok(Some(moved_caller))
}

/// The error for a failed step.
fn refused(action: &'static str, path: &Path, parent: &Path, source: io::Error) -> ProbeError {
    match source.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            ProbeError::GroupNotPermitted { parent: parent.to_path_buf(), source }
        }
        _ => ProbeError::Group { action, path: path.to_path_buf(), source },
    }
}

/// Writes into a file of a control group. Never creates a file: on another file system that would
/// look like success.
fn write_existing(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

fn move_process(pid: u32, group: &Path) -> Result<(), ProbeError> {
    let path = group.join(PROCS);
    write_existing(&path, &pid.to_string()).map_err(|source| ProbeError::Group {
        action: "move a process into",
        path,
        source,
    })
}

fn read_pids(path: &Path) -> io::Result<Vec<u32>> {
    Ok(fs::read_to_string(path)?.lines().filter_map(|line| line.trim().parse().ok()).collect())
}

/// Moves the calling process; both versions accept `0` for it.
fn enter_group(procs: &File) -> io::Result<()> {
    const MYSELF: &[u8] = b"0\n";
    // SAFETY: the pointer and length are those of a static slice, and the descriptor is open.
    let written = unsafe { libc::write(procs.as_raw_fd(), MYSELF.as_ptr().cast(), MYSELF.len()) };
    if written < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::locate::Location;

    /// A fake version 2 group. Plain files refuse nothing, so it tests only the steps before the
    /// kernel decides.
    fn imitation(files: &[(&str, &str)]) -> (tempfile::TempDir, MemoryGroup) {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(root.path().join(name), text).unwrap();
        }
        let directories = vec![root.path().to_path_buf()];
        let location = Location { version: CgroupVersion::V2, directories, is_own: true };
        (root, MemoryGroup::new(location))
    }

    #[test]
    fn what_killed_processes_left_behind_is_removed() {
        let root = tempfile::tempdir().unwrap();
        // No process has this id: the kernel's largest is 2^22.
        let gone = (1 << 22) + 7;
        let make = |name: String, age: Duration| {
            fs::create_dir(root.path().join(&name)).unwrap();
            let directory = File::open(root.path().join(&name)).unwrap();
            directory.set_modified(std::time::SystemTime::now() - age).unwrap();
            name
        };
        let hour = Duration::from_secs(3600);
        let left = [
            make(format!("onelayer-{}-0", std::process::id()), hour),
            make(format!("onelayer-{gone}-3"), Duration::ZERO),
            make("onelayer-".to_owned(), hour),
            make("another".to_owned(), hour),
        ];
        make(format!("onelayer-{gone}-0"), hour);
        make(format!("onelayer-{gone}-1-caller"), hour);
        let in_use = make(format!("onelayer-{gone}-2"), Duration::ZERO);
        fs::write(root.path().join(&in_use).join("member"), "").unwrap();
        sweep(root.path());
        let mut found: Vec<String> = fs::read_dir(root.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        found.sort();
        let mut expected: Vec<String> = left.into_iter().chain([in_use]).collect();
        expected.sort();
        assert_eq!(found, expected);
    }

    #[test]
    fn an_undelegated_controller_is_refused_by_name() {
        let (root, parent) =
            imitation(&[("cgroup.controllers", "cpu pids\n"), ("cgroup.subtree_control", "\n")]);
        let refused = ChildGroup::create_under(&parent, None).unwrap_err();
        assert!(
            matches!(&refused, ProbeError::GroupNotDelegated { found, .. } if found == "cpu pids"),
            "{refused}"
        );
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2, "nothing is left behind");
    }

    #[test]
    fn a_limit_that_cannot_be_set_leaves_no_group_behind() {
        let (root, parent) =
            imitation(&[("cgroup.controllers", "memory\n"), ("cgroup.subtree_control", "memory\n")]);
        let refused = ChildGroup::create_under(&parent, Some(1 << 20)).unwrap_err();
        assert!(matches!(&refused, ProbeError::Group { action: "set the limit in", .. }), "{refused}");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_hierarchy_that_is_not_one_is_refused() {
        let (_root, parent) = imitation(&[]);
        let refused = ChildGroup::create_under(&parent, None).unwrap_err();
        assert!(matches!(refused, ProbeError::GroupNotHere { .. }), "{refused}");
    }
}
