//! `--device-map`: measures a load onto several devices, host and disk. One place after the other,
//! each a stream whose layers are kept until all are there. What is looked at before is in
//! `places`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use onelayer::checkpoint::Checkpoint;
use onelayer::load::{LoadReport, LoadedLayer};
use onelayer::{Device, LoadError, LoadPlan, Target};
use onelayer_fit::{DeviceMap, Tier};
use onelayer_fit::{PlacedError, PlacedPlan, TierLoader};
use onelayer_probe::{Procfs, Sampler, SamplerOptions, Summary};

use super::attendant::{Attendant, add_missed};
use super::measure::{
    Failure, TIMELINE_ROWS, fallback_notes, lost, pinning_note, queueing_note, ring_of, tell_hashes,
};
use super::protocol::{Crossing, Finished, Message, Watch, tell};
use super::tiers::{gpus_of, loader, no_device, on_disk, planned_share, problems_of};
use super::tracker::Tracker;
use super::verify::Verifier;
use super::vram::{Counted, VramMeter};
use super::{heap, reading};
use crate::config::{Budgets, LoadConfig};
use crate::inputs::open_checkpoint;
use crate::inputs::tier_name;
use crate::library_errors;
use crate::measured::{self, point, split};
use crate::planned::files;
use crate::problem::{Code, Problem};
use crate::report::{
    FileReading, IoCounters, Outcome, Peak, Place, PlaceShare, Point, QuantisedTensor, Run, Samples, Verified,
};

/// A GPU's memory, watched from before the load.
struct Gpu {
    tier: Tier,
    /// Holds the context, so that it is not the load's.
    _device: Device,
    vram: Option<VramMeter>,
}

/// The task `Measure` for a load by a map.
///
/// # Errors
/// Whatever kept the load from starting.
pub(super) fn measure(
    config: &LoadConfig,
    map: &DeviceMap,
    budgets: &Budgets,
    watches: &[Watch],
    interval_ms: Option<u64>,
    cancel: &AtomicBool,
) -> Result<Finished, Vec<Problem>> {
    let open = |gpu: u32| {
        let device = Device::open(Target::Cuda(gpu)).map_err(|error| no_device(gpu, &error))?;
        Ok(Gpu { tier: Tier::Device(gpu), vram: VramMeter::open(&device), _device: device })
    };
    let gpus: Vec<Gpu> = gpus_of(map)
        .into_iter()
        .map(open)
        .collect::<Result<_, _>>()
        .map_err(|problem: Problem| vec![problem])?;
    let verifier = config.verify.then(Verifier::new);
    let mut options = SamplerOptions { timeline_rows: 0, ..SamplerOptions::default() };
    if let Some(interval_ms) = interval_ms {
        options.interval = Duration::from_millis(interval_ms);
        options.timeline_rows = TIMELINE_ROWS;
    }
    let unmeasurable = |error: &dyn std::fmt::Display| {
        vec![Problem::new(Code::CannotMeasure, format!("cannot measure: {error}"))]
    };
    let sampler = Sampler::start(&options).map_err(|error| unmeasurable(&error))?;
    tell(&Message::Started { baseline: point(&sampler.baseline().memory) });
    let load =
        Load { config, map, budgets, gpus: &gpus, sampler: &sampler, watches, cancel, start: Instant::now() };
    let mut loaded = load.carry_out(verifier)?;
    heap::give_back();
    for gpu in gpus.iter().filter_map(|gpu| gpu.vram.as_ref()) {
        gpu.after_unload();
    }
    let after_unload = split(point(&sampler.snapshot().memory));
    let summary = sampler.finish().map_err(|error| unmeasurable(&error))?;
    let mut unavailable = measured::unavailable(&summary);
    for gpu in &gpus {
        let Some(Counted { vram, unavailable: more, .. }) = gpu.vram.as_ref().map(VramMeter::finish) else {
            continue;
        };
        let name = tier_name(gpu.tier);
        if let Some(share) = loaded.places.iter_mut().find(|share| share.tier == name) {
            share.vram = vram;
        }
        unavailable.extend(more);
    }
    let (problem, outcome) = loaded.outcome();
    add_missed(&mut loaded.crossings, watches, &summary);
    let crossings = std::mem::take(&mut loaded.crossings);
    let notes = std::mem::take(&mut loaded.notes);
    let run = Run {
        outcome,
        after_unload: Some(after_unload),
        ..loaded.run(config, budgets, summary, interval_ms.is_some())
    };
    Ok(Finished { run, unavailable, crossings, notes, problem })
}

/// A load about to happen.
struct Load<'a> {
    config: &'a LoadConfig,
    map: &'a DeviceMap,
    budgets: &'a Budgets,
    gpus: &'a [Gpu],
    sampler: &'a Sampler,
    watches: &'a [Watch],
    cancel: &'a AtomicBool,
    start: Instant,
}

/// A load that happened, and whose memory has been given back.
struct Loaded {
    plan: PlacedPlan,
    places: Vec<PlaceShare>,
    reports: Vec<LoadReport>,
    elapsed: Duration,
    cpu_seconds: Option<f64>,
    after_load: Point,
    verified: Option<Verified>,
    failure: Option<Failure>,
    crossings: Vec<Crossing>,
    notes: Vec<String>,
    files: Vec<FileReading>,
    quantised: Vec<QuantisedTensor>,
}

/// The layers of one place, until everything is there.
struct Held {
    plan: Arc<LoadPlan>,
    layers: Vec<LoadedLayer>,
}

impl Load<'_> {
    fn carry_out(&self, mut verifier: Option<Verifier>) -> Result<Loaded, Vec<Problem>> {
        let checkpoint = open_checkpoint(&self.config.path.0, self.config.opaque_dtypes)?;
        let loader = loader(self.config, self.map, self.budgets, &checkpoint)?;
        let of_error = |error: PlacedError| problems_of(&error, self.config);
        // The plans are for the report alone: those of the loads are made when they begin.
        let plan = loader.plan().map_err(of_error)?;
        let mut loaded = Loaded::new(plan, &checkpoint);
        let mut held = Vec::new();
        let mut before_bytes = 0;
        for one in loader.open().map_err(of_error)? {
            let (layers, failure) = self.load_place(&one, &checkpoint, before_bytes, &mut loaded)?;
            before_bytes += layers.plan.tensor_bytes();
            held.push(layers);
            loaded.failure = failure;
            if loaded.failure.is_some() {
                break;
            }
        }
        loaded.elapsed = self.start.elapsed();
        let activity = Procfs::default().myself().activity().since(&self.sampler.baseline().activity);
        loaded.cpu_seconds = activity.cpu_seconds.value();
        self.sampler.marker().sample();
        for gpu in self.gpus.iter().filter_map(|gpu| gpu.vram.as_ref()) {
            gpu.after_load(|| Place { seconds: self.start.elapsed().as_secs_f64(), ..Place::default() });
        }
        loaded.after_load = split(point(&self.sampler.snapshot().memory));
        if let Some(verifier) = verifier.as_mut().filter(|_| loaded.failure.is_none()) {
            loaded.failure = self.compare(verifier, &checkpoint, &held).err();
        }
        loaded.verified = verifier.filter(|_| loaded.failure.is_none()).map(Verifier::finish);
        loaded.places.extend(on_disk(&loaded.plan));
        Ok(loaded)
    }

    /// Loads one place, and keeps its layers.
    fn load_place(
        &self,
        one: &TierLoader,
        checkpoint: &Checkpoint,
        before_bytes: u64,
        loaded: &mut Loaded,
    ) -> Result<(Held, Option<Failure>), Vec<Problem>> {
        let begun = Instant::now();
        let rules = self.config.layers.as_ref().map(|path| path.0.as_path());
        let stream = one.loader.stream(checkpoint);
        let mut stream = stream.map_err(|error| vec![library_errors::load(&error, rules)])?;
        let plan = Arc::clone(stream.plan());
        let over = AtomicBool::new(false);
        let gpu = self.gpus.iter().find(|gpu| gpu.tier == one.tier);
        let attendant = Attendant {
            sampler: self.sampler,
            vram: gpu.and_then(|gpu| gpu.vram.as_ref()),
            pinned_bytes: stream.report().pinned_bytes,
            watches: self.watches,
            cancel: self.cancel,
            start: self.start,
            marker: self.sampler.marker(),
            tracker: Tracker::new(checkpoint, &plan),
            progress: stream.progress(),
            before_bytes,
            total_bytes: loaded.plan.tensor_bytes(),
            cancel_handle: stream.cancel_handle(),
            over: &over,
            crossings: std::mem::take(&mut loaded.crossings),
        };
        // In whatever order they come, up to the error that ends it.
        let mut layers = Vec::new();
        let take_all = || stream.by_ref().try_for_each(|layer| layer.map(|layer| layers.push(layer)));
        let (mut taken, crossings) = attendant.beside(take_all)?;
        loaded.crossings = crossings;
        layers.sort_by_key(LoadedLayer::index);
        if self.config.hash && taken.is_ok() {
            taken = layers.iter().try_for_each(tell_hashes);
        }
        let report = stream.report();
        loaded.note(checkpoint, &report);
        loaded.quantised.extend(lost(checkpoint, &stream));
        loaded.places.push(PlaceShare {
            resident_bytes: layers.iter().map(LoadedLayer::resident_bytes).sum(),
            read_bytes: report.read_bytes,
            seconds: Some(begun.elapsed().as_secs_f64()),
            ..planned_share(one.tier, &plan)
        });
        loaded.reports.push(report);
        let failure = taken.err().map(|error| match error {
            LoadError::Cancelled => Failure::Cancelled,
            error => Failure::Failed(library_errors::load(&error, rules)),
        });
        Ok((Held { plan, layers }, failure))
    }

    fn compare(
        &self,
        verifier: &mut Verifier,
        checkpoint: &Checkpoint,
        held: &[Held],
    ) -> Result<(), Failure> {
        for Held { plan, layers } in held {
            for layer in layers {
                let planned = &plan.layers()[layer.index()];
                verifier.compare(checkpoint, plan, planned, layer, self.cancel)?;
            }
        }
        Ok(())
    }
}

impl Loaded {
    fn new(plan: PlacedPlan, checkpoint: &Checkpoint) -> Self {
        let files = plan.steps().first().map(|step| files(checkpoint, &step.plan));
        Self {
            plan,
            places: Vec::new(),
            reports: Vec::new(),
            elapsed: Duration::ZERO,
            cpu_seconds: None,
            after_load: Point::default(),
            verified: None,
            failure: None,
            crossings: Vec::new(),
            notes: Vec::new(),
            files: files.unwrap_or_default(),
            quantised: Vec::new(),
        }
    }

    /// What a person should know of one place's load; once, if it is the same everywhere.
    fn note(&mut self, checkpoint: &Checkpoint, report: &LoadReport) {
        let notes = fallback_notes(checkpoint, report).into_iter();
        for note in notes.chain(pinning_note(report)).chain(queueing_note(report)) {
            if !self.notes.contains(&note) {
                self.notes.push(note);
            }
        }
    }

    fn outcome(&self) -> (Option<Problem>, Outcome) {
        match &self.failure {
            Some(Failure::Cancelled) => (None, Outcome::Interrupted),
            Some(Failure::Failed(problem)) => (Some(problem.clone()), Outcome::Failed),
            None => match self.verified.as_ref().and_then(Verified::problem) {
                Some(problem) => (Some(problem), Outcome::Failed),
                None => (None, Outcome::Completed),
            },
        }
    }

    /// All loads together, as if they were one.
    fn whole(&self) -> Option<LoadReport> {
        let mut reports = self.reports.iter();
        let mut whole = reports.next()?.clone();
        for report in reports {
            whole.read_bytes += report.read_bytes;
            whole.ways.direct_bytes += report.ways.direct_bytes;
            whole.ways.buffered_bytes += report.ways.buffered_bytes;
            whole.ways.mapped_bytes += report.ways.mapped_bytes;
            whole.ways.corrected_bytes += report.ways.corrected_bytes;
            whole.ways.dropped_behind_bytes += report.ways.dropped_behind_bytes;
            whole.pinned_bytes = whole.pinned_bytes.max(report.pinned_bytes);
        }
        Some(whole)
    }

    fn run(self, config: &LoadConfig, budgets: &Budgets, summary: Summary, keeps_timeline: bool) -> Run {
        let first = self.plan.steps().first().map(|step| step.plan.memory());
        let whole = self.whole();
        let is_whole = self.failure.is_none();
        let sources: u64 = self.plan.steps().iter().map(|step| step.plan.source_bytes()).sum();
        let from_storage = summary.activity.read_bytes.value();
        let io = whole.as_ref().map_or_else(IoCounters::default, |whole| IoCounters {
            major_faults: summary.activity.major_faults.value(),
            ..reading::counters(whole, from_storage, is_whole.then_some(sources), self.files.clone())
        });
        let resident_bytes = self.places.iter().map(|place| place.resident_bytes).sum();
        let host_bytes = self.plan.resident_host_bytes();
        let peak = measured::peak(&summary);
        let pinned_bytes = whole.as_ref().map(|whole| whole.pinned_bytes);
        Run {
            strategy: "stream".to_owned(),
            params: Some(config.params(budgets, first.map(|memory| u64::from(memory.ring().readers)))),
            seconds: Some(self.elapsed.as_secs_f64()),
            cpu_seconds: self.cpu_seconds,
            baseline: point(&summary.baseline.memory),
            peak: Peak {
                host_bytes: peak.host_bytes.max(self.after_load.host_bytes),
                pinned_bytes: peak.pinned_bytes.max(pinned_bytes),
                ..peak
            },
            after_load: Some(self.after_load),
            verified: self.verified,
            quantised: self.quantised,
            io,
            resident_bytes: Some(resident_bytes),
            resident_host_bytes: Some(host_bytes),
            places: self.places,
            ring: whole.as_ref().zip(first).map(|(whole, memory)| ring_of(whole, memory)),
            promise: measured::promise(&summary, budgets.host_bytes, host_bytes),
            samples: Some(Samples::new(summary.interval_ms, &summary.timeline, keeps_timeline)),
            ..Run::default()
        }
    }
}
