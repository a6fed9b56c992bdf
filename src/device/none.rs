//! The device that keeps nothing: a copy is complete as soon as it is asked for.

use std::sync::Arc;

use super::{Backend, DeviceError, PendingCopy, Resident};
use crate::plan::Copies;
use crate::staging::{Empty, Filled, Slot};

/// Drops every byte.
#[derive(Debug, Default)]
pub(crate) struct NoneBackend;

/// An arena without memory.
#[derive(Debug)]
pub(crate) struct NoArena;

impl Resident for NoArena {
    fn len_bytes(&self) -> u64 {
        0
    }

    fn host_bytes(&self) -> Option<&[u8]> {
        None
    }
}

impl Backend for NoneBackend {
    type Arena = NoArena;
    type Resident = NoArena;
    type Pending = CompletedCopy;

    fn allocate(&self, _len_bytes: u64) -> Result<Arc<NoArena>, DeviceError> {
        Ok(Arc::new(NoArena))
    }

    fn copy_async(
        &self,
        _arena: &Arc<NoArena>,
        slot: Slot<Filled>,
        _copies: Copies<'_>,
    ) -> Result<CompletedCopy, DeviceError> {
        Ok(CompletedCopy(slot))
    }

    fn complete(&self, arena: NoArena) -> NoArena {
        arena
    }

    fn trim(&self) {}
}

/// A copy that was complete when it was issued.
#[derive(Debug)]
pub(crate) struct CompletedCopy(pub(super) Slot<Filled>);

impl PendingCopy for CompletedCopy {
    fn is_complete(&self) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn wait(self) -> Result<Slot<Empty>, DeviceError> {
        Ok(self.0.into_empty())
    }
}
