//! What the loader asks of a device.
//!
//! ```text
//! allocate --> arena, shared by the copies into it --(all copies queued)--> seal --> resident --> drop frees
//! ```
#![allow(unsafe_code, reason = "handles of the caller's are promises; each says which")]

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
    /// Memory of one layer that is being filled. Dropping the last owner frees it.
    type Arena: Send + Sync + 'static;
    /// The same memory once it is filled, or as good as.
    type Resident: Resident + 'static;
    /// What [`Self::copy_async`] gives.
    type Pending: PendingCopy;

    /// True if copies go on after [`Self::copy_async`] has returned, and if allocating takes its
    /// time: then both get a thread that waits for them.
    const IS_ASYNCHRONOUS: bool;

    /// Makes the arena of a layer, at that place. A place in the window is nobody else's until the
    /// arena is gone.
    fn allocate(&self, layer: &PlannedLayer, place: ArenaPlace) -> Result<Arc<Self::Arena>, DeviceError>;

    /// Starts the copies of one read. The pending copy owns the slot and keeps the arena alive. On
    /// an error nothing is in flight any more when this returns.
    ///
    /// The arena must have been allocated for the layer of the read, and each read of the plan is
    /// copied once: so no two calls ever write to the same bytes.
    fn copy_async(
        &self,
        arena: &Arc<Self::Arena>,
        slot: Slot<Filled>,
        copies: Copies<'_>,
    ) -> Result<Self::Pending, DeviceError>;

    /// Ends the filling: every copy of the layer has been started, and nothing but pending copies
    /// shares the arena. Moves what could not land in its place.
    fn seal(&self, arena: Arc<Self::Arena>, moves: &[MoveOp]) -> Result<Arc<Self::Resident>, DeviceError>;

    /// The load has failed or is not wanted any more: bytes that are missing will not come. Called
    /// before what is in flight is waited for.
    fn give_up(&self) {}

    /// Gives recycled arenas, and the window, back to the system. Called once, when no copy is in
    /// flight.
    fn trim(&self);
}

/// Where the arena of a layer lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArenaPlace {
    /// In memory of its own.
    Own,
    /// In the window, which the backend has allocated as a whole, at this offset.
    InWindow { offset_bytes: u64 },
}

/// What has to be over before memory is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum After {
    /// What a `CUevent` marks, as it was last recorded.
    Event(u64),
    /// Everything queued in a `CUstream` so far.
    Stream(u64),
}

/// What became of memory that was given up.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "host memory goes back to the system at once"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    /// The system or the driver has taken it back, and said so.
    Returned,
    /// Its pool has it, and gives it back to the device as far as it can when it is
    /// [settled](ArenaPool::settle).
    ToPool,
    /// The device frees it once what somebody named is over.
    Queued,
    /// The load that it belongs to uses it again, and gives it back at its end.
    Recycled,
    /// It is the caller's, and the caller has it again.
    Lent,
    /// It was refused, or somebody still uses it, or nobody can say.
    Unconfirmed,
}

/// Where arenas come from and go back to. Lives longer than they do.
pub(crate) trait ArenaPool: Send + Sync {
    /// Bytes that its pool has taken from the device, used or not, as the driver says. `None`
    /// without a pool, or without an answer.
    fn pool_bytes(&self) -> Option<u64>;

    /// Waits until what was freed so far is free, and gives back what the pool does not use. False
    /// if either was refused.
    fn settle(&self) -> bool;

    /// An arena for the layer with bytes that it had before: `fill` writes them, from an offset on
    /// and from the front to the back, at most [`REFILLED_BYTES_MAX`] at a time.
    fn refill(
        self: Arc<Self>,
        layer: &PlannedLayer,
        fill: &mut Fill<'_>,
    ) -> Result<Arc<dyn Resident>, Unfilled>;
}

/// Bytes of an arena that are refilled at once.
pub(crate) const REFILLED_BYTES_MAX: u64 = MIB;

/// Writes the bytes of an arena from an offset on.
pub(crate) type Fill<'a> = dyn FnMut(u64, &mut [u8]) -> io::Result<()> + 'a;

/// Why an arena could not be refilled.
#[derive(Debug)]
pub(crate) enum Unfilled {
    /// The device has refused.
    Device(DeviceError),
    /// There are no bytes to fill it with.
    Bytes(io::Error),
}

impl From<DeviceError> for Unfilled {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

/// The pieces of an arena in which it is refilled: where each starts, and how long it is.
pub(crate) fn refill_pieces(len_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let starts = (0..len_bytes).step_by(to_usize(REFILLED_BYTES_MAX));
    starts.map(move |start| (start, REFILLED_BYTES_MAX.min(len_bytes - start)))
}

/// Memory of one layer on a device. Once it is ready, nothing of ours writes to it any more.
/// Dropping it frees it.
pub(crate) trait Resident: Send + Sync {
    /// Where it lies.
    fn target(&self) -> Target {
        Target::None
    }

    /// Bytes that it takes on the device.
    fn len_bytes(&self) -> u64;

    /// Gives the memory up, as dropping its only owner does, and says what became of it. What went
    /// [to the pool](Freed::ToPool) is to be settled.
    fn free(self: Arc<Self>) -> Freed {
        drop(self);
        Freed::Unconfirmed
    }

    /// Where it came from, if that wants to be settled.
    fn arena_pool(&self) -> Option<Arc<dyn ArenaPool>> {
        None
    }

    /// Its entry in the list of what is allocated, if its memory is ours.
    fn live(&self) -> Option<&Entry> {
        None
    }

    /// The bytes, where the host can read them.
    fn host_bytes(&self) -> Option<&[u8]>;

    /// Where it starts in the host's memory, if it is there and has bytes. Others may write through
    /// the pointer.
    fn host_address(&self) -> Option<NonNull<u8>> {
        None
    }

    /// Where it starts in the device's address space, if it has one. From now on others may use the
    /// memory.
    fn device_address(&self) -> Option<u64> {
        None
    }

    /// True if the bytes are anywhere at all.
    fn is_somewhere(&self) -> bool {
        true
    }

    /// Copies bytes to the host. Waits until the layer is ready. False if there are none to copy.
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

    /// The event that tells so, if the device has events.
    fn ready_event(&self) -> Option<u64> {
        None
    }

    /// Lets what is queued in a stream of the caller's from now on wait until the layer is ready.
    ///
    /// # Safety
    /// A live stream of the device's context.
    unsafe fn let_wait(&self, _stream: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Lets the memory be freed only after something; dropping then waits for nothing else.
    ///
    /// # Safety
    /// A live event or stream of the device's context, behind everything that uses the memory.
    unsafe fn release_after(&self, _after: After) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// A copy in flight; owns its slot. Dropping it waits.
pub(crate) trait PendingCopy: Send + 'static {
    /// Waits for the copy and gives the slot back.
    fn wait(self) -> Result<Slot<Empty>, DeviceError>;
}
