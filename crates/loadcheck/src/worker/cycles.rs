//! The task `Cycle`: load, use, unload, again and again, in one process that measures itself after
//! each cycle.
//!
//! Nothing is kept from one cycle to the next but counters and one sum for each load: what is
//! measured is told to the parent at once, so that the list of measurements is no leak of its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use onelayer::live::{self, MemoryUse};
use onelayer::load::{LoadedLayer, Loader};
use onelayer::units::HumanBytes;
use onelayer::{LoadError, Receipt, Target};

use super::failure::{Failure, outcome_of};
use super::measure;
use super::protocol::{CycleLoad, Finished, Message, TELL_INTERVAL, tell, tell_progress, tell_started};
use super::vram::VramMeter;
use crate::heap;
use crate::inputs::open_checkpoint;
use crate::leak::{CyclePoint, Held};
use crate::measuring::Session;
use crate::problem::{Code, Problem};
use crate::report::{Place, Run};

/// Runs `count` cycles of `loads` and measures them.
///
/// # Errors
/// Whatever kept the first load from starting. Cycles that began and failed are a [`Finished`] with
/// a problem in it.
pub(super) fn cycle(loads: &[CycleLoad], count: u32, cancel: &AtomicBool) -> Result<Finished, Vec<Problem>> {
    let mut tell_point = |point: CyclePoint| tell(&Message::Cycle(point));
    let mut cycles = Cycles::begin(loads, cancel)?;
    tell_started(&cycles.session, cycles.floor.vram_bytes);
    let ended = cycles.run(count, &mut tell_point, &mut touch);
    cycles.finish(ended)
}

/// Reads every byte of a layer; the sum of the first halves of its tensors' hashes tells one
/// content from another in any order of layers.
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

/// Uses a layer: returns a sum over its bytes.
type Use<'a> = dyn FnMut(&LoadedLayer) -> Result<u64, LoadError> + 'a;

/// Cycles under way.
struct Cycles<'a> {
    loads: &'a [CycleLoad],
    loaders: Vec<Loader>,
    /// The sum of each load in its first cycle.
    sums: Vec<Option<u64>>,
    session: Session,
    vram: Option<VramMeter>,
    cancel: &'a AtomicBool,
    floor: Held,
    receipt: Receipt,
    done_bytes: u64,
    total_bytes: u64,
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
        let session = Session::start(None).map_err(|one| vec![one])?;
        let (told, sums) = (session.start, vec![None; loads.len()]);
        let mut cycles = Self {
            loads,
            loaders,
            sums,
            session,
            vram,
            cancel,
            floor: Held::default(),
            receipt: Receipt::default(),
            done_bytes: 0,
            total_bytes: 0,
            told,
        };
        cycles.floor = cycles.held();
        Ok(cycles)
    }

    /// Memory of the process now, on the host and on the device.
    fn held(&self) -> Held {
        let mut held = Held::of(&self.session.sampler.snapshot().memory);
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

    fn run(
        &mut self,
        count: u32,
        tell_point: &mut dyn FnMut(CyclePoint),
        touch: &mut Use<'_>,
    ) -> Result<(), Failure> {
        let each: u64 = self.loads.iter().map(|load| load.tensor_bytes).sum();
        self.total_bytes = each.saturating_mul(u64::from(count));
        tell_point(CyclePoint { number: 0, held: self.floor });
        for number in 1..=u64::from(count) {
            for index in 0..self.loads.len() {
                self.load_once(index, touch).map_err(|failure| match failure {
                    Failure::Cancelled => Failure::Cancelled,
                    Failure::Failed(problem) => {
                        let path = || self.loads[index].load.path.0.display().to_string();
                        let place = problem.place.unwrap_or_else(path);
                        Failure::Failed(Problem {
                            place: Some(format!("cycle {number}: {place}")),
                            ..problem
                        })
                    }
                })?;
            }
            heap::give_back();
            tell_point(CyclePoint { number, held: self.held() });
        }
        Ok(())
    }

    /// Loads, uses and unloads one of them.
    fn load_once(&mut self, index: usize, touch: &mut Use<'_>) -> Result<(), Failure> {
        let loads = self.loads;
        let config = &loads[index].load;
        let failed = |error: LoadError| Failure::of(&error, config.layers_path());
        let checkpoint = open_checkpoint(&config.path.0, &config.opening)
            .map_err(|problems| Failure::Failed(first(problems)))?;
        let mut stream = self.loaders[index].stream(&checkpoint).map_err(failed)?;
        let (mut kept, mut sum) = (Vec::new(), 0_u64);
        for layer in stream.by_ref() {
            let layer = layer.map_err(failed)?;
            if self.cancel.load(Ordering::Relaxed) {
                return Err(Failure::Cancelled);
            }
            sum = sum.wrapping_add(touch(&layer).map_err(failed)?);
            self.done_bytes += layer.tensor_bytes();
            if self.told.elapsed() >= TELL_INTERVAL {
                self.told = Instant::now();
                let bytes = (self.done_bytes, self.total_bytes);
                tell_progress(&self.session, bytes, layer.id().as_str(), None);
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
        self.session.sampler.marker().sample();
        // What a running stream has back it keeps for its next layer.
        drop(stream);
        for layer in kept {
            self.receipt = std::mem::take(&mut self.receipt).and(layer.unload());
        }
        // Who holds what is not asked for, and would be one entry more each time.
        self.receipt.holders.clear();
        match self.sums[index].replace(sum) {
            Some(before) if before != sum => Err(Failure::Failed(Problem::new(
                Code::LoadFailed,
                "two cycles delivered different bytes: the hashes differ",
            ))),
            _ => Ok(()),
        }
    }

    /// The most that the cycles held, against what was promised.
    fn finish(self, ended: Result<(), Failure>) -> Result<Finished, Vec<Problem>> {
        let elapsed = self.session.start.elapsed();
        let measurement = self.session.finish(|| None).map_err(|one| vec![one])?;
        let promised_bytes = self.loads.iter().map(|load| load.promised_bytes).max().unwrap_or(0);
        let (outcome, problem) = outcome_of(ended.err());
        let mut run = Run {
            outcome,
            promise: measurement.promise(promised_bytes),
            ..measurement.run("stream", elapsed, None)
        };
        let mut unavailable = measurement.unavailable();
        if let Some(counted) = self.vram.as_ref().map(VramMeter::finish) {
            counted.put_into(&mut run, &mut unavailable);
            // No layer of a cycle is told to the meter.
            run.peak.vram_at = None;
        }
        let unconfirmed_bytes = self.receipt.unconfirmed_bytes + self.receipt.held_bytes;
        let note = (unconfirmed_bytes > 0).then(|| {
            let bytes = HumanBytes(unconfirmed_bytes);
            format!("{bytes} of the unloaded memory are not confirmed as returned")
        });
        Ok(Finished { run, unavailable, crossings: Vec::new(), notes: note.into_iter().collect(), problem })
    }
}

/// The first of several: that is the one that the others follow from.
fn first(problems: Vec<Problem>) -> Problem {
    let none = || Problem::new(Code::LoadFailed, "the checkpoint does not open any more");
    problems.into_iter().next().unwrap_or_else(none)
}

#[cfg(all(test, feature = "cuda"))]
mod tests;
