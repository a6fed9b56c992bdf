//! The task `Imitate`: a load by somebody else's habit, watched as `Measure` watches ours.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use onelayer::checkpoint::{Checkpoint, TensorId};
use onelayer::units::HumanBytes;
use onelayer_probe::{Marker, Procfs, Sampler, SamplerOptions};

use super::heap;
use super::protocol::{Finished, Message, tell};
use crate::args::Device;
use crate::config::{LoadConfig, bad_pattern};
use crate::inputs::open_checkpoint;
use crate::machine;
use crate::measured::{self, point};
use crate::problem::{Code, Problem};
use crate::report::{IoCounters, Outcome, Point, Run, Samples};
use crate::strategies::{self, Follow, Habit, Stop, Strategy};

/// Rows of the timeline, if one is wanted.
const TIMELINE_ROWS: usize = 4096;
/// How often progress is reported.
const TELL_INTERVAL: Duration = Duration::from_millis(100);

/// Loads and measures.
///
/// # Errors
/// Whatever kept the load from starting; [`Code::CannotBeMet`] if it `refuses` what memory cannot
/// hold, and that is so. A load that started and failed is a [`Finished`] with a problem in it.
pub(super) fn imitate(
    config: &LoadConfig,
    habit: Habit,
    refuses: bool,
    interval_ms: Option<u64>,
    cancel: &AtomicBool,
) -> Result<Finished, Vec<Problem>> {
    // Before the baseline: a compiled pattern is the program's.
    let select = config.select.as_deref().map(regex::Regex::new).transpose();
    let select = select.map_err(|error| vec![bad_pattern("--select", &error)])?;
    let mut options = SamplerOptions { timeline_rows: 0, ..SamplerOptions::default() };
    if let Some(interval_ms) = interval_ms {
        options.interval = Duration::from_millis(interval_ms);
        options.timeline_rows = TIMELINE_ROWS;
    }
    let cannot_measure = |error| vec![Problem::new(Code::CannotMeasure, format!("cannot measure: {error}"))];
    let sampler = Sampler::start(&options).map_err(cannot_measure)?;
    tell(&Message::Started { baseline: point(&sampler.baseline().memory) });
    let start = Instant::now();
    let checkpoint = open_checkpoint(&config.path.0, config.opaque_dtypes)?;
    let is_wanted = |name: &str| select.as_ref().is_none_or(|select| select.is_match(name));
    let tensors: Vec<TensorId> =
        checkpoint.tensors().filter(|tensor| is_wanted(tensor.name)).map(|tensor| tensor.id).collect();
    let keeps = config.device != Device::None;
    let needed_bytes =
        strategies::needed_bytes(habit, &checkpoint, &tensors, keeps).map_err(|stop| vec![problem(&stop)])?;
    if refuses {
        fits(needed_bytes)?;
    }
    let mut follower =
        Follower::new(&sampler, cancel, start, total_bytes(&checkpoint, &tensors, needed_bytes, habit));
    let loaded = strategies::load(habit, &checkpoint, &tensors, keeps, &mut follower);
    let elapsed = start.elapsed();
    let activity = Procfs::default().myself().activity().since(&sampler.baseline().activity);
    follower.marker.sample();
    let after_load = point(&sampler.snapshot().memory);
    let (read_bytes, notes) = (follower.done_bytes, follower.notes);
    let stop = loaded.map(drop).err();
    drop((tensors, checkpoint));
    heap::give_back();
    let after_unload = point(&sampler.snapshot().memory);
    let summary = sampler.finish().map_err(cannot_measure)?;
    let mut peak = measured::peak(&summary);
    // Sampled: what was held at the end was held, whether a sample caught it or not.
    peak.host_bytes = peak.host_bytes.max(after_load.host_bytes);
    let run = Run {
        strategy: Strategy::Habit(habit).name().to_owned(),
        outcome: outcome(stop.as_ref()),
        seconds: Some(elapsed.as_secs_f64()),
        cpu_seconds: activity.cpu_seconds.value(),
        baseline: point(&summary.baseline.memory),
        peak,
        after_load: Some(after_load),
        after_unload: Some(after_unload),
        io: IoCounters {
            read_bytes: Some(read_bytes),
            from_cache_bytes: activity.read_bytes.value().map(|storage| read_bytes.saturating_sub(storage)),
            major_faults: activity.major_faults.value(),
            ..IoCounters::default()
        },
        samples: Some(Samples::new(summary.interval_ms, &summary.timeline, interval_ms.is_some())),
        ..Run::default()
    };
    let problem = stop.filter(|stop| !matches!(stop, Stop::Cancelled)).map(|stop| problem(&stop));
    let unavailable = measured::unavailable(&summary);
    Ok(Finished { run, unavailable, crossings: Vec::new(), notes, problem })
}

fn outcome(stop: Option<&Stop>) -> Outcome {
    match stop {
        None => Outcome::Completed,
        Some(Stop::Cancelled) => Outcome::Interrupted,
        Some(_) => Outcome::Failed,
    }
}

/// What a load will move: for whole files, what stands between their tensors as well.
fn total_bytes(checkpoint: &Checkpoint, tensors: &[TensorId], needed_bytes: u64, habit: Habit) -> u64 {
    match habit {
        Habit::Read => needed_bytes,
        _ => tensors.iter().map(|tensor| checkpoint.tensor(*tensor).extent.len_bytes()).sum(),
    }
}

/// Refuses what memory cannot hold: the kernel would end it halfway, and perhaps others with it.
fn fits(needed_bytes: u64) -> Result<(), Vec<Problem>> {
    match machine::memory_available_bytes() {
        Some(available_bytes) if needed_bytes > available_bytes => {
            let (needed, available) = (HumanBytes(needed_bytes), HumanBytes(available_bytes));
            let message = format!("it keeps {needed}, and {available} of memory are available");
            Err(vec![Problem::new(Code::CannotBeMet, message)])
        }
        _ => Ok(()),
    }
}

fn problem(stop: &Stop) -> Problem {
    let code = if matches!(stop, Stop::EndOfFile { .. }) { Code::SourceChanged } else { Code::LoadFailed };
    Problem {
        place: stop.path().map(|path| path.display().to_string()),
        ..Problem::new(code, stop.to_string())
    }
}

/// Passes on how far a load is, and that it is to end.
struct Follower<'a> {
    sampler: &'a Sampler,
    marker: Marker,
    cancel: &'a AtomicBool,
    start: Instant,
    told: Instant,
    place: String,
    done_bytes: u64,
    total_bytes: u64,
    notes: Vec<String>,
}

impl<'a> Follower<'a> {
    fn new(sampler: &'a Sampler, cancel: &'a AtomicBool, start: Instant, total_bytes: u64) -> Self {
        let marker = sampler.marker();
        let (place, notes) = (String::new(), Vec::new());
        Self { sampler, marker, cancel, start, told: start, place, done_bytes: 0, total_bytes, notes }
    }

    fn tell(&mut self) {
        self.told = Instant::now();
        let peaks = self.sampler.peaks();
        tell(&Message::Progress {
            done_bytes: self.done_bytes,
            total_bytes: self.total_bytes,
            layer: self.place.clone(),
            peak: Point {
                host_bytes: peaks.host.bytes().value(),
                rss_bytes: peaks.rss.bytes().value(),
                ..Point::default()
            },
            seconds: self.start.elapsed().as_secs_f64(),
        });
    }
}

impl Follow for Follower<'_> {
    fn enter(&mut self, name: &str) {
        name.clone_into(&mut self.place);
        self.marker.enter_tensor(name);
    }

    fn arrived(&mut self, len_bytes: u64) -> Result<(), Stop> {
        self.done_bytes += len_bytes;
        if self.cancel.load(Ordering::Relaxed) {
            return Err(Stop::Cancelled);
        }
        if self.told.elapsed() >= TELL_INTERVAL || self.done_bytes == self.total_bytes {
            self.tell();
        }
        Ok(())
    }

    fn note(&mut self, note: String) {
        if self.notes.len() < 3 {
            self.notes.push(note);
        }
    }
}
