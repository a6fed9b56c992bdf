//! A thread beside the load: labels the samples with layer and tensor, measures device memory,
//! reports progress, notes limits that are crossed, passes on cancellation.

use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use onelayer::LoadPlan;
use onelayer::checkpoint::Checkpoint;
use onelayer::load::{CancelHandle, LayerStream, Progress};
use onelayer_probe::{Marker, Measured, Peak, Peaks, Summary};

use super::protocol::{Crossing, TELL_INTERVAL, Watch, tell_progress};
use super::tracker::Tracker;
use super::vram::VramMeter;
use crate::args::Metric;
use crate::measuring::{Session, place_of};
use crate::problem::{Code, Problem};
use crate::report::Place;

/// How often the monitor looks at the load.
const TICK: Duration = Duration::from_millis(5);

/// Watches one stream.
pub(super) struct Monitor<'a> {
    session: &'a Session,
    vram: Option<&'a VramMeter>,
    /// Bytes of the ring that are page-locked, from the start to the end.
    pinned_bytes: u64,
    watches: &'a [Watch],
    cancel: &'a AtomicBool,
    marker: Marker,
    tracker: Tracker<'a>,
    progress: Progress,
    cancel_handle: CancelHandle,
    /// Bytes that arrived in streams before this one, and of all streams together.
    pub(super) before_bytes: u64,
    pub(super) total_bytes: u64,
    /// The limits that were crossed in streams before this one.
    pub(super) crossings: Vec<Crossing>,
}

impl<'a> Monitor<'a> {
    /// For the only stream of a load.
    pub(super) fn new(
        session: &'a Session,
        (checkpoint, plan): (&'a Checkpoint, &'a LoadPlan),
        stream: &LayerStream,
        vram: Option<&'a VramMeter>,
        watches: &'a [Watch],
        cancel: &'a AtomicBool,
    ) -> Self {
        Self {
            session,
            vram,
            pinned_bytes: stream.report().pinned_bytes,
            watches,
            cancel,
            marker: session.sampler.marker(),
            tracker: Tracker::new(checkpoint, plan),
            progress: stream.progress(),
            cancel_handle: stream.cancel_handle(),
            before_bytes: 0,
            total_bytes: stream.progress().tensor_bytes_total(),
            crossings: Vec::with_capacity(watches.len()),
        }
    }

    /// Does `work` with the monitor beside it; returns the limits that were crossed so far.
    ///
    /// # Errors
    /// There is no thread to be had. Nothing was done then.
    pub(super) fn beside<T>(self, work: impl FnOnce() -> T) -> Result<(T, Vec<Crossing>), Vec<Problem>> {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let thread = thread::Builder::new().name("monitor".to_owned());
            let monitor = thread.spawn_scoped(scope, || self.run(&over)).map_err(|error| {
                let message = format!("cannot start a thread beside the load: {error}");
                vec![Problem::new(Code::LoadFailed, message)]
            })?;
            // A panic of the work has to end the monitor too: the scope waits for it.
            let done = panic::catch_unwind(AssertUnwindSafe(work));
            over.store(true, Ordering::Relaxed);
            monitor.thread().unpark();
            let crossings = monitor.join().unwrap_or_default();
            Ok((done.unwrap_or_else(|panic| panic::resume_unwind(panic)), crossings))
        })
    }

    fn run(mut self, over: &AtomicBool) -> Vec<Crossing> {
        self.marker.enter_layer(self.tracker.layer());
        self.marker.enter_tensor(self.tracker.tensor());
        self.watch_baseline();
        let mut told = Instant::now();
        let mut is_cancelled = false;
        loop {
            // Read before everything else: a last look follows the end of the load.
            let is_over = over.load(Ordering::Relaxed);
            if !is_cancelled && self.cancel.load(Ordering::Relaxed) {
                is_cancelled = true;
                self.cancel_handle.cancel();
            }
            let done_bytes = self.progress.tensor_bytes_done();
            let (layer_changed, tensor_changed) = self.tracker.advance(done_bytes);
            if layer_changed {
                self.marker.enter_layer(self.tracker.layer());
            }
            if tensor_changed {
                self.marker.enter_tensor(self.tracker.tensor());
            }
            let vram_bytes = self.vram.and_then(|vram| vram.look(|| self.place()));
            if !self.watches.is_empty() {
                self.watch(vram_bytes);
            }
            if is_over || told.elapsed() >= TELL_INTERVAL {
                told = Instant::now();
                let done_bytes = self.before_bytes + self.progress.tensor_bytes_done();
                tell_progress(self.session, (done_bytes, self.total_bytes), self.tracker.layer(), vram_bytes);
            }
            if is_over {
                return self.crossings;
            }
            thread::park_timeout(TICK);
        }
    }

    fn place(&self) -> Place {
        Place { tensor: Some(self.tracker.tensor().to_owned()), ..self.session.place(self.tracker.layer()) }
    }

    /// Limits that were exceeded before anything was loaded were exceeded at the beginning, however
    /// late this thread starts.
    fn watch_baseline(&mut self) {
        let memory = &self.session.sampler.baseline().memory;
        for watch in self.watches {
            let before = match watch.metric {
                Metric::Host => memory.host_bytes.value(),
                Metric::Rss => memory.rss_bytes.value(),
                _ => continue,
            };
            if before > Some(watch.limit_bytes) {
                let place = Place { seconds: 0.0, ..self.place() };
                self.crossings.push(Crossing { watch: *watch, place });
            }
        }
    }

    fn watch(&mut self, vram_bytes: Option<u64>) {
        let peaks = self.session.sampler.peaks();
        for watch in self.watches {
            let sampled = peak_of(watch.metric, &peaks).and_then(|peak| peak.bytes().value());
            let peak = match watch.metric {
                Metric::Pinned => sampled.max(Some(self.pinned_bytes)),
                Metric::Vram => vram_bytes,
                _ => sampled,
            };
            if !is_known(&self.crossings, *watch) && peak > Some(watch.limit_bytes) {
                self.crossings.push(Crossing { watch: *watch, place: self.place() });
            }
        }
    }
}

/// The sampled peak of a metric.
fn peak_of(metric: Metric, peaks: &Peaks) -> Option<&Measured<Peak>> {
    match metric {
        Metric::Host => Some(&peaks.host),
        Metric::Rss => Some(&peaks.rss),
        Metric::File => Some(&peaks.file),
        Metric::Pinned => Some(&peaks.pinned),
        _ => None,
    }
}

fn is_known(crossings: &[Crossing], watch: Watch) -> bool {
    crossings.iter().any(|crossing| crossing.watch == watch)
}

/// Adds limits that were crossed between two looks of the monitor, at the place of the peak.
pub(super) fn add_missed(crossings: &mut Vec<Crossing>, watches: &[Watch], summary: &Summary) {
    for watch in watches {
        let Some(peak) = peak_of(watch.metric, &summary.peak) else { continue };
        if !is_known(crossings, *watch)
            && peak.bytes().value() > Some(watch.limit_bytes)
            && let Some(place) = place_of(peak)
        {
            crossings.push(Crossing { watch: *watch, place });
        }
    }
}
