//! `--device-map`: prepares and measures a load onto several devices, host and disk. One place after the other, each a stream whose layers
//! are kept until all are there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use onelayer::checkpoint::Checkpoint;
use onelayer::fit::{DeviceMap, Tier};
use onelayer::layers::Layers;
use onelayer::load::{LoadReport, LoadedLayer};
use onelayer::placed::{PlacedError, PlacedLoader, PlacedPlan, TierLoader};
use onelayer::probe::{Procfs, Sampler, SamplerOptions, Summary};
use onelayer::units::HumanBytes;
use onelayer::{Device, LoadError, LoadPlan, Target};

use super::attendant::{Attendant, add_missed};
use super::child::tell;
use super::measure::{
    Failure, TIMELINE_ROWS, fallback_notes, pinning_note, queueing_note, ring_of, tell_hashes,
};
use super::protocol::{Checked, Crossing, Finished, Message, Watch};
use super::tracker::Tracker;
use super::verify::Verifier;
use super::vram::{Counted, VramMeter};
use super::{device, heap, prepare, reading, translate};
use crate::args::{CacheArg, Device as Asked};
use crate::config::{Budgets, LoadConfig};
use crate::device_map::{config_beside, tier_name};
use crate::measured::{self, point, split};
use crate::problem::{Code, Problem};
use crate::report::{IoCounters, Outcome, PlaceShare, Plan, Point, Run, Samples, Verified};

/// What is wrong is found at the flag.
const FLAG: &str = "--device-map";

/// The task `Prepare` for a load by a map.
///
/// # Errors
/// Devices that are not there, a map that does not fit the checkpoint, places that are too small: as far as they can be told
/// together.
pub(super) fn prepare(
    config: &LoadConfig,
    map: &DeviceMap,
    has_source: bool,
    cache: Option<CacheArg>,
    cancel: &AtomicBool,
) -> Result<Checked, Vec<Problem>> {
    let mut problems = Vec::new();
    if cache.is_none() {
        let looked = gpus_of(map).into_iter().map(|gpu| device::look_at(gpu).map_err(|error| (gpu, error)));
        let (there, missing): (Vec<_>, Vec<_>) = looked.partition(Result::is_ok);
        let gpus = there.into_iter().flatten().filter_map(|decided| decided.gpu).collect();
        tell(&Message::Decided { device: Asked::Host, gpus });
        problems
            .extend(missing.into_iter().filter_map(Result::err).map(|(gpu, error)| no_device(gpu, &error)));
    }
    if !has_source {
        return Err(problems);
    }
    let map_path = config.layers.as_ref().map(|path| path.0.as_path());
    let one = |problem| vec![problem];
    let planned = prepare::open_checkpoint(&config.path.0, config.opaque_dtypes).and_then(|checkpoint| {
        let rules = prepare::layer_map(map_path).map_err(one)?;
        let layers = Layers::group_with(&checkpoint, &rules)
            .map_err(|error| one(translate::layers(&error, map_path)))?;
        let context = prepare::context_of(&checkpoint, &layers);
        let budgets = config.budgets(&context).map_err(one)?;
        let loader = loader(config, map, &budgets, &checkpoint)?;
        let plan = loader.plan().map_err(|error| problems_of(&error, config))?;
        Ok((checkpoint, layers, context, budgets, loader, plan))
    });
    let (checkpoint, layers, context, budgets, loader, plan) = match (planned, problems.is_empty()) {
        (Ok(planned), true) => planned,
        (planned, _) => {
            problems.extend(planned.err().unwrap_or_default());
            return Err(problems);
        }
    };
    let plan = derived(&checkpoint, &plan, config, &budgets).map_err(one)?;
    if cache.is_none() {
        loader.open().map_err(|error| problems_of(&error, config))?;
    }
    fits_the_host(&plan).map_err(one)?;
    let mut notes = checkpoint.notes().to_vec();
    let cached_share = match cache {
        None | Some(CacheArg::Asis) => None,
        Some(state) => super::cache::bring_about(&checkpoint, state, cancel, &mut notes),
    };
    let source = prepare::describe(&checkpoint, &layers);
    Ok(Checked { source, plan, budgets, context, cached_share, notes })
}

/// The GPUs that a map names, by number.
fn gpus_of(map: &DeviceMap) -> Vec<u32> {
    let gpu = |(_, tier): &(String, Tier)| match tier {
        Tier::Device(gpu) => Some(*gpu),
        _ => None,
    };
    let mut gpus: Vec<u32> = map.entries().iter().filter_map(gpu).collect();
    gpus.sort_unstable();
    gpus.dedup();
    gpus
}

fn no_device(gpu: u32, error: &dyn std::error::Error) -> Problem {
    let message = format!("cannot use GPU {gpu} of the device map: {}", translate::chain(error));
    Problem::new(Code::NoDevice, message)
        .at(FLAG)
        .help("`loadcheck plan --vram` finds places on the GPUs that there are")
}

/// The loader, its devices not yet open.
fn loader(
    config: &LoadConfig,
    map: &DeviceMap,
    budgets: &Budgets,
    checkpoint: &Checkpoint,
) -> Result<PlacedLoader, Vec<Problem>> {
    let one = |problem| vec![problem];
    let settings = prepare::builder(config, budgets).map_err(one)?;
    let model = config_beside(&config.path.0).map_err(one)?.map(|(_, model)| model);
    PlacedLoader::new(settings, map, checkpoint, model.as_ref()).map_err(|error| problems_of(&error, config))
}

fn problems_of(error: &PlacedError, config: &LoadConfig) -> Vec<Problem> {
    let rules = config.layers.as_ref().map(|path| path.0.as_path());
    match error {
        PlacedError::Map { faults } => {
            faults.iter().map(|fault| Problem::new(Code::DeviceMap, fault.to_string()).at(FLAG)).collect()
        }
        PlacedError::NoDevice { device, source } => vec![no_device(*device, source)],
        PlacedError::DeviceTooSmall { .. } => {
            vec![Problem::new(Code::CannotBeMet, error.to_string()).at(FLAG)]
        }
        PlacedError::Load { source, .. } | PlacedError::Checkpoint(source) => {
            vec![translate::load(source, rules)]
        }
        other => vec![Problem::new(Code::LoadFailed, translate::chain(other))],
    }
}

/// The plan as a report has it: the first place's, with the sums of all.
fn derived(
    checkpoint: &Checkpoint,
    plan: &PlacedPlan,
    config: &LoadConfig,
    budgets: &Budgets,
) -> Result<Plan, Problem> {
    let Some(first) = plan.steps().first() else {
        let message = "the device map leaves everything on the disk: there is nothing to load";
        return Err(Problem::new(Code::CannotBeMet, message).at(FLAG));
    };
    let sum = |of: &dyn Fn(&LoadPlan) -> u64| plan.steps().iter().map(|step| of(&step.plan)).sum::<u64>();
    Ok(Plan {
        host_bytes: plan.budgeted_bytes(),
        resident_bytes: Some(sum(&|plan| plan.memory().resident_bytes())),
        resident_host_bytes: Some(plan.resident_host_bytes()),
        tensor_bytes: plan.tensor_bytes(),
        reads: sum(&|plan| count(plan.reads().len())),
        read_bytes: plan.read_bytes(),
        over_read_bytes: sum(&LoadPlan::over_read_bytes),
        jumps: sum(&LoadPlan::jumps),
        places: plan
            .steps()
            .iter()
            .map(|step| planned_place(step.tier, &step.plan))
            .chain(on_disk(plan))
            .collect(),
        ..prepare::derived(checkpoint, &first.plan, config, budgets)
    })
}

fn planned_place(tier: Tier, plan: &LoadPlan) -> PlaceShare {
    PlaceShare {
        tier: tier_name(tier),
        layers: count(plan.layers().len()),
        tensor_bytes: plan.tensor_bytes(),
        resident_bytes: plan.memory().resident_bytes(),
        read_bytes: plan.aligned_read_bytes(),
        ..PlaceShare::default()
    }
}

fn on_disk(plan: &PlacedPlan) -> Option<PlaceShare> {
    let disk = plan.disk();
    (disk.tensors > 0).then(|| PlaceShare {
        tier: tier_name(Tier::Disk),
        layers: count(disk.layers.len()),
        tensor_bytes: disk.tensor_bytes,
        ..PlaceShare::default()
    })
}

/// Refuses what the machine cannot hold: the kernel would end it halfway.
fn fits_the_host(plan: &Plan) -> Result<(), Problem> {
    let resident_bytes = plan.resident_host_bytes.unwrap_or(0);
    let needed_bytes = resident_bytes.saturating_add(plan.host_bytes);
    match crate::machine::memory_available_bytes() {
        Some(available_bytes) if resident_bytes > 0 && needed_bytes > available_bytes => {
            let (needed, available) = (HumanBytes(needed_bytes), HumanBytes(available_bytes));
            let message =
                format!("the layers on the host need {needed}, and {available} of memory are available");
            Err(Problem::new(Code::CannotBeMet, message).at(FLAG).help("put more on GPUs or on the disk"))
        }
        _ => Ok(()),
    }
}

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
    files: Vec<crate::report::FileReading>,
}

/// The layers of one place, until everything is there.
struct Held {
    plan: Arc<LoadPlan>,
    layers: Vec<LoadedLayer>,
}

impl Load<'_> {
    fn carry_out(&self, mut verifier: Option<Verifier>) -> Result<Loaded, Vec<Problem>> {
        let checkpoint = prepare::open_checkpoint(&self.config.path.0, self.config.opaque_dtypes)?;
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
            gpu.after_load(|| crate::report::Place {
                seconds: self.start.elapsed().as_secs_f64(),
                ..crate::report::Place::default()
            });
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
        let mut stream = stream.map_err(|error| vec![translate::load(&error, rules)])?;
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
        let (taken, crossings) = thread::scope(|scope| {
            let attendant = thread::Builder::new()
                .name("attendant".to_owned())
                .spawn_scoped(scope, move || attendant.run())
                .map_err(|error| {
                    let message = format!("cannot start a thread beside the load: {error}");
                    vec![Problem::new(Code::LoadFailed, message)]
                })?;
            let mut layers = Vec::new();
            let taken = stream.by_ref().try_for_each(|layer| layer.map(|layer| layers.push(layer)));
            over.store(true, Ordering::Relaxed);
            attendant.thread().unpark();
            Ok::<_, Vec<Problem>>(((layers, taken), attendant.join().unwrap_or_default()))
        })?;
        loaded.crossings = crossings;
        let (mut layers, mut taken) = taken;
        layers.sort_by_key(LoadedLayer::index);
        if self.config.hash && taken.is_ok() {
            taken = layers.iter().try_for_each(tell_hashes);
        }
        let report = stream.report();
        loaded.note(checkpoint, &report);
        loaded.places.push(PlaceShare {
            resident_bytes: layers.iter().map(LoadedLayer::resident_bytes).sum(),
            read_bytes: report.read_bytes,
            seconds: Some(begun.elapsed().as_secs_f64()),
            ..planned_place(one.tier, &plan)
        });
        loaded.reports.push(report);
        let failure = taken.err().map(|error| match error {
            LoadError::Cancelled => Failure::Cancelled,
            error => Failure::Failed(translate::load(&error, rules)),
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
        let files = plan.steps().first().map(|step| reading::files(checkpoint, &step.plan));
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
            peak: crate::report::Peak {
                host_bytes: peak.host_bytes.max(self.after_load.host_bytes),
                pinned_bytes: peak.pinned_bytes.max(pinned_bytes),
                ..peak
            },
            after_load: Some(self.after_load),
            verified: self.verified,
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

fn count(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
