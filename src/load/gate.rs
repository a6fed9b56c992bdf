//! How many of the readers may read: those with the lowest numbers, so that the same few stay busy.
//!
//! ```text
//! GateKeeper::set(limit) --> Gate --> reader: wait_for_turn(number), until number < limit
//! GateKeeper dropped     --> open to all, so that they find their jobs gone and end
//! ```

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The readers' end.
#[derive(Debug)]
pub(super) struct Gate {
    limit: Mutex<u32>,
    changed: Condvar,
}

impl Gate {
    /// Waits until the reader of this number, from 0, may read.
    pub(super) fn wait_for_turn(&self, number: u32) {
        let is_closed = |limit: &mut u32| number >= *limit;
        drop(self.changed.wait_while(self.lock(), is_closed).unwrap_or_else(PoisonError::into_inner));
    }

    /// How many may read.
    pub(super) fn limit(&self) -> u32 {
        *self.lock()
    }

    fn set(&self, limit: u32) {
        *self.lock() = limit;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, u32> {
        // It is only ever assigned.
        self.limit.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The control loop's end. Dropping it lets every reader through.
#[derive(Debug)]
pub(super) struct GateKeeper(Arc<Gate>);

impl GateKeeper {
    /// Lets so many readers through.
    pub(super) fn new(limit: u32) -> Self {
        Self(Arc::new(Gate { limit: Mutex::new(limit), changed: Condvar::new() }))
    }

    /// The readers' end.
    pub(super) fn gate(&self) -> Arc<Gate> {
        Arc::clone(&self.0)
    }

    /// From now on, lets so many through. Whoever reads finishes that read.
    pub(super) fn set(&self, limit: u32) {
        self.0.set(limit);
    }
}

impl Drop for GateKeeper {
    fn drop(&mut self) {
        self.0.set(u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crossbeam_channel::{RecvTimeoutError, unbounded};

    use super::*;

    const SOON: Duration = Duration::from_secs(20);
    const NOT_YET: Duration = Duration::from_millis(30);

    #[test]
    fn readers_wait_for_their_turn_and_for_the_end() {
        let keeper = GateKeeper::new(1);
        let (sender, passed) = unbounded();
        for number in 0..4 {
            let (gate, sender) = (keeper.gate(), sender.clone());
            std::thread::spawn(move || {
                gate.wait_for_turn(number);
                sender.send(number).unwrap();
            });
        }
        assert_eq!(passed.recv_timeout(SOON), Ok(0));
        assert_eq!(passed.recv_timeout(NOT_YET), Err(RecvTimeoutError::Timeout));
        keeper.set(2);
        assert_eq!(passed.recv_timeout(SOON), Ok(1));
        assert_eq!(passed.recv_timeout(NOT_YET), Err(RecvTimeoutError::Timeout));
        keeper.set(0);
        drop(keeper);
        let mut last = [passed.recv_timeout(SOON).unwrap(), passed.recv_timeout(SOON).unwrap()];
        last.sort_unstable();
        assert_eq!(last, [2, 3]);
    }
}
