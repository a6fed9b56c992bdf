//! Our own loader or a simple strategy under a limit: a fresh worker, as `run` and `compare` start
//! it, in a group.

use onelayer_probe::ChildGroup;

use super::trial::{End, Ran};
use crate::config::LoadConfig;
use crate::exit::Exit;
use crate::problem::{Code, Problem};
use crate::progress::Progress;
use crate::signals::Interrupts;
use crate::sizes::SizeContext;
use crate::strategies::Strategy;
use crate::worker::{Ending, Finished, MeasureTask, Message, Task, carry_out};

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
        Strategy::Stream => {
            Task::Measure(MeasureTask { load: settled, budgets, watches: Vec::new(), interval_ms: None })
        }
        // Under a limit of ours, the kernel is to decide; the machine itself is not to run out of memory.
        Strategy::Simple(strategy) => {
            let refuses = group.limit_bytes().is_none();
            Task::MeasureSimple { load: settled, strategy, refuses, interval_ms: None }
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
