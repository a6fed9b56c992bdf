//! The task `MeasureSimple`: a load by a simple strategy, measured as `Measure` measures ours.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use onelayer::checkpoint::TensorId;

use super::failure::{Failure, outcome_of};
use super::protocol::{Finished, TELL_INTERVAL, tell_progress, tell_started};
use crate::args::Device;
use crate::config::{LoadConfig, bad_pattern};
use crate::inputs::open_checkpoint;
use crate::machine::shortage;
use crate::measuring::Session;
use crate::problem::{Code, Problem};
use crate::report::{IoCounters, Run};
use crate::strategies::{self, Event, SimpleStrategy, Strategy, StrategyError};

/// Notes that are kept.
const NOTES_MAX: usize = 3;

/// Loads and measures.
///
/// # Errors
/// The load did not start; [`Code::CannotBeMet`] if it `refuses` what memory cannot hold. A load
/// that started and failed is a [`Finished`] with a problem in it.
pub(super) fn measure(
    config: &LoadConfig,
    strategy: SimpleStrategy,
    refuses: bool,
    interval_ms: Option<u64>,
    cancel: &AtomicBool,
) -> Result<Finished, Vec<Problem>> {
    let one = |problem| vec![problem];
    // Before the baseline: a compiled pattern is the program's.
    let select = config.select.as_deref().map(regex::Regex::new).transpose();
    let select = select.map_err(|error| one(bad_pattern("--select", &error)))?;
    let mut session = Session::start(interval_ms).map_err(one)?;
    tell_started(&session, None);
    session.begin_work();
    let checkpoint = open_checkpoint(&config.path.0, &config.opening)?;
    let is_wanted = |name: &str| select.as_ref().is_none_or(|select| select.is_match(name));
    let tensors: Vec<TensorId> =
        checkpoint.tensors().filter(|tensor| is_wanted(tensor.name)).map(|tensor| tensor.id).collect();
    let keeps = config.device != Device::None;
    let needed_bytes = strategies::needed_bytes(strategy, &checkpoint, &tensors, keeps)
        .map_err(|error| one(problem_of(&error)))?;
    if let Some(shortage) = shortage(needed_bytes).filter(|_| refuses) {
        return Err(one(Problem::new(Code::CannotBeMet, format!("it keeps {shortage}"))));
    }
    let total_bytes = match strategy {
        // Whole files, with the bytes between their tensors.
        SimpleStrategy::Read => needed_bytes,
        _ => tensors.iter().map(|tensor| checkpoint.tensor(*tensor).len_bytes()).sum(),
    };
    let mut observer = Observer::new(&session, cancel, total_bytes);
    let loaded = strategies::load(strategy, &checkpoint, &tensors, keeps, &mut |event| observer.hear(event));
    let after_load = session.loaded(|| None);
    let Observer { read_bytes, notes, .. } = observer;
    let failure = loaded.map(drop).err().map(|error| match error {
        StrategyError::Cancelled => Failure::Cancelled,
        error => Failure::Failed(problem_of(&error)),
    });
    drop((tensors, checkpoint));
    let measurement = session.finish(|| None).map_err(one)?;
    let (outcome, problem) = outcome_of(failure);
    let activity = &after_load.activity;
    let io = IoCounters {
        read_bytes: Some(read_bytes),
        from_cache_bytes: activity.read_bytes.value().map(|storage| read_bytes.saturating_sub(storage)),
        major_faults: activity.major_faults.value(),
        ..IoCounters::default()
    };
    let name = Strategy::Simple(strategy).name();
    let run = Run { outcome, io, ..measurement.run(name, after_load.elapsed, Some(&after_load)) };
    Ok(Finished { run, unavailable: measurement.unavailable(), crossings: Vec::new(), notes, problem })
}

fn problem_of(error: &StrategyError) -> Problem {
    let code = match error {
        StrategyError::EndOfFile { .. } => Code::SourceChanged,
        _ => Code::LoadFailed,
    };
    Problem {
        place: error.path().map(|path| path.display().to_string()),
        ..Problem::new(code, error.to_string())
    }
}

/// Reports progress, and passes on cancellation.
struct Observer<'a> {
    session: &'a Session,
    cancel: &'a AtomicBool,
    told: Instant,
    /// The file or tensor that is being loaded.
    name: String,
    read_bytes: u64,
    total_bytes: u64,
    notes: Vec<String>,
}

impl<'a> Observer<'a> {
    fn new(session: &'a Session, cancel: &'a AtomicBool, total_bytes: u64) -> Self {
        let (told, name, notes) = (session.start, String::new(), Vec::new());
        Self { session, cancel, told, name, read_bytes: 0, total_bytes, notes }
    }

    fn hear(&mut self, event: Event<'_>) -> Result<(), StrategyError> {
        match event {
            Event::Begins(name) => {
                name.clone_into(&mut self.name);
                self.session.sampler.marker().enter_tensor(name);
            }
            Event::Note(note) if self.notes.len() < NOTES_MAX => self.notes.push(note),
            Event::Note(_) => {}
            Event::Arrived(len_bytes) => {
                self.read_bytes += len_bytes;
                if self.cancel.load(Ordering::Relaxed) {
                    return Err(StrategyError::Cancelled);
                }
                if self.told.elapsed() >= TELL_INTERVAL || self.read_bytes == self.total_bytes {
                    self.told = Instant::now();
                    tell_progress(self.session, (self.read_bytes, self.total_bytes), &self.name, None);
                }
            }
        }
        Ok(())
    }
}
