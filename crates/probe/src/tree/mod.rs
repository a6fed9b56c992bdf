//! Watches a process and all of its descendants from outside: how somebody else's loader is
//! measured.
//!
//! ```text
//! TreeSampler (thread, pace) ── Watch (one sample: who is alive, what they hold) ── discover (who is whose child)
//!                                                                               └── adopt (orphans come to us)
//! ```
//!
//! Two sums are kept, because processes share pages. The plain sum counts a shared page once per
//! process: it is never too small, and it is taken at every interval. The other counts each page
//! once (`Pss` of `smaps_rollup`): it is the real amount, and costs the kernel a walk through all
//! page tables, so it is taken as often as fits into a fifth of the time and only where it could be
//! a new peak. With one process both are the same.
//!
//! What is not seen: a process that lives and dies between two samples, and what happened to a
//! process after its last sample. A [`ChildGroup`](super::ChildGroup) around the run catches both
//! in the kernel's own peak.

mod adopt;
mod discover;
mod watch;

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::sampler::{INTERVAL_DEFAULT, INTERVAL_MAX, INTERVAL_MIN};
use super::timeline::{TIMELINE_ROWS_DEFAULT, Timeline};
use super::{Measured, ProbeError, Procfs, Unavailable};
use adopt::Adoption;
use watch::Watch;

/// How to watch a tree.
#[derive(Clone, Debug)]
pub struct TreeOptions {
    /// The time between two samples, [`INTERVAL_MIN`] to [`INTERVAL_MAX`].
    pub interval: Duration,
    /// How many rows the timeline holds at most; 0 keeps none.
    pub timeline_rows: usize,
    /// Become the reaper of descendants whose parent ends (`PR_SET_CHILD_SUBREAPER`), so that they
    /// stay in sight, and reap them. The root must be a child of the caller, who must start no
    /// other children meanwhile.
    pub adopt_orphans: bool,
    /// A control group's directory: everything in it belongs to the tree as well, whoever its
    /// parent is.
    pub group: Option<PathBuf>,
    /// Where `/proc` is.
    pub procfs: Procfs,
}

impl Default for TreeOptions {
    fn default() -> Self {
        Self {
            interval: INTERVAL_DEFAULT,
            timeline_rows: TIMELINE_ROWS_DEFAULT,
            adopt_orphans: false,
            group: None,
            procfs: Procfs::default(),
        }
    }
}

/// The most that a tree held of something.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TreePeak {
    /// How much.
    pub bytes: u64,
    /// When it was seen, since the start of watching.
    pub seconds: f64,
    /// How many processes there were then.
    pub process_count: u32,
}

/// How a peak of the whole tree was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TreeMethod {
    /// There was never more than one process: the kernel's high-water mark for `rss`, samples for
    /// `host`.
    SingleProcess,
    /// Sampled, each page counted once.
    SharedOnce,
    /// Sampled, shared pages counted once per process: more than there really was. `smaps_rollup`
    /// could not be read.
    PlainSum,
}

/// One process of a tree.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ProcessRecord {
    /// Its id.
    pub pid: u32,
    /// Its parent's id when it was first seen.
    pub parent_pid: u32,
    /// The name of its program, as last seen.
    pub name: Box<str>,
    /// When it was first seen, since the start of watching.
    pub first_seen_seconds: f64,
    /// When it was last seen alive.
    pub last_seen_seconds: f64,
    /// The high-water mark of its resident memory when it was last seen, or before its last `exec`
    /// if that was more.
    pub rss_peak_bytes: Measured<u64>,
    /// The most it held of what the kernel cannot take back, sampled.
    pub host_peak_bytes: Measured<u64>,
    /// True if its end was seen.
    pub has_ended: bool,
}

/// What a tree of processes cost.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct TreeSummary {
    /// How long it was watched.
    pub seconds: f64,
    /// The interval that was asked for.
    pub interval_ms: f64,
    /// The longest time between two samples.
    pub gap_ms_max: f64,
    /// The longest time between two samples that count shared pages once, while there were several
    /// processes and one was due; 0 if none was ever late.
    pub shared_once_gap_ms_max: f64,
    /// How many samples were taken.
    pub sample_count: u64,
    /// Memory the kernel cannot take back.
    pub host: Measured<TreePeak>,
    /// How `host` was found.
    pub host_method: TreeMethod,
    /// Resident memory.
    pub rss: Measured<TreePeak>,
    /// How `rss` was found.
    pub rss_method: TreeMethod,
    /// `host`, shared pages counted once per process: an upper bound.
    pub host_sum: Measured<TreePeak>,
    /// `rss`, shared pages counted once per process: an upper bound.
    pub rss_sum: Measured<TreePeak>,
    /// Resident anonymous memory, plain sum.
    pub anon_sum: Measured<TreePeak>,
    /// Resident pages of mapped files, plain sum.
    pub file_sum: Measured<TreePeak>,
    /// Resident shared memory, plain sum.
    pub shmem_sum: Measured<TreePeak>,
    /// How many processes were seen at all.
    pub process_count: u64,
    /// How many were alive in one sample at most.
    pub process_count_peak: u32,
    /// How many ends were seen.
    pub ended_count: u64,
    /// The processes in order of appearance; at most 4096 of them.
    pub processes: Vec<ProcessRecord>,
    /// The plain sums over time.
    pub timeline: Timeline,
    /// What could not be measured, and why.
    pub unavailable: Vec<Unavailable>,
}

/// What the thread and its owner share.
#[derive(Debug, Default)]
struct Shared {
    is_stopped: Mutex<bool>,
    changed: Condvar,
    live_count: std::sync::atomic::AtomicU32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Watches a tree from [`TreeSampler::start`] to [`TreeSampler::finish`]. Dropping it stops the
/// thread and loses the numbers.
#[derive(Debug)]
pub struct TreeSampler {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Watch>>,
    interval: Duration,
}

impl TreeSampler {
    /// Takes a first sample and starts the thread.
    ///
    /// # Errors
    /// [`ProbeError::Interval`] for an interval out of bounds; [`ProbeError::Process`] if the root
    /// cannot be read, such as after it was waited for; [`ProbeError::Subreaper`] or
    /// [`ProbeError::Thread`] if the system refuses.
    pub fn start(root_pid: u32, options: &TreeOptions) -> Result<Self, ProbeError> {
        let interval = options.interval;
        if !(INTERVAL_MIN..=INTERVAL_MAX).contains(&interval) {
            return Err(ProbeError::Interval { found: interval, min: INTERVAL_MIN, max: INTERVAL_MAX });
        }
        let adoption = match options.adopt_orphans {
            true => Some(Adoption::begin(&options.procfs, root_pid)?),
            false => None,
        };
        let mut watch = Watch::new(root_pid, options, adoption)?;
        let shared = Arc::new(Shared::default());
        publish(&shared, watch.sample());
        let thread = Builder::new()
            .name("probe-tree".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || watch_until_stopped(&shared, watch, interval)
            })
            .map_err(|source| ProbeError::Thread { what: "tree sampling", source })?;
        Ok(Self { shared, thread: Some(thread), interval })
    }

    /// How many processes were alive in the latest sample. 0 after the root has ended and left
    /// nobody behind.
    #[must_use]
    pub fn live_count(&self) -> u32 {
        self.shared.live_count.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Takes a last sample, stops the thread and sums up. The order of this and of waiting for the
    /// root is free: a process that has ended keeps the numbers of its last sample.
    ///
    /// # Errors
    /// [`ProbeError::ThreadPanicked`] if the thread did.
    pub fn finish(mut self) -> Result<TreeSummary, ProbeError> {
        self.stop();
        let thread = self.thread.take().expect("only finish and drop take the thread");
        let mut watch = thread.join().map_err(|_| ProbeError::ThreadPanicked { what: "tree sampling" })?;
        watch.sample();
        Ok(watch.summary(self.interval))
    }

    fn stop(&self) {
        *lock(&self.shared.is_stopped) = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for TreeSampler {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            // A panic there cannot be reported from here; `finish` is where it is.
            let _ = thread.join();
        }
    }
}

fn publish(shared: &Shared, live_count: u32) {
    shared.live_count.store(live_count, std::sync::atomic::Ordering::Relaxed);
}

fn watch_until_stopped(shared: &Shared, mut watch: Watch, interval: Duration) -> Watch {
    let mut next = Instant::now() + interval;
    loop {
        let wait = next.saturating_duration_since(Instant::now());
        let waited = shared.changed.wait_timeout_while(lock(&shared.is_stopped), wait, |stopped| !*stopped);
        let is_stopped = *waited.unwrap_or_else(PoisonError::into_inner).0;
        if is_stopped {
            return watch;
        }
        publish(shared, watch.sample());
        next = (next + interval).max(Instant::now());
    }
}
