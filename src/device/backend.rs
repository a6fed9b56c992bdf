//! The traits of a device: arenas, copies, resident layers.
//!
//! ```text
//! allocate --> arena, shared by the copies into it --(all copies queued)--> seal --> resident --> drop frees
//! ```
#![allow(unsafe_code, reason = "functions that take the caller's handles; each states what it needs")]

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{DeviceError, Target};
use crate::live::Entry;
use crate::plan::{Copies, MoveOp, PlannedLayer};
use crate::staging::{Empty, Filled, Slot};
use crate::units::{MIB, to_usize};

/// A kind of device. Shared by the threads of a load.
pub(crate) trait Backend: Send + Sync + 'static {
    /// Memory of one layer while it is filled. Dropping the last owner frees it.
    type Arena: Send + Sync + 'static;
    /// The same memory once all its copies are started.
    type Resident: Resident + 'static;
    /// A copy in flight.
    type Pending: PendingCopy;

    /// True if copies continue after [`Self::copy_async`] returns and allocations are slow: both
    /// then get a thread that waits for them.
    const IS_ASYNCHRONOUS: bool;

    /// Allocates the arena of a layer at `place`. A place in the window has no other user until the
    /// arena is dropped.
    fn allocate(&self, layer: &PlannedLayer, place: ArenaPlace) -> Result<Arc<Self::Arena>, DeviceError>;

    /// Starts the copies of one read. Until they are over, the pending copy or a thread of the
    /// backend owns the slot and keeps the target alive. On an error nothing is in flight when this
    /// returns.
    ///
    /// The arena must be that of the read's layer, and each read of the plan is copied once: so no
    /// two calls write to the same bytes.
    fn copy_async(
        &self,
        arena: &Arc<Self::Arena>,
        slot: Slot<Filled>,
        copies: Copies<'_>,
    ) -> Result<Self::Pending, DeviceError>;

    /// Ends the filling. Every copy of the layer was started, and only pending copies share the
    /// arena. Makes the moves.
    fn seal(&self, arena: Arc<Self::Arena>, moves: &[MoveOp]) -> Result<Arc<Self::Resident>, DeviceError>;

    /// The load failed or was cancelled: missing bytes will not come. Called before waiting for
    /// what is in flight.
    fn give_up(&self) {}

    /// Returns recycled arenas and the window to the system. Called once, when no copy is in
    /// flight.
    fn trim(&self);
}

/// Where the arena of a layer is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArenaPlace {
    /// In its own memory.
    Own,
    /// At an offset of the window, which the backend has allocated as a whole.
    InWindow { offset_bytes: u64 },
}

/// What has to finish before memory is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum After {
    /// A `CUevent`, as it was last recorded.
    Event(u64),
    /// Everything queued in a `CUstream` so far.
    Stream(u64),
}

/// What happened to memory that was freed.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "host memory goes back to the system at once"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    /// The system or the driver confirmed that it has the memory back.
    Returned,
    /// Its pool has it, and returns it to the device as far as possible in [`ArenaPool::settle`].
    ToPool,
    /// The device frees it once the caller's event or stream has finished.
    Queued,
    /// Its load reuses it, and returns it at the end.
    Recycled,
    /// It belongs to the caller, who has it again.
    Lent,
    /// Freeing was refused, or the memory is still in use, or that is unknown.
    Unconfirmed,
}

/// The pool of a load's arenas. Outlives them.
pub(crate) trait ArenaPool: Send + Sync {
    /// Bytes that the driver's pool has taken from the device, used or not. `None` without a pool,
    /// or without an answer.
    fn pool_bytes(&self) -> Option<u64>;

    /// Waits until all freed memory is free, and returns unused memory of the pool. False if either
    /// was refused.
    fn settle(&self) -> bool;

    /// An arena with the bytes that the layer had before. `fill` writes them from an offset on,
    /// from front to back, at most [`REFILLED_BYTES_MAX`] at a time.
    fn refill(
        self: Arc<Self>,
        layer: &PlannedLayer,
        fill: &mut Fill<'_>,
    ) -> Result<Arc<dyn Resident>, Unfilled>;
}

/// Bytes of an arena that are refilled in one step.
pub(crate) const REFILLED_BYTES_MAX: u64 = MIB;

/// Writes the bytes of an arena from an offset on.
pub(crate) type Fill<'a> = dyn FnMut(u64, &mut [u8]) -> io::Result<()> + 'a;

/// Why an arena could not be refilled.
#[derive(Debug)]
pub(crate) enum Unfilled {
    /// The device refused.
    Device(DeviceError),
    /// The bytes could not be read.
    Bytes(io::Error),
}

impl From<DeviceError> for Unfilled {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

/// The pieces in which an arena is refilled: start and length of each.
pub(crate) fn refill_pieces(len_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let starts = (0..len_bytes).step_by(to_usize(REFILLED_BYTES_MAX));
    starts.map(move |start| (start, REFILLED_BYTES_MAX.min(len_bytes - start)))
}

/// Memory of one layer on a device. Once it is ready, the loader no longer writes to it. Dropping
/// it frees it.
pub(crate) trait Resident: Send + Sync {
    /// Where it is.
    fn target(&self) -> Target {
        Target::None
    }

    /// Its bytes on the device.
    fn len_bytes(&self) -> u64;

    /// Frees the memory as dropping does, and reports the result. Memory that went [to the
    /// pool](Freed::ToPool) has to be settled.
    fn free(self: Arc<Self>) -> Freed {
        drop(self);
        Freed::Unconfirmed
    }

    /// Its pool, if there is one to be settled.
    fn arena_pool(&self) -> Option<Arc<dyn ArenaPool>> {
        None
    }

    /// Its entry in the list of allocations, if the memory belongs to the loader.
    fn live(&self) -> Option<&Entry> {
        None
    }

    /// The bytes, if the host can read them.
    fn host_bytes(&self) -> Option<&[u8]>;

    /// Its address in host memory, if it has bytes there. Others may write through the pointer.
    fn host_address(&self) -> Option<NonNull<u8>> {
        None
    }

    /// Its address on the device, if it has one. From now on others may use the memory.
    fn device_address(&self) -> Option<u64> {
        None
    }

    /// True if the bytes are kept anywhere.
    fn is_somewhere(&self) -> bool {
        true
    }

    /// Copies bytes to the host, after waiting until the layer is ready. False if the device keeps
    /// none.
    ///
    /// # Panics
    /// If the range is not inside the arena.
    fn read(&self, offset_bytes: u64, target: &mut [u8]) -> Result<bool, DeviceError>;

    /// Waits until every byte is in its place.
    fn wait_ready(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// True if every byte is in its place.
    fn is_ready(&self) -> Result<bool, DeviceError> {
        Ok(true)
    }

    /// The event that marks readiness, if the device has events.
    fn ready_event(&self) -> Option<u64> {
        None
    }

    /// Makes later work in the caller's stream wait until the layer is ready.
    ///
    /// # Safety
    /// A live stream of the device's context.
    unsafe fn let_wait(&self, _stream: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Makes freeing wait for `after`; dropping then waits for nothing else.
    ///
    /// # Safety
    /// A live event or stream of the device's context, behind everything that uses the memory.
    unsafe fn release_after(&self, _after: After) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// A copy in flight. Dropping it never frees the slot before the copy is over.
pub(crate) trait PendingCopy: Send + 'static {
    /// Waits for the copy and returns the slot.
    fn wait(self) -> Result<Slot<Empty>, DeviceError>;
}
