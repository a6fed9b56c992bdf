//! What this stage can refuse.
//!
//! A number that cannot be read is not an error: it is a
//! [`Measured::Unavailable`](super::Measured). Errors are for requests that change something (a
//! peak reset, a group of one's own, a dropped page cache) or that cannot be begun at all.

use std::io;
use std::path::PathBuf;

use super::Reason;
use onelayer_system::units::HumanBytes;

/// What this stage can refuse.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// The kernel does not let us reset the high-water mark of resident memory.
    #[error("cannot reset the peak of resident memory through {}: {source}", path.display())]
    PeakResetRefused {
        /// The file that was written to.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel took the request and the high-water mark stayed.
    #[error(
        "resetting the peak of resident memory through {} had no effect: the peak is {}, resident are {}",
        path.display(), HumanBytes(*peak_bytes), HumanBytes(*rss_bytes)
    )]
    PeakResetIneffective {
        /// The file that was written to.
        path: PathBuf,
        /// The high-water mark after the request.
        peak_bytes: u64,
        /// Resident memory after the request.
        rss_bytes: u64,
    },
    /// The effect of a peak reset could not be read back.
    #[error("cannot tell whether the peak of resident memory was reset: {reason}")]
    PeakResetUnchecked {
        /// Why `VmHWM` or `VmRSS` could not be read.
        reason: Reason,
    },
    /// The sampling thread could not be started.
    #[error("cannot start the {what} thread: {source}")]
    Thread {
        /// Which thread.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The sampling thread panicked.
    #[error("the {what} thread panicked; its numbers are lost")]
    ThreadPanicked {
        /// Which thread.
        what: &'static str,
    },
    /// The interval cannot be used.
    #[error("a sampling interval of {found:?} is outside {min:?}..={max:?}")]
    Interval {
        /// What was asked for.
        found: std::time::Duration,
        /// The smallest that is accepted.
        min: std::time::Duration,
        /// The largest that is accepted.
        max: std::time::Duration,
    },
    /// The process to watch does not exist, or cannot be read.
    #[error("cannot watch process {pid}: {reason}")]
    Process {
        /// Its id.
        pid: u32,
        /// Why.
        reason: Reason,
    },
    /// Orphans cannot be adopted, so processes whose parent ends would be lost.
    #[error("cannot become the reaper of orphaned descendants: {source}")]
    Subreaper {
        /// What the kernel said.
        source: io::Error,
    },
    /// No group of our own: there is no memory controller to make one under.
    #[error("cannot make a control group: {reason}")]
    GroupNotHere {
        /// Why.
        reason: Reason,
    },
    /// No group of our own: we may not write there.
    #[error(
        "cannot make a control group under {}: {source}; run with delegation, such as \
         `systemd-run --user --scope -p Delegate=yes -- COMMAND`, or as root",
        parent.display()
    )]
    GroupNotPermitted {
        /// The group we are in.
        parent: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// No group of our own: the version 2 hierarchy does not hand the memory controller to children
    /// here.
    #[error(
        "cannot make a control group under {}: the memory controller is not delegated to it \
         (cgroup.controllers holds `{found}`); run with \
         `systemd-run --user --scope -p Delegate=yes -- COMMAND`",
        parent.display()
    )]
    GroupNotDelegated {
        /// The group we are in.
        parent: PathBuf,
        /// The controllers it has.
        found: String,
    },
    /// No group of our own: version 2 allows controllers on children only if the group itself holds
    /// no process.
    #[error(
        "cannot make a control group under {}: the group itself holds {process_count} processes, and \
         version 2 hands controllers only to the children of a group without any; run alone in a scope, such as \
         `systemd-run --user --scope -p Delegate=yes -- COMMAND`",
        parent.display()
    )]
    GroupHoldsProcesses {
        /// The group we are in.
        parent: PathBuf,
        /// How many processes are in it.
        process_count: usize,
    },
    /// A step on a control group failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Group {
        /// What was tried, as a verb: `set the limit in`, `move a process into`, `remove`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A step on a file's page cache failed.
    #[error("cannot {action} {}: {source}", path.display())]
    PageCache {
        /// What was tried, as a verb: `open`, `flush`, `drop the cached pages of`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}
