//! The messages between parent and worker.

use std::io::{self, Write as _};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::args::{CacheArg, Device, Metric};
use crate::config::{Budgets, LoadConfig};
use crate::exit::Exit;
use crate::leak::CyclePoint;
use crate::measuring::Session;
use crate::problem::Problem;
use crate::report::{Gpu, Place, Plan, Point, Run, Source, TensorHash, Unavailable};
use crate::sizes::SizeContext;
use crate::strategies::SimpleStrategy;

/// How often progress is reported.
pub(super) const TELL_INTERVAL: Duration = Duration::from_millis(100);

/// The order to a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    /// The process that started it; a worker whose parent is another one ends at once.
    pub(crate) parent_pid: u32,
    /// The task.
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
    Measure(MeasureTask),
    /// Load by a simple strategy, and measure it.
    MeasureSimple {
        /// The load.
        load: LoadConfig,
        /// How.
        strategy: SimpleStrategy,
        /// Refuse what memory cannot hold. Without it, the kernel decides.
        refuses: bool,
        /// Distance of the samples; `None` is the default.
        interval_ms: Option<u64>,
    },
    /// Load, use and unload again and again, and measure what stays.
    Cycle {
        /// The loads of each cycle, one after the other.
        loads: Vec<CycleLoad>,
        /// How many cycles.
        count: u32,
    },
}

/// A load that is measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MeasureTask {
    /// The load, its device decided.
    pub(crate) load: LoadConfig,
    /// The most it may hold.
    pub(crate) budgets: Budgets,
    /// Limits to notice.
    pub(crate) watches: Vec<Watch>,
    /// Distance of the samples; `None` is the default.
    pub(crate) interval_ms: Option<u64>,
}

/// Something that each cycle loads.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CycleLoad {
    /// The load, its device decided.
    pub(crate) load: LoadConfig,
    /// The most it may hold.
    pub(crate) budgets: Budgets,
    /// The most that the process may grow meanwhile, by the plan.
    pub(crate) promised_bytes: u64,
    /// Bytes of its tensors.
    pub(crate) tensor_bytes: u64,
}

/// A limit whose first crossing is to be noticed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Watch {
    /// The limited metric.
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

/// A message of the worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message {
    /// The device that `--device` stands for on this machine; the first message of `Prepare`,
    /// unless it cannot be used.
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
        /// The layer, tensor or file that is being loaded.
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
    /// `Measure`, `MeasureSimple` or `Cycle` is done, perhaps partly.
    Done(Box<Finished>),
    /// It could not be done.
    Error(Vec<Problem>),
}

/// The findings of `Prepare`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Checked {
    /// The checkpoint.
    pub(crate) source: Source,
    /// The plan of the load.
    pub(crate) plan: Plan,
    /// The most that the load may hold.
    pub(crate) budgets: Budgets,
    /// The quantities that relative sizes refer to.
    pub(crate) context: SizeContext,
    /// Share of the source's pages that are cached now; `None` is unchecked.
    pub(crate) cached_share: Option<f64>,
    /// Notes for people.
    pub(crate) notes: Vec<String>,
}

/// A load that was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Finished {
    /// The numbers.
    pub(crate) run: Run,
    /// Metrics that could not be measured.
    pub(crate) unavailable: Vec<Unavailable>,
    /// Limits that were crossed, and where.
    pub(crate) crossings: Vec<Crossing>,
    /// Notes for people, such as files that were read in another way than asked for.
    pub(crate) notes: Vec<String>,
    /// The problem that ended the load early.
    pub(crate) problem: Option<Problem>,
}

/// Sends a message. A worker that cannot send ends at once, so that its parent does not take part
/// of the messages for all of them.
pub(super) fn tell(message: &Message) {
    let mut line = serde_json::to_vec(message).expect("messages are plain data");
    line.push(b'\n');
    let mut stdout = io::stdout().lock();
    if stdout.write_all(&line).and_then(|()| stdout.flush()).is_err() {
        std::process::exit(i32::from(Exit::LoadFailed.code()));
    }
}

/// Tells that the baseline was taken.
pub(super) fn tell_started(session: &Session, vram_bytes: Option<u64>) {
    tell(&Message::Started { baseline: Point { vram_bytes, ..session.baseline() } });
}

/// Tells how far a load is: bytes that have arrived, of how many.
pub(super) fn tell_progress(
    session: &Session,
    (done_bytes, total_bytes): (u64, u64),
    layer: &str,
    vram_bytes: Option<u64>,
) {
    let peaks = session.sampler.peaks();
    tell(&Message::Progress {
        done_bytes,
        total_bytes,
        layer: layer.to_owned(),
        peak: Point {
            host_bytes: peaks.host.bytes().value(),
            rss_bytes: peaks.rss.bytes().value(),
            vram_bytes,
            split: None,
        },
        seconds: session.start.elapsed().as_secs_f64(),
    });
}
