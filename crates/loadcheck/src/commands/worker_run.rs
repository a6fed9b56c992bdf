//! Loads in a worker, for the commands that measure: preparing, hearing messages, and the end
//! of it.

use onelayer_probe::{ChildGroup, GroupMemory};

use super::group::own_group;
use crate::args::CacheArg;
use crate::config::LoadConfig;
use crate::leak::CyclePoint;
use crate::machine::{PressureCounters, note_missing_pressure};
use crate::problem::{Code, Problem};
use crate::progress::Progress;
use crate::report::{Outcome as RunOutcome, Params, Place, Point, Report, Run, TensorHash};
use crate::signals::Interrupts;
use crate::worker::{Checked, Crossing, Ending, Finished, Message, Stop, Task, ask_to_prepare, carry_out};

/// Decides on the device, reads the headers, and brings the page cache into the state that is
/// wanted.
///
/// The device that was decided on is put into `config` and `report` even if something is wrong.
///
/// # Errors
/// [`Stop`].
pub(super) fn prepare(
    config: &mut LoadConfig,
    report: &mut Report,
    interrupts: &Interrupts,
    has_source: bool,
    cache: Option<CacheArg>,
) -> Result<Checked, Stop> {
    let preparation = ask_to_prepare(config, has_source, cache, interrupts);
    if let Some(gpus) = preparation.gpus {
        report.host.get_or_insert_default().gpus = gpus;
    }
    preparation.checked
}

/// A load that is over: the worker's own report, or what it told before it was gone.
pub(super) struct Settled {
    pub(super) run: Run,
    /// Its problems.
    pub(super) problems: Vec<Problem>,
    /// The signal that ended it early.
    pub(super) signal: Option<i32>,
    /// The limits that were exceeded, and where first.
    pub(super) crossings: Vec<Crossing>,
    /// The hashes of the tensors, in the order of delivery.
    pub(super) hashes: Vec<TensorHash>,
    /// Memory after each cycle.
    pub(super) points: Vec<CyclePoint>,
    /// Processes that the kernel killed for want of memory; `None` without a count.
    pub(super) oom_kills: Option<u64>,
}

/// Loads once: a fresh process, a control group of its own where there can be one. What could not
/// be measured is noted in `report`.
///
/// A run that did not get as far as a report of its own is called `strategy`, and ran with
/// `params`.
pub(super) fn measure(
    task: Task,
    named: (&str, Option<Params>),
    progress: Progress,
    interrupts: &Interrupts,
    report: &mut Report,
) -> Settled {
    let group = own_group(interrupts, report);
    let mut settled = measure_in(group.as_ref(), task, named, progress, interrupts, report);
    let memory = group.map(|group| group.memory());
    interrupts.forget_leftovers();
    if let Some(GroupMemory { peak_bytes, oom_kill_count, .. }) = memory {
        settled.run.peak.cgroup_bytes = peak_bytes.value();
        settled.oom_kills = oom_kill_count.value();
        if let Some(reason) = peak_bytes.reason() {
            report.missing("peak.cgroup_bytes", &reason.to_string());
        }
    }
    settled
}

/// The same in a group that several runs share, if there is one. Its peak belongs to no single run.
pub(super) fn measure_in(
    group: Option<&ChildGroup>,
    task: Task,
    (strategy, params): (&str, Option<Params>),
    mut progress: Progress,
    interrupts: &Interrupts,
    report: &mut Report,
) -> Settled {
    let mut heard = Heard::default();
    let before = PressureCounters::now();
    let ending = carry_out(task, group, interrupts, |message| heard.hear(message, &mut progress));
    let pressure = before.until_now();
    drop(progress);
    let mut settled = heard.settle(ending, strategy, params, report);
    note_missing_pressure(&pressure, report);
    settled.run.pressure = pressure;
    settled
}

/// The messages of a worker so far.
#[derive(Default)]
struct Heard {
    baseline: Point,
    peak: Point,
    seconds: Option<f64>,
    layer: Option<String>,
    hashes: Vec<TensorHash>,
    points: Vec<CyclePoint>,
    /// Its own report, once it is done.
    finished: Option<Box<Finished>>,
    /// Why it could not be done.
    problems: Vec<Problem>,
}

impl Heard {
    /// Takes a message in.
    fn hear(&mut self, message: Message, progress: &mut Progress) {
        match message {
            Message::Started { baseline } => self.baseline = baseline,
            Message::Progress { done_bytes, total_bytes, layer, peak, seconds } => {
                progress.update(done_bytes, total_bytes, &layer);
                self.peak = peak;
                self.seconds = Some(seconds);
                self.layer = Some(layer);
            }
            Message::Hash(hash) => self.hashes.push(hash),
            Message::Cycle(point) => self.points.push(point),
            Message::Done(finished) => self.finished = Some(finished),
            Message::Error(problems) => self.problems = problems,
            Message::Checked(_) | Message::Decided { .. } => {}
        }
    }

    /// Everything known of a run that is over.
    fn settle(
        mut self,
        ending: Ending,
        strategy: &str,
        params: Option<Params>,
        report: &mut Report,
    ) -> Settled {
        let mut problems = std::mem::take(&mut self.problems);
        let hashes = std::mem::take(&mut self.hashes);
        let points = std::mem::take(&mut self.points);
        let signal = match ending {
            Ending::Interrupted(signal) => Some(signal),
            Ending::Ended(lost) => {
                problems.extend(lost);
                None
            }
        };
        let (run, crossings) = match self.finished.take() {
            Some(finished) => {
                for entry in &finished.unavailable {
                    report.missing(&entry.metric, &entry.reason);
                }
                finished.notes.into_iter().for_each(|note| report.note(note));
                problems.extend(finished.problem);
                (finished.run, finished.crossings)
            }
            None => (self.partial(signal.is_some(), &problems, strategy, params), Vec::new()),
        };
        Settled { run, problems, signal, crossings, hashes, points, oom_kills: None }
    }

    /// The run of a worker that is gone without a report: what it told before.
    fn partial(
        self,
        is_interrupted: bool,
        problems: &[Problem],
        strategy: &str,
        params: Option<Params>,
    ) -> Run {
        let is_killed = problems.iter().any(|problem| problem.code == Code::WorkerKilled);
        let outcome = match (is_interrupted, is_killed) {
            (true, _) => RunOutcome::Interrupted,
            (false, true) => RunOutcome::Killed,
            (false, false) => RunOutcome::Failed,
        };
        let seconds = self.seconds;
        let mut run = Run {
            strategy: strategy.to_owned(),
            params,
            outcome,
            seconds,
            baseline: self.baseline,
            ..Run::default()
        };
        run.peak.host_bytes = self.peak.host_bytes;
        run.peak.rss_bytes = self.peak.rss_bytes;
        let seconds = seconds.unwrap_or_default();
        run.peak.at = self.layer.map(|layer| Place { layer: Some(layer), tensor: None, seconds });
        run
    }
}
