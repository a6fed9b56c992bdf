//! What parent and worker say to each other.

use std::io::{self, Write as _};

use serde::{Deserialize, Serialize};

use crate::args::{CacheArg, Device, Metric};
use crate::config::{Budgets, LoadConfig};
use crate::exit::Exit;
use crate::leak::CyclePoint;
use crate::problem::Problem;
use crate::report::{Gpu, Place, Plan, Point, Run, Source, TensorHash, Unavailable};
use crate::sizes::SizeContext;
use crate::strategies::Habit;

/// What the worker is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    /// The process that started it; a worker whose parent is another one ends at once.
    pub(crate) parent_pid: u32,
    /// What to do.
    pub(crate) task: Task,
}

/// The tasks.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Task {
    /// Decide on the device, read the headers, plan, and bring the page cache into the state that
    /// was asked for.
    Prepare {
        /// The load that will follow.
        load: LoadConfig,
        /// There is a checkpoint. Without one, only the device is looked at.
        has_source: bool,
        /// The state of the page cache; `None` leaves it alone.
        cache: Option<CacheArg>,
    },
    /// Load, and measure it.
    Measure {
        /// The load, its device decided.
        load: LoadConfig,
        /// What it may hold.
        budgets: Budgets,
        /// Limits to notice.
        watches: Vec<Watch>,
        /// Distance of the samples; `None` is the default.
        interval_ms: Option<u64>,
    },
    /// Load by somebody else's habit, and measure it.
    Imitate {
        /// What to load; how is the habit's.
        load: LoadConfig,
        /// The habit.
        habit: Habit,
        /// Refuse what memory cannot hold. Without it, the kernel decides.
        refuses: bool,
        /// Distance of the samples; `None` is the default.
        interval_ms: Option<u64>,
    },
    /// Load, use and unload again and again, and measure what stays.
    Cycle {
        /// What each cycle loads, one after the other.
        loads: Vec<CycleLoad>,
        /// How many cycles.
        count: u32,
    },
}

/// Something that each cycle loads.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CycleLoad {
    /// What and how, its device decided.
    pub(crate) load: LoadConfig,
    /// What it may hold.
    pub(crate) budgets: Budgets,
    /// The most that the process may grow meanwhile, by the plan.
    pub(crate) promised_bytes: u64,
    /// Bytes of its tensors.
    pub(crate) tensor_bytes: u64,
}

/// A limit whose first crossing is to be noticed.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Watch {
    /// What is limited.
    pub(crate) metric: Metric,
    /// The most it may be.
    pub(crate) limit_bytes: u64,
}

/// Where a limit was first exceeded.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Crossing {
    /// Which one.
    pub(crate) watch: Watch,
    /// Where.
    pub(crate) place: Place,
}

/// What the worker tells its parent.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message {
    /// What `--device` comes to on this machine; the first word of `Prepare`, unless the device
    /// cannot be used.
    Decided {
        /// Where layers go; never `auto`.
        device: Device,
        /// That device, if it is a GPU; with a device map, all of its GPUs.
        gpus: Vec<Gpu>,
    },
    /// The baseline was taken; the load begins.
    Started {
        /// Memory before the load.
        baseline: Point,
    },
    /// How far it is.
    Progress {
        /// Bytes that have arrived.
        done_bytes: u64,
        /// Bytes in all.
        total_bytes: u64,
        /// What is being loaded.
        layer: String,
        /// The highest memory so far: all that is known should the worker be killed.
        peak: Point,
        /// Since the start of the load.
        seconds: f64,
    },
    /// `Cycle`: what was held after a cycle.
    Cycle(CyclePoint),
    /// A tensor's hash.
    Hash(TensorHash),
    /// `Prepare` is done.
    Checked(Box<Checked>),
    /// `Measure`, `Imitate` or `Cycle` is done, perhaps partly.
    Done(Box<Finished>),
    /// It could not be done.
    Error(Vec<Problem>),
}

/// What the headers and the machine say.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Checked {
    /// The checkpoint.
    pub(crate) source: Source,
    /// What a load will need.
    pub(crate) plan: Plan,
    /// What the load may hold.
    pub(crate) budgets: Budgets,
    /// What relative sizes relate to.
    pub(crate) context: SizeContext,
    /// Share of the source's pages that are cached now; `None` is unchecked.
    pub(crate) cached_share: Option<f64>,
    /// What a person should know.
    pub(crate) notes: Vec<String>,
}

/// What a load cost.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Finished {
    /// The numbers.
    pub(crate) run: Run,
    /// What could not be measured.
    pub(crate) unavailable: Vec<Unavailable>,
    /// Limits that were crossed, and where.
    pub(crate) crossings: Vec<Crossing>,
    /// What a person should know: files that were read in another way than asked for.
    pub(crate) notes: Vec<String>,
    /// What ended the load early.
    pub(crate) problem: Option<Problem>,
}

/// Sends a message. A worker that cannot, ends: its parent must not take a part of the story for
/// the whole. (A parent that is gone takes this process with it anyway.)
pub(super) fn tell(message: &Message) {
    let mut line = serde_json::to_vec(message).expect("messages are plain data");
    line.push(b'\n');
    let mut stdout = io::stdout().lock();
    if stdout.write_all(&line).and_then(|()| stdout.flush()).is_err() {
        std::process::exit(i32::from(Exit::LoadFailed.code()));
    }
}
