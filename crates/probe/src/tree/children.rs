//! Finds the children of a process and the processes of a control group.
//!
//! `/proc/<pid>/task/<tid>/children` (kernel 3.5, `CONFIG_PROC_CHILDREN`) lists the children of one
//! thread; the children of all threads are those of the process. Without that file, the parent of
//! every process on the machine is read. Both may miss a child that starts or ends meanwhile, so
//! the caller remembers the processes it knows.

use std::fs;
use std::io;
use std::path::Path;

use crate::Procfs;

/// The ids of the visible children of `pid`.
pub(super) fn children(procfs: &Procfs, pid: u32) -> Vec<u32> {
    let threads = procfs.root().join(pid.to_string()).join("task");
    children_of_threads(&threads).unwrap_or_else(|_| children_by_parent(procfs, pid))
}

/// The ids in a control group's list of processes.
pub(super) fn members(group: &Path) -> Vec<u32> {
    let list = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    list.lines().filter_map(|line| line.trim().parse().ok()).collect()
}

fn children_of_threads(threads: &Path) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    let mut first_error = None;
    let mut has_read_one = false;
    for thread in fs::read_dir(threads)? {
        match fs::read_to_string(thread?.path().join("children")) {
            Ok(list) => {
                has_read_one = true;
                found.extend(list.split_ascii_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
            }
            // The thread has just ended, or no such file can be read at all.
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    match first_error {
        Some(error) if !has_read_one => Err(error),
        _ => Ok(found),
    }
}

fn children_by_parent(procfs: &Procfs, parent_pid: u32) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(procfs.root()) else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| procfs.process(*pid).stat().is_ok_and(|stat| stat.parent_pid == parent_pid)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_of_all_threads_are_found() {
        let root = tempfile::tempdir().unwrap();
        for (thread, list) in [("7", "8 9 \n"), ("12", ""), ("13", "10 ")] {
            let directory = root.path().join("7/task").join(thread);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("children"), list).unwrap();
        }
        fs::create_dir(root.path().join("7/task/14")).unwrap();
        let mut found = children(&Procfs::at(root.path()), 7);
        found.sort_unstable();
        assert_eq!(found, [8, 9, 10]);
    }

    #[test]
    fn without_those_files_parents_are_read() {
        let root = tempfile::tempdir().unwrap();
        for (pid, parent) in [(7, 1), (8, 7), (9, 8), (10, 7)] {
            let directory = root.path().join(pid.to_string());
            fs::create_dir_all(directory.join("task").join(pid.to_string())).unwrap();
            let stat = format!("{pid} (x) S {parent} 0 0 0 0 0 0 0 0 0 0 0 0 0 20 0 1 0 5 0 0\n");
            fs::write(directory.join("stat"), stat).unwrap();
        }
        let mut found = children(&Procfs::at(root.path()), 7);
        found.sort_unstable();
        assert_eq!(found, [8, 10]);
    }

    #[test]
    fn a_real_child_is_found() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let procfs = Procfs::default();
        assert!(children(&procfs, std::process::id()).contains(&child.id()));
        assert!(children_by_parent(&procfs, std::process::id()).contains(&child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
