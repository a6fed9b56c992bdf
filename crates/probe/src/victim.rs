//! Whom the kernel is to end first where memory runs out. For whoever measures another process and
//! reports about it.

#![allow(unsafe_code, reason = "what is inherited has to be set between fork and exec: Command::pre_exec")]

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::fs::{Mode, OFlags};

/// Where memory runs out, the kernel is to end what `command` starts, and everything which that
/// starts in turn, before anybody else: before the process that reports about it, which in a small
/// memory group may well be the larger one, and before a bystander.
///
/// The highest `oom_score_adj` of proc(5); raising it needs no privilege. Where it cannot be
/// raised, the kernel chooses as ever.
pub fn goes_first(command: &mut Command) {
    let raise = || {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        // Without it the command runs as well.
        if let Ok(file) = rustix::fs::open(c"/proc/self/oom_score_adj", flags, Mode::empty()) {
            let _ = rustix::io::write(&file, b"1000");
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes an `open`, a `write` and a `close` with texts
    // that are constants; it takes no lock and allocates nothing, so it is async-signal-safe as
    // pre_exec demands.
    unsafe { command.pre_exec(raise) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_started_goes_first_and_what_it_starts_too() {
        let mut command = Command::new("sh");
        command.args(["-c", "cat /proc/self/oom_score_adj; sh -c 'cat /proc/self/oom_score_adj; :'"]);
        goes_first(&mut command);
        let output = command.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "1000\n1000\n");
        let ours = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
        assert_ne!(ours, "1000\n", "nobody else does");
    }
}
