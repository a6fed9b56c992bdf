//! The living processes that descend from this one: whom to stop, and who was left behind.

use onelayer::probe::Procfs;
use rustix::process::Pid;

/// Every living process that descends from this one. Orphans among them have this one as their parent, since it
/// is their reaper.
pub(crate) fn descendants() -> Vec<Pid> {
    if !Procfs::default().is_of_this_namespace() {
        // The numbers are not ours: whoever is called like a child is none.
        return Vec::new();
    }
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let parents: Vec<(u32, u32)> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid: u32| Some((pid, living_parent_of(pid)?)))
        .collect();
    let mut family = vec![std::process::id()];
    let mut next = 0;
    while next < family.len() {
        let parent = family[next];
        family.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
        next += 1;
    }
    family.into_iter().skip(1).filter_map(|pid| Pid::from_raw(i32::try_from(pid).ok()?)).collect()
}

/// The parent of a process, unless it is a zombie: field 4 of its `stat`, after the name, which may hold anything.
fn living_parent_of(pid: u32) -> Option<u32> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let after_name = text.iter().rposition(|byte| *byte == b')')? + 1;
    let mut fields = std::str::from_utf8(&text[after_name..]).ok()?.split_ascii_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(parent)
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
}
