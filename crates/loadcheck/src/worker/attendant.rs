//! A thread beside the load: marks the place for the samples, looks at the device's memory, reports
//! progress, notices limits that are crossed, passes on cancellation.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use onelayer::load::{CancelHandle, Progress};
use onelayer_probe::{Marker, Sampler, Summary};

use super::protocol::{Crossing, Message, Watch, tell};
use super::tracker::Tracker;
use super::vram::VramMeter;
use crate::args::Metric;
use crate::measured::place_of;
use crate::problem::{Code, Problem};
use crate::report::{Place, Point};

/// How often the attendant looks at the load.
const TICK: Duration = Duration::from_millis(5);
/// How often progress is reported.
const TELL_INTERVAL: Duration = Duration::from_millis(100);

/// See the head of this file.
pub(super) struct Attendant<'a> {
    pub(super) sampler: &'a Sampler,
    pub(super) vram: Option<&'a VramMeter>,
    /// Bytes of the ring that are page-locked, from the start to the end.
    pub(super) pinned_bytes: u64,
    pub(super) watches: &'a [Watch],
    pub(super) cancel: &'a AtomicBool,
    pub(super) start: Instant,
    pub(super) marker: Marker,
    pub(super) tracker: Tracker<'a>,
    pub(super) progress: Progress,
    /// Bytes that arrived in streams before this one, and of all streams together.
    pub(super) before_bytes: u64,
    pub(super) total_bytes: u64,
    pub(super) cancel_handle: CancelHandle,
    pub(super) over: &'a AtomicBool,
    pub(super) crossings: Vec<Crossing>,
}

impl Attendant<'_> {
    /// Does `work` with the attendant beside it; the limits that were crossed meanwhile.
    ///
    /// # Errors
    /// There is no thread to be had. Nothing was done then.
    pub(super) fn beside<T>(self, work: impl FnOnce() -> T) -> Result<(T, Vec<Crossing>), Vec<Problem>> {
        let over = self.over;
        thread::scope(|scope| {
            let thread = thread::Builder::new().name("attendant".to_owned());
            let attendant = thread.spawn_scoped(scope, move || self.run()).map_err(|error| {
                let message = format!("cannot start a thread beside the load: {error}");
                vec![Problem::new(Code::LoadFailed, message)]
            })?;
            let done = work();
            over.store(true, Ordering::Relaxed);
            attendant.thread().unpark();
            Ok((done, attendant.join().unwrap_or_default()))
        })
    }

    fn run(mut self) -> Vec<Crossing> {
        self.marker.enter_layer(self.tracker.layer());
        self.marker.enter_tensor(self.tracker.tensor());
        self.watch_baseline();
        let mut told = Instant::now();
        let mut is_cancelled = false;
        loop {
            // Read first: what is done after it is looked at once more.
            let is_over = self.over.load(Ordering::Relaxed);
            if !is_cancelled && self.cancel.load(Ordering::Relaxed) {
                is_cancelled = true;
                self.cancel_handle.cancel();
            }
            let (layer_changed, tensor_changed) = self.tracker.advance(self.progress.tensor_bytes_done());
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
                self.tell_progress(vram_bytes);
            }
            if is_over {
                return self.crossings;
            }
            thread::park_timeout(TICK);
        }
    }

    fn tell_progress(&self, vram_bytes: Option<u64>) {
        let peaks = self.sampler.peaks();
        tell(&Message::Progress {
            done_bytes: self.before_bytes + self.progress.tensor_bytes_done(),
            total_bytes: self.total_bytes,
            layer: self.tracker.layer().to_owned(),
            peak: Point {
                host_bytes: peaks.host.bytes().value(),
                rss_bytes: peaks.rss.bytes().value(),
                vram_bytes,
                split: None,
            },
            seconds: self.start.elapsed().as_secs_f64(),
        });
    }

    fn place(&self) -> Place {
        Place {
            layer: Some(self.tracker.layer().to_owned()),
            tensor: Some(self.tracker.tensor().to_owned()),
            seconds: self.start.elapsed().as_secs_f64(),
        }
    }

    /// What was exceeded before anything was loaded was exceeded at its beginning, however late
    /// this thread comes.
    fn watch_baseline(&mut self) {
        let memory = &self.sampler.baseline().memory;
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
        let peaks = self.sampler.peaks();
        for watch in self.watches {
            let peak = match watch.metric {
                Metric::Host => peaks.host.bytes().value(),
                Metric::Rss => peaks.rss.bytes().value(),
                Metric::File => peaks.file.bytes().value(),
                Metric::Pinned => peaks.pinned.bytes().value().max(Some(self.pinned_bytes)),
                Metric::Vram => vram_bytes,
                _ => continue,
            };
            if !is_known(&self.crossings, *watch) && peak > Some(watch.limit_bytes) {
                self.crossings.push(Crossing { watch: *watch, place: self.place() });
            }
        }
    }
}

fn is_known(crossings: &[Crossing], watch: Watch) -> bool {
    crossings.iter().any(|crossing| {
        crossing.watch.metric == watch.metric && crossing.watch.limit_bytes == watch.limit_bytes
    })
}

/// A peak between two looks of the attendant: the peak's own place is the best there is.
pub(super) fn add_missed(crossings: &mut Vec<Crossing>, watches: &[Watch], summary: &Summary) {
    for watch in watches {
        let peak = match watch.metric {
            Metric::Host => &summary.peak.host,
            Metric::Rss => &summary.peak.rss,
            Metric::File => &summary.peak.file,
            Metric::Pinned => &summary.peak.pinned,
            _ => continue,
        };
        if !is_known(crossings, *watch)
            && peak.bytes().value() > Some(watch.limit_bytes)
            && let Some(place) = place_of(peak)
        {
            crossings.push(Crossing { watch: *watch, place });
        }
    }
}
