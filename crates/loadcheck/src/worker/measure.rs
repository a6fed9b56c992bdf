//! The task `Measure`: one load, watched from before the checkpoint is opened until everything is
//! given back.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use onelayer::checkpoint::Checkpoint;
use onelayer::load::{LayerStream, LoadError, LoadReport, LoadedLayer, Loader};
use onelayer::plan::{MemoryTerms, Placement, TermKind};
use onelayer::source::Queueing;
use onelayer::{LoadPlan, Pinning, RingMode};
use onelayer_probe::{Procfs, Sampler, SamplerOptions, Summary};

use super::attendant::{Attendant, add_missed};
use super::deliveries::DeliveryLog;
use super::heap;
use super::protocol::{Crossing, Finished, Message, Watch, tell};
use super::reading;
use super::tracker::Tracker;
use super::verify::{Stopped, Verifier};
use super::vram::{Counted, VramMeter};
use crate::args::Device;
use crate::config::{Budgets, LoadConfig};
use crate::inputs::open_checkpoint;
use crate::library_errors;
use crate::measured::{self, point, split};
use crate::planned::{builder, files};
use crate::problem::{Code, Problem};
use crate::report::{
    self, Deliveries, FileReading, IoCounters, Outcome, Place, Point, QuantisedTensor, Ring, Run, Samples,
    TensorHash, Verified,
};

/// Rows of the timeline, if one is wanted.
pub(super) const TIMELINE_ROWS: usize = 4096;

/// Loads and measures.
///
/// # Errors
/// Whatever kept the load from starting. A load that started and failed is a [`Finished`] with a
/// problem in it.
pub(super) fn measure(
    config: &LoadConfig,
    budgets: &Budgets,
    watches: &[Watch],
    interval_ms: Option<u64>,
    cancel: &AtomicBool,
) -> Result<Finished, Vec<Problem>> {
    // Before the baseline: a compiled pattern is the program's, not the load's, and so is a driver's
    // context, and what it takes to count and to compare.
    let passes = Arc::new(Mutex::new(Vec::with_capacity(usize::try_from(config.passes.passes).unwrap_or(0))));
    let loader = open(config, budgets, &passes).map_err(|problem| vec![problem])?;
    let vram = VramMeter::open(loader.device());
    let verifier = config.verify.then(Verifier::new);
    let mut options = SamplerOptions { timeline_rows: 0, ..SamplerOptions::default() };
    if let Some(interval_ms) = interval_ms {
        options.interval = Duration::from_millis(interval_ms);
        options.timeline_rows = TIMELINE_ROWS;
        vram.iter().for_each(VramMeter::keep_steps);
    }
    let log = interval_ms.map(|_| DeliveryLog::new());
    let sampler = Sampler::start(&options)
        .map_err(|error| vec![Problem::new(Code::CannotMeasure, format!("cannot measure: {error}"))])?;
    let baseline_taken = Instant::now();
    let vram_bytes = vram.as_ref().and_then(VramMeter::baseline);
    tell(&Message::Started { baseline: Point { vram_bytes, ..point(&sampler.baseline().memory) } });
    let load = Load {
        config,
        loader: &loader,
        sampler: &sampler,
        vram: vram.as_ref(),
        watches,
        cancel,
        baseline_taken,
        start: Instant::now(),
    };
    let loaded = load.carry_out(verifier, log)?;
    heap::give_back();
    let vram_bytes = vram.as_ref().and_then(VramMeter::after_unload);
    let after_unload = split(Point { vram_bytes, ..point(&sampler.snapshot().memory) });
    let keeps_timeline = interval_ms.is_some();
    let summary = sampler
        .finish()
        .map_err(|error| vec![Problem::new(Code::CannotMeasure, format!("cannot measure: {error}"))])?;
    let counted = vram.as_ref().map(VramMeter::finish);
    let seen = Seen { summary, counted, after_unload, keeps_timeline, baseline_taken };
    let each = std::mem::take(&mut *note(&passes));
    let passes = config.passes.is_asked().then(|| loaded.passes(config, each));
    let mut finished = loaded.finish(config, budgets, watches, seen);
    finished.run.passes = passes;
    Ok(finished)
}

/// The loader, its device open.
pub(super) fn open(config: &LoadConfig, budgets: &Budgets, passes: &PassTimes) -> Result<Loader, Problem> {
    let map_path = config.layers.as_ref().map(|path| path.0.as_path());
    let mut builder = builder(config, budgets)?;
    if config.passes.is_asked() {
        let passes = Arc::clone(passes);
        builder = builder.on_pass(move |pass| note(&passes).push(pass.into()));
    }
    builder.build().map_err(|error| match (&error, config.device) {
        (LoadError::Device(device), Device::Cuda(ordinal)) => super::device::unusable(ordinal, device),
        _ => library_errors::load(&error, map_path),
    })
}

/// What is heard of passes while they go on.
pub(super) type PassTimes = Arc<Mutex<Vec<report::Pass>>>;

fn note(passes: &PassTimes) -> MutexGuard<'_, Vec<report::Pass>> {
    // Whatever is in it is whole.
    passes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A load about to happen.
struct Load<'a> {
    config: &'a LoadConfig,
    loader: &'a Loader,
    sampler: &'a Sampler,
    vram: Option<&'a VramMeter>,
    watches: &'a [Watch],
    cancel: &'a AtomicBool,
    /// Where the clock of the samples begins.
    baseline_taken: Instant,
    start: Instant,
}

/// A load that happened, and whose memory has been given back.
struct Loaded {
    report: LoadReport,
    memory: MemoryTerms,
    elapsed: Duration,
    cpu_seconds: Option<f64>,
    after_load: Point,
    crossings: Vec<Crossing>,
    failure: Option<Failure>,
    verified: Option<Verified>,
    deliveries: Option<Deliveries>,
    quantised: Vec<QuantisedTensor>,
    /// How each file was to be read, where that was decided.
    files: Vec<FileReading>,
    /// Bytes of all tensors in their files, as often as they were wanted.
    wanted_bytes: u64,
    notes: Vec<String>,
}

impl Load<'_> {
    fn carry_out(
        &self,
        mut verifier: Option<Verifier>,
        mut log: Option<DeliveryLog>,
    ) -> Result<Loaded, Vec<Problem>> {
        let map_path = self.config.layers.as_ref().map(|path| path.0.as_path());
        let checkpoint = open_checkpoint(&self.config.path.0, self.config.opaque_dtypes)?;
        let mut stream =
            self.loader.stream(&checkpoint).map_err(|error| vec![library_errors::load(&error, map_path)])?;
        let plan = Arc::clone(stream.plan());
        let over = AtomicBool::new(false);
        let attendant = self.attendant(&checkpoint, &plan, &stream, &over);
        let deliver = || self.deliver(&mut stream, &checkpoint, verifier.as_mut(), log.as_mut());
        let (delivered, crossings) = attendant.beside(deliver)?;
        let mut notes = fallback_notes(&checkpoint, &stream.report());
        notes.extend(pinning_note(&stream.report()));
        notes.extend(queueing_note(&stream.report()));
        let spent = verifier.as_ref().map(Verifier::spent).filter(|_| !self.config.keeps_all());
        notes.extend(spent.map(verified_between));
        Ok(Loaded {
            report: stream.report(),
            memory: plan.memory().clone(),
            elapsed: delivered.elapsed,
            cpu_seconds: delivered.cpu_seconds,
            after_load: delivered.after_load,
            crossings,
            verified: verifier.filter(|_| delivered.failure.is_none()).map(Verifier::finish),
            failure: delivered.failure,
            deliveries: log.map(|log| log.finish(|index| plan.layers()[index].id.as_str())),
            quantised: lost(&checkpoint, &stream),
            files: files(&checkpoint, &plan),
            wanted_bytes: wanted_bytes(&plan),
            notes,
        })
    }

    /// Takes every layer; keeps them all if the window is all, else holds each as long as an engine
    /// would. Compares them once all are there, or each before it is dropped; that is not part
    /// of the time.
    fn deliver(
        &self,
        stream: &mut LayerStream,
        checkpoint: &Checkpoint,
        mut verifier: Option<&mut Verifier>,
        mut log: Option<&mut DeliveryLog>,
    ) -> Delivered {
        let keep = self.config.keeps_all() && self.config.device != Device::None;
        let plan = Arc::clone(stream.plan());
        let compare = |verifier: &mut Option<&mut Verifier>, index: usize, layer: &LoadedLayer| {
            let Some(verifier) = verifier else { return Ok(()) };
            let planned = &plan.layers()[index];
            verifier.compare(checkpoint, &plan, planned, layer, self.cancel).map_err(Failure::from)
        };
        let mut kept = Vec::new();
        let mut failure = None;
        for layer in stream.by_ref() {
            let taken = layer.map_err(|error| self.failure(&error)).and_then(|layer| {
                if let Some(log) = &mut log {
                    log.note(layer.index(), self.baseline_taken);
                }
                if self.config.hash && layer.pass() == 0 {
                    tell_hashes(&layer).map_err(|error| self.failure(&error))?;
                }
                let index = layer.index();
                if keep {
                    kept.push(layer);
                } else {
                    if let Some(vram) = self.vram {
                        vram.layer_end(|| self.place(layer.id().as_str()));
                    }
                    compare(&mut verifier, index, &layer)?;
                    thread::sleep(self.config.engine_time);
                }
                Ok(())
            });
            if let Err(found) = taken {
                failure = Some(found);
                break;
            }
        }
        let wall = self.start.elapsed();
        let activity = Procfs::default().myself().activity().since(&self.sampler.baseline().activity);
        let cpu_seconds = activity.cpu_seconds.value();
        self.sampler.marker().sample();
        let last = plan.layers().last().map_or("", |layer| layer.id.as_str());
        let vram_bytes = self.vram.and_then(|vram| vram.after_load(|| self.place(last)));
        let after_load = split(Point { vram_bytes, ..point(&self.sampler.snapshot().memory) });
        let compared_between = verifier.as_ref().map_or(Duration::ZERO, |verifier| verifier.spent());
        if failure.is_none() {
            kept.sort_by_key(LoadedLayer::index);
            failure = kept.iter().try_for_each(|layer| compare(&mut verifier, layer.index(), layer)).err();
        }
        drop(kept);
        Delivered { elapsed: wall.saturating_sub(compared_between), cpu_seconds, after_load, failure }
    }

    /// Now, at a layer.
    fn place(&self, layer: &str) -> Place {
        Place { layer: Some(layer.to_owned()), tensor: None, seconds: self.start.elapsed().as_secs_f64() }
    }

    fn failure(&self, error: &LoadError) -> Failure {
        let map_path = self.config.layers.as_ref().map(|path| path.0.as_path());
        match error {
            LoadError::Cancelled => Failure::Cancelled,
            error => Failure::Failed(library_errors::load(error, map_path)),
        }
    }

    fn attendant<'a>(
        &'a self,
        checkpoint: &'a Checkpoint,
        plan: &'a LoadPlan,
        stream: &LayerStream,
        over: &'a AtomicBool,
    ) -> Attendant<'a> {
        Attendant {
            sampler: self.sampler,
            vram: self.vram,
            pinned_bytes: stream.report().pinned_bytes,
            watches: self.watches,
            cancel: self.cancel,
            start: self.start,
            marker: self.sampler.marker(),
            tracker: Tracker::new(checkpoint, plan),
            progress: stream.progress(),
            before_bytes: 0,
            total_bytes: stream.progress().tensor_bytes_total(),
            cancel_handle: stream.cancel_handle(),
            over,
            crossings: Vec::with_capacity(self.watches.len()),
        }
    }
}

/// Bytes that all passes want of the files: of layers that stay, once.
fn wanted_bytes(plan: &LoadPlan) -> u64 {
    let others = plan.layers().iter().filter(|layer| !layer.is_kept);
    let again = others.flat_map(|layer| plan.placements(layer)).map(Placement::source_bytes).sum::<u64>();
    let more = plan.passes().count().map_or(0, |count| count - 1);
    plan.source_bytes().saturating_add(again.saturating_mul(more))
}

impl From<Stopped> for Failure {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Cancelled => Self::Cancelled,
            Stopped::Failed(problem) => Self::Failed(problem),
        }
    }
}

/// What a person should know about a time that was taken with comparisons between the layers.
fn verified_between(spent: Duration) -> String {
    format!(
        "the time leaves out {} of comparing between the layers, in which reading ahead went on: a load without \
         --verify may take longer",
        crate::numbers::seconds(spent.as_secs_f64())
    )
}

/// The hash of every tensor of a layer, as far as its bytes can be had.
pub(super) fn tell_hashes(layer: &LoadedLayer) -> Result<(), LoadError> {
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
    cpu_seconds: Option<f64>,
    after_load: Point,
    failure: Option<Failure>,
}

/// What ended a load before its end.
pub(super) enum Failure {
    Cancelled,
    Failed(Problem),
}

/// What was seen of a load from outside.
struct Seen {
    summary: Summary,
    counted: Option<Counted>,
    after_unload: Point,
    keeps_timeline: bool,
    baseline_taken: Instant,
}

impl Loaded {
    /// What is known of passes, from those that came to their end.
    fn passes(&self, config: &LoadConfig, each: Vec<report::Pass>) -> report::Passes {
        let waits = self.report.waits;
        report::Passes {
            asked: u64::from(config.passes.passes),
            window_bytes: self.memory.bytes_of(TermKind::Window),
            kept_bytes: self.memory.bytes_of(TermKind::KeptLayers),
            engine_seconds: config.engine_time.as_secs_f64(),
            binds: waits.longest().map(|binding| binding.to_string()),
            shares: report::Shares::of(&waits, self.report.elapsed.as_secs_f64()),
            each,
        }
    }

    fn finish(self, config: &LoadConfig, budgets: &Budgets, watches: &[Watch], seen: Seen) -> Finished {
        let problem = match &self.failure {
            Some(Failure::Cancelled) => Err(()),
            Some(Failure::Failed(problem)) => Ok(Some(problem.clone())),
            None => Ok(self.verified.as_ref().and_then(Verified::problem)),
        };
        let outcome = match &problem {
            Ok(None) => Outcome::Completed,
            Ok(Some(_)) => Outcome::Failed,
            Err(()) => Outcome::Interrupted,
        };
        let mut run = self.run(config, budgets, &seen);
        run.outcome = outcome;
        if let Some(counted) = &seen.counted {
            let steps = counted.steps_since(seen.baseline_taken);
            run.samples = run.samples.map(|samples| samples.with_vram(&steps));
        }
        run.peak = self.peak(&seen.summary);
        let mut crossings = self.crossings;
        add_missed(&mut crossings, watches, &seen.summary);
        let mut unavailable = measured::unavailable(&seen.summary);
        if let Some(counted) = seen.counted {
            run.baseline.vram_bytes = counted.baseline_bytes;
            run.peak.vram_bytes = counted.peak_bytes;
            run.peak.vram_method = counted.method;
            run.peak.vram_at = counted.peak_at;
            run.vram = counted.vram;
            unavailable.extend(counted.unavailable);
        }
        Finished { run, unavailable, crossings, notes: self.notes, problem: problem.ok().flatten() }
    }

    /// Everything but its peaks.
    fn run(&self, config: &LoadConfig, budgets: &Budgets, seen: &Seen) -> Run {
        let summary = &seen.summary;
        let wanted_bytes = self.failure.is_none().then_some(self.wanted_bytes);
        let from_storage = summary.activity.read_bytes.value();
        Run {
            strategy: "stream".to_owned(),
            params: Some(config.params(budgets, Some(u64::from(self.memory.ring().readers)))),
            seconds: Some(self.elapsed.as_secs_f64()),
            cpu_seconds: self.cpu_seconds,
            baseline: point(&summary.baseline.memory),
            after_load: Some(self.after_load.clone()),
            after_unload: Some(seen.after_unload.clone()),
            verified: self.verified.clone(),
            quantised: self.quantised.clone(),
            io: IoCounters {
                major_faults: summary.activity.major_faults.value(),
                ..reading::counters(&self.report, from_storage, wanted_bytes, self.files.clone())
            },
            resident_bytes: Some(self.memory.resident_bytes()),
            resident_host_bytes: Some(self.memory.resident_host_bytes()),
            ring: Some(ring_of(&self.report, &self.memory)),
            promise: measured::promise(summary, budgets.host_bytes, self.memory.resident_host_bytes()),
            samples: Some(Samples::new(summary.interval_ms, &summary.timeline, seen.keeps_timeline)),
            deliveries: self.deliveries.clone(),
            ..Run::default()
        }
    }

    /// The highest values of host memory.
    fn peak(&self, summary: &Summary) -> report::Peak {
        let peak = measured::peak(summary);
        report::Peak {
            // Sampled: what was held at the end was held, whether a sample caught it or not.
            host_bytes: peak.host_bytes.max(self.after_load.host_bytes),
            // The kernel may count the ring's pages too: the larger number has them once.
            pinned_bytes: peak.pinned_bytes.max(Some(self.report.pinned_bytes)),
            ..peak
        }
    }
}

/// What quantising lost.
pub(super) fn lost(checkpoint: &Checkpoint, stream: &LayerStream) -> Vec<QuantisedTensor> {
    let errors = stream.progress().quantisation_errors();
    errors.iter().map(|error| QuantisedTensor::new(checkpoint.tensor(error.tensor).name, error)).collect()
}

/// The ring as it was had. A driver that pins less than all of it may leave fewer slots.
pub(super) fn ring_of(report: &LoadReport, memory: &MemoryTerms) -> Ring {
    let shape = memory.ring();
    let slots = match report.pinning {
        Pinning::FewerSlots { slots, .. } => slots,
        _ => shape.slots,
    };
    let mode = match report.ring_mode {
        RingMode::HugePages => "huge_pages",
        _ => "small_pages",
    };
    Ring {
        mode: Some(mode.to_owned()),
        slots: u64::from(slots),
        slot_bytes: shape.slot_bytes,
        pinning: report.pinning.name().to_owned(),
        pinning_reason: report.pinning.reason().map(str::to_owned),
        pinned_bytes: report.pinned_bytes,
    }
}

/// What became of a ring that was not pinned as it should be.
pub(super) fn pinning_note(report: &LoadReport) -> Option<String> {
    let reason = report.pinning.reason()?;
    Some(match &report.pinning {
        Pinning::SlotBySlot { .. } => format!("the ring was pinned slot by slot, not as a whole: {reason}"),
        Pinning::FewerSlots { slots, .. } => {
            format!("only {slots} slots of the ring could be pinned, the rest was left out: {reason}")
        }
        _ => format!("the ring could not be pinned, so copies to the device are slower: {reason}"),
    })
}

/// What became of a queue that is not as it should be.
pub(super) fn queueing_note(report: &LoadReport) -> Option<String> {
    let reason = report.queueing.reason()?;
    Some(match &report.queueing {
        Queueing::Refused { .. } => {
            format!("reads went through no queue, but each through a thread: {reason}")
        }
        _ => format!("reads went through a queue that does not know the ring: {reason}"),
    })
}

pub(super) fn fallback_notes(checkpoint: &Checkpoint, report: &LoadReport) -> Vec<String> {
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
