//! Keeps orphans in sight: makes the calling process their new parent.
//!
//! A process whose parent ends is handed to the nearest ancestor that is a "subreaper", else to
//! init, where nothing tells it from a stranger. While an [`Adoption`] lives, that ancestor is the
//! caller. In return the caller must reap those it adopted, and only those: the root and other
//! children are waited for by whoever started them.
//!
//! Source: `PR_SET_CHILD_SUBREAPER(2const)`.

use std::collections::HashSet;

use rustix::process::{Pid, WaitOptions};

use super::discover;
use crate::{ProbeError, Procfs};

/// The caller is the reaper of orphaned descendants until this is dropped.
#[derive(Debug)]
pub(super) struct Adoption {
    own_pid: u32,
    had_before: bool,
    not_adopted: HashSet<u32>,
}

impl Adoption {
    /// Begins. Children that the caller already has are not orphans, and neither is `root_pid`.
    pub(super) fn begin(procfs: &Procfs, root_pid: u32) -> Result<Self, ProbeError> {
        let own_pid = std::process::id();
        let subreaper = |errno: rustix::io::Errno| ProbeError::Subreaper { source: errno.into() };
        let had_before = rustix::process::child_subreaper().map_err(subreaper)?.is_some();
        let mut not_adopted: HashSet<u32> = discover::children(procfs, own_pid).into_iter().collect();
        not_adopted.insert(root_pid);
        // Any process id switches it on.
        let on = Pid::from_raw(1);
        rustix::process::set_child_subreaper(on).map_err(subreaper)?;
        Ok(Self { own_pid, had_before, not_adopted })
    }

    /// The ids of those that were handed to the caller, zombies included.
    pub(super) fn orphans(&self, procfs: &Procfs) -> Vec<u32> {
        let children = discover::children(procfs, self.own_pid).into_iter();
        children.filter(|pid| !self.not_adopted.contains(pid)).collect()
    }

    pub(super) fn own_pid(&self) -> u32 {
        self.own_pid
    }

    /// Lets the kernel forget an orphan that has ended. Does nothing for any other process.
    pub(super) fn reap(&self, pid: u32) {
        if self.not_adopted.contains(&pid) {
            return;
        }
        if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            // Not our child, or not ended yet: then there is nothing to forget.
            let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }
}

impl Drop for Adoption {
    fn drop(&mut self) {
        if !self.had_before {
            // It was switched on by us, so it can be switched off.
            let _ = rustix::process::set_child_subreaper(None);
        }
    }
}
