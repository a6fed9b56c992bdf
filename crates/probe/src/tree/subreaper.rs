//! Makes the calling process the new parent of orphaned descendants, so that they stay visible.
//!
//! When a parent ends, the kernel gives its children to the nearest ancestor that is a "subreaper",
//! or else to init, where they can no longer be told from unrelated processes. While a
//! [`Subreaper`] lives, the caller is that ancestor. The caller must then reap the processes it
//! adopted, and only those: other children are reaped by the code that started them.
//!
//! Source: `PR_SET_CHILD_SUBREAPER(2const)`.

use std::collections::HashSet;

use rustix::process::{Pid, WaitOptions};

use super::children;
use crate::{ProbeError, Procfs};

/// Makes the caller a subreaper until dropped.
#[derive(Debug)]
pub(super) struct Subreaper {
    own_pid: u32,
    had_before: bool,
    not_adopted: HashSet<u32>,
}

impl Subreaper {
    /// Starts adopting. The existing children and `root_pid` do not count as orphans.
    pub(super) fn begin(procfs: &Procfs, root_pid: u32) -> Result<Self, ProbeError> {
        let own_pid = std::process::id();
        let subreaper = |errno: rustix::io::Errno| ProbeError::Subreaper { source: errno.into() };
        let had_before = rustix::process::child_subreaper().map_err(subreaper)?.is_some();
        let mut not_adopted: HashSet<u32> = children::children(procfs, own_pid).into_iter().collect();
        not_adopted.insert(root_pid);
        // Any process id enables it.
        let on = Pid::from_raw(1);
        rustix::process::set_child_subreaper(on).map_err(subreaper)?;
        Ok(Self { own_pid, had_before, not_adopted })
    }

    /// The ids of adopted processes, zombies included.
    pub(super) fn orphans(&self, procfs: &Procfs) -> Vec<u32> {
        let children = children::children(procfs, self.own_pid).into_iter();
        children.filter(|pid| !self.not_adopted.contains(pid)).collect()
    }

    pub(super) fn own_pid(&self) -> u32 {
        self.own_pid
    }

    /// Reaps an adopted process that has ended. Does nothing for any other process.
    pub(super) fn reap(&self, pid: u32) {
        if self.not_adopted.contains(&pid) {
            return;
        }
        if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            // An error means that it is not our child or has not ended.
            let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }
}

impl Drop for Subreaper {
    fn drop(&mut self) {
        if !self.had_before {
            // Enabled by `begin`, so it can be disabled.
            let _ = rustix::process::set_child_subreaper(None);
        }
    }
}
