//! Reader threads: a slot and a read come in, a filled slot or a copy in flight goes out.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use super::{LoadError, Progress};
use crate::device::Backend;
use crate::plan::LoadPlan;
use crate::source::Source;
use crate::staging::cast::Casting;
use crate::staging::{Empty, Filled, Slot};
use crate::units::to_usize;

/// One read to do.
pub(super) struct Job<B: Backend> {
    /// Index of the layer.
    pub(super) layer: usize,
    /// Index of the read.
    pub(super) read: u32,
    /// Where the bytes go.
    pub(super) slot: Slot<Empty>,
    /// Where they go next, if the layer has its arena by now: then the copy starts on the reader's own core, while the
    /// bytes are in its cache.
    pub(super) arena: Option<Arc<B::Arena>>,
}

/// What became of a job.
pub(super) struct JobResult<B: Backend> {
    pub(super) layer: usize,
    pub(super) read: u32,
    pub(super) outcome: Result<Done<B>, LoadError>,
}

/// How far a read got.
pub(super) enum Done<B: Backend> {
    /// The bytes are in the slot and wait for an arena.
    Filled(Slot<Filled>),
    /// The copy has been started.
    Copying(B::Pending),
}

/// What all readers of a load share.
pub(super) struct ReaderContext<B: Backend> {
    pub(super) plan: Arc<LoadPlan>,
    pub(super) source: Arc<dyn Source>,
    pub(super) backend: Arc<B>,
    pub(super) progress: Progress,
}

/// Starts `count` readers. They end when the job channel closes.
pub(super) fn spawn<B: Backend>(
    count: u32,
    context: &Arc<ReaderContext<B>>,
    jobs: &Receiver<Job<B>>,
    results: &Sender<JobResult<B>>,
) -> Result<Vec<JoinHandle<()>>, LoadError> {
    let mut threads = Vec::with_capacity(to_usize(u64::from(count)));
    for number in 0..count {
        let (context, jobs, results) = (Arc::clone(context), jobs.clone(), results.clone());
        let thread = thread::Builder::new().name(format!("onelayer-read-{number}"));
        let thread = thread.spawn(move || read_all(&context, &jobs, &results));
        threads.push(thread.map_err(|source| LoadError::Thread { source })?);
    }
    Ok(threads)
}

fn read_all<B: Backend>(context: &ReaderContext<B>, jobs: &Receiver<Job<B>>, results: &Sender<JobResult<B>>) {
    for job in jobs {
        let (layer, read) = (job.layer, job.read);
        // A panic must become an error of this load: without it the control loop would wait for the result for ever.
        // Unwinding drops the slot, and with it anything the job held.
        let outcome = catch_unwind(AssertUnwindSafe(|| context.run(job)))
            .unwrap_or_else(|panic| Err(LoadError::Panicked { message: panic_message(&*panic) }));
        if results.send(JobResult { layer, read, outcome }).is_err() {
            return;
        }
    }
}

impl<B: Backend> ReaderContext<B> {
    fn run(&self, job: Job<B>) -> Result<Done<B>, LoadError> {
        let read = self.plan.read(job.read);
        let mut slot = job.slot;
        let start = Instant::now();
        let mut casting = Casting::new(self.plan.casts(&read));
        let mut casting_time = Duration::ZERO;
        let read_bytes = if casting.is_needed() {
            let payload_start = read.request.payload.start() - read.request.extent.start();
            self.source.read_in_pieces(&read.request, slot.bytes_mut(), &mut |slot, arrived_bytes| {
                let start = Instant::now();
                casting.advance(slot, payload_start + arrived_bytes, |step, overflowed| {
                    self.progress.add_overflowed(step.tensor, overflowed);
                });
                casting_time += start.elapsed();
            })?
        } else {
            self.source.read(&read.request, slot.bytes_mut())?
        };
        let reading_ns = start.elapsed().saturating_sub(casting_time).as_nanos();
        self.progress.add_read(read_bytes, u64::try_from(reading_ns).unwrap_or(u64::MAX));
        let slot = slot.into_filled();
        Ok(match job.arena {
            Some(arena) => Done::Copying(self.backend.copy_async(&arena, slot, self.plan.copies(&read))?),
            None => Done::Filled(slot),
        })
    }
}

/// The message of a panic, as far as it has one.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
