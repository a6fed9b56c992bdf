//! Reader threads with a queue of reads each: as many in flight as the gate lets through, and a
//! hand on those that are over.
//!
//! ```text
//! jobs --> claim becomes a slot --> ReadQueue (the kernel's while in flight) --> cast, copy --> results
//! ```

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;

use super::LoadError;
use super::jobs::{JobReceiver, Next};
use super::meter::Work;
use super::reader::{Job, JobResult, ReaderContext, panic_message};
use crate::device::Backend;
use crate::source::ReadQueue;
use crate::staging::{Empty, Slot};
use crate::units::to_usize;

/// A job whose read is in the queue.
struct Queued<B: Backend> {
    turn: usize,
    sequence: u64,
    read: u32,
    arena: Option<Arc<B::Arena>>,
    /// What its reader did for it before it was in the queue: what is not read direct is there
    /// already.
    begun: Duration,
}

/// One of `count` such threads.
struct QueuedReader<'a, B: Backend> {
    queue: ReadQueue<Slot<Empty>>,
    /// By tag.
    jobs: Vec<Option<Queued<B>>>,
    context: &'a ReaderContext<B>,
    results: &'a Sender<JobResult<B>>,
}

/// Reads until the job channel closes. What is in flight then is waited for. This is number
/// `number` of `count`.
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
            context.gate.wait_for_turn(number);
        }
        let limit = context.gate.limit();
        let share = to_usize(u64::from(limit / count + u32::from(number < limit % count)));
        // Once the load has ended the gate is open to all, for more than the queue was made for.
        while reader.queue.len() < share && reader.queue.has_room() {
            // With nothing to wait for but jobs, waits for those.
            let next = match reader.queue.len() {
                0 => jobs.wait().map_or(Next::Ended, Next::Job),
                _ => jobs.next(),
            };
            match next {
                Next::Job(job) => reader.submit(job),
                Next::NoneYet => break,
                Next::Ended => return,
            }
        }
        if reader.hand_on_next().is_err() {
            return;
        }
    }
}

/// Nobody wants results any more, or there will be none.
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
            Ok(()) => self.jobs[tag] = Some(Queued { turn, sequence, read, arena, begun: start.elapsed() }),
            Err(panic) => {
                let outcome = Err(LoadError::Panicked { message: panic_message(&*panic) });
                // Whoever has gone does not want to know.
                let _ = self.results.send(JobResult { turn, sequence, read, work: Work::default(), outcome });
            }
        }
    }

    /// Waits for a read and hands on what came of it.
    fn hand_on_next(&mut self) -> Result<(), Ended> {
        let (queue, context, start) = (&mut self.queue, self.context, Instant::now());
        let finished = match catch_unwind(AssertUnwindSafe(|| queue.next())) {
            Ok(Ok(Some(finished))) => finished,
            // A read that panicked in the queue was the only one.
            Ok(Ok(None)) => return Ok(()),
            Ok(Err(source)) => return self.fail_all(|| LoadError::Queue { source: copy_of(&source) }),
            Err(panic) => {
                let message = panic_message(&*panic);
                return self.fail_all(|| LoadError::Panicked { message: message.clone() });
            }
        };
        let Queued { turn, sequence, read, arena, begun } =
            self.jobs[finished.tag].take().expect("a tag is a job's until it is over");
        // The time of this thread, which had others in flight meanwhile and copied some.
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

    /// Nothing more comes out of the queue: every job of it has failed.
    fn fail_all(&mut self, error: impl Fn() -> LoadError) -> Result<(), Ended> {
        for Queued { turn, sequence, read, .. } in self.jobs.drain(..).flatten() {
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

/// Errors of the system cannot be cloned.
fn copy_of(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| io::Error::from(error.kind()), io::Error::from_raw_os_error)
}
