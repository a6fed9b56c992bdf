//! The parts that a load is made of, and the channels of its control loop.

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};

use super::channels::{JobReceiver, JobSender, ReaderLimitSetter, Signals};
use super::completion::CompletionThreads;
use super::depth::Depth;
use super::error::LoadError;
use super::layer::LoadedLayer;
use super::reader::{Job, JobResult};
use super::times::Hooks;
use crate::budget::Reservation;
use crate::checkpoint::Checkpoint;
use crate::device::Backend;
use crate::plan::{LoadOptions, LoadPlan, ReadOp};
use crate::source::Source;
use crate::staging::{Filled, Ring, Slot};

/// Sees the bytes of every read, cast and gathered, in the order of the plan. For targets that keep
/// no bytes. An error ends the load.
pub(crate) type ReadObserver = Box<dyn FnMut(&ReadOp, &Slot<Filled>) -> Result<(), LoadError> + Send>;

/// The settings of a load on any device.
pub(crate) struct LoadSetup {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) plan: Arc<LoadPlan>,
    /// The options, with [`LoadOptions::hash`] only if every tensor is hashed on the way.
    pub(crate) options: LoadOptions,
    /// Find out how many reads in flight are best, up to the number of readers.
    pub(crate) adapts: bool,
    /// The number of threads with a queue of reads each, if reads go through queues.
    pub(crate) queues: Option<u32>,
    pub(crate) observer: Option<ReadObserver>,
    pub(crate) hooks: Hooks,
    /// When the load began.
    pub(crate) started: Instant,
}

impl LoadSetup {
    /// True if the bytes are hashed or observed in the order of the plan.
    pub(super) fn is_in_order(&self) -> bool {
        self.options.hash || self.observer.is_some()
    }
}

/// The resources of a load.
pub(super) struct Resources<B: Backend> {
    pub(super) ring: Arc<Ring>,
    pub(super) source: Arc<dyn Source>,
    pub(super) backend: Arc<B>,
    /// The load's part of the budget beside the ring.
    pub(super) reservations: Vec<Reservation>,
}

/// The channels of the control loop.
pub(super) struct Channels<B: Backend> {
    pub(super) jobs: JobSender<Job<B>>,
    /// The readers' end of `jobs`, to take back the jobs that no reader has begun.
    pub(super) jobs_not_begun: JobReceiver<Job<B>>,
    pub(super) results: Receiver<JobResult<B>>,
    /// Has a message when a signal has changed.
    pub(super) woken: Receiver<()>,
    pub(super) signals: Arc<Signals>,
    pub(super) deliveries: Sender<Delivery>,
    /// `None` for a synchronous device.
    pub(super) completion: Option<CompletionThreads<B>>,
    /// How many reads may be in flight.
    pub(super) depth: Depth,
    /// Passes that number on to the readers.
    pub(super) reader_limit: ReaderLimitSetter,
}

impl<B: Backend> Channels<B> {
    /// Ends the readers and the completion threads, and waits for the work in flight.
    pub(super) fn close(self) {
        let Self { jobs, jobs_not_begun, results, completion, reader_limit, .. } = self;
        drop(jobs);
        // Jobs that no reader has begun are dropped, so that a caller that cancels waits only for
        // the reads in flight.
        while let Some(job) = jobs_not_begun.wait() {
            drop(job);
        }
        // Only now, so that waiting readers find no job left.
        drop(reader_limit);
        // Each reader finishes the job it has and then sees the closed queue. Until then it holds
        // slots.
        for result in results {
            drop(result);
        }
        drop(completion);
    }
}

/// A message from the control loop to the stream.
pub(super) enum Delivery {
    Layer(LoadedLayer),
    /// Boxed, so that the places of the channel stay small.
    Failed(Box<LoadError>),
}
