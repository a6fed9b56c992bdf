//! What the loader asks of a device.

use std::sync::Arc;

use super::DeviceError;
use crate::plan::Copies;
use crate::staging::{Empty, Filled, Slot};

/// Memory of one layer on a device. Dropping the last owner frees it.
pub(crate) trait Arena: Send + Sync {
    /// Bytes that the arena takes on the device.
    fn len_bytes(&self) -> u64;

    /// The bytes, where the host can read them. Only to be called once every copy into the arena has completed.
    fn host_bytes(&self) -> Option<&[u8]>;
}

/// A kind of device. Shared by the control loop and the reader threads.
pub(crate) trait Backend: Send + Sync + 'static {
    /// What [`Self::allocate`] gives.
    type Arena: Arena + 'static;
    /// What [`Self::copy_async`] gives.
    type Pending: PendingCopy;

    /// Allocates an arena of `len_bytes`.
    fn allocate(&self, len_bytes: u64) -> Result<Arc<Self::Arena>, DeviceError>;

    /// Starts the copies of one read. The pending copy owns the slot and keeps the arena alive. On an error nothing is in
    /// flight any more when this returns.
    fn copy_async(
        &self,
        arena: &Arc<Self::Arena>,
        slot: Slot<Filled>,
        copies: Copies<'_>,
    ) -> Result<Self::Pending, DeviceError>;

    /// Gives recycled arenas back to the system. Called once, when no copy is in flight.
    fn trim(&self);
}

/// A copy in flight; owns its slot. Dropping it waits.
pub(crate) trait PendingCopy: Send + 'static {
    /// True once the slot may be filled again.
    fn is_complete(&self) -> Result<bool, DeviceError>;

    /// Waits for the copy and gives the slot back.
    fn wait(self) -> Result<Slot<Empty>, DeviceError>;
}
