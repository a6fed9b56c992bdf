//! The task `Measure` with `--device-map`: a load onto several devices, host and disk. One tier
//! after the other, each a stream whose layers are kept until all are there.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use onelayer::checkpoint::Checkpoint;
use onelayer::load::{LoadReport, LoadedLayer};
use onelayer::{Device, LoadPlan, Target};
use onelayer_fit::{DeviceMap, PlacedError, PlacedPlan, Tier, TierLoader};

use super::failure::Failure;
use super::loaded::{Loaded, notes_of, quantised, tell_hashes};
use super::monitor::Monitor;
use super::protocol::{Crossing, Finished, MeasureTask, tell_started};
use super::tiers::{gpus_of, loader, no_device, on_disk, planned_share, problems_of};
use super::verify::Verifier;
use super::vram::{Counted, VramMeter};
use crate::inputs::{open_checkpoint, tier_name};
use crate::library_errors;
use crate::measuring::{Session, split};
use crate::planned::files;
use crate::problem::Problem;
use crate::report::{Place, PlaceShare, QuantisedTensor};

/// A GPU's memory, measured from before the load.
struct Gpu {
    tier: Tier,
    /// Holds the context open, so that it does not count as the load's.
    _device: Device,
    vram: Option<VramMeter>,
}

/// Loads by a map and measures.
///
/// # Errors
/// The load did not start.
pub(super) fn measure(
    task: &MeasureTask,
    map: &DeviceMap,
    cancel: &AtomicBool,
) -> Result<Finished, Vec<Problem>> {
    let one = |problem| vec![problem];
    let open = |gpu: u32| {
        let device = Device::open(Target::Cuda(gpu)).map_err(|error| no_device(gpu, &error))?;
        Ok(Gpu { tier: Tier::Device(gpu), vram: VramMeter::open(&device), _device: device })
    };
    let gpus: Vec<Gpu> = gpus_of(map).into_iter().map(open).collect::<Result<_, _>>().map_err(one)?;
    let verifier = task.load.verify.then(Verifier::new);
    let mut session = Session::start(task.interval_ms).map_err(one)?;
    tell_started(&session, None);
    session.begin_work();
    let load = Load { task, map, gpus: &gpus, session: &session, cancel };
    let mut loaded = load.carry_out(verifier)?;
    let vrams = || gpus.iter().filter_map(|gpu| Some((gpu.tier, gpu.vram.as_ref()?)));
    let measurement = session.finish(|| {
        for (_, vram) in vrams() {
            vram.after_unload();
        }
        None
    });
    let mut unavailable = Vec::new();
    for (tier, gpu) in vrams() {
        let Counted { vram, unavailable: more, .. } = gpu.finish();
        let name = tier_name(tier);
        if let Some(share) = loaded.tiers.iter_mut().find(|share| share.tier == name) {
            share.vram = vram;
        }
        unavailable.extend(more);
    }
    let mut finished = loaded.finish(task, measurement.map_err(one)?, None);
    finished.unavailable.extend(unavailable);
    Ok(finished)
}

/// A load about to happen.
struct Load<'a> {
    task: &'a MeasureTask,
    map: &'a DeviceMap,
    gpus: &'a [Gpu],
    session: &'a Session,
    cancel: &'a AtomicBool,
}

/// The results of the tiers so far.
#[derive(Default)]
struct Done {
    /// The layers of each tier, kept until all are there.
    kept: Vec<(Arc<LoadPlan>, Vec<LoadedLayer>)>,
    /// The counters of all streams together.
    report: Option<LoadReport>,
    done_bytes: u64,
    crossings: Vec<Crossing>,
    quantised: Vec<QuantisedTensor>,
    tiers: Vec<PlaceShare>,
    notes: Vec<String>,
}

impl Load<'_> {
    fn carry_out(&self, mut verifier: Option<Verifier>) -> Result<Loaded, Vec<Problem>> {
        let config = &self.task.load;
        let checkpoint = open_checkpoint(&config.path.0, &config.opening)?;
        let loader = loader(config, self.map, &self.task.budgets, &checkpoint)?;
        let of_error = |error: PlacedError| problems_of(&error, config);
        // For the report only: the loads make their plans when they begin.
        let plan = loader.plan().map_err(of_error)?;
        let mut done = Done::default();
        let mut failure = None;
        for tier in loader.open().map_err(of_error)? {
            failure = self.load_tier(&tier, &checkpoint, &plan, &mut done)?;
            if failure.is_some() {
                break;
            }
        }
        let mut after_load = self.session.loaded(|| {
            let seconds = self.session.start.elapsed().as_secs_f64();
            for vram in self.gpus.iter().filter_map(|gpu| gpu.vram.as_ref()) {
                vram.after_load(|| Place { seconds, ..Place::default() });
            }
            None
        });
        after_load.point = split(after_load.point);
        if let Some(verifier) = verifier.as_mut().filter(|_| failure.is_none()) {
            let mut layers =
                done.kept.iter().flat_map(|(plan, layers)| layers.iter().map(move |one| (plan, one)));
            let compare =
                |(plan, layer): (&Arc<LoadPlan>, _)| verifier.compare(&checkpoint, plan, layer, self.cancel);
            failure = layers.try_for_each(compare).err();
        }
        done.tiers.extend(on_disk(&plan));
        let first = plan.steps().first();
        Ok(Loaded {
            report: done.report,
            memory: first.map(|step| step.plan.memory().clone()),
            resident_bytes: done.tiers.iter().map(|tier| tier.resident_bytes).sum(),
            resident_host_bytes: plan.resident_host_bytes(),
            after_load,
            crossings: done.crossings,
            verified: verifier.filter(|_| failure.is_none()).map(Verifier::finish),
            failure,
            deliveries: None,
            quantised: done.quantised,
            files: first.map(|step| files(&checkpoint, &step.plan)).unwrap_or_default(),
            wanted_bytes: plan.steps().iter().map(|step| step.plan.source_bytes()).sum(),
            tiers: done.tiers,
            notes: done.notes,
        })
    }

    /// Loads one tier, and keeps its layers.
    fn load_tier(
        &self,
        tier: &TierLoader,
        checkpoint: &Checkpoint,
        whole: &PlacedPlan,
        done: &mut Done,
    ) -> Result<Option<Failure>, Vec<Problem>> {
        let begun = Instant::now();
        let rules = self.task.load.layers_path();
        let stream = tier.loader.stream(checkpoint);
        let mut stream = stream.map_err(|error| vec![library_errors::load(&error, rules)])?;
        let plan = Arc::clone(stream.plan());
        let gpu = self.gpus.iter().find(|gpu| gpu.tier == tier.tier);
        let vram = gpu.and_then(|gpu| gpu.vram.as_ref());
        let opened = (checkpoint, &*plan);
        let watches = &self.task.watches;
        let mut monitor = Monitor::new(self.session, opened, &stream, vram, watches, self.cancel);
        monitor.before_bytes = done.done_bytes;
        monitor.total_bytes = whole.tensor_bytes();
        monitor.crossings = std::mem::take(&mut done.crossings);
        // In any order, up to the error that ends the stream.
        let mut layers = Vec::new();
        let take_all = || stream.by_ref().try_for_each(|layer| layer.map(|layer| layers.push(layer)));
        let (mut taken, crossings) = monitor.beside(take_all)?;
        done.crossings = crossings;
        layers.sort_by_key(LoadedLayer::index);
        if self.task.load.hash && taken.is_ok() {
            taken = layers.iter().try_for_each(tell_hashes);
        }
        let report = stream.report();
        for note in notes_of(checkpoint, &report) {
            if !done.notes.contains(&note) {
                done.notes.push(note);
            }
        }
        done.quantised.extend(quantised(checkpoint, &stream));
        done.tiers.push(PlaceShare {
            resident_bytes: layers.iter().map(LoadedLayer::resident_bytes).sum(),
            read_bytes: report.read_bytes,
            seconds: Some(begun.elapsed().as_secs_f64()),
            ..planned_share(tier.tier, &plan)
        });
        done.done_bytes += plan.tensor_bytes();
        done.kept.push((plan, layers));
        match &mut done.report {
            None => done.report = Some(report),
            Some(sum) => add(sum, &report),
        }
        Ok(taken.err().map(|error| Failure::of(&error, rules)))
    }
}

/// Adds the counters of one stream to those of the streams before it.
fn add(sum: &mut LoadReport, report: &LoadReport) {
    sum.read_bytes += report.read_bytes;
    sum.ways.direct_bytes += report.ways.direct_bytes;
    sum.ways.buffered_bytes += report.ways.buffered_bytes;
    sum.ways.mapped_bytes += report.ways.mapped_bytes;
    sum.ways.corrected_bytes += report.ways.corrected_bytes;
    sum.ways.dropped_behind_bytes += report.ways.dropped_behind_bytes;
    sum.pinned_bytes = sum.pinned_bytes.max(report.pinned_bytes);
}
