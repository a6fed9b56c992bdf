//! The task `Measure`: one load, measured from before the checkpoint is opened until everything is
//! given back.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use onelayer::LoadPlan;
use onelayer::checkpoint::Checkpoint;
use onelayer::load::{LayerStream, LoadError, LoadedLayer, Loader, Progress};
use onelayer::plan::{Placement, TermKind};

use super::deliveries::{DeliveryLog, Moved};
use super::device::unusable;
use super::failure::Failure;
use super::loaded::{Loaded, notes_of, quantised, tell_hashes};
use super::monitor::Monitor;
use super::protocol::{Finished, MeasureTask, tell_started};
use super::verify::Verifier;
use super::vram::VramMeter;
use crate::args::Device;
use crate::config::{Budgets, LoadConfig};
use crate::inputs::open_checkpoint;
use crate::library_errors;
use crate::measuring::{AfterLoad, Session, split};
use crate::numbers::seconds;
use crate::planned::{builder, files};
use crate::problem::Problem;
use crate::report::{Pass, Passes, Shares};

/// Loads to one device and measures.
///
/// # Errors
/// The load did not start. A load that started and failed is a [`Finished`] with a problem in it.
pub(super) fn measure(task: &MeasureTask, cancel: &AtomicBool) -> Result<Finished, Vec<Problem>> {
    let config = &task.load;
    let one = |problem| vec![problem];
    // Before the baseline: compiled patterns, a driver's context, and buffers for counting and
    // comparing are the program's, not the load's.
    let passes = Arc::new(Mutex::new(Vec::with_capacity(usize::try_from(config.passes.passes).unwrap_or(0))));
    let loader = open(config, &task.budgets, &passes).map_err(one)?;
    let vram = VramMeter::open(loader.device());
    let verifier = config.verify.then(Verifier::new);
    if task.interval_ms.is_some() {
        vram.iter().for_each(VramMeter::keep_steps);
    }
    let log = task.interval_ms.map(|_| DeliveryLog::new());
    let mut session = Session::start(task.interval_ms).map_err(one)?;
    tell_started(&session, vram.as_ref().and_then(VramMeter::baseline));
    session.begin_work();
    let load = Load { task, session: &session, vram: vram.as_ref(), cancel };
    let (loaded, passes) = load.carry_out(&loader, verifier, log, &passes)?;
    let measurement = session.finish(|| vram.as_ref().and_then(VramMeter::after_unload)).map_err(one)?;
    let mut finished = loaded.finish(task, measurement, vram.as_ref().map(VramMeter::finish));
    finished.run.passes = passes;
    Ok(finished)
}

/// The loader, its device open.
pub(super) fn open(config: &LoadConfig, budgets: &Budgets, passes: &PassTimes) -> Result<Loader, Problem> {
    let mut builder = builder(config, budgets)?;
    if config.passes.is_asked() {
        let passes = Arc::clone(passes);
        builder = builder.on_pass(move |pass| locked(&passes).push(pass.into()));
    }
    builder.build().map_err(|error| match (&error, config.device) {
        (LoadError::Device(device), Device::Cuda(ordinal)) => unusable(ordinal, device),
        _ => library_errors::load(&error, config.layers_path()),
    })
}

/// The passes that have ended.
pub(super) type PassTimes = Arc<Mutex<Vec<Pass>>>;

fn locked(passes: &PassTimes) -> MutexGuard<'_, Vec<Pass>> {
    // Each entry is pushed whole.
    passes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A load about to happen.
struct Load<'a> {
    task: &'a MeasureTask,
    session: &'a Session,
    vram: Option<&'a VramMeter>,
    cancel: &'a AtomicBool,
}

impl Load<'_> {
    fn carry_out(
        &self,
        loader: &Loader,
        mut verifier: Option<Verifier>,
        mut log: Option<DeliveryLog>,
        passes: &PassTimes,
    ) -> Result<(Loaded, Option<Passes>), Vec<Problem>> {
        let config = &self.task.load;
        let checkpoint = open_checkpoint(&config.path.0, &config.opening)?;
        let mut stream = loader
            .stream(&checkpoint)
            .map_err(|error| vec![library_errors::load(&error, config.layers_path())])?;
        let plan = Arc::clone(stream.plan());
        let opened = (&checkpoint, &*plan);
        let monitor = Monitor::new(self.session, opened, &stream, self.vram, &self.task.watches, self.cancel);
        let deliver = || self.deliver(&mut stream, &checkpoint, verifier.as_mut(), log.as_mut());
        let ((after_load, failure), crossings) = monitor.beside(deliver)?;
        let report = stream.report();
        let mut notes = notes_of(&checkpoint, &report);
        let between = verifier.as_ref().map(Verifier::spent).filter(|_| !config.keeps_all());
        notes.extend(between.map(verified_between));
        let memory = plan.memory().clone();
        let passes = config.passes.is_asked().then(|| Passes {
            asked: u64::from(config.passes.passes),
            window_bytes: memory.bytes_of(TermKind::Window),
            kept_bytes: memory.bytes_of(TermKind::KeptLayers),
            engine_seconds: config.engine_time.as_secs_f64(),
            binds: report.waits.longest().map(|binding| binding.to_string()),
            shares: Shares::of(&report.waits, report.elapsed.as_secs_f64()),
            each: std::mem::take(&mut *locked(passes)),
        });
        let loaded = Loaded {
            report: Some(report),
            resident_bytes: memory.resident_bytes(),
            resident_host_bytes: memory.resident_host_bytes(),
            memory: Some(memory),
            after_load,
            crossings,
            verified: verifier.filter(|_| failure.is_none()).map(Verifier::finish),
            failure,
            deliveries: log.map(|log| log.finish(|index| plan.layers()[index].id.as_str())),
            quantised: quantised(&checkpoint, &stream),
            files: files(&checkpoint, &plan),
            wanted_bytes: wanted_bytes(&plan),
            tiers: Vec::new(),
            notes,
        };
        Ok((loaded, passes))
    }

    /// Takes every layer. Keeps them all if the window is all; otherwise holds each as long as an
    /// engine would. `--verify` compares layers at the end, or each before it is dropped; that time
    /// does not count.
    fn deliver(
        &self,
        stream: &mut LayerStream,
        checkpoint: &Checkpoint,
        mut verifier: Option<&mut Verifier>,
        mut log: Option<&mut DeliveryLog>,
    ) -> (AfterLoad, Option<Failure>) {
        let config = &self.task.load;
        let keep = config.keeps_all() && config.device != Device::None;
        let plan = Arc::clone(stream.plan());
        let failed = |error: &LoadError| Failure::of(error, config.layers_path());
        let compare = |verifier: &mut Option<&mut Verifier>, layer: &LoadedLayer| {
            let Some(verifier) = verifier else { return Ok(()) };
            verifier.compare(checkpoint, &plan, layer, self.cancel)
        };
        let (mut kept, progress) = (Vec::new(), stream.progress());
        let mut failure = None;
        for layer in stream.by_ref() {
            let taken = layer.map_err(|error| failed(&error)).and_then(|layer| {
                if let Some(log) = &mut log {
                    let moved = || moved(self.session, &progress);
                    log.note((layer.index(), layer.tensor_bytes()), self.session.baseline_taken, moved);
                }
                if config.hash && layer.pass() == 0 {
                    tell_hashes(&layer).map_err(|error| failed(&error))?;
                }
                if keep {
                    kept.push(layer);
                } else {
                    if let Some(vram) = self.vram {
                        vram.layer_end(|| self.session.place(layer.id().as_str()));
                    }
                    compare(&mut verifier, &layer)?;
                    thread::sleep(config.engine_time);
                }
                Ok(())
            });
            if let Err(found) = taken {
                failure = Some(found);
                break;
            }
        }
        let last = plan.layers().last().map_or("", |layer| layer.id.as_str());
        let vram_bytes = || self.vram.and_then(|vram| vram.after_load(|| self.session.place(last)));
        let mut after_load = self.session.loaded(vram_bytes);
        after_load.point = split(after_load.point);
        let compared_between = verifier.as_ref().map_or(Duration::ZERO, |verifier| verifier.spent());
        after_load.elapsed = after_load.elapsed.saturating_sub(compared_between);
        if failure.is_none() {
            kept.sort_by_key(LoadedLayer::index);
            failure = kept.iter().try_for_each(|layer| compare(&mut verifier, layer)).err();
        }
        (after_load, failure)
    }
}

/// What a load has read so far.
fn moved(session: &Session, progress: &Progress) -> Moved {
    let storage_bytes = session.activity().read_bytes.value();
    Moved { read_bytes: progress.read_bytes(), storage_bytes, ..Moved::default() }
}

/// Bytes that all passes want of the files. Layers that stay count once.
fn wanted_bytes(plan: &LoadPlan) -> u64 {
    let others = plan.layers().iter().filter(|layer| !layer.is_kept);
    let again = others.flat_map(|layer| plan.placements(layer)).map(Placement::source_bytes).sum::<u64>();
    let more = plan.passes().count().map_or(0, |count| count - 1);
    plan.source_bytes().saturating_add(again.saturating_mul(more))
}

/// A note on a time that was taken with comparisons between the layers.
fn verified_between(spent: Duration) -> String {
    format!(
        "the time leaves out {} of comparing between the layers, in which reading ahead went on: a load without \
         --verify may take longer",
        seconds(spent.as_secs_f64())
    )
}
