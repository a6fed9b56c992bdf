//! Arenas on a CUDA device, copies out of the ring, and when a layer is ready.
#![allow(unsafe_code, reason = "queues copies whose memory outlives them; each block says why")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::sys;

use super::memory::DeviceMemory;
use super::window::DeviceWindow;
use super::{Event, Lane, Stream, call};
use crate::device::{
    After, Backend, DeviceError, Fill, Freed, Home, PendingCopy, Place, REFILLED_BYTES_MAX, Resident, Target,
    Unfilled, refill_pieces,
};
use crate::live::Entry;
use crate::plan::{Copies, MoveOp, PlannedLayer};
use crate::staging::{Empty, Filled, Slot};
use crate::units::{Alignment, to_u64, to_usize};

/// Drives one lane.
#[derive(Debug)]
pub(crate) struct CudaBackend {
    lane: Arc<Lane>,
    /// One for each slot, recycled with it.
    slot_events: Arc<[Event]>,
    /// What layers share that come and go. `None` if each has an arena of its own, and once it was
    /// trimmed.
    window: Mutex<Option<Arc<DeviceWindow>>>,
}

impl CudaBackend {
    /// A backend for a ring of so many slots.
    pub(crate) fn new(lane: Arc<Lane>, slots: u32) -> Result<Self, DeviceError> {
        let slot_events =
            (0..slots).map(|_| Event::new(&lane.context)).collect::<Result<Vec<_>, _>>()?.into();
        Ok(Self { lane, slot_events, window: Mutex::default() })
    }

    /// The same with a window of so many bytes, which layers share, those aside that get an arena
    /// of their own.
    pub(crate) fn with_window(self, bytes: u64) -> Result<Self, DeviceError> {
        if bytes > 0 {
            let memory = self.lane.memory.allocate(bytes)?;
            *self.window() = Some(Arc::new(DeviceWindow::new(memory)));
        }
        Ok(self)
    }

    fn window(&self) -> MutexGuard<'_, Option<Arc<DeviceWindow>>> {
        // It is only ever assigned.
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Device memory of one layer.
#[derive(Debug)]
pub(crate) struct CudaArena {
    address: u64,
    len_bytes: u64,
    /// `None` for a layer without bytes, for memory of the caller's, and while being made or
    /// dropped.
    memory: Option<Memory>,
    /// True for memory of the caller's, which counts for nothing here.
    is_callers: bool,
    /// What tells that everything is in its place. Set once all copies are queued.
    ready: OnceLock<Event>,
    /// True once somebody outside knows the address.
    is_exposed: AtomicBool,
    /// True once somebody has said when it is free.
    is_ordered: AtomicBool,
    /// True once the driver has refused to say, or to note, when a use of it is over.
    is_in_doubt: AtomicBool,
    /// True once its memory was given up.
    is_gone: bool,
    lane: Arc<Lane>,
}

/// The memory of one arena, if it is ours.
#[derive(Debug)]
enum Memory {
    Own(DeviceMemory),
    Part(Arc<DeviceWindow>),
}

impl Memory {
    /// What it is, or lies in.
    fn whole(&self) -> &DeviceMemory {
        match self {
            Self::Own(memory) => memory,
            Self::Part(window) => window.memory(),
        }
    }
}

impl CudaArena {
    /// An arena without memory.
    fn new(lane: &Arc<Lane>, len_bytes: u64) -> Self {
        Self {
            address: 0,
            len_bytes,
            memory: None,
            is_callers: false,
            ready: OnceLock::new(),
            is_exposed: AtomicBool::new(false),
            is_ordered: AtomicBool::new(false),
            is_in_doubt: AtomicBool::new(false),
            is_gone: false,
            lane: Arc::clone(lane),
        }
    }

    /// An arena in memory of the caller's, if there is some for the layer.
    fn in_memory_of_caller(lane: &Arc<Lane>, layer: &PlannedLayer) -> Result<Option<Self>, DeviceError> {
        let Some(give) = lane.destinations.as_ref().filter(|_| layer.arena_bytes > 0) else {
            return Ok(None);
        };
        let Some(region) = give(layer) else { return Ok(None) };
        if region.len_bytes < layer.arena_bytes || !region.address.is_multiple_of(Alignment::TENSOR.bytes()) {
            return Err(DeviceError::UnfitDestination {
                layer: layer.id.to_string(),
                address: region.address,
                given_bytes: region.len_bytes,
                needed_bytes: layer.arena_bytes,
            });
        }
        let mut arena = Self::new(lane, layer.arena_bytes);
        (arena.address, arena.is_callers) = (region.address, true);
        Ok(Some(arena))
    }

    /// An arena for the layer, in memory of the caller's, of an earlier layer, or of the pool.
    fn allocate(lane: &Arc<Lane>, layer: &PlannedLayer) -> Result<Self, DeviceError> {
        if let Some(arena) = Self::in_memory_of_caller(lane, layer)? {
            return Ok(arena);
        }
        let len_bytes = layer.arena_bytes;
        let mut arena = Self::new(lane, len_bytes);
        // From here on the arena's drop gives back what the pool counts, whatever fails below.
        let recycled = lane.idle.take(len_bytes);
        if len_bytes > 0 {
            let memory = match recycled.memory {
                Some(memory) => memory,
                None => {
                    if recycled.has_dropped {
                        // Freed in the order of a stream, it is still taken until that has come so far.
                        lane.memory.give_back();
                    }
                    lane.memory.allocate(len_bytes)?
                }
            };
            arena.address = memory.address();
            let Memory::Own(memory) = arena.memory.insert(Memory::Own(memory)) else {
                unreachable!("just put there")
            };
            memory.wake()?;
        }
        Ok(arena)
    }

    /// An arena in the window, at a place that nobody else has.
    fn in_window(
        lane: &Arc<Lane>,
        window: &Arc<DeviceWindow>,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<Self, DeviceError> {
        let mut arena = Self::new(lane, len_bytes);
        if len_bytes > 0 {
            window.wake(&lane.copies)?;
            arena.address = window.address_of(offset_bytes, len_bytes);
            arena.memory = Some(Memory::Part(Arc::clone(window)));
        }
        Ok(arena)
    }

    /// True if somebody may use the memory whose end nobody knows.
    fn has_unknown_users(&self) -> bool {
        let is_exposed = self.is_exposed.load(Ordering::Acquire);
        is_exposed && !self.is_ordered.load(Ordering::Acquire) || self.is_in_doubt.load(Ordering::Acquire)
    }

    /// Lets what frees or reuses the memory come after all that was queued for it. Waits only if
    /// the driver refuses. False if that was refused too: then somebody may use the memory for
    /// ever.
    fn order_end(&self, memory: &DeviceMemory) -> bool {
        let ordered = match self.ready.get() {
            Some(ready) => self.lane.memory.frees().wait_for(ready),
            None => memory.free_after_copies(),
        };
        let is_filled = ordered.is_ok() || self.lane.copies.drain();
        // Kernels of the caller's may read it, in streams that nobody told us of.
        is_filled && (!self.has_unknown_users() || self.lane.context.drain())
    }

    /// Frees the memory or hands it to the next layer, in the order of what uses it. What went to
    /// the pool is to be settled.
    fn give_up(&mut self) -> Freed {
        let was_gone = std::mem::replace(&mut self.is_gone, true);
        if self.is_callers {
            return Freed::Lent;
        }
        if was_gone {
            return Freed::Unconfirmed;
        }
        let pool = &self.lane.idle;
        let Some(memory) = self.memory.take() else {
            pool.give(None, self.len_bytes);
            return Freed::Returned;
        };
        if !self.order_end(memory.whole()) {
            // It is never used again, nor freed, and so it stays counted.
            if let Memory::Part(window) = &memory {
                window.spoil();
            }
            std::mem::forget(memory);
            return Freed::Unconfirmed;
        }
        let mut memory = match memory {
            Memory::Own(memory) => memory,
            Memory::Part(window) => return window.give_up(),
        };
        let freed = if pool.is_open() && memory.rest().is_ok() {
            // Closed meanwhile, the pool gives it back.
            let Some(memory) = pool.give(Some(memory), self.len_bytes) else { return Freed::Recycled };
            memory.free()
        } else {
            let freed = memory.free();
            pool.give(None, self.len_bytes);
            freed
        };
        match freed {
            // Nobody waits for what the caller has named.
            Freed::ToPool if self.is_ordered.load(Ordering::Acquire) => Freed::Queued,
            freed => freed,
        }
    }
}

impl Drop for CudaArena {
    fn drop(&mut self) {
        if !self.is_gone && self.give_up() == Freed::ToPool {
            self.lane.memory.give_back();
        }
    }
}

impl Home for Lane {
    fn pool_bytes(&self) -> Option<u64> {
        self.memory.reserved_bytes()
    }

    fn settle(&self) -> bool {
        self.memory.give_back()
    }

    fn refill(
        self: Arc<Self>,
        layer: &PlannedLayer,
        fill: &mut Fill<'_>,
    ) -> Result<Arc<dyn Resident>, Unfilled> {
        let arena = CudaArena::allocate(&self, layer)?;
        let mut buffer = vec![0; to_usize(REFILLED_BYTES_MAX.min(layer.arena_bytes))];
        for (offset_bytes, len_bytes) in refill_pieces(layer.arena_bytes) {
            let piece = &mut buffer[..to_usize(len_bytes)];
            fill(offset_bytes, piece).map_err(Unfilled::Bytes)?;
            let copied = copy_piece(&self.copies, piece, arena.address + offset_bytes)
                .and_then(|()| self.copies.synchronize());
            if let Err(error) = copied {
                if !self.copies.drain() {
                    // Nobody knows whether the device still reads it.
                    std::mem::forget(buffer);
                }
                return Err(error.into());
            }
        }
        arena.ready.set(self.copies.mark()?).expect("an arena that was just made");
        Ok(Arc::new(CudaResident { arena: Arc::new(arena) }))
    }
}

/// Queues a copy of a piece that its owner keeps until the stream has passed it, or for ever.
fn copy_piece(stream: &Stream, piece: &[u8], address: u64) -> Result<(), DeviceError> {
    let _entered = stream.context().enter()?;
    // SAFETY: the source is kept for as long (the caller's promise); the target lies in an arena that
    // the stream has allocated or waits for, and that is freed behind the copy.
    let answer =
        unsafe { sys::cuMemcpyHtoDAsync_v2(address, piece.as_ptr().cast(), piece.len(), stream.raw()) };
    call("cuMemcpyHtoDAsync_v2", answer)
}

/// Breaks the ring: slots come back before their copies are over. For the test that shows that this
/// is noticed.
#[cfg(test)]
pub(super) static SKIPS_THE_WAIT: AtomicBool = AtomicBool::new(false);

/// Copies of one slot in flight.
#[derive(Debug)]
pub(crate) struct CudaCopy {
    /// `None` once it was given back.
    slot: Option<Slot<Filled>>,
    slot_events: Arc<[Event]>,
    /// Kept until the copy is over.
    _arena: Arc<CudaArena>,
    lane: Arc<Lane>,
}

impl CudaCopy {
    /// Waits and gives the slot back, with what the driver said of the copy.
    fn finish(&mut self) -> (Option<Slot<Empty>>, Result<(), DeviceError>) {
        let Some(slot) = self.slot.take() else { return (None, Ok(())) };
        #[cfg(test)]
        if SKIPS_THE_WAIT.load(Ordering::Relaxed) {
            return (Some(slot.into_empty()), Ok(()));
        }
        let waited = self.slot_events[slot.index()].wait();
        if waited.is_err() && !self.lane.copies.drain() {
            // Nobody knows whether the device still reads the slot: it is never filled again, nor freed.
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

    fn allocate(&self, layer: &PlannedLayer, place: Place) -> Result<Arc<CudaArena>, DeviceError> {
        let window = self.window().clone();
        let arena = match (place, window) {
            (Place::InWindow { offset_bytes }, Some(window)) => {
                CudaArena::in_window(&self.lane, &window, offset_bytes, layer.arena_bytes)?
            }
            (Place::Own | Place::InWindow { .. }, _) => CudaArena::allocate(&self.lane, layer)?,
        };
        Ok(Arc::new(arena))
    }

    fn copy_async(
        &self,
        arena: &Arc<CudaArena>,
        slot: Slot<Filled>,
        copies: Copies<'_>,
    ) -> Result<CudaCopy, DeviceError> {
        let queued = queue_copies(&self.lane.copies, arena.address, &slot, copies)
            .and_then(|()| self.slot_events[slot.index()].record(&self.lane.copies));
        if let Err(error) = queued {
            // Copies may be queued with no event behind them.
            if !self.lane.copies.drain() {
                std::mem::forget(slot);
            }
            return Err(error);
        }
        Ok(CudaCopy {
            slot: Some(slot),
            slot_events: Arc::clone(&self.slot_events),
            _arena: Arc::clone(arena),
            lane: Arc::clone(&self.lane),
        })
    }

    fn seal(&self, arena: Arc<CudaArena>, moves: &[MoveOp]) -> Result<Arc<CudaResident>, DeviceError> {
        let copies = &self.lane.copies;
        let ready = queue_moves(copies, arena.address, moves).and_then(|()| copies.mark());
        if ready.is_err() && arena.is_callers {
            // Moves may be queued with no event behind them, and once the load has ended the memory is the
            // caller's again.
            copies.drain();
        }
        arena.ready.set(ready?).expect("a layer is sealed once");
        Ok(Arc::new(CudaResident { arena }))
    }

    fn trim(&self) {
        self.lane.idle.close();
        // What a layer still lies in stays until that is gone.
        drop(self.window().take());
        self.lane.rest();
        self.lane.memory.give_back();
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
        // SAFETY: the source is a part of the slot (checked), which whoever queues this keeps until the
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

/// Device memory of one layer whose copies are all queued.
#[derive(Debug)]
pub(crate) struct CudaResident {
    arena: Arc<CudaArena>,
}

impl CudaResident {
    fn ready(&self) -> &Event {
        self.arena.ready.get().expect("a resident layer is sealed")
    }
}

impl Resident for CudaResident {
    fn target(&self) -> Target {
        let ordinal = u32::try_from(self.arena.lane.context.device());
        Target::Cuda(ordinal.expect("the driver counts its devices from zero"))
    }

    fn len_bytes(&self) -> u64 {
        self.arena.len_bytes
    }

    fn free(self: Arc<Self>) -> Freed {
        let arena = Arc::clone(&self.arena);
        drop(self);
        // Else a copy under way has it, and frees it when it is over.
        Arc::into_inner(arena).map_or(Freed::Unconfirmed, |mut arena| arena.give_up())
    }

    fn home(&self) -> Option<Arc<dyn Home>> {
        let lane = Arc::clone(&self.arena.lane);
        Some(lane)
    }

    fn live(&self) -> Option<&Entry> {
        self.arena.memory.as_ref().map(|memory| memory.whole().live())
    }

    fn host_bytes(&self) -> Option<&[u8]> {
        None
    }

    fn device_address(&self) -> Option<u64> {
        self.arena.is_exposed.store(true, Ordering::Release);
        Some(self.arena.address)
    }

    fn read(&self, offset_bytes: u64, target: &mut [u8]) -> Result<bool, DeviceError> {
        let end = offset_bytes.checked_add(to_u64(target.len()));
        assert!(end.is_some_and(|end| end <= self.arena.len_bytes), "a read beyond the end of a layer");
        // SAFETY: the bytes lie in the arena, which `self` keeps, and nothing writes to them once the event
        // is over.
        let read =
            unsafe { self.arena.lane.read_back(self.ready(), self.arena.address + offset_bytes, target) };
        if read.is_err() {
            self.arena.is_in_doubt.store(true, Ordering::Release);
        }
        read.map(|()| true)
    }

    fn wait_ready(&self) -> Result<(), DeviceError> {
        self.ready().wait()
    }

    fn is_ready(&self) -> Result<bool, DeviceError> {
        self.ready().is_complete()
    }

    fn ready_event(&self) -> Option<u64> {
        Some(self.ready().handle())
    }

    unsafe fn let_wait(&self, stream: u64) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise; the value does not outlive this call.
        let stream = unsafe { Stream::of_caller(stream, &self.arena.lane.context) };
        stream.wait_for(self.ready())
    }

    unsafe fn release_after(&self, after: After) -> Result<(), DeviceError> {
        let lane = &self.arena.lane;
        let frees = lane.memory.frees();
        let ordered = match after {
            // SAFETY: the caller's promise.
            After::Event(event) => unsafe { frees.wait_for_event_of_caller(event) },
            After::Stream(stream) => {
                // SAFETY: the caller's promise; the value does not outlive this call.
                let stream = unsafe { Stream::of_caller(stream, &lane.context) };
                stream.mark().and_then(|event| frees.wait_for(&event))
            }
        };
        // One that was refused is not made good by others that were granted.
        let flag = if ordered.is_ok() { &self.arena.is_ordered } else { &self.arena.is_in_doubt };
        flag.store(true, Ordering::Release);
        ordered
    }
}

impl Drop for CudaResident {
    fn drop(&mut self) {
        if self.arena.is_callers {
            // Memory of the caller's is the caller's again: nothing may write to it any more.
            let ready = self.ready();
            if ready.wait().is_err() {
                self.arena.lane.copies.drain();
            }
        }
    }
}
