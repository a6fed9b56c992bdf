//! The device that keeps nothing. Its copies are complete at once.

use std::sync::Arc;

use super::{ArenaPlace, Backend, DeviceError, PendingCopy, Resident};
use crate::plan::{Copies, MoveOp, PlannedLayer};
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

    fn is_somewhere(&self) -> bool {
        false
    }

    fn read(&self, _offset_bytes: u64, _target: &mut [u8]) -> Result<bool, DeviceError> {
        Ok(false)
    }
}

impl Backend for NoneBackend {
    type Arena = NoArena;
    type Resident = NoArena;
    type Pending = CompletedCopy;

    const IS_ASYNCHRONOUS: bool = false;

    fn allocate(&self, _layer: &PlannedLayer, _place: ArenaPlace) -> Result<Arc<NoArena>, DeviceError> {
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

    fn seal(&self, arena: Arc<NoArena>, _moves: &[MoveOp]) -> Result<Arc<NoArena>, DeviceError> {
        Ok(arena)
    }

    fn trim(&self) {}
}

/// A copy that was complete when it was issued.
#[derive(Debug)]
pub(crate) struct CompletedCopy(pub(super) Slot<Filled>);

impl PendingCopy for CompletedCopy {
    fn wait(self) -> Result<Slot<Empty>, DeviceError> {
        Ok(self.0.into_empty())
    }
}
