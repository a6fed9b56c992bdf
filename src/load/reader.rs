//! Reader threads. A read and a claim on a slot come in; a filled slot, or a copy in flight, goes
//! out.
//!
//! A reader either has one read at a time, or a queue of reads (io_uring):
//!
//! ```text
//! job --> claim becomes a slot --> Source::read, or ReadQueue --> gather, cast, quantise --> copy --> result
//! ```
//!
//! A reader takes its slot when it begins to read. So jobs can wait for readers without a slot, and
//! only as many slots are in use as reads are in flight: a few that stay in the cache.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;

use super::channels::{JobReceiver, NextJob, ReaderLimit};
use super::error::{LoadError, panic_message};
use super::progress::Progress;
use super::times::Work;
use crate::checkpoint::{Checkpoint, TensorId};
use crate::device::{Backend, PendingCopy as _};
use crate::plan::{CastOp, LoadPlan, ReadOp};
use crate::source::{ReadQueue, Source};
use crate::staging::cast::{Casting, Narrowing, quantise_step};
use crate::staging::gather::gather_step;
use crate::staging::permute::permute_step;
use crate::staging::{Claim, Empty, Filled, Slot};
use crate::units::to_usize;

/// One read to do.
pub(super) struct Job<B: Backend> {
    /// The turn of the layer.
    pub(super) turn: usize,
    /// The number of reads that were issued before it.
    pub(super) sequence: u64,
    /// The index of the read in the plan.
    pub(super) read: u32,
    /// The right to a slot for the bytes.
    pub(super) claim: Claim,
    /// The arena of the layer, if it has one by now. Then the reader starts the copy itself, while
    /// the bytes are in the cache of its core.
    pub(super) arena: Option<Arc<B::Arena>>,
}

/// The result of a job.
pub(super) struct JobResult<B: Backend> {
    pub(super) turn: usize,
    pub(super) sequence: u64,
    pub(super) read: u32,
    /// The time that the reader spent on it.
    pub(super) work: Work,
    pub(super) outcome: Result<Done<B>, LoadError>,
}

/// How far a read got.
pub(super) enum Done<B: Backend> {
    /// The bytes are in the slot. The arena is not there yet.
    Filled(Slot<Filled>),
    /// The copy was started, on an asynchronous device.
    Copying(B::Pending),
    /// The bytes are in their arena, and the slot is free.
    Copied,
}

/// The data that all readers of a load share.
pub(super) struct ReaderContext<B: Backend> {
    pub(super) checkpoint: Checkpoint,
    pub(super) plan: Arc<LoadPlan>,
    pub(super) source: Arc<dyn Source>,
    pub(super) backend: Arc<B>,
    pub(super) progress: Progress,
    /// How many of the readers may read.
    pub(super) limit: Arc<ReaderLimit>,
}

fn read_all<B: Backend>(
    number: u32,
    context: &ReaderContext<B>,
    jobs: &JobReceiver<Job<B>>,
    results: &Sender<JobResult<B>>,
) {
    loop {
        context.limit.wait_until_allowed(number);
        let Some(job) = jobs.wait() else { return };
        let (turn, sequence, read) = (job.turn, job.sequence, job.read);
        let mut work = Work::default();
        // Without a result the control loop would wait for ever. Unwinding drops the slot.
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
        let is_whole = self.plan.gathers(&read).next().is_some()
            || self.plan.permuting(&read).next().is_some()
            || self.plan.quantising(&read).next().is_some();
        if is_whole {
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

    /// The steps after a read that was not cast on the way: gathers, casts and quantises the whole
    /// slot, and copies it if there is an arena.
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
        for step in self.plan.permuting(read) {
            permute_step(slot.bytes_mut(), &step);
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
        // the same one, still in the cache.
        drop(copy.wait()?);
        work.filling += start.elapsed();
        Ok(Done::Copied)
    }
}

/// A job whose read is in the queue.
struct QueuedJob<B: Backend> {
    turn: usize,
    sequence: u64,
    read: u32,
    arena: Option<Arc<B::Arena>>,
    /// The time that the reader spent on it before it was queued. Bytes that are not read directly
    /// are there already.
    begun: Duration,
}

/// A reader with a queue.
struct QueuedReader<'a, B: Backend> {
    queue: ReadQueue<Slot<Empty>>,
    /// By tag.
    jobs: Vec<Option<QueuedJob<B>>>,
    context: &'a ReaderContext<B>,
    results: &'a Sender<JobResult<B>>,
}

/// Reads until the job queue closes, then waits for the reads in flight. This is reader `number` of
/// `count`, and its share of the limit is the number of its reads in flight.
pub(super) fn read_queued<B: Backend>(
    number: u32,
    count: u32,
    queue: ReadQueue<Slot<Empty>>,
    context: &ReaderContext<B>,
    jobs: &JobReceiver<Job<B>>,
    results: &Sender<JobResult<B>>,
) {
    let tags = Vec::with_capacity(queue.reads_most());
    let mut reader = QueuedReader { queue, jobs: tags, context, results };
    loop {
        if reader.queue.len() == 0 {
            context.limit.wait_until_allowed(number);
        }
        let limit = context.limit.get();
        let share = to_usize(u64::from(limit / count + u32::from(number < limit % count)));
        // Once the load has ended there is no limit, and the share may exceed the size of the
        // queue.
        while reader.queue.len() < share && reader.queue.has_room() {
            // With no read in flight, waits for a job.
            let next = match reader.queue.len() {
                0 => jobs.wait().map_or(NextJob::Ended, NextJob::Job),
                _ => jobs.next(),
            };
            match next {
                NextJob::Job(job) => reader.submit(job),
                NextJob::NoneYet => break,
                NextJob::Ended => return,
            }
        }
        if reader.finish_next().is_err() {
            return;
        }
    }
}

/// The receiver of results is gone, or the queue has failed.
struct Ended;

impl<B: Backend> QueuedReader<'_, B> {
    fn submit(&mut self, job: Job<B>) {
        let Job { turn, sequence, read, claim, arena } = job;
        let request = self.context.plan.read(read).request;
        let tag = self.jobs.iter().position(Option::is_none).unwrap_or_else(|| {
            self.jobs.push(None);
            self.jobs.len() - 1
        });
        let (queue, start) = (&mut self.queue, Instant::now());
        let submitted = catch_unwind(AssertUnwindSafe(|| queue.submit(tag, request, claim.take())));
        match submitted {
            Ok(()) => {
                self.jobs[tag] = Some(QueuedJob { turn, sequence, read, arena, begun: start.elapsed() })
            }
            Err(panic) => {
                let outcome = Err(LoadError::Panicked { message: panic_message(&*panic) });
                // The receiver may be gone.
                let _ = self.results.send(JobResult { turn, sequence, read, work: Work::default(), outcome });
            }
        }
    }

    /// Waits for the next finished read and sends its result.
    fn finish_next(&mut self) -> Result<(), Ended> {
        let (queue, context, start) = (&mut self.queue, self.context, Instant::now());
        let finished = match catch_unwind(AssertUnwindSafe(|| queue.next())) {
            Ok(Ok(Some(finished))) => finished,
            // The only read in the queue panicked.
            Ok(Ok(None)) => return Ok(()),
            Ok(Err(source)) => return self.fail_all(|| LoadError::Queue { source: copy_of(&source) }),
            Err(panic) => {
                let message = panic_message(&*panic);
                return self.fail_all(|| LoadError::Panicked { message: message.clone() });
            }
        };
        let QueuedJob { turn, sequence, read, arena, begun } =
            self.jobs[finished.tag].take().expect("a tag belongs to one job until it is over");
        // Includes other work of this thread while the read was in flight.
        let took = begun + start.elapsed();
        let mut work = Work::default();
        let deliver = || {
            let read_bytes = finished.outcome?;
            context.add_read(read_bytes, took, &mut work);
            context.deliver(&context.plan.read(read), finished.buffer, arena, &mut work)
        };
        let outcome = catch_unwind(AssertUnwindSafe(deliver))
            .unwrap_or_else(|panic| Err(LoadError::Panicked { message: panic_message(&*panic) }));
        self.results.send(JobResult { turn, sequence, read, work, outcome }).map_err(|_| Ended)
    }

    /// Fails every job of the queue: no more reads come out of it.
    fn fail_all(&mut self, error: impl Fn() -> LoadError) -> Result<(), Ended> {
        for QueuedJob { turn, sequence, read, .. } in self.jobs.drain(..).flatten() {
            let _ = self.results.send(JobResult {
                turn,
                sequence,
                read,
                work: Work::default(),
                outcome: Err(error()),
            });
        }
        Err(Ended)
    }
}

/// `io::Error` cannot be cloned.
fn copy_of(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| io::Error::from(error.kind()), io::Error::from_raw_os_error)
}

/// How readers read.
pub(super) enum ReaderKind {
    /// Each of this many readers has one read at a time.
    OneByOne { readers: u32 },
    /// Each reader has one of these queues.
    Queued(Vec<ReadQueue<Slot<Empty>>>),
}

/// Starts the readers. They end when the job queue closes.
pub(super) fn spawn<B: Backend>(
    kind: ReaderKind,
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
    match kind {
        ReaderKind::OneByOne { readers } => {
            for number in 0..readers {
                let (context, jobs, results) = ends();
                start(number, Box::new(move || read_all(number, &context, &jobs, &results)))?;
            }
        }
        ReaderKind::Queued(queues) => {
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
