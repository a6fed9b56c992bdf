//! What the loader asks of a device.
//!
//! ```text
//! allocate --> arena, shared by the copies into it --(the last copy is over)--> resident --> drop frees
//! ```

use std::sync::Arc;

use super::DeviceError;
use crate::plan::Copies;
use crate::staging::{Empty, Filled, Slot};

/// A kind of device. Shared by the control loop and the reader threads.
pub(crate) trait Backend: Send + Sync + 'static {
    /// Memory of one layer that is being filled. Dropping the last owner frees it.
    type Arena: Send + Sync + 'static;
    /// The same memory once it is complete.
    type Resident: Resident + 'static;
    /// What [`Self::copy_async`] gives.
    type Pending: PendingCopy;

    /// Allocates an arena of `len_bytes`.
    fn allocate(&self, len_bytes: u64) -> Result<Arc<Self::Arena>, DeviceError>;

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

    /// Ends the filling. The arena comes by value: a pending copy would share it, so none is left.
    fn complete(&self, arena: Self::Arena) -> Self::Resident;

    /// Gives recycled arenas back to the system. Called once, when no copy is in flight.
    fn trim(&self);
}

/// Memory of one complete layer on a device. Nothing writes to it any more. Dropping it frees it.
pub(crate) trait Resident: Send + Sync {
    /// Bytes that it takes on the device.
    fn len_bytes(&self) -> u64;

    /// The bytes, where the host can read them.
    fn host_bytes(&self) -> Option<&[u8]>;
}

/// A copy in flight; owns its slot. Dropping it waits.
pub(crate) trait PendingCopy: Send + 'static {
    /// True once the slot may be filled again.
    fn is_complete(&self) -> Result<bool, DeviceError>;

    /// Waits for the copy and gives the slot back.
    fn wait(self) -> Result<Slot<Empty>, DeviceError>;
}
