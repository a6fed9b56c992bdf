//! The task `Cycle`: load, use, unload, again and again, in one process that measures itself after
//! each cycle.
//!
//! Nothing is kept from one cycle to the next but counters and one sum for each load: what is
//! measured is told to the parent at once, so that the list of measurements is no leak of its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use onelayer::live::{self, MemoryUse};
use onelayer::load::{LoadedLayer, Loader};
use onelayer::{LoadError, Receipt, Target};
use onelayer_probe::{Sampler, SamplerOptions};

use super::protocol::{CycleLoad, Finished, Message, tell};
use super::vram::VramMeter;
use super::{heap, measure};
use crate::inputs::open_checkpoint;
use crate::leak::{CyclePoint, Held};
use crate::library_errors;
use crate::measured::{self, point};
use crate::problem::{Code, Problem};
use crate::report::{Outcome, Place, Point, Run, Samples};

/// How often progress is told.
const TELL_INTERVAL: Duration = Duration::from_millis(100);

/// Runs `count` cycles of `loads` and measures them.
///
/// # Errors
/// Whatever kept the first load from starting. Cycles that began and failed are a [`Finished`] with
/// a problem in it.
pub(super) fn cycle(loads: &[CycleLoad], count: u32, cancel: &AtomicBool) -> Result<Finished, Vec<Problem>> {
    let mut tell_point = |point: CyclePoint| tell(&Message::Cycle(point));
    let mut cycles = Cycles::begin(loads, cancel)?;
    tell(&Message::Started { baseline: Point { vram_bytes: cycles.floor.vram_bytes, ..cycles.baseline() } });
    let ended = cycles.run(count, &mut tell_point, &mut touch);
    cycles.finish(ended)
}

/// Reads every byte of a layer; the sum of the first halves of its tensors' hashes tells one
/// content from another in whatever order layers come.
fn touch(layer: &LoadedLayer) -> Result<u64, LoadError> {
    let mut sum = 0_u64;
    for tensor in layer.tensors() {
        if let Some(hash) = tensor.hash()? {
            let start = hash.to_hex().get(..16).and_then(|start| u64::from_str_radix(start, 16).ok());
            sum = sum.wrapping_add(start.unwrap_or_default());
        }
    }
    Ok(sum)
}

/// What became of the cycles.
enum Ended {
    Completed,
    Cancelled,
    Failed(Problem),
}

/// Uses a layer: returns a sum over its bytes.
type Use<'a> = dyn FnMut(&LoadedLayer) -> Result<u64, LoadError> + 'a;

/// Cycles under way.
struct Cycles<'a> {
    loads: &'a [CycleLoad],
    loaders: Vec<Loader>,
    /// What each load came to the first time.
    sums: Vec<Option<u64>>,
    sampler: Sampler,
    vram: Option<VramMeter>,
    cancel: &'a AtomicBool,
    floor: Held,
    receipt: Receipt,
    done_bytes: u64,
    total_bytes: u64,
    start: Instant,
    told: Instant,
}

impl<'a> Cycles<'a> {
    /// Opens the device, and measures what is there before the first load: a driver's context is no
    /// leak of a load.
    fn begin(loads: &'a [CycleLoad], cancel: &'a AtomicBool) -> Result<Self, Vec<Problem>> {
        let open =
            |load: &CycleLoad| measure::open(&load.load, &load.budgets, &measure::PassTimes::default());
        let loaders =
            loads.iter().map(open).collect::<Result<Vec<Loader>, Problem>>().map_err(|one| vec![one])?;
        let vram = loaders.first().and_then(|loader| VramMeter::open(loader.device()));
        let options = SamplerOptions { timeline_rows: 0, ..SamplerOptions::default() };
        let sampler = Sampler::start(&options).map_err(cannot_measure)?;
        let (now, sums) = (Instant::now(), vec![None; loads.len()]);
        let mut cycles = Self {
            loads,
            loaders,
            sums,
            sampler,
            vram,
            cancel,
            floor: Held::default(),
            receipt: Receipt::default(),
            done_bytes: 0,
            total_bytes: 0,
            start: now,
            told: now,
        };
        cycles.floor = cycles.held();
        Ok(cycles)
    }

    fn baseline(&self) -> Point {
        point(&self.sampler.baseline().memory)
    }

    /// What the process holds now, and what it has on the device.
    fn held(&self) -> Held {
        let mut held = Held::of(&self.sampler.snapshot().memory);
        let live = live::snapshot();
        held.live_bytes = Some(live.allocations().iter().map(|one| one.bytes).sum());
        let is_cuda =
            self.loaders.first().is_some_and(|loader| matches!(loader.device().target(), Target::Cuda(_)));
        if is_cuda {
            // A ring of ours is page-locked; the kernel may or may not count it.
            let rings = live.allocations().iter().filter(|one| one.used_for == MemoryUse::Ring);
            held.pinned_bytes = held.pinned_bytes.max(Some(rings.map(|one| one.bytes).sum()));
        }
        held.vram_bytes = self.vram.as_ref().and_then(VramMeter::after_unload);
        held
    }

    fn run(&mut self, count: u32, tell_point: &mut dyn FnMut(CyclePoint), touch: &mut Use<'_>) -> Ended {
        let each: u64 = self.loads.iter().map(|load| load.tensor_bytes).sum();
        self.total_bytes = each.saturating_mul(u64::from(count));
        tell_point(CyclePoint { number: 0, held: self.floor });
        for number in 1..=u64::from(count) {
            for index in 0..self.loads.len() {
                match self.load_once(index, touch) {
                    Ok(()) => {}
                    Err(Ended::Failed(problem)) => {
                        let place = problem
                            .place
                            .unwrap_or_else(|| self.loads[index].load.path.0.display().to_string());
                        return Ended::Failed(Problem {
                            place: Some(format!("cycle {number}: {place}")),
                            ..problem
                        });
                    }
                    Err(ended) => return ended,
                }
            }
            heap::give_back();
            tell_point(CyclePoint { number, held: self.held() });
        }
        Ended::Completed
    }

    /// Loads, uses and unloads one of them.
    fn load_once(&mut self, index: usize, touch: &mut Use<'_>) -> Result<(), Ended> {
        let loads = self.loads;
        let config = &loads[index].load;
        let map_path = config.layers.as_ref().map(|path| path.0.as_path());
        let failed = |error: LoadError| match error {
            LoadError::Cancelled => Ended::Cancelled,
            error => Ended::Failed(library_errors::load(&error, map_path)),
        };
        let checkpoint = open_checkpoint(&config.path.0, config.opaque_dtypes)
            .map_err(|problems| Ended::Failed(first(problems)))?;
        let mut stream = self.loaders[index].stream(&checkpoint).map_err(failed)?;
        let (mut kept, mut sum) = (Vec::new(), 0_u64);
        for layer in stream.by_ref() {
            let layer = layer.map_err(failed)?;
            if self.cancel.load(Ordering::Relaxed) {
                return Err(Ended::Cancelled);
            }
            sum = sum.wrapping_add(touch(&layer).map_err(failed)?);
            self.done_bytes += layer.tensor_bytes();
            if self.told.elapsed() >= TELL_INTERVAL {
                self.told = Instant::now();
                self.tell_progress(layer.id().as_str());
            }
            if config.window.is_none() {
                kept.push(layer);
            } else {
                if let Some(vram) = &self.vram {
                    vram.layer_end(Place::default);
                }
                self.receipt = std::mem::take(&mut self.receipt).and(layer.unload());
            }
        }
        if let Some(vram) = &self.vram {
            vram.after_load(Place::default);
        }
        self.sampler.marker().sample();
        // What a running stream has back it keeps for its next layer.
        drop(stream);
        for layer in kept {
            self.receipt = std::mem::take(&mut self.receipt).and(layer.unload());
        }
        // Who holds what is not asked for, and would be one entry more each time.
        self.receipt.holders.clear();
        match self.sums[index].replace(sum) {
            Some(before) if before != sum => Err(Ended::Failed(Problem::new(
                Code::LoadFailed,
                "two cycles delivered different bytes: the hashes differ",
            ))),
            _ => Ok(()),
        }
    }

    fn tell_progress(&self, layer: &str) {
        let peaks = self.sampler.peaks();
        let peak = Point {
            host_bytes: peaks.host.bytes().value(),
            rss_bytes: peaks.rss.bytes().value(),
            ..Point::default()
        };
        tell(&Message::Progress {
            done_bytes: self.done_bytes,
            total_bytes: self.total_bytes,
            layer: layer.to_owned(),
            peak,
            seconds: self.start.elapsed().as_secs_f64(),
        });
    }

    /// What they cost at most, and whether that was promised.
    fn finish(self, ended: Ended) -> Result<Finished, Vec<Problem>> {
        let elapsed = self.start.elapsed();
        let after_unload = point(&self.sampler.snapshot().memory);
        let summary = self.sampler.finish().map_err(cannot_measure)?;
        let promised_bytes = self.loads.iter().map(|load| load.promised_bytes).max().unwrap_or(0);
        let mut run = Run {
            strategy: "stream".to_owned(),
            outcome: match &ended {
                Ended::Completed => Outcome::Completed,
                Ended::Cancelled => Outcome::Interrupted,
                Ended::Failed(_) => Outcome::Failed,
            },
            seconds: Some(elapsed.as_secs_f64()),
            baseline: point(&summary.baseline.memory),
            peak: measured::peak(&summary),
            after_unload: Some(after_unload),
            promise: measured::promise_of(&summary, promised_bytes),
            samples: Some(Samples::new(summary.interval_ms, &summary.timeline, false)),
            ..Run::default()
        };
        let mut unavailable = measured::unavailable(&summary);
        if let Some(counted) = self.vram.as_ref().map(VramMeter::finish) {
            run.baseline.vram_bytes = counted.baseline_bytes;
            run.peak.vram_bytes = counted.peak_bytes;
            run.peak.vram_method = counted.method;
            run.vram = counted.vram;
            unavailable.extend(counted.unavailable);
        }
        let unconfirmed_bytes = self.receipt.unconfirmed_bytes + self.receipt.held_bytes;
        let note = (unconfirmed_bytes > 0).then(|| {
            let bytes = onelayer::units::HumanBytes(unconfirmed_bytes);
            format!("of what was unloaded, nobody confirms that {bytes} are back")
        });
        let problem = match ended {
            Ended::Failed(problem) => Some(problem),
            _ => None,
        };
        Ok(Finished { run, unavailable, crossings: Vec::new(), notes: note.into_iter().collect(), problem })
    }
}

fn cannot_measure(error: onelayer_probe::ProbeError) -> Vec<Problem> {
    vec![Problem::new(Code::CannotMeasure, format!("cannot measure: {error}"))]
}

/// The first of several: that is the one that the others follow from.
fn first(problems: Vec<Problem>) -> Problem {
    let none = || Problem::new(Code::LoadFailed, "the checkpoint does not open any more");
    problems.into_iter().next().unwrap_or_else(none)
}

#[cfg(all(test, feature = "cuda"))]
mod tests;
