//! Our own loader under a limit, or a habit of others that we imitate: a fresh worker, as `run` and `compare` start it, in a
//! group.

use onelayer::probe::ChildGroup;

use super::trial::{End, Ran, Stop};
use crate::args::CacheArg;
use crate::config::LoadConfig;
use crate::exit::Exit;
use crate::problem::{Code, Problem};
use crate::progress::Progress;
use crate::report::Gpu;
use crate::signals::Interrupts;
use crate::sizes::SizeContext;
use crate::strategies::Strategy;
use crate::worker::{Checked, Ending, Finished, Message, Task, carry_out};

/// What the headers said, if there are any, and the device that was decided on.
pub(crate) struct Prepared {
    pub(crate) checked: Option<Checked>,
    pub(crate) gpu: Option<Gpu>,
}

/// Decides on the device, reads the headers, and brings the page cache into the state that is wanted.
///
/// # Errors
/// What is wrong with source or device, or the signal that came.
pub(crate) fn prepare(
    load: &mut LoadConfig,
    has_source: bool,
    cache: Option<CacheArg>,
    interrupts: &Interrupts,
) -> Result<Prepared, Stop> {
    let task = Task::Prepare { load: load.clone(), has_source, cache };
    let (mut checked, mut problems, mut decided) = (None, Vec::new(), None);
    let ending = carry_out(task, None, interrupts, |message| match message {
        Message::Checked(answer) => checked = Some(*answer),
        Message::Error(found) => problems = found,
        Message::Decided { device, gpu } => decided = Some((device, gpu)),
        _ => {}
    });
    let gpu = decided.and_then(|(device, gpu)| {
        load.device = device;
        gpu
    });
    match ending {
        Ending::Interrupted(signal) => Err(Stop::Signal(signal)),
        Ending::Ended(_) if checked.is_some() => Ok(Prepared { checked, gpu }),
        Ending::Ended(lost) => {
            problems.extend(lost);
            if problems.is_empty() { Ok(Prepared { checked, gpu }) } else { Err(Stop::Problems(problems)) }
        }
    }
}

/// Loads once in `group`. Sizes that are shares of the memory limit mean that of the group.
pub(crate) fn run(
    load: &LoadConfig,
    strategy: Strategy,
    context: &SizeContext,
    group: &ChildGroup,
    interrupts: &Interrupts,
    cached_share: Option<f64>,
    mut progress: Progress,
) -> Ran {
    let ran = |end, seconds, peak_host_bytes| Ran { end, seconds, peak_host_bytes, cached_share };
    let limit_bytes = match (context.limit_bytes, group.limit_bytes()) {
        (Some(here), Some(tried)) => Some(here.min(tried)),
        (here, tried) => tried.or(here),
    };
    let budgets = match load.budgets(&SizeContext { limit_bytes, ..*context }) {
        Ok(budgets) => budgets,
        Err(problem) => return ran(End::Failed(problem), None, None),
    };
    let mut settled = load.clone();
    settled.settle(&budgets);
    let task = match strategy {
        Strategy::Stream => Task::Measure { load: settled, budgets, watches: Vec::new(), interval_ms: None },
        // Under a limit of ours, the kernel is to decide; the machine itself is not to run out of memory.
        Strategy::Habit(habit) => {
            let refuses = group.limit_bytes().is_none();
            Task::Imitate { load: settled, habit, refuses, interval_ms: None }
        }
    };
    let (mut finished, mut problems, mut seconds, mut peak_host_bytes) = (None, Vec::new(), None, None);
    let ending = carry_out(task, Some(group), interrupts, |message| match message {
        Message::Progress { done_bytes, total_bytes, layer, peak, seconds: now } => {
            progress.update(done_bytes, total_bytes, &layer);
            (seconds, peak_host_bytes) = (Some(now), peak.host_bytes);
        }
        Message::Done(done) => finished = Some(*done),
        Message::Error(found) => problems = found,
        _ => {}
    });
    let end = match ending {
        Ending::Interrupted(signal) => End::Interrupted(signal),
        Ending::Ended(lost) => {
            problems.extend(lost);
            problems.extend(finished.as_ref().and_then(|finished| finished.problem.clone()));
            end_of(problems)
        }
    };
    if let Some(Finished { run, .. }) = finished {
        (seconds, peak_host_bytes) = (run.seconds, run.peak.host_bytes);
    }
    ran(end, seconds, peak_host_bytes)
}

/// The end that the worker's problems mean.
fn end_of(mut problems: Vec<Problem>) -> End {
    crate::problem::most_basic_first(&mut problems);
    match problems.into_iter().next() {
        None => End::Completed,
        Some(problem) if problem.code == Code::WorkerKilled => End::Killed(problem),
        Some(problem) if problem.code.exit() == Exit::Usage => End::Refused(problem),
        Some(problem) => End::Failed(problem),
    }
}
