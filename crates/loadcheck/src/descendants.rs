//! The living processes that descend from this one: those to stop, and those that were left behind.
//! And those of a process that was not started here, which are only looked at.
//!
//! A shell may have started other processes before it became this program (`server & exec loadcheck
//! ...`, as entry points of containers do). They are children of this process, but not its own:
//! [`remember_strangers`] lists them. If such a process starts another one and leaves it behind as
//! an orphan, that one counts as ours.

use std::sync::OnceLock;

use onelayer_probe::Procfs;
use rustix::process::Pid;

/// A process: its id, which is used again, and its start in ticks since the machine started.
pub(crate) type Identity = (u32, u64);

/// The descendants of this process before it started any.
static STRANGERS: OnceLock<Vec<Identity>> = OnceLock::new();

/// Lists the descendants of this process that it did not start. Only the first call counts: it
/// comes before this program starts its first child.
pub(crate) fn remember_strangers() {
    STRANGERS.get_or_init(|| living_descendants(std::process::id(), &[]));
}

/// Every living descendant that this program has started. Orphans have this process as their
/// parent, since it is their reaper.
pub(crate) fn descendants() -> Vec<Pid> {
    let of_raw = |pid| Pid::from_raw(i32::try_from(pid).ok()?);
    descendant_ids().into_iter().filter_map(of_raw).collect()
}

/// The process ids of [`descendants`].
pub(crate) fn descendant_ids() -> Vec<u32> {
    let found = living_descendants(std::process::id(), STRANGERS.get().map_or(&[], Vec::as_slice));
    found.into_iter().map(|(pid, _)| pid).collect()
}

/// A process with all its living descendants; empty once it has ended.
pub(crate) fn tree_of(root: u32) -> Vec<u32> {
    let Some(identity) = identity_of(root) else { return Vec::new() };
    std::iter::once(identity).chain(living_descendants(root, &[])).map(|(pid, _)| pid).collect()
}

/// What tells a living process from an earlier one of the same id. A zombie has ended.
pub(crate) fn identity_of(pid: u32) -> Option<Identity> {
    living(pid).map(|(identity, _)| identity)
}

/// Descendants of a process, without these strangers and their descendants. Parents come before
/// their children.
fn living_descendants(root: u32, strangers: &[Identity]) -> Vec<Identity> {
    if !Procfs::default().is_of_this_namespace() {
        // Process ids of another namespace mean other processes.
        return Vec::new();
    }
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let living: Vec<(Identity, u32)> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(living)
        .filter(|(identity, _)| !strangers.contains(identity))
        .collect();
    let mut found: Vec<Identity> = Vec::new();
    let mut parent = Some(root);
    let mut next = 0;
    while let Some(pid) = parent {
        found.extend(living.iter().filter(|(_, of)| *of == pid).map(|(identity, _)| *identity));
        parent = found.get(next).map(|(pid, _)| *pid);
        next += 1;
    }
    found
}

/// A process and its parent, unless it is a zombie: fields 3, 4 and 22 of its `stat`. They follow
/// the name, which may contain anything.
fn living(pid: u32) -> Option<(Identity, u32)> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let after_name = text.iter().rposition(|byte| *byte == b')')? + 1;
    let mut fields = std::str::from_utf8(&text[after_name..]).ok()?.split_ascii_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    let start_ticks = fields.nth(17)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(((pid, start_ticks), parent))
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn descendants_are_found_and_zombies_are_not() {
        let mut child = Command::new("sleep").arg("30").spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(descendants().contains(&pid));
        child.kill().unwrap();
        let gone = (0..500).any(|_| {
            thread::sleep(Duration::from_millis(2));
            !descendants().contains(&pid)
        });
        assert!(gone, "a killed child that is not waited for is a zombie, not a living process");
        child.wait().unwrap();
    }

    #[test]
    fn whoever_was_there_before_is_left_out() {
        let mut before = Command::new("sleep").arg("30").spawn().unwrap();
        let strangers = living_descendants(std::process::id(), &[]);
        let mut after = Command::new("sleep").arg("30").spawn().unwrap();
        let found: Vec<u32> =
            living_descendants(std::process::id(), &strangers).into_iter().map(|(pid, _)| pid).collect();
        let all: Vec<u32> =
            living_descendants(std::process::id(), &[]).into_iter().map(|(pid, _)| pid).collect();
        for child in [&mut before, &mut after] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(found.contains(&after.id()) && !found.contains(&before.id()), "{found:?}");
        assert!(all.contains(&after.id()) && all.contains(&before.id()), "{all:?}");
    }
}
