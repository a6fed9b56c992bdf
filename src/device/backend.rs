//! What the loader asks of a device.
//!
//! ```text
//! allocate --> arena, shared by the copies into it --(all copies queued)--> seal --> resident --> drop frees
//! ```
#![allow(unsafe_code, reason = "handles of the caller's are promises; each says which")]

use std::sync::Arc;

use super::DeviceError;
use crate::plan::{Copies, MoveOp, PlannedLayer};
use crate::staging::{Empty, Filled, Slot};

/// A kind of device. Shared by the threads of a load.
pub(crate) trait Backend: Send + Sync + 'static {
    /// Memory of one layer that is being filled. Dropping the last owner frees it.
    type Arena: Send + Sync + 'static;
    /// The same memory once it is filled, or as good as.
    type Resident: Resident + 'static;
    /// What [`Self::copy_async`] gives.
    type Pending: PendingCopy;

    /// True if copies go on after [`Self::copy_async`] has returned, and if allocating takes its time: then both get a
    /// thread that waits for them.
    const IS_ASYNCHRONOUS: bool;

    /// Allocates the arena of a layer.
    fn allocate(&self, layer: &PlannedLayer) -> Result<Arc<Self::Arena>, DeviceError>;

    /// Starts the copies of one read. The pending copy owns the slot and keeps the arena alive. On an error nothing is in
    /// flight any more when this returns.
    ///
    /// The arena must have been allocated for the layer of the read, and each read of the plan is copied once: so no
    /// two calls ever write to the same bytes.
    fn copy_async(
        &self,
        arena: &Arc<Self::Arena>,
        slot: Slot<Filled>,
        copies: Copies<'_>,
    ) -> Result<Self::Pending, DeviceError>;

    /// Ends the filling: every copy of the layer has been started, and nothing but pending copies shares the arena. Moves
    /// what could not land in its place.
    fn seal(&self, arena: Arc<Self::Arena>, moves: &[MoveOp]) -> Result<Self::Resident, DeviceError>;

    /// The load has failed or is not wanted any more: bytes that are missing will not come. Called before what is in flight
    /// is waited for.
    fn give_up(&self) {}

    /// Gives recycled arenas back to the system. Called once, when no copy is in flight.
    fn trim(&self);
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

/// Memory of one layer on a device. Once it is ready, nothing writes to it any more. Dropping it frees it.
pub(crate) trait Resident: Send + Sync {
    /// Bytes that it takes on the device.
    fn len_bytes(&self) -> u64;

    /// The bytes, where the host can read them.
    fn host_bytes(&self) -> Option<&[u8]>;

    /// Where it starts in the device's address space, if it has one. From now on others may use the memory.
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
