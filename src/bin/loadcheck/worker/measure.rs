//! The task `Measure`: one load, watched from before the checkpoint is opened until everything is given back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use onelayer::LoadPlan;
use onelayer::checkpoint::Checkpoint;
use onelayer::load::{LayerStream, LoadError, LoadReport, LoadedLayer, Loader};
use onelayer::plan::MemoryTerms;
use onelayer::probe::{Marker, Measured, Peak, ProcessMemory, Sampler, SamplerOptions, Summary};
use onelayer::units::MIB;

use super::child::tell;
use super::heap;
use super::prepare;
use super::protocol::{Crossing, Finished, Message, Watch};
use super::tracker::Tracker;
use super::translate;
use crate::config::{LoadConfig, TargetChoice};
use crate::limits::Metric;
use crate::problem::{Code, Problem};
use crate::report::{IoCounters, Outcome, Place, Point, Promise, Run, Samples, TensorHash, Unavailable};

/// What is promised beside the budget: thread stacks and the allocator's slack.
const SLACK_BYTES: u64 = 16 * MIB;
/// How often the attendant looks at the load.
const TICK: Duration = Duration::from_millis(5);
/// How often progress is reported.
const TELL_INTERVAL: Duration = Duration::from_millis(100);
/// Rows of the timeline, if one is wanted.
const TIMELINE_ROWS: usize = 4096;

/// Loads and measures.
///
/// # Errors
/// Whatever kept the load from starting. A load that started and failed is a [`Finished`] with a problem in it.
pub(super) fn measure(
    config: &LoadConfig,
    budget_bytes: u64,
    watches: &[Watch],
    interval_ms: Option<u64>,
    cancel: &AtomicBool,
) -> Result<Finished, Vec<Problem>> {
    // Built before the baseline: a compiled pattern is the program's, not the load's.
    let loader = prepare::loader(config, budget_bytes).map_err(|problem| vec![problem])?;
    let mut options = SamplerOptions { timeline_rows: 0, ..SamplerOptions::default() };
    if let Some(interval_ms) = interval_ms {
        options.interval = Duration::from_millis(interval_ms);
        options.timeline_rows = TIMELINE_ROWS;
    }
    let sampler = Sampler::start(&options)
        .map_err(|error| vec![Problem::new(Code::CannotMeasure, format!("cannot measure: {error}"))])?;
    tell(&Message::Started { baseline: point(&sampler.baseline().memory) });
    let load = Load { config, loader: &loader, sampler: &sampler, watches, cancel, start: Instant::now() };
    let loaded = load.carry_out()?;
    heap::give_back();
    let after_unload = point(&sampler.snapshot().memory);
    let keeps_timeline = interval_ms.is_some();
    let summary = sampler
        .finish()
        .map_err(|error| vec![Problem::new(Code::CannotMeasure, format!("cannot measure: {error}"))])?;
    Ok(loaded.finish(config, budget_bytes, watches, &summary, after_unload, keeps_timeline))
}

/// A load about to happen.
struct Load<'a> {
    config: &'a LoadConfig,
    loader: &'a Loader,
    sampler: &'a Sampler,
    watches: &'a [Watch],
    cancel: &'a AtomicBool,
    start: Instant,
}

/// A load that happened, and whose memory has been given back.
struct Loaded {
    report: LoadReport,
    memory: MemoryTerms,
    elapsed: Duration,
    after_load: Point,
    crossings: Vec<Crossing>,
    failure: Option<LoadError>,
    notes: Vec<String>,
}

impl Load<'_> {
    fn carry_out(&self) -> Result<Loaded, Vec<Problem>> {
        let map_path = self.config.layers.as_ref().map(|path| path.0.as_path());
        let checkpoint = prepare::open_checkpoint(&self.config.path.0, self.config.opaque_dtypes)?;
        let mut stream =
            self.loader.stream(&checkpoint).map_err(|error| vec![translate::load(&error, map_path)])?;
        let plan = Arc::clone(stream.plan());
        let over = AtomicBool::new(false);
        let (delivered, crossings) = thread::scope(|scope| {
            let attendant = self.attendant(&checkpoint, &plan, &stream, &over);
            let thread = thread::Builder::new().name("attendant".to_owned());
            let attendant = thread.spawn_scoped(scope, move || attendant.run()).map_err(|error| {
                vec![Problem::new(
                    Code::LoadFailed,
                    format!("cannot start a thread beside the load: {error}"),
                )]
            })?;
            let delivered = self.deliver(&mut stream);
            over.store(true, Ordering::Relaxed);
            attendant.thread().unpark();
            Ok::<_, Vec<Problem>>((delivered, attendant.join().unwrap_or_default()))
        })?;
        let notes = fallback_notes(&checkpoint, &stream.report());
        Ok(Loaded {
            report: stream.report(),
            memory: plan.memory().clone(),
            elapsed: delivered.elapsed,
            after_load: delivered.after_load,
            crossings,
            failure: delivered.failure,
            notes,
        })
    }

    /// Takes every layer; keeps them all if the window is all, else drops each at once.
    fn deliver(&self, stream: &mut LayerStream) -> Delivered {
        let keep = self.config.window.is_none() && self.config.target == TargetChoice::Host;
        let mut kept = Vec::new();
        let mut failure = None;
        for layer in stream.by_ref() {
            let layer = match layer {
                Ok(layer) => layer,
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            };
            if self.config.hash
                && let Err(error) = tell_hashes(&layer)
            {
                failure = Some(error);
                break;
            }
            if keep {
                kept.push(layer);
            }
        }
        let elapsed = self.start.elapsed();
        self.sampler.marker().sample();
        let after_load = point(&self.sampler.snapshot().memory);
        drop(kept);
        Delivered { elapsed, after_load, failure }
    }

    fn attendant<'a>(
        &'a self,
        checkpoint: &'a Checkpoint,
        plan: &'a LoadPlan,
        stream: &LayerStream,
        over: &'a AtomicBool,
    ) -> Attendant<'a> {
        Attendant {
            load: self,
            marker: self.sampler.marker(),
            tracker: Tracker::new(checkpoint, plan),
            progress: stream.progress(),
            cancel_handle: stream.cancel_handle(),
            over,
            crossings: Vec::with_capacity(self.watches.len()),
        }
    }
}

/// The hash of every tensor of a layer, as far as its bytes can be had.
fn tell_hashes(layer: &LoadedLayer) -> Result<(), LoadError> {
    for tensor in layer.tensors() {
        if let Some(hash) = tensor.hash()? {
            let name = tensor.name().to_owned();
            tell(&Message::Hash(TensorHash { name, blake3: hash.to_hex().to_string() }));
        }
    }
    Ok(())
}

/// What the caller's side of the load saw.
struct Delivered {
    elapsed: Duration,
    after_load: Point,
    failure: Option<LoadError>,
}

/// A thread beside the load: marks the place, reports progress, notices crossed limits, passes on cancellation.
struct Attendant<'a> {
    load: &'a Load<'a>,
    marker: Marker,
    tracker: Tracker<'a>,
    progress: onelayer::load::Progress,
    cancel_handle: onelayer::load::CancelHandle,
    over: &'a AtomicBool,
    crossings: Vec<Crossing>,
}

impl Attendant<'_> {
    fn run(mut self) -> Vec<Crossing> {
        self.marker.enter_layer(self.tracker.layer());
        self.marker.enter_tensor(self.tracker.tensor());
        let mut told = Instant::now();
        let mut is_cancelled = false;
        loop {
            // Read first: what is done after it is looked at once more.
            let is_over = self.over.load(Ordering::Relaxed);
            if !is_cancelled && self.load.cancel.load(Ordering::Relaxed) {
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
            if !self.load.watches.is_empty() {
                self.watch();
            }
            if is_over || told.elapsed() >= TELL_INTERVAL {
                told = Instant::now();
                self.tell_progress();
            }
            if is_over {
                return self.crossings;
            }
            thread::park_timeout(TICK);
        }
    }

    fn tell_progress(&self) {
        let peaks = self.load.sampler.peaks();
        tell(&Message::Progress {
            done_bytes: self.progress.tensor_bytes_done(),
            total_bytes: self.progress.tensor_bytes_total(),
            layer: self.tracker.layer().to_owned(),
            peak: Point {
                host_bytes: peaks.host.bytes().value(),
                rss_bytes: peaks.rss.bytes().value(),
                vram_bytes: None,
            },
            seconds: self.load.start.elapsed().as_secs_f64(),
        });
    }

    fn watch(&mut self) {
        let peaks = self.load.sampler.peaks();
        for watch in self.load.watches {
            let is_known = self.crossings.iter().any(|crossing| {
                crossing.watch.metric == watch.metric && crossing.watch.limit_bytes == watch.limit_bytes
            });
            let peak = match watch.metric {
                Metric::Host => peaks.host.bytes(),
                Metric::Rss => peaks.rss.bytes(),
                Metric::File => peaks.file.bytes(),
                Metric::Pinned => peaks.pinned.bytes(),
                _ => continue,
            };
            if !is_known && peak.value() > Some(watch.limit_bytes) {
                let place = Place {
                    layer: Some(self.tracker.layer().to_owned()),
                    tensor: Some(self.tracker.tensor().to_owned()),
                    seconds: self.load.start.elapsed().as_secs_f64(),
                };
                self.crossings.push(Crossing { watch: *watch, place });
            }
        }
    }
}

impl Loaded {
    fn finish(
        self,
        config: &LoadConfig,
        budget_bytes: u64,
        watches: &[Watch],
        summary: &Summary,
        after_unload: Point,
        keeps_timeline: bool,
    ) -> Finished {
        let map_path = config.layers.as_ref().map(|path| path.0.as_path());
        let outcome = match &self.failure {
            None => Outcome::Completed,
            Some(LoadError::Cancelled) => Outcome::Interrupted,
            Some(_) => Outcome::Failed,
        };
        let growth_bytes = summary.rss_growth_bytes().value();
        let limit_bytes =
            budget_bytes.saturating_add(SLACK_BYTES).saturating_add(self.memory.resident_host_bytes());
        let promise = growth_bytes.map(|growth_bytes| Promise {
            limit_bytes,
            growth_bytes,
            kept: growth_bytes <= limit_bytes,
        });
        let read_bytes = self.report.read_bytes;
        let from_storage = summary.activity.read_bytes.value();
        let peak = &summary.peak;
        let mut run = Run {
            strategy: "stream".to_owned(),
            params: Some(config.params(budget_bytes, Some(u64::from(self.memory.ring().readers)))),
            outcome,
            seconds: Some(self.elapsed.as_secs_f64()),
            baseline: point(&summary.baseline.memory),
            after_load: Some(self.after_load),
            after_unload: Some(after_unload),
            io: IoCounters {
                read_bytes: Some(read_bytes),
                from_cache_bytes: from_storage.map(|storage| read_bytes.saturating_sub(storage)),
                major_faults: summary.activity.major_faults.value(),
            },
            resident_bytes: Some(self.memory.resident_bytes()),
            promise,
            samples: Some(Samples::new(summary.interval_ms, &summary.timeline, keeps_timeline)),
            ..Run::default()
        };
        // `host` is sampled: what was held at the end was held, whether a sample caught it or not.
        let host_at_end = run.after_load.as_ref().and_then(|point| point.host_bytes);
        run.peak.host_bytes = peak.host.bytes().value().max(host_at_end);
        run.peak.rss_bytes = peak.rss.bytes().value();
        run.peak.anon_bytes = peak.anon.bytes().value();
        run.peak.file_bytes = peak.file.bytes().value();
        run.peak.pinned_bytes = peak.pinned.bytes().value();
        run.peak.at = place(&peak.host);
        run.peak.rss_at = place(&peak.rss);
        let mut crossings = self.crossings;
        add_missed(&mut crossings, watches, summary);
        let unavailable = summary
            .unavailable
            .iter()
            .map(|entry| Unavailable { metric: entry.metric.clone(), reason: entry.reason.clone() });
        Finished {
            run,
            unavailable: unavailable.collect(),
            crossings,
            notes: self.notes,
            problem: self
                .failure
                .filter(|failure| !matches!(failure, LoadError::Cancelled))
                .map(|failure| translate::load(&failure, map_path)),
        }
    }
}

/// A peak between two looks of the attendant: the peak's own place is the best there is.
fn add_missed(crossings: &mut Vec<Crossing>, watches: &[Watch], summary: &Summary) {
    for watch in watches {
        let peak = match watch.metric {
            Metric::Host => &summary.peak.host,
            Metric::Rss => &summary.peak.rss,
            Metric::File => &summary.peak.file,
            Metric::Pinned => &summary.peak.pinned,
            _ => continue,
        };
        let is_known = crossings.iter().any(|crossing| {
            crossing.watch.metric == watch.metric && crossing.watch.limit_bytes == watch.limit_bytes
        });
        if !is_known
            && peak.bytes().value() > Some(watch.limit_bytes)
            && let Some(place) = place(peak)
        {
            crossings.push(Crossing { watch: *watch, place });
        }
    }
}

fn point(memory: &ProcessMemory) -> Point {
    Point { host_bytes: memory.host_bytes.value(), rss_bytes: memory.rss_bytes.value(), vram_bytes: None }
}

fn place(peak: &Measured<Peak>) -> Option<Place> {
    let Measured::Value(peak) = peak else { return None };
    Some(Place {
        layer: peak.at.layer.as_deref().map(str::to_owned),
        tensor: peak.at.tensor.as_deref().map(str::to_owned),
        seconds: peak.at.seconds,
    })
}

fn fallback_notes(checkpoint: &Checkpoint, report: &LoadReport) -> Vec<String> {
    let note = |fallback: &onelayer::source::Fallback| {
        format!(
            "{} was read {} instead of {}: {}",
            checkpoint.shard(fallback.shard).path.display(),
            fallback.to,
            fallback.from,
            fallback.reason
        )
    };
    let mut notes: Vec<String> = report.fallbacks.iter().take(3).map(note).collect();
    let more = report.fallbacks.len().saturating_sub(3);
    if more > 0 {
        notes.push(format!("{more} more files were read in another way than asked for"));
    }
    notes
}
