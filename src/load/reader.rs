//! Reader threads: a read and a claim on a slot come in, a filled slot or a copy in flight goes
//! out. Here they have one read at a time; [`queued`](super::queued) has those with many.
//!
//! A reader takes its slot when it begins to read. So jobs can wait for readers, and no reader for
//! the control loop, while only as many slots are in use as reads are in flight: a few that stay in
//! the cache.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;

use super::gate::Gate;
use super::jobs::JobReceiver;
use super::meter::Work;
use super::queued::read_queued;
use super::{LoadError, Progress};
use crate::checkpoint::{Checkpoint, TensorId};
use crate::device::{Backend, PendingCopy as _};
use crate::plan::{CastOp, LoadPlan, ReadOp};
use crate::source::{ReadQueue, Source};
use crate::staging::cast::{Casting, Narrowing, quantise_step};
use crate::staging::gather::gather_step;
use crate::staging::{Claim, Empty, Filled, Slot};

/// One read to do.
pub(super) struct Job<B: Backend> {
    /// Turn of the layer.
    pub(super) turn: usize,
    /// How many reads were issued before it.
    pub(super) sequence: u64,
    /// Index of the read.
    pub(super) read: u32,
    /// Where the bytes will go.
    pub(super) claim: Claim,
    /// Where they go next, if the layer has its arena by now: then the copy starts on the reader's
    /// own core, while the bytes are in its cache.
    pub(super) arena: Option<Arc<B::Arena>>,
}

/// What became of a job.
pub(super) struct JobResult<B: Backend> {
    pub(super) turn: usize,
    pub(super) sequence: u64,
    pub(super) read: u32,
    /// What the reader did for it.
    pub(super) work: Work,
    pub(super) outcome: Result<Done<B>, LoadError>,
}

/// How far a read got.
pub(super) enum Done<B: Backend> {
    /// The bytes are in the slot and wait for an arena.
    Filled(Slot<Filled>),
    /// The copy has been started, on a device that copies by itself.
    Copying(B::Pending),
    /// The bytes are in their arena, and the slot is free.
    Copied,
}

/// What all readers of a load share.
pub(super) struct ReaderContext<B: Backend> {
    pub(super) checkpoint: Checkpoint,
    pub(super) plan: Arc<LoadPlan>,
    pub(super) source: Arc<dyn Source>,
    pub(super) backend: Arc<B>,
    pub(super) progress: Progress,
    /// How many of the readers may read.
    pub(super) gate: Arc<Gate>,
}

/// What readers read with.
pub(super) enum Ways {
    /// Each has one read at a time; so many readers.
    OneByOne { readers: u32 },
    /// Each has a queue of its own.
    Queued(Vec<ReadQueue<Slot<Empty>>>),
}

/// Starts readers. They end when the job channel closes.
pub(super) fn spawn<B: Backend>(
    ways: Ways,
    context: &Arc<ReaderContext<B>>,
    jobs: &JobReceiver<Job<B>>,
    results: &Sender<JobResult<B>>,
) -> Result<Vec<JoinHandle<()>>, LoadError> {
    let mut threads = Vec::new();
    let mut start = |number: u32, work: Box<dyn FnOnce() + Send>| {
        let thread = thread::Builder::new().name(format!("onelayer-read-{number}")).spawn(work);
        threads.push(thread.map_err(|source| LoadError::Thread { source })?);
        Ok::<(), LoadError>(())
    };
    let ends = || (Arc::clone(context), jobs.clone(), results.clone());
    match ways {
        Ways::OneByOne { readers } => {
            for number in 0..readers {
                let (context, jobs, results) = ends();
                start(number, Box::new(move || read_all(number, &context, &jobs, &results)))?;
            }
        }
        Ways::Queued(queues) => {
            let count = u32::try_from(queues.len()).expect("no more than cores");
            for (number, queue) in (0..).zip(queues) {
                let (context, jobs, results) = ends();
                start(
                    number,
                    Box::new(move || read_queued(number, count, queue, &context, &jobs, &results)),
                )?;
            }
        }
    }
    Ok(threads)
}

fn read_all<B: Backend>(
    number: u32,
    context: &ReaderContext<B>,
    jobs: &JobReceiver<Job<B>>,
    results: &Sender<JobResult<B>>,
) {
    loop {
        context.gate.wait_for_turn(number);
        let Some(job) = jobs.wait() else { return };
        let (turn, sequence, read) = (job.turn, job.sequence, job.read);
        let mut work = Work::default();
        // A panic must become an error of this load: without it the control loop would wait for the
        // result for ever. Unwinding drops the slot, and with it anything the job held.
        let outcome = catch_unwind(AssertUnwindSafe(|| context.run(job, &mut work)))
            .unwrap_or_else(|panic| Err(LoadError::Panicked { message: panic_message(&*panic) }));
        if results.send(JobResult { turn, sequence, read, work, outcome }).is_err() {
            return;
        }
    }
}

impl<B: Backend> ReaderContext<B> {
    fn run(&self, job: Job<B>, work: &mut Work) -> Result<Done<B>, LoadError> {
        let read = self.plan.read(job.read);
        let mut slot = job.claim.take();
        let start = Instant::now();
        if self.plan.gathers(&read).next().is_some() || self.plan.quantising(&read).next().is_some() {
            let read_bytes = self.source.read(&read.request, slot.bytes_mut())?;
            self.add_read(read_bytes, start.elapsed(), work);
            return self.deliver(&read, slot, job.arena, work);
        }
        let mut casting = Casting::new(self.plan.casts(&read));
        let mut casting_time = Duration::ZERO;
        let read_bytes = if casting.is_needed() {
            let payload_start = read.request.payload.start() - read.request.extent.start();
            let narrowing =
                Narrowing::of(self.plan.casts(&read), payload_start, read.request.payload.len_bytes());
            let count = |step: &CastOp, overflowed| self.progress.add_overflowed(step.tensor, overflowed);
            self.source.read_in_pieces(&read.request, slot.bytes_mut(), &mut |slot, arrival| {
                let start = Instant::now();
                let next_position_bytes = match narrowing {
                    Some(narrowing) => narrowing.advance(slot, arrival, count),
                    None => {
                        casting.advance(slot, payload_start + arrival.end_bytes(), count);
                        arrival.next_position_bytes()
                    }
                };
                casting_time += start.elapsed();
                next_position_bytes
            })?
        } else {
            self.source.read(&read.request, slot.bytes_mut())?
        };
        self.add_read(read_bytes, start.elapsed().saturating_sub(casting_time), work);
        work.filling += casting_time;
        self.start_copy(&read, slot, job.arena, work)
    }

    pub(super) fn add_read(&self, read_bytes: u64, took: Duration, work: &mut Work) {
        work.reading += took;
        self.progress.add_read(read_bytes, u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// What comes after a read that was not cast on the way: it is gathered, cast and quantised as
    /// a whole, and copied if there is an arena.
    pub(super) fn deliver(
        &self,
        read: &ReadOp,
        mut slot: Slot<Empty>,
        arena: Option<Arc<B::Arena>>,
        work: &mut Work,
    ) -> Result<Done<B>, LoadError> {
        let start = Instant::now();
        let arrived_bytes = read.request.payload.end() - read.request.extent.start();
        for step in self.plan.gathers(read) {
            gather_step(slot.bytes_mut(), &step);
        }
        Casting::new(self.plan.casts(read)).advance(slot.bytes_mut(), arrived_bytes, |step, overflowed| {
            self.progress.add_overflowed(step.tensor, overflowed);
        });
        for step in self.plan.quantising(read) {
            let loss = quantise_step(slot.bytes_mut(), &step)
                .map_err(|not_finite| self.not_finite(step.tensor, not_finite.row))?;
            self.progress.add_loss(step.tensor, loss);
        }
        work.filling += start.elapsed();
        self.start_copy(read, slot, arena, work)
    }

    fn not_finite(&self, tensor: TensorId, row: u64) -> LoadError {
        LoadError::NotFinite { tensor: self.checkpoint.name_of(tensor).to_owned(), row }
    }

    /// Starts the copy, if there is an arena.
    fn start_copy(
        &self,
        read: &ReadOp,
        slot: Slot<Empty>,
        arena: Option<Arc<B::Arena>>,
        work: &mut Work,
    ) -> Result<Done<B>, LoadError> {
        let slot = slot.into_filled();
        let Some(arena) = arena else { return Ok(Done::Filled(slot)) };
        let start = Instant::now();
        let copy = self.backend.copy_async(&arena, slot, self.plan.copies(read))?;
        if B::IS_ASYNCHRONOUS {
            return Ok(Done::Copying(copy));
        }
        // It is over already. The slot is free before this thread takes its next one, which then is
        // this one, still in the cache: as many slots are in use as there are reads in flight.
        drop(copy.wait()?);
        work.filling += start.elapsed();
        Ok(Done::Copied)
    }
}

/// The message of a panic, as far as it has one.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
