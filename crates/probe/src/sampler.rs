//! Watches the calling process while it works: baseline, samples on a thread of its own, marks,
//! summary.
//!
//! ```text
//! start ── buffers allocated and touched, thread running ── peak reset ── baseline
//!   │ every interval: sample          enter_layer: sample, then the new layer is current
//!   │                                 enter_tensor: the new tensor is current, no sample
//! finish ── last sample ── thread ended ── after ── Summary
//! ```
//!
//! The kernel keeps no high-water mark of anonymous memory, so `host` is as good as its samples:
//! the summary carries the interval and the longest gap there really was. Resident memory has such
//! a mark, which is reset at the start. The sampler's own memory is allocated before the baseline
//! and does not grow; its CPU time is in the summary. It observes and never enforces. One sampler
//! at a time makes sense: a second one would reset the first one's peak.

use std::fs;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::measured::{Unavailable, UnavailableList};
use super::memory::MemoryReader;
use super::recorder::{Peaks, Recorder};
use super::timeline::{TIMELINE_ROWS_DEFAULT, Timeline};
use super::{Activity, Measured, MemoryGroup, PeakReset, ProbeError, Process, Procfs, Reason, Snapshot};

/// The time between two samples unless asked otherwise. A sample costs about 12 µs of CPU time in a
/// release build (`cargo test -p onelayer-probe --release --test probe watching -- --nocapture` prints it), so
/// this is 0.3 % of one core.
pub const INTERVAL_DEFAULT: Duration = Duration::from_millis(5);
/// The shortest interval that is accepted: below it, one core does little else.
pub const INTERVAL_MIN: Duration = Duration::from_micros(100);
/// The longest interval that is accepted.
pub const INTERVAL_MAX: Duration = Duration::from_secs(60);

/// Enough for a loop that reads one file into a buffer on the heap.
const THREAD_STACK_BYTES: usize = 64 << 10;

/// How to watch.
#[derive(Clone, Debug)]
pub struct SamplerOptions {
    /// The time between two samples, [`INTERVAL_MIN`] to [`INTERVAL_MAX`].
    pub interval: Duration,
    /// How many rows the timeline holds at most, 48 bytes each; 0 keeps none.
    pub timeline_rows: usize,
    /// Reset the high-water mark of resident memory before the baseline. Without it, an earlier
    /// peak may hide this run's.
    pub reset_peak: bool,
    /// Where `/proc` is.
    pub procfs: Procfs,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            interval: INTERVAL_DEFAULT,
            timeline_rows: TIMELINE_ROWS_DEFAULT,
            reset_peak: true,
            procfs: Procfs::default(),
        }
    }
}

/// What became of the reset of the high-water mark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PeakResetOutcome {
    /// Reset, and the kernel showed it.
    Done(PeakReset),
    /// Not asked for.
    NotAsked,
    /// Asked for and refused; the text says why.
    Failed(String),
}

/// What a run cost.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Summary {
    /// From baseline to the last sample.
    pub seconds: f64,
    /// The interval that was asked for.
    pub interval_ms: f64,
    /// The longest time between two samples: a shorter spike of `host` may have gone unseen.
    pub gap_ms_max: f64,
    /// How many samples were taken.
    pub sample_count: u64,
    /// CPU time of the sampling thread.
    pub sampler_cpu_seconds: Measured<f64>,
    /// What became of the reset of the high-water mark.
    pub peak_reset: PeakResetOutcome,
    /// Before.
    pub baseline: Snapshot,
    /// The most of each metric, and where.
    pub peak: Peaks,
    /// After.
    pub after: Snapshot,
    /// What was done between `baseline` and `after`.
    pub activity: Activity,
    /// The curve.
    pub timeline: Timeline,
    /// What could not be measured, and why.
    pub unavailable: Vec<Unavailable>,
}

impl Summary {
    /// Peak of `host` above the baseline.
    #[must_use]
    pub fn host_growth_bytes(&self) -> Measured<u64> {
        self.peak.host.bytes().growth_since(self.baseline.memory.host_bytes)
    }

    /// Peak of resident memory above the baseline: what the promise is about.
    #[must_use]
    pub fn rss_growth_bytes(&self) -> Measured<u64> {
        self.peak.rss.bytes().growth_since(self.baseline.memory.rss_bytes)
    }
}

/// What the sampling thread, the marks and the sampler share.
#[derive(Debug)]
struct Shared {
    recorder: Mutex<Recorder>,
    /// For the marks; the thread has a reader of its own, so that neither waits for the other's
    /// system calls.
    mark_reader: Mutex<MemoryReader>,
    run: Mutex<Run>,
    changed: Condvar,
}

/// Where the sampling thread stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    WarmingUp,
    Ready,
    Sampling { start: Instant },
    Stopped,
}

/// A panic elsewhere does not spoil numbers: every update leaves them consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn set_run(&self, run: Run) {
        *lock(&self.run) = run;
        self.changed.notify_all();
    }

    /// Waits until `run` is no longer `current`.
    fn wait_while(&self, current: Run) -> Run {
        let guard = self.changed.wait_while(lock(&self.run), |run| *run == current);
        *guard.unwrap_or_else(PoisonError::into_inner)
    }

    fn sample_on_callers_thread(&self) {
        let Run::Sampling { start } = *lock(&self.run) else { return };
        let memory = lock(&self.mark_reader).read();
        lock(&self.recorder).record(start.elapsed(), &memory);
    }
}

/// Tells a running [`Sampler`] where the load is. Cheap to clone; any thread may use it; useless
/// but harmless once the sampler has finished.
#[derive(Clone, Debug)]
pub struct Marker {
    shared: Arc<Shared>,
}

impl Marker {
    /// `layer` begins: takes a sample for what came before it, then makes it the current place.
    /// Call it with the next layer's name, or with an empty one, when a layer ends.
    pub fn enter_layer(&self, layer: &str) {
        self.shared.sample_on_callers_thread();
        lock(&self.shared.recorder).enter_layer(layer);
    }

    /// `tensor` begins: makes it the current place. Takes no sample, so it is cheap enough for a
    /// million tensors.
    pub fn enter_tensor(&self, tensor: &str) {
        lock(&self.shared.recorder).enter_tensor(tensor);
    }

    /// Takes a sample now.
    pub fn sample(&self) {
        self.shared.sample_on_callers_thread();
    }
}

/// Watches the calling process from [`Sampler::start`] to [`Sampler::finish`]. Dropping it stops
/// the thread and loses the numbers.
#[derive(Debug)]
pub struct Sampler {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Measured<f64>>>,
    process: Process,
    group: Result<MemoryGroup, Reason>,
    interval: Duration,
    peak_reset: PeakResetOutcome,
    baseline: Snapshot,
    start: Instant,
}

impl Sampler {
    /// Starts the thread, finds the control group, resets the peak, takes the baseline and begins
    /// to sample. What should not count as growth (warm-up, a device context) must have
    /// happened before.
    ///
    /// A peak that cannot be reset and a `/proc` that cannot be read are not errors: the summary
    /// says so.
    ///
    /// # Errors
    /// [`ProbeError::Interval`] for an interval out of bounds; [`ProbeError::Thread`] if no thread
    /// can be started.
    pub fn start(options: &SamplerOptions) -> Result<Self, ProbeError> {
        let interval = options.interval;
        if !(INTERVAL_MIN..=INTERVAL_MAX).contains(&interval) {
            return Err(ProbeError::Interval { found: interval, min: INTERVAL_MIN, max: INTERVAL_MAX });
        }
        let process = options.procfs.myself();
        let group = process.memory_group();
        let shared = Arc::new(Shared {
            recorder: Mutex::new(Recorder::new(options.timeline_rows)),
            mark_reader: Mutex::new(MemoryReader::new(&process)),
            run: Mutex::new(Run::WarmingUp),
            changed: Condvar::new(),
        });
        let reader = MemoryReader::new(&process);
        let thread = Builder::new()
            .name("probe-sampler".into())
            .stack_size(THREAD_STACK_BYTES)
            .spawn({
                let shared = Arc::clone(&shared);
                move || sample_until_stopped(&shared, reader, interval)
            })
            .map_err(|source| ProbeError::Thread { what: "sampling", source })?;
        shared.wait_while(Run::WarmingUp);
        lock(&shared.mark_reader).read();
        // Once for nothing: the buffers of this reading belong to the baseline, not to the growth.
        let _ = Snapshot::take(&process, &group);
        let peak_reset = if options.reset_peak {
            process
                .reset_peak()
                .map_or_else(|error| PeakResetOutcome::Failed(error.to_string()), PeakResetOutcome::Done)
        } else {
            PeakResetOutcome::NotAsked
        };
        let baseline = Snapshot::take(&process, &group);
        let start = Instant::now();
        lock(&shared.recorder).record(Duration::ZERO, &baseline.memory);
        shared.set_run(Run::Sampling { start });
        Ok(Self { shared, thread: Some(thread), process, group, interval, peak_reset, baseline, start })
    }

    /// A handle for marks.
    #[must_use]
    pub fn marker(&self) -> Marker {
        Marker { shared: Arc::clone(&self.shared) }
    }

    /// What the baseline was.
    #[must_use]
    pub fn baseline(&self) -> &Snapshot {
        &self.baseline
    }

    /// Everything that can be read now, exact memory included.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::take(&self.process, &self.group)
    }

    /// The peaks so far.
    #[must_use]
    pub fn peaks(&self) -> Peaks {
        let mark_was_reset = matches!(self.peak_reset, PeakResetOutcome::Done(_));
        lock(&self.shared.recorder).peaks(mark_was_reset)
    }

    /// Takes the last sample, stops the thread and sums up.
    ///
    /// # Errors
    /// [`ProbeError::ThreadPanicked`] if the sampling thread did.
    pub fn finish(mut self) -> Result<Summary, ProbeError> {
        self.shared.sample_on_callers_thread();
        let seconds = self.start.elapsed().as_secs_f64();
        self.shared.set_run(Run::Stopped);
        let thread = self.thread.take().expect("only finish and drop take the thread");
        let sampler_cpu_seconds =
            thread.join().map_err(|_| ProbeError::ThreadPanicked { what: "sampling" })?;
        let after = self.snapshot();
        let peak = self.peaks();
        let recorder = lock(&self.shared.recorder);
        let mut list = UnavailableList::default();
        self.baseline.note_unavailable("baseline.", &mut list);
        peak.note_unavailable(&mut list);
        after.note_unavailable("after.", &mut list);
        list.note("", "sampler_cpu_seconds", &sampler_cpu_seconds);
        let mut unavailable = list.into_vec();
        if let PeakResetOutcome::Failed(reason) = &self.peak_reset {
            unavailable.push(Unavailable { metric: "peak_reset".into(), reason: reason.clone() });
        }
        Ok(Summary {
            seconds,
            interval_ms: self.interval.as_secs_f64() * 1e3,
            gap_ms_max: recorder.gap_max().as_secs_f64() * 1e3,
            sample_count: recorder.sample_count(),
            sampler_cpu_seconds,
            peak_reset: self.peak_reset.clone(),
            baseline: self.baseline,
            activity: after.activity.since(&self.baseline.activity),
            peak,
            after,
            timeline: recorder.timeline().clone(),
            unavailable,
        })
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.shared.set_run(Run::Stopped);
        if let Some(thread) = self.thread.take() {
            // A panic there cannot be reported from here; `finish` is where it is.
            let _ = thread.join();
        }
    }
}

/// The thread. Returns its own CPU time.
fn sample_until_stopped(shared: &Shared, mut reader: MemoryReader, interval: Duration) -> Measured<f64> {
    reader.read();
    let cpu_at_start = own_cpu_seconds();
    shared.set_run(Run::Ready);
    let Run::Sampling { start } = shared.wait_while(Run::Ready) else { return cpu_at_start };
    let mut next = start + interval;
    loop {
        let wait = next.saturating_duration_since(Instant::now());
        let (run, _) = shared
            .changed
            .wait_timeout_while(lock(&shared.run), wait, |run| *run != Run::Stopped)
            .unwrap_or_else(PoisonError::into_inner);
        let is_stopped = *run == Run::Stopped;
        drop(run);
        if is_stopped {
            return own_cpu_seconds().combine(cpu_at_start, |now, then| now - then);
        }
        let memory = reader.read();
        lock(&shared.recorder).record(start.elapsed(), &memory);
        // A tick that was missed is skipped: sampling twice in a row would show nothing new.
        next = (next + interval).max(Instant::now());
    }
}

/// CPU time of the calling thread: the first number of `schedstat`, in nanoseconds.
fn own_cpu_seconds() -> Measured<f64> {
    const FILE: &str = "/proc/thread-self/schedstat";
    fs::read_to_string(FILE)
        .map_err(|error| Reason::unreadable(FILE, &error))
        .and_then(|text| {
            let first = text.split_ascii_whitespace().next().and_then(|number| number.parse().ok());
            first.ok_or(Reason::Malformed { file: FILE, field: "run time" })
        })
        .map(|nanoseconds| Duration::from_nanos(nanoseconds).as_secs_f64())
        .into()
}
