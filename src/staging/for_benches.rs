//! A ring without a load, for `benches/ring.rs`: the cost of taking and returning a slot.

use std::sync::Arc;

use super::{Empty, Ring, Slot, StagingError};
use crate::budget::MemoryBudget;
use crate::plan::RingShape;

/// A ring of small slots. Clones share it.
#[derive(Clone, Debug)]
pub struct Slots {
    ring: Arc<Ring>,
}

/// A taken slot, returned when it is dropped, by whichever thread has it then.
#[derive(Debug)]
pub struct Taken {
    slot: Slot<Empty>,
}

impl Slots {
    /// `slots` slots of `slot_bytes` bytes each.
    ///
    /// # Errors
    /// [`StagingError::Map`] if the memory cannot be had.
    ///
    /// # Panics
    /// Never: the budget is as large as the ring.
    pub fn new(slots: u32, slot_bytes: u64) -> Result<Self, StagingError> {
        let shape = RingShape { slots, slot_bytes, readers: 1 };
        let budget = MemoryBudget::new(shape.bytes());
        let reservation = budget.reserve("ring", shape.bytes()).expect("the budget is as large as the ring");
        Ok(Self { ring: Ring::new(shape, reservation, None)? })
    }

    /// A free slot, if there is one.
    #[must_use]
    pub fn take(&self) -> Option<Taken> {
        self.ring.try_claim().map(|claim| Taken { slot: claim.take() })
    }
}

impl Taken {
    /// Writes its first byte, so that the slot is used by the thread that has it.
    pub fn mark(&mut self) {
        self.slot.bytes_mut()[0] = 1;
    }
}
