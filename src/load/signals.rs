//! What the caller's side tells the control loop: that the next layer is wanted, that a place is
//! free, that the load is not wanted.
//!
//! Counters, and a bell that is rung when one has changed. The bell has room for one ring: whoever
//! hears it looks at everything. So nothing is allocated and nobody who rings waits, however long
//! the load goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crossbeam_channel::{Receiver, Sender, bounded};

/// The caller's end, shared by the stream, its handles and the places of the window.
#[derive(Debug)]
pub(super) struct Signals {
    wanted: AtomicUsize,
    is_cancelled: AtomicBool,
    bell: Sender<()>,
}

impl Signals {
    /// The signals, and the control loop's ear.
    pub(super) fn new() -> (Arc<Self>, Receiver<()>) {
        let (bell, ear) = bounded(1);
        (Arc::new(Self { wanted: AtomicUsize::new(0), is_cancelled: AtomicBool::new(false), bell }), ear)
    }

    /// The caller asks for one more layer.
    pub(super) fn want(&self) {
        self.wanted.fetch_add(1, Ordering::SeqCst);
        self.ring();
    }

    /// The load is not wanted any more.
    pub(super) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::SeqCst);
        self.ring();
    }

    /// Something has changed, here or in the window.
    pub(super) fn ring(&self) {
        // One that has not been heard yet will tell this too. A loop that has ended needs none.
        let _ = self.bell.try_send(());
    }

    /// Layers that the caller has asked for so far.
    pub(super) fn wanted(&self) -> usize {
        self.wanted.load(Ordering::SeqCst)
    }

    /// True once the load is not wanted any more.
    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_ring_tells_of_everything_before_it() {
        let (signals, ear) = Signals::new();
        signals.want();
        signals.want();
        signals.cancel();
        assert_eq!(ear.try_iter().count(), 1);
        assert_eq!((signals.wanted(), signals.is_cancelled()), (2, true));
        signals.ring();
        assert!(ear.try_recv().is_ok(), "it rings again once it was heard");
        drop(ear);
        signals.ring();
    }
}
