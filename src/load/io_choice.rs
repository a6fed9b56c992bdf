//! How files are read unless the options say: the number of readers, and whether reads go through
//! queues.

use std::thread;

use crate::checkpoint::Checkpoint;
use crate::device::Target;
use crate::plan::{
    IoDecision, IoMode, IoReason, LoadOptions, LoadPlan, PlanLimits, is_most, is_mostly_direct,
};
use crate::source::{self, SourceError};

/// The default limit of direct reads in flight: enough for arrays of flash disks, at 1 or 2 MiB
/// each.
const DIRECT_READS_MAX: u32 = 16;
/// Most threads with a queue of reads each.
const QUEUES_MAX: u32 = 8;
/// Reads in flight over a network.
const NETWORK_READERS: u32 = 8;

/// Looks at each file and puts into the limits of a plan how it is read.
pub(crate) fn decide_io(
    limits: &mut PlanLimits,
    checkpoint: &Checkpoint,
    target: Target,
) -> Result<(), SourceError> {
    let io = limits.options.io;
    if io == IoMode::Auto {
        let survey = source::survey(checkpoint)?;
        (limits.alignment, limits.decisions) = (survey.alignment, survey.decisions);
    } else {
        limits.alignment = source::alignment(checkpoint)?;
    }
    limits.default_readers = default_readers(io, &limits.decisions, target);
    Ok(())
}

/// The default number of reader threads.
///
/// Buffered and mapped reads are limited by copying, so they get a thread for each core: up to 8,
/// or 12 for a CUDA device, whose link takes more than eight cores can copy. Direct reads wait for
/// the disk: they get as many as any disk needs, and the load finds out how many to use. A network
/// answers late, whatever the number of cores. If files differ, most of the bytes decide.
///
/// [`thread::available_parallelism`] counts the affinity of this process and the CPU quotas of its
/// control groups, versions 1 and 2.
pub(super) fn default_readers(io: IoMode, decisions: &[IoDecision], target: Target) -> u32 {
    let most = if matches!(target, Target::Cuda(_)) { 12 } else { 8 };
    let copying = cores().clamp(1, most);
    match io {
        IoMode::Mmap | IoMode::Buffered => copying,
        IoMode::Direct | IoMode::Uring => DIRECT_READS_MAX,
        IoMode::Auto if is_most(decisions, |decision| decision.reason == IoReason::Network) => {
            NETWORK_READERS
        }
        IoMode::Auto if is_mostly_direct(io, decisions) => DIRECT_READS_MAX,
        IoMode::Auto => copying,
    }
}

fn cores() -> u32 {
    thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX))
}

/// True if the load finds out by itself how many reads in flight are best.
pub(super) fn adapts(options: &LoadOptions, plan: &LoadPlan) -> bool {
    options.readers.is_none() && is_mostly_direct(plan.io(), plan.decisions())
}

/// The number of threads with a queue of reads each, if reads go through queues.
///
/// One queue keeps any disk busy. Casts and copies on the host are the thread's work too, and then
/// every core takes part. In that case [`IoMode::Auto`] uses queues as well, unless some files
/// answer late and go through no queue: their reads would hold up the others.
pub(super) fn queues(options: &LoadOptions, target: Target, plan: &LoadPlan) -> Option<u32> {
    let works = target == Target::Host || options.dtype.is_some() || options.quantise.is_some();
    let for_work = cores().clamp(1, QUEUES_MAX);
    let answers_late =
        |decision: &IoDecision| matches!(decision.reason, IoReason::Network | IoReason::Program);
    match options.io {
        IoMode::Uring => Some(if works { for_work } else { 1 }),
        IoMode::Auto if !cfg!(feature = "uring") => None,
        IoMode::Auto if plan.decisions().iter().any(answers_late) => None,
        IoMode::Auto if works && is_mostly_direct(plan.io(), plan.decisions()) => Some(for_work),
        IoMode::Auto | IoMode::Direct | IoMode::Buffered | IoMode::Mmap => None,
    }
}
