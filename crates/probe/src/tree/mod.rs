//! Measures a process and all of its descendants from outside, such as another program's loader.
//!
//! ```text
//! TreeSampler (thread, interval) ── Watch (one sample: live processes, their memory) ── children
//!                                                                                   └── subreaper
//! ```
//!
//! Processes share pages, so there are two sums. The plain sum counts a shared page once per
//! process. It is an upper bound and is taken at every interval. The exact sum counts each page
//! once (`Pss` of
//! `smaps_rollup`). The kernel walks all page tables for it, so it takes at most a fifth of the
//! time and is taken only if it could be a new peak. For one process both sums are equal.
//!
//! Not seen: a process that starts and ends between two samples, and changes after a process's last
//! sample. The kernel's peak of a [`ChildGroup`](super::ChildGroup) around the run covers both.

mod children;
mod subreaper;
mod watch;

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::sampler::{INTERVAL_DEFAULT, INTERVAL_MAX, INTERVAL_MIN};
use super::timeline::{TIMELINE_ROWS_DEFAULT, Timeline};
use super::{Measured, ProbeError, Procfs, Unavailable};
use subreaper::Subreaper;
use watch::Watch;

/// Options of a [`TreeSampler`].
#[derive(Clone, Debug)]
pub struct TreeOptions {
    /// The time between two samples, [`INTERVAL_MIN`] to [`INTERVAL_MAX`].
    pub interval: Duration,
    /// Maximum number of timeline rows; 0 keeps none.
    pub timeline_rows: usize,
    /// Adopt and reap descendants whose parent ends (`PR_SET_CHILD_SUBREAPER`), so that they stay
    /// visible. The root must be a child of the caller, and the caller must not start other
    /// children during the measurement.
    pub adopt_orphans: bool,
    /// The directory of a control group. All processes in it belong to the tree, whatever their
    /// parent is.
    pub group: Option<PathBuf>,
    /// The proc file system to read.
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

/// The peak of one metric over a whole tree.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TreePeak {
    /// The size.
    pub bytes: u64,
    /// Time since the start of the measurement.
    pub seconds: f64,
    /// The number of live processes at that time.
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
    /// Sampled, shared pages counted once per process: an upper bound. `smaps_rollup` could not be
    /// read.
    PlainSum,
}

/// One process of a tree.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ProcessRecord {
    /// Process id.
    pub pid: u32,
    /// Id of its parent when it was first seen.
    pub parent_pid: u32,
    /// The name of its program, as last seen.
    pub name: Box<str>,
    /// Time since the start of the measurement when it was first seen.
    pub first_seen_seconds: f64,
    /// Time since the start of the measurement when it was last seen alive.
    pub last_seen_seconds: f64,
    /// The larger of its last resident high-water mark and the mark before its last `exec`.
    pub rss_peak_bytes: Measured<u64>,
    /// Peak of unreclaimable memory, sampled.
    pub host_peak_bytes: Measured<u64>,
    /// True if its end was seen.
    pub has_ended: bool,
}

/// The measurements of a process tree.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct TreeSummary {
    /// Duration of the measurement.
    pub seconds: f64,
    /// The requested interval.
    pub interval_ms: f64,
    /// The longest time between two samples.
    pub gap_ms_max: f64,
    /// The longest delay of an exact sum (shared pages counted once) that was due while several
    /// processes lived; 0 if none was late.
    pub shared_once_gap_ms_max: f64,
    /// The number of samples.
    pub sample_count: u64,
    /// Unreclaimable memory.
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
    /// Number of processes seen.
    pub process_count: u64,
    /// Maximum number of live processes in one sample.
    pub process_count_peak: u32,
    /// Number of processes that were seen to end.
    pub ended_count: u64,
    /// The first 4096 processes, in order of appearance.
    pub processes: Vec<ProcessRecord>,
    /// The plain sums over time.
    pub timeline: Timeline,
    /// The missing measurements, with reasons.
    pub unavailable: Vec<Unavailable>,
}

/// State shared by the thread and its owner.
#[derive(Debug, Default)]
struct Shared {
    is_stopped: Mutex<bool>,
    changed: Condvar,
    live_count: std::sync::atomic::AtomicU32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Measures a tree from [`TreeSampler::start`] to [`TreeSampler::finish`]. Dropping it stops the
/// thread and discards the numbers.
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
        let subreaper = match options.adopt_orphans {
            true => Some(Subreaper::begin(&options.procfs, root_pid)?),
            false => None,
        };
        let mut watch = Watch::new(root_pid, options, subreaper)?;
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

    /// The number of live processes in the latest sample.
    #[must_use]
    pub fn live_count(&self) -> u32 {
        self.shared.live_count.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Takes a last sample, stops the thread and returns the summary. The root may be waited for
    /// before or after: an ended process keeps the numbers of its last sample.
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
            // Only `finish` reports a panic of the thread.
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
