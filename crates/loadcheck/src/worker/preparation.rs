//! Asks a worker to prepare a load: the parent's side of `Task::Prepare`.

use super::parent::{Ending, carry_out};
use super::protocol::{Checked, Message, Task};
use crate::args::CacheArg;
use crate::config::LoadConfig;
use crate::problem::Problem;
use crate::report::Gpu;
use crate::signals::Interrupts;

/// Why a command cannot go on.
#[derive(Clone, Debug)]
pub(crate) enum Stop {
    /// Something is wrong.
    Problems(Vec<Problem>),
    /// This signal came.
    Signal(i32),
}

impl From<Problem> for Stop {
    fn from(problem: Problem) -> Self {
        Self::Problems(vec![problem])
    }
}

/// The answer of a worker.
pub(crate) struct Preparation {
    /// The GPUs that there are, if it was to decide on a device and could.
    pub(crate) gpus: Option<Vec<Gpu>>,
    /// The headers. Without a source there are none: then it stops without a problem, if
    /// the device is there.
    pub(crate) checked: Result<Checked, Stop>,
}

/// Decides on the device, reads the headers, and brings the page cache into the state that is
/// wanted.
///
/// The device that was decided on is put into `load` even if something is wrong.
pub(crate) fn ask_to_prepare(
    load: &mut LoadConfig,
    has_source: bool,
    cache: Option<CacheArg>,
    interrupts: &Interrupts,
) -> Preparation {
    let task = Task::Prepare { load: load.clone(), has_source, cache };
    let (mut checked, mut problems, mut decided) = (None, Vec::new(), None);
    let ending = carry_out(task, None, interrupts, |message| match message {
        Message::Checked(answer) => checked = Some(*answer),
        Message::Error(found) => problems = found,
        Message::Decided { device, gpus } => decided = Some((device, gpus)),
        _ => {}
    });
    let gpus = decided.map(|(device, gpus)| {
        load.device = device;
        gpus
    });
    let checked = match (ending, checked) {
        (Ending::Interrupted(signal), _) => Err(Stop::Signal(signal)),
        (Ending::Ended(_), Some(checked)) => Ok(checked),
        (Ending::Ended(lost), None) => {
            problems.extend(lost);
            Err(Stop::Problems(problems))
        }
    };
    Preparation { gpus, checked }
}
