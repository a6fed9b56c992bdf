//! Errors of this crate.
//!
//! A number that cannot be read is not an error but a [`Measured::Unavailable`](super::Measured).
//! Errors are for requests that change something (reset a peak, create a group, drop cached pages)
//! and for measurements that cannot start.

use std::io;
use std::path::PathBuf;

use super::Reason;
use onelayer_system::units::HumanBytes;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// The kernel refused to reset the high-water mark of resident memory.
    #[error("cannot reset the peak of resident memory through {}: {source}", path.display())]
    PeakResetRefused {
        /// The file written to.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel accepted the request, but the high-water mark did not change.
    #[error(
        "resetting the peak of resident memory through {} had no effect: the peak is {}, resident memory is {}",
        path.display(), HumanBytes(*peak_bytes), HumanBytes(*rss_bytes)
    )]
    PeakResetIneffective {
        /// The file written to.
        path: PathBuf,
        /// The high-water mark after the request.
        peak_bytes: u64,
        /// Resident memory after the request.
        rss_bytes: u64,
    },
    /// The effect of a peak reset could not be read back.
    #[error("cannot check whether the peak of resident memory was reset: {reason}")]
    PeakResetUnchecked {
        /// Why `VmHWM` or `VmRSS` could not be read.
        reason: Reason,
    },
    /// The sampling thread could not be started.
    #[error("cannot start the {what} thread: {source}")]
    Thread {
        /// Which thread.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The sampling thread panicked.
    #[error("the {what} thread panicked; its numbers are lost")]
    ThreadPanicked {
        /// Which thread.
        what: &'static str,
    },
    /// The interval is out of bounds.
    #[error("a sampling interval of {found:?} is outside {min:?}..={max:?}")]
    Interval {
        /// The requested interval.
        found: std::time::Duration,
        /// The smallest accepted interval.
        min: std::time::Duration,
        /// The largest accepted interval.
        max: std::time::Duration,
    },
    /// The process does not exist or cannot be read.
    #[error("cannot measure process {pid}: {reason}")]
    Process {
        /// Process id.
        pid: u32,
        /// The reason.
        reason: Reason,
    },
    /// Orphaned descendants cannot be adopted, so they would be lost.
    #[error("cannot become the reaper of orphaned descendants: {source}")]
    Subreaper {
        /// The kernel's error.
        source: io::Error,
    },
    /// No group can be created: there is no memory controller here.
    #[error("cannot create a control group: {reason}")]
    GroupNotHere {
        /// The reason.
        reason: Reason,
    },
    /// No group can be created: no permission to write.
    #[error(
        "cannot create a control group under {}: {source}; run with delegation, such as \
         `systemd-run --user --scope -p Delegate=yes -- COMMAND`, or as root",
        parent.display()
    )]
    GroupNotPermitted {
        /// The group of this process.
        parent: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// No group can be created: version 2 does not enable the memory controller for children here.
    #[error(
        "cannot create a control group under {}: the memory controller is not delegated to it \
         (cgroup.controllers holds `{found}`); run with \
         `systemd-run --user --scope -p Delegate=yes -- COMMAND`",
        parent.display()
    )]
    GroupNotDelegated {
        /// The group of this process.
        parent: PathBuf,
        /// The controllers it has.
        found: String,
    },
    /// No group can be created: version 2 enables controllers for children only if the group itself
    /// holds no process.
    #[error(
        "cannot create a control group under {}: the group itself holds {process_count} processes, and \
         version 2 enables controllers only for children of a group without processes; run alone in a scope, such as \
         `systemd-run --user --scope -p Delegate=yes -- COMMAND`",
        parent.display()
    )]
    GroupHoldsProcesses {
        /// The group of this process.
        parent: PathBuf,
        /// How many processes are in it.
        process_count: usize,
    },
    /// A step on a control group failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Group {
        /// The attempted step, as a verb: `set the limit in`, `move a process into`, `remove`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A step on a file's page cache failed.
    #[error("cannot {action} {}: {source}", path.display())]
    PageCache {
        /// The attempted step, as a verb: `open`, `flush`, `drop the cached pages of`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}
