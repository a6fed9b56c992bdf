//! The channels between the threads of a load.
//!
//! In one pass they grow as they need to. Where the load goes on pass after pass each has room from
//! the beginning for all that can be in it at once: nothing is allocated later, and still nobody
//! who sends waits.

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use crate::plan::LoadPlan;
use crate::units::to_usize;

/// A channel with room for so many, or for any number.
pub(super) fn channel<T>(room: Option<usize>) -> (Sender<T>, Receiver<T>) {
    room.map_or_else(unbounded, bounded)
}

/// How much room each channel needs; `None` for any number.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sizes {
    /// Reads that wait for a reader, or are over and wait for the control loop.
    pub(super) jobs: Option<usize>,
    /// Layers that are open, or on their way to the caller.
    pub(super) layers: Option<usize>,
    /// What the attendants are asked to wait for: copies, each with a slot, and layers.
    pub(super) waits: Option<usize>,
    /// What they have to tell: of those, and of arenas.
    pub(super) notices: Option<usize>,
}

impl Sizes {
    pub(super) fn of(plan: &LoadPlan) -> Self {
        if plan.passes().is_one() {
            return Self::default();
        }
        let slots = to_usize(u64::from(plan.memory().ring().slots));
        // Twice as many as may be in flight are issued at most.
        let readers = to_usize(u64::from(plan.memory().ring().readers));
        let jobs = 2 * readers.max(slots) + 1;
        // Open ahead of the caller (see `ahead_most`), and one that it has asked for; with an error
        // behind them.
        let layers = ahead_most(plan) + 2;
        Self {
            jobs: Some(jobs),
            layers: Some(layers),
            waits: Some(slots + layers),
            notices: Some(slots + 2 * layers),
        }
    }
}

/// Most layers that may be ahead of the last one the caller has asked for: a layer that is read
/// ahead of the window holds a slot at least, so that more cannot be. The memory of open layers, a
/// term of the plan, counts on this.
pub(super) fn ahead_most(plan: &LoadPlan) -> usize {
    let window = plan.window().over(plan.layers().len());
    window.saturating_add(to_usize(u64::from(plan.memory().ring().slots)))
}
