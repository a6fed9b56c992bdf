//! How the threads of a load talk to each other.
//!
//! ```text
//! caller  --- Signals: one more layer, a place is free, cancel ---> control loop
//! control --- JobSender ---> JobReceiver, shared by all readers
//! control --- ReaderLimitSetter ---> ReaderLimit: how many readers may read
//! ```
//!
//! All other messages go through crossbeam channels. In one pass they grow as needed. In a load of
//! several passes each has room from the start for all that it can hold at once ([`Sizes`]), so
//! that later passes allocate nothing and no sender waits.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use crate::plan::LoadPlan;
use crate::units::to_usize;

/// A channel with room for this many messages, or for any number.
pub(super) fn channel<T>(room: Option<usize>) -> (Sender<T>, Receiver<T>) {
    room.map_or_else(unbounded, bounded)
}

/// How many messages each channel has room for; `None` for any number.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sizes {
    /// Reads that wait for a reader, or results that wait for the control loop.
    pub(super) jobs: Option<usize>,
    /// Open layers, or layers on their way to the caller.
    pub(super) layers: Option<usize>,
    /// Copies (each has a slot) and layers that the completion threads wait for.
    pub(super) waits: Option<usize>,
    /// Events from the completion threads: about those, and about arenas.
    pub(super) events: Option<usize>,
}

impl Sizes {
    pub(super) fn of(plan: &LoadPlan) -> Self {
        if plan.passes().is_one() {
            return Self::default();
        }
        let slots = to_usize(u64::from(plan.memory().ring().slots));
        // At most two jobs are issued for each read in flight.
        let readers = to_usize(u64::from(plan.memory().ring().readers));
        let jobs = 2 * readers.max(slots) + 1;
        // Layers ahead of the caller (see `layers_ahead_max`), the one it asked for, and an error.
        let layers = layers_ahead_max(plan) + 2;
        Self {
            jobs: Some(jobs),
            layers: Some(layers),
            waits: Some(slots + layers),
            events: Some(slots + 2 * layers),
        }
    }
}

/// Most layers that can be ahead of the last one the caller asked for. A layer that is read ahead
/// of the window holds at least one slot, so there cannot be more. The plan's term for loader state
/// relies on this.
pub(super) fn layers_ahead_max(plan: &LoadPlan) -> usize {
    let window = plan.window().over(plan.layers().len());
    window.saturating_add(to_usize(u64::from(plan.memory().ring().slots)))
}

/// Signals from the caller's side to the control loop. Shared by the stream, its cancel handles and
/// the window permits.
///
/// These are counters and a wake-up channel with room for one message. Once woken, the control loop
/// reads all counters, so nothing is allocated and no sender waits.
#[derive(Debug)]
pub(super) struct Signals {
    wanted: AtomicUsize,
    is_cancelled: AtomicBool,
    wake: Sender<()>,
}

impl Signals {
    /// The signals, and the channel that wakes the control loop.
    pub(super) fn new() -> (Arc<Self>, Receiver<()>) {
        let (wake, woken) = bounded(1);
        (Arc::new(Self { wanted: AtomicUsize::new(0), is_cancelled: AtomicBool::new(false), wake }), woken)
    }

    /// The caller asks for one more layer.
    pub(super) fn want(&self) {
        self.wanted.fetch_add(1, Ordering::SeqCst);
        self.wake();
    }

    /// Cancels the load.
    pub(super) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Wakes the control loop: something has changed, here or in the window.
    pub(super) fn wake(&self) {
        // A message that is still in the channel serves as well. A loop that has ended needs none.
        let _ = self.wake.try_send(());
    }

    /// Layers that the caller has asked for so far.
    pub(super) fn wanted(&self) -> usize {
        self.wanted.load(Ordering::SeqCst)
    }

    /// True once the load is cancelled.
    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::SeqCst)
    }
}

/// The queue of reads that wait for a reader, with room for this many, or for any number.
///
/// It is written by hand because a crossbeam receiver allocates when a thread waits on it for the
/// first time, and idle readers may first wait in a late pass.
pub(super) fn job_queue<J>(room: Option<usize>) -> (JobSender<J>, JobReceiver<J>) {
    let state = JobQueueState { jobs: VecDeque::with_capacity(room.unwrap_or(0)), is_closed: false };
    let queue = Arc::new(JobQueue { state: Mutex::new(state), changed: Condvar::new() });
    (JobSender(Arc::clone(&queue)), JobReceiver(queue))
}

struct JobQueue<J> {
    state: Mutex<JobQueueState<J>>,
    /// Notified of each new job, and when the queue is closed.
    changed: Condvar,
}

struct JobQueueState<J> {
    jobs: VecDeque<J>,
    is_closed: bool,
}

impl<J> JobQueue<J> {
    fn lock(&self) -> MutexGuard<'_, JobQueueState<J>> {
        // Each change is one push or pop, so the state is valid after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The control loop's end. Dropping it closes the queue.
pub(super) struct JobSender<J>(Arc<JobQueue<J>>);

impl<J> JobSender<J> {
    /// Puts a job behind the others.
    pub(super) fn send(&self, job: J) {
        self.0.lock().jobs.push_back(job);
        self.0.changed.notify_one();
    }
}

impl<J> Drop for JobSender<J> {
    fn drop(&mut self) {
        self.0.lock().is_closed = true;
        self.0.changed.notify_all();
    }
}

/// The readers' end. The control loop has one too, to take back the jobs that no reader has begun.
pub(super) struct JobReceiver<J>(Arc<JobQueue<J>>);

impl<J> Clone for JobReceiver<J> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// The state of the queue at one moment.
pub(super) enum NextJob<J> {
    Job(J),
    NoneYet,
    /// The queue is empty and closed.
    Ended,
}

impl<J> JobReceiver<J> {
    /// Waits for a job. `None` once the queue is empty and closed.
    pub(super) fn wait(&self) -> Option<J> {
        let is_idle = |state: &mut JobQueueState<J>| state.jobs.is_empty() && !state.is_closed;
        let mut state =
            self.0.changed.wait_while(self.0.lock(), is_idle).unwrap_or_else(PoisonError::into_inner);
        state.jobs.pop_front()
    }

    /// A job, if one is there.
    pub(super) fn next(&self) -> NextJob<J> {
        let mut state = self.0.lock();
        match state.jobs.pop_front() {
            Some(job) => NextJob::Job(job),
            None if state.is_closed => NextJob::Ended,
            None => NextJob::NoneYet,
        }
    }
}

/// How many of the readers may read. Those with the lowest numbers may, so that the same few stay
/// busy.
#[derive(Debug)]
pub(super) struct ReaderLimit {
    limit: Mutex<u32>,
    changed: Condvar,
}

impl ReaderLimit {
    /// Waits until the reader of this number, counted from 0, may read.
    pub(super) fn wait_until_allowed(&self, number: u32) {
        let is_over = |limit: &mut u32| number >= *limit;
        drop(self.changed.wait_while(self.lock(), is_over).unwrap_or_else(PoisonError::into_inner));
    }

    /// How many may read.
    pub(super) fn get(&self) -> u32 {
        *self.lock()
    }

    fn set(&self, limit: u32) {
        *self.lock() = limit;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, u32> {
        // Assignments cannot leave it half done.
        self.limit.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The control loop's end. Dropping it lifts the limit, so that all readers find their queue closed
/// and end.
#[derive(Debug)]
pub(super) struct ReaderLimitSetter(Arc<ReaderLimit>);

impl ReaderLimitSetter {
    /// Lets this many readers read.
    pub(super) fn new(limit: u32) -> Self {
        Self(Arc::new(ReaderLimit { limit: Mutex::new(limit), changed: Condvar::new() }))
    }

    /// The readers' end.
    pub(super) fn limit(&self) -> Arc<ReaderLimit> {
        Arc::clone(&self.0)
    }

    /// From now on, lets this many read. Reads in progress are finished.
    pub(super) fn set(&self, limit: u32) {
        self.0.set(limit);
    }
}

impl Drop for ReaderLimitSetter {
    fn drop(&mut self) {
        self.0.set(u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crossbeam_channel::RecvTimeoutError;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);
    const NOT_YET: Duration = Duration::from_millis(30);

    #[test]
    fn readers_wait_until_they_may_read_or_the_load_ends() {
        let setter = ReaderLimitSetter::new(1);
        let (sender, passed) = unbounded();
        for number in 0..4 {
            let (limit, sender) = (setter.limit(), sender.clone());
            std::thread::spawn(move || {
                limit.wait_until_allowed(number);
                sender.send(number).unwrap();
            });
        }
        assert_eq!(passed.recv_timeout(SOON), Ok(0));
        assert_eq!(passed.recv_timeout(NOT_YET), Err(RecvTimeoutError::Timeout));
        setter.set(2);
        assert_eq!(passed.recv_timeout(SOON), Ok(1));
        assert_eq!(passed.recv_timeout(NOT_YET), Err(RecvTimeoutError::Timeout));
        setter.set(0);
        drop(setter);
        let mut last = [passed.recv_timeout(SOON).unwrap(), passed.recv_timeout(SOON).unwrap()];
        last.sort_unstable();
        assert_eq!(last, [2, 3]);
    }

    #[test]
    fn one_wake_up_covers_every_earlier_signal() {
        let (signals, woken) = Signals::new();
        signals.want();
        signals.want();
        signals.cancel();
        assert_eq!(woken.try_iter().count(), 1);
        assert_eq!((signals.wanted(), signals.is_cancelled()), (2, true));
        signals.wake();
        assert!(woken.try_recv().is_ok(), "it wakes again once the message was taken");
        drop(woken);
        signals.wake();
    }

    #[test]
    fn every_job_is_taken_once_and_in_order_and_then_it_ends() {
        let (sender, receiver) = job_queue(Some(2));
        assert!(matches!(receiver.next(), NextJob::NoneYet));
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let receiver = receiver.clone();
                std::thread::spawn(move || std::iter::from_fn(|| receiver.wait()).collect::<Vec<u32>>())
            })
            .collect();
        (0..1000).for_each(|job| sender.send(job));
        drop(sender);
        let taken: Vec<Vec<u32>> = waiting.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(taken.iter().all(|jobs| jobs.is_sorted()), "no thread is given an older job later");
        let mut all = taken.concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..1000));
        assert!(matches!(receiver.next(), NextJob::Ended));
    }

    #[test]
    fn jobs_that_no_reader_has_begun_are_there_after_the_end() {
        let (sender, receiver) = job_queue(None);
        sender.send(1);
        sender.send(2);
        drop(sender);
        assert_eq!((receiver.wait(), receiver.wait(), receiver.wait()), (Some(1), Some(2), None));
    }
}
