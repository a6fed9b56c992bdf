//! Copies out of the ring, and when a layer is ready.
#![allow(unsafe_code, reason = "queues copies whose memory outlives them; each block says why")]

#[cfg(test)]
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use super::arena::{CudaArena, CudaResident};
use super::window::DeviceWindow;
use super::{CudaSession, Event, Stream, call};
use crate::device::{ArenaPlace, Backend, DeviceError, PendingCopy};
use crate::plan::{Copies, MoveOp, PlannedLayer};
use crate::staging::{Empty, Filled, Slot};
use crate::units::to_usize;

/// The backend of one session.
#[derive(Debug)]
pub(crate) struct CudaBackend {
    session: Arc<CudaSession>,
    /// One event per slot, recycled with it.
    slot_events: Arc<[Event]>,
    /// The memory that layers share. `None` if each has its own arena, and after the trim.
    window: Mutex<Option<Arc<DeviceWindow>>>,
}

impl CudaBackend {
    /// A backend for a ring of `slots` slots.
    pub(crate) fn new(session: Arc<CudaSession>, slots: u32) -> Result<Self, DeviceError> {
        let slot_events =
            (0..slots).map(|_| Event::new(&session.context)).collect::<Result<Vec<_>, _>>()?.into();
        Ok(Self { session, slot_events, window: Mutex::default() })
    }

    /// The same with a window of `bytes`, which layers share, except those that get their own
    /// arena.
    pub(crate) fn with_window(self, bytes: u64) -> Result<Self, DeviceError> {
        if bytes > 0 {
            let memory = self.session.memory.allocate(bytes)?;
            *self.window() = Some(Arc::new(DeviceWindow::new(memory)));
        }
        Ok(self)
    }

    fn window(&self) -> MutexGuard<'_, Option<Arc<DeviceWindow>>> {
        // Every update is one assignment.
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Breaks the ring for a test: slots are returned before their copies are over. The test shows that
/// this is noticed.
#[cfg(test)]
pub(super) static SKIPS_THE_WAIT: AtomicBool = AtomicBool::new(false);

/// Copies of one slot in flight.
#[derive(Debug)]
pub(crate) struct CudaCopy {
    /// `None` once it was returned.
    slot: Option<Slot<Filled>>,
    slot_events: Arc<[Event]>,
    /// Kept until the copy is over.
    _arena: Arc<CudaArena>,
    session: Arc<CudaSession>,
}

impl CudaCopy {
    /// Waits and returns the slot, with the driver's result of the copy.
    fn finish(&mut self) -> (Option<Slot<Empty>>, Result<(), DeviceError>) {
        let Some(slot) = self.slot.take() else { return (None, Ok(())) };
        #[cfg(test)]
        if SKIPS_THE_WAIT.load(Ordering::Relaxed) {
            return (Some(slot.into_empty()), Ok(()));
        }
        let waited = self.slot_events[slot.index()].wait();
        if waited.is_err() && !self.session.copies.drain() {
            // The device may still read the slot: it is never filled again nor freed.
            std::mem::forget(slot);
            return (None, waited);
        }
        (Some(slot.into_empty()), waited)
    }
}

impl PendingCopy for CudaCopy {
    fn wait(mut self) -> Result<Slot<Empty>, DeviceError> {
        let (slot, waited) = self.finish();
        waited?;
        Ok(slot.expect("a copy that nobody waited for owns its slot"))
    }
}

impl Drop for CudaCopy {
    fn drop(&mut self) {
        drop(self.finish());
    }
}

impl Backend for CudaBackend {
    type Arena = CudaArena;
    type Resident = CudaResident;
    type Pending = CudaCopy;

    const IS_ASYNCHRONOUS: bool = true;

    fn allocate(&self, layer: &PlannedLayer, place: ArenaPlace) -> Result<Arc<CudaArena>, DeviceError> {
        let window = self.window().clone();
        let arena = match (place, window) {
            (ArenaPlace::InWindow { offset_bytes }, Some(window)) => {
                CudaArena::in_window(&self.session, &window, offset_bytes, layer.arena_bytes)?
            }
            (ArenaPlace::Own | ArenaPlace::InWindow { .. }, _) => CudaArena::allocate(&self.session, layer)?,
        };
        Ok(Arc::new(arena))
    }

    fn copy_async(
        &self,
        arena: &Arc<CudaArena>,
        slot: Slot<Filled>,
        copies: Copies<'_>,
    ) -> Result<CudaCopy, DeviceError> {
        let queued = queue_copies(&self.session.copies, arena.address, &slot, copies)
            .and_then(|()| self.slot_events[slot.index()].record(&self.session.copies));
        if let Err(error) = queued {
            // Copies may be queued without an event behind them.
            if !self.session.copies.drain() {
                std::mem::forget(slot);
            }
            return Err(error);
        }
        Ok(CudaCopy {
            slot: Some(slot),
            slot_events: Arc::clone(&self.slot_events),
            _arena: Arc::clone(arena),
            session: Arc::clone(&self.session),
        })
    }

    fn seal(&self, arena: Arc<CudaArena>, moves: &[MoveOp]) -> Result<Arc<CudaResident>, DeviceError> {
        let copies = &self.session.copies;
        let ready = queue_moves(copies, arena.address, moves).and_then(|()| copies.mark());
        if ready.is_err() && arena.is_callers {
            // Moves may be queued without an event behind them, and after the load the memory is
            // the caller's again.
            copies.drain();
        }
        arena.ready.set(ready?).expect("a layer is sealed once");
        Ok(Arc::new(CudaResident { arena }))
    }

    fn trim(&self) {
        self.session.idle.close();
        // The window stays until its last layer is dropped.
        drop(self.window().take());
        self.session.end();
        self.session.memory.give_back();
    }
}

/// Queues the copies out of one slot.
fn queue_copies(
    stream: &Stream,
    arena_address: u64,
    slot: &Slot<Filled>,
    copies: Copies<'_>,
) -> Result<(), DeviceError> {
    let _entered = stream.context().enter()?;
    for copy in copies {
        let source = slot.part(copy.slot_offset_bytes, copy.len_bytes);
        // SAFETY: the source is a part of the slot (checked), which the caller keeps until the
        // stream has passed the copy, or for ever. The target lies in an arena that lives as long
        // (the plan puts every copy inside), and that the stream has allocated or waits for.
        let answer = unsafe {
            sys::cuMemcpyHtoDAsync_v2(
                arena_address + copy.arena_offset_bytes,
                source.as_ptr().cast(),
                source.len(),
                stream.raw(),
            )
        };
        call("cuMemcpyHtoDAsync_v2", answer)?;
    }
    Ok(())
}

/// Queues the moves inside one arena, behind its copies.
fn queue_moves(stream: &Stream, arena_address: u64, moves: &[MoveOp]) -> Result<(), DeviceError> {
    let _entered = stream.context().enter()?;
    for step in moves {
        // SAFETY: both ranges lie in an arena that lives until the stream has passed the move (the plan
        // puts every move inside, and apart), and the stream has passed the copies by then.
        let answer = unsafe {
            sys::cuMemcpyDtoDAsync_v2(
                arena_address + step.target_arena_offset_bytes,
                arena_address + step.source_arena_offset_bytes,
                to_usize(step.len_bytes),
                stream.raw(),
            )
        };
        call("cuMemcpyDtoDAsync_v2", answer)?;
    }
    Ok(())
}
