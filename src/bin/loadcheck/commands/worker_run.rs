//! What the commands share that load in a worker: how they prepare, listen, and settle what became of it.

use crate::args::CacheArg;
use crate::config::LoadConfig;
use crate::problem::{Code, Problem};
use crate::progress::Progress;
use crate::report::{Outcome as RunOutcome, Params, Place, Point, Report, Run, TensorHash};
use crate::signals::Interrupts;
use crate::worker::{Checked, Ending, Finished, Message, Task, carry_out};

/// Why the runs ended early.
pub(super) enum Stop {
    /// Something is wrong.
    Problems(Vec<Problem>),
    /// This signal came.
    Signal(i32),
}

/// Decides on the device, reads the headers, and brings the page cache into the state that is wanted.
///
/// The device that was decided on is put into `config` and `report` whatever is wrong otherwise.
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
    let task = Task::Prepare { load: config.clone(), has_source, cache };
    let (mut checked, mut problems, mut decided) = (None, Vec::new(), None);
    let ending = carry_out(task, None, interrupts, |message| match message {
        Message::Checked(answer) => checked = Some(*answer),
        Message::Error(found) => problems = found,
        Message::Decided { device, gpu } => decided = Some((device, gpu)),
        _ => {}
    });
    if let Some((device, gpu)) = decided {
        config.device = device;
        report.host.get_or_insert_default().gpus = gpu.into_iter().collect();
    }
    match (ending, checked) {
        (Ending::Interrupted(signal), _) => Err(Stop::Signal(signal)),
        (Ending::Ended(_), Some(checked)) => Ok(checked),
        (Ending::Ended(lost), None) => {
            problems.extend(lost);
            Err(Stop::Problems(problems))
        }
    }
}

/// What a worker has told so far about the load it is measuring.
#[derive(Default)]
pub(super) struct Heard {
    baseline: Point,
    peak: Point,
    seconds: Option<f64>,
    layer: Option<String>,
    /// The hashes of the tensors, in the order of delivery.
    pub(super) hashes: Vec<TensorHash>,
    /// Its own report, once it is done.
    pub(super) finished: Option<Box<Finished>>,
    /// Why it could not be done.
    pub(super) problems: Vec<Problem>,
}

impl Heard {
    /// Takes a message in.
    pub(super) fn hear(&mut self, message: Message, progress: &mut Progress) {
        match message {
            Message::Started { baseline } => self.baseline = baseline,
            Message::Progress { done_bytes, total_bytes, layer, peak, seconds } => {
                progress.update(done_bytes, total_bytes, &layer);
                self.peak = peak;
                self.seconds = Some(seconds);
                self.layer = Some(layer);
            }
            Message::Hash(hash) => self.hashes.push(hash),
            Message::Done(finished) => self.finished = Some(finished),
            Message::Error(problems) => self.problems = problems,
            Message::Checked(_) | Message::Decided { .. } => {}
        }
    }

    /// The run of a worker that is gone without a report: what it told before.
    pub(super) fn partial(
        self,
        ending: &Ending,
        problems: &[Problem],
        strategy: &str,
        params: Option<Params>,
    ) -> Run {
        let outcome = match ending {
            Ending::Interrupted(_) => RunOutcome::Interrupted,
            Ending::Ended(_) if problems.iter().any(|problem| problem.code == Code::WorkerKilled) => {
                RunOutcome::Killed
            }
            Ending::Ended(_) => RunOutcome::Failed,
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
