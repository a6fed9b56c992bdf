//! What a load is made of, and the channels of its control loop.

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};

use super::Witness;
use super::attend::Attendants;
use super::depth::Depth;
use super::gate::GateKeeper;
use super::jobs::{JobReceiver, JobSender};
use super::reader::{Job, JobResult};
use super::signals::Signals;
use super::stream::Delivery;
use super::times::Hooks;
use crate::budget::Reservation;
use crate::checkpoint::Checkpoint;
use crate::device::Backend;
use crate::plan::{HandOut, LoadPlan};
use crate::source::Source;
use crate::staging::Ring;

/// What a load is made of, before its threads run.
pub(super) struct Setup<B: Backend> {
    pub(super) checkpoint: Checkpoint,
    pub(super) plan: Arc<LoadPlan>,
    pub(super) ring: Arc<Ring>,
    pub(super) source: Arc<dyn Source>,
    pub(super) backend: Arc<B>,
    /// Layers read ahead of the one the caller has or waits for.
    pub(super) prefetch: usize,
    /// When the caller gets a layer.
    pub(super) hand_out: HandOut,
    /// Find out how many reads in flight are best, up to the readers there are.
    pub(super) adapts: bool,
    /// Threads with a queue of reads each, if reads are to go through queues.
    pub(super) queues: Option<u32>,
    /// Hash every tensor on the way.
    pub(super) hash: bool,
    /// Sees every byte on the way.
    pub(super) witness: Option<Witness>,
    /// Whom the caller wants told.
    pub(super) hooks: Hooks,
    /// When the load began.
    pub(super) started: Instant,
    /// What the load holds of the budget beside the ring.
    pub(super) reservations: Vec<Reservation>,
}

impl<B: Backend> Setup<B> {
    /// True if somebody has to see the bytes in the order of the plan, and the target keeps none.
    pub(super) fn is_in_order(&self) -> bool {
        self.hash || self.witness.is_some()
    }
}

/// The channels of the control loop.
pub(super) struct Wires<B: Backend> {
    pub(super) jobs: JobSender<Job<B>>,
    /// The readers' end of `jobs`: to take back what none of them has begun.
    pub(super) jobs_not_begun: JobReceiver<Job<B>>,
    pub(super) results: Receiver<JobResult<B>>,
    /// Rings when a signal has changed.
    pub(super) bell: Receiver<()>,
    pub(super) signals: Arc<Signals>,
    pub(super) deliveries: Sender<Delivery>,
    /// Who waits for the device, if it is one to wait for.
    pub(super) attendants: Option<Attendants<B>>,
    /// How many reads may be in flight.
    pub(super) depth: Depth,
    /// Who tells the readers.
    pub(super) keeper: GateKeeper,
}
