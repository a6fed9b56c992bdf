//! Makes a started command the first choice of the kernel's out-of-memory killer, so that the
//! process that measures it survives and can report.

#![allow(unsafe_code, reason = "an inherited setting is made between fork and exec: Command::pre_exec")]

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::fs::{Mode, OFlags};

/// Makes the kernel kill `command` and its descendants before any other process when memory runs
/// out. Without this it might kill the measuring process, which can be the larger one in a small
/// memory group.
///
/// Sets the highest `oom_score_adj` of proc(5), which needs no privilege. If that fails, the kernel
/// chooses as usual.
pub fn prefer_for_oom_kill(command: &mut Command) {
    let raise = || {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        // A failure is harmless: the command runs with the usual priority.
        if let Ok(file) = rustix::fs::open(c"/proc/self/oom_score_adj", flags, Mode::empty()) {
            let _ = rustix::io::write(&file, b"1000");
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure calls `open`, `write` and `close` with constant
    // strings. It takes no lock and allocates nothing, so it is async-signal-safe, which pre_exec
    // requires.
    unsafe { command.pre_exec(raise) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_and_its_children_are_killed_first() {
        let mut command = Command::new("sh");
        command.args(["-c", "cat /proc/self/oom_score_adj; sh -c 'cat /proc/self/oom_score_adj; :'"]);
        prefer_for_oom_kill(&mut command);
        let output = command.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "1000\n1000\n");
        let ours = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
        assert_ne!(ours, "1000\n", "this process is unchanged");
    }
}
