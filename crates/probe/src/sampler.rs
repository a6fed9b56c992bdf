//! Measures the calling process over time, with samples on a separate thread.
//!
//! ```text
//! start ── buffers allocated and touched, thread running ── peak reset ── baseline
//!   │ every interval: sample          enter_layer: sample, then switch to the new layer
//!   │                                 enter_tensor: switch to the new tensor, no sample
//! finish ── last sample ── thread ended ── after ── Summary
//! ```
//!
//! The kernel keeps no high-water mark of anonymous memory, so `host` comes from samples. The
//! summary has the interval and the longest real gap between samples. Resident memory has a
//! high-water mark, which is reset at the start. The sampler allocates all its memory before the
//! baseline, and the summary has its CPU time. Use one sampler at a time: a second one would reset
//! the peak of the first.

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

/// The default time between two samples. A sample costs about 12 µs of CPU time in a release build,
/// so this is 0.3 % of one core. To measure it: `cargo test -p onelayer-probe --release --test
/// probe watching -- --nocapture`.
pub const INTERVAL_DEFAULT: Duration = Duration::from_millis(5);
/// The shortest accepted interval; a shorter one would keep a core busy.
pub const INTERVAL_MIN: Duration = Duration::from_micros(100);
/// The longest accepted interval.
pub const INTERVAL_MAX: Duration = Duration::from_secs(60);

/// Enough for a loop that reads one file into a heap buffer.
const THREAD_STACK_BYTES: usize = 64 << 10;

/// Options of a [`Sampler`].
#[derive(Clone, Debug)]
pub struct SamplerOptions {
    /// The time between two samples, [`INTERVAL_MIN`] to [`INTERVAL_MAX`].
    pub interval: Duration,
    /// Maximum number of timeline rows, 48 bytes each; 0 keeps none.
    pub timeline_rows: usize,
    /// Reset the high-water mark of resident memory before the baseline. Otherwise an earlier peak
    /// may hide this run's.
    pub reset_peak: bool,
    /// The proc file system to read.
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

/// The outcome of resetting the high-water mark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PeakResetOutcome {
    /// Reset, and checked.
    Done(PeakReset),
    /// Not requested.
    NotAsked,
    /// Refused, with the reason.
    Failed(String),
}

/// The measurements of a run.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Summary {
    /// Time from the baseline to the last sample.
    pub seconds: f64,
    /// The requested interval.
    pub interval_ms: f64,
    /// The longest time between two samples. A shorter spike of `host` may have been missed.
    pub gap_ms_max: f64,
    /// The number of samples.
    pub sample_count: u64,
    /// CPU time of the sampling thread.
    pub sampler_cpu_seconds: Measured<f64>,
    /// The outcome of resetting the high-water mark.
    pub peak_reset: PeakResetOutcome,
    /// The state before the run.
    pub baseline: Snapshot,
    /// The peak of each metric, and where it was reached.
    pub peak: Peaks,
    /// The state after the run.
    pub after: Snapshot,
    /// The activity between `baseline` and `after`.
    pub activity: Activity,
    /// Memory over time.
    pub timeline: Timeline,
    /// The missing measurements, with reasons.
    pub unavailable: Vec<Unavailable>,
}

impl Summary {
    /// Peak of `host` above the baseline.
    #[must_use]
    pub fn host_growth_bytes(&self) -> Measured<u64> {
        self.peak.host.bytes().growth_since(self.baseline.memory.host_bytes)
    }

    /// Peak of resident memory above the baseline. The memory promise is about this number.
    #[must_use]
    pub fn rss_growth_bytes(&self) -> Measured<u64> {
        self.peak.rss.bytes().growth_since(self.baseline.memory.rss_bytes)
    }
}

/// State shared by the sampling thread, the markers and the sampler.
#[derive(Debug)]
struct Shared {
    recorder: Mutex<Recorder>,
    /// For markers. The thread has a separate reader, so neither waits for the other's system
    /// calls.
    mark_reader: Mutex<MemoryReader>,
    run: Mutex<Run>,
    changed: Condvar,
}

/// The state of the sampling thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    WarmingUp,
    Ready,
    Sampling { start: Instant },
    Stopped,
}

/// Ignores poisoning: every update leaves the numbers consistent.
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

/// Tells a running [`Sampler`] which layer and tensor are being loaded. Cheap to clone and usable
/// from any thread. Does nothing once the sampler has finished.
#[derive(Clone, Debug)]
pub struct Marker {
    shared: Arc<Shared>,
}

impl Marker {
    /// Starts `layer`: takes a sample for the previous layer, then makes this one current. At the
    /// end of a layer, call it with the next layer's name or an empty one.
    pub fn enter_layer(&self, layer: &str) {
        self.shared.sample_on_callers_thread();
        lock(&self.shared.recorder).enter_layer(layer);
    }

    /// Starts `tensor`. Takes no sample, so it is cheap enough for a million tensors.
    pub fn enter_tensor(&self, tensor: &str) {
        lock(&self.shared.recorder).enter_tensor(tensor);
    }

    /// Takes a sample now.
    pub fn sample(&self) {
        self.shared.sample_on_callers_thread();
    }
}

/// Measures the calling process from [`Sampler::start`] to [`Sampler::finish`]. Dropping it stops
/// the thread and discards the numbers.
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
    /// to sample. Do warm-up and device contexts that must not count as growth before this call.
    ///
    /// A peak that cannot be reset or a `/proc` that cannot be read is not an error; the summary
    /// lists it.
    ///
    /// # Errors
    /// [`ProbeError::Interval`] for an interval out of bounds; [`ProbeError::Thread`] if the thread
    /// cannot be started.
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
        // A discarded reading: its buffers then belong to the baseline, not to the growth.
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

    /// A new marker of this sampler.
    #[must_use]
    pub fn marker(&self) -> Marker {
        Marker { shared: Arc::clone(&self.shared) }
    }

    /// The baseline.
    #[must_use]
    pub fn baseline(&self) -> &Snapshot {
        &self.baseline
    }

    /// All current metrics, exact memory included.
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

    /// Takes the last sample, stops the thread and returns the summary.
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
            // Only `finish` reports a panic of the thread.
            let _ = thread.join();
        }
    }
}

/// The loop of the sampling thread. Returns the thread's CPU time.
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
        // Missed ticks are skipped: two samples in a row would show nothing new.
        next = (next + interval).max(Instant::now());
    }
}

/// CPU time of the calling thread, from the first number of `schedstat` (nanoseconds).
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
