//! The reads that wait for a reader: a queue with many takers.
//!
//! Readers are many, and some of them have nothing to do until the load finds that more reads in
//! flight pay. A thread that waits here for the first time, however late, takes nothing from the
//! allocator: there is a lock and a bell, and room for all jobs from the beginning where that is
//! known.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A queue with so much room, or with any.
pub(super) fn queue<J>(room: Option<usize>) -> (JobSender<J>, JobReceiver<J>) {
    let state = State { jobs: VecDeque::with_capacity(room.unwrap_or(0)), is_closed: false };
    let queue = Arc::new(Queue { state: Mutex::new(state), bell: Condvar::new() });
    (JobSender(Arc::clone(&queue)), JobReceiver(queue))
}

struct Queue<J> {
    state: Mutex<State<J>>,
    /// Rings for a job, and when there will be none any more.
    bell: Condvar,
}

struct State<J> {
    jobs: VecDeque<J>,
    is_closed: bool,
}

impl<J> Queue<J> {
    fn lock(&self) -> MutexGuard<'_, State<J>> {
        // One job comes or goes at a time.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The control loop's end. Dropping it closes the queue.
pub(super) struct JobSender<J>(Arc<Queue<J>>);

impl<J> JobSender<J> {
    /// Puts a job behind the others.
    pub(super) fn send(&self, job: J) {
        self.0.lock().jobs.push_back(job);
        self.0.bell.notify_one();
    }
}

impl<J> Drop for JobSender<J> {
    fn drop(&mut self) {
        self.0.lock().is_closed = true;
        self.0.bell.notify_all();
    }
}

/// The readers' end, and that of whoever takes back what no reader has begun.
pub(super) struct JobReceiver<J>(Arc<Queue<J>>);

impl<J> Clone for JobReceiver<J> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// What there is at the moment.
pub(super) enum Next<J> {
    Job(J),
    NoneYet,
    /// And no more will come.
    Ended,
}

impl<J> JobReceiver<J> {
    /// Waits for a job. `None` once there are none left and no more will come.
    pub(super) fn wait(&self) -> Option<J> {
        let is_idle = |state: &mut State<J>| state.jobs.is_empty() && !state.is_closed;
        let mut state =
            self.0.bell.wait_while(self.0.lock(), is_idle).unwrap_or_else(PoisonError::into_inner);
        state.jobs.pop_front()
    }

    /// A job, if one is there.
    pub(super) fn next(&self) -> Next<J> {
        let mut state = self.0.lock();
        match state.jobs.pop_front() {
            Some(job) => Next::Job(job),
            None if state.is_closed => Next::Ended,
            None => Next::NoneYet,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_job_is_taken_once_and_in_order_and_then_it_ends() {
        let (sender, receiver) = queue(Some(2));
        assert!(matches!(receiver.next(), Next::NoneYet));
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let receiver = receiver.clone();
                std::thread::spawn(move || std::iter::from_fn(|| receiver.wait()).collect::<Vec<u32>>())
            })
            .collect();
        (0..1000).for_each(|job| sender.send(job));
        drop(sender);
        let taken: Vec<Vec<u32>> = waiting.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(taken.iter().all(|jobs| jobs.is_sorted()), "nobody is given an older job later");
        let mut all = taken.concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..1000));
        assert!(matches!(receiver.next(), Next::Ended));
    }

    #[test]
    fn what_nobody_has_begun_is_there_after_the_end() {
        let (sender, receiver) = queue(None);
        sender.send(1);
        sender.send(2);
        drop(sender);
        assert_eq!((receiver.wait(), receiver.wait(), receiver.wait()), (Some(1), Some(2), None));
    }
}
