//! Device memory of one layer: allocated, filled, and freed in the order of everything that uses
//! it.
#![allow(unsafe_code, reason = "calls the driver; each block says why its arguments are valid")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

use super::memory::DeviceMemory;
use super::window::DeviceWindow;
use super::{CudaSession, Event, Stream, call};
use crate::device::{
    After, ArenaPool, DeviceError, Fill, Freed, REFILLED_BYTES_MAX, Resident, Target, Unfilled, refill_pieces,
};
use crate::live::Entry;
use crate::plan::PlannedLayer;
use crate::units::{Alignment, to_u64, to_usize};

/// Device memory of one layer.
#[derive(Debug)]
pub(crate) struct CudaArena {
    pub(super) address: u64,
    len_bytes: u64,
    /// `None` for a layer without bytes, for the caller's memory, and while being made or dropped.
    memory: Option<Memory>,
    /// True for the caller's memory, which is not counted.
    pub(super) is_callers: bool,
    /// Marks that every byte is in place. Set once all copies are queued.
    pub(super) ready: OnceLock<Event>,
    /// True once a caller knows the address.
    is_exposed: AtomicBool,
    /// True once a caller has named the end of its use.
    is_ordered: AtomicBool,
    /// True once the driver has refused to report or to record the end of a use.
    is_in_doubt: AtomicBool,
    /// True once its memory was freed.
    is_gone: bool,
    session: Arc<CudaSession>,
}

/// The memory of one arena, if it is not the caller's.
#[derive(Debug)]
enum Memory {
    Own(DeviceMemory),
    Part(Arc<DeviceWindow>),
}

impl Memory {
    /// The allocation that it is, or is part of.
    fn whole(&self) -> &DeviceMemory {
        match self {
            Self::Own(memory) => memory,
            Self::Part(window) => window.memory(),
        }
    }
}

impl CudaArena {
    /// An arena without memory.
    fn new(session: &Arc<CudaSession>, len_bytes: u64) -> Self {
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
            session: Arc::clone(session),
        }
    }

    /// An arena in the caller's memory, if the caller has some for the layer.
    fn in_memory_of_caller(
        session: &Arc<CudaSession>,
        layer: &PlannedLayer,
    ) -> Result<Option<Self>, DeviceError> {
        let Some(give) = session.destinations.as_ref().filter(|_| layer.arena_bytes > 0) else {
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
        let mut arena = Self::new(session, layer.arena_bytes);
        (arena.address, arena.is_callers) = (region.address, true);
        Ok(Some(arena))
    }

    /// An arena for the layer: in the caller's memory, in that of an earlier layer, or from the
    /// pool.
    pub(super) fn allocate(session: &Arc<CudaSession>, layer: &PlannedLayer) -> Result<Self, DeviceError> {
        if let Some(arena) = Self::in_memory_of_caller(session, layer)? {
            return Ok(arena);
        }
        let len_bytes = layer.arena_bytes;
        let mut arena = Self::new(session, len_bytes);
        // From here on, the arena's drop undoes the pool's count, whatever fails below.
        let recycled = session.idle.take(len_bytes);
        if len_bytes > 0 {
            let memory = match recycled.memory {
                Some(memory) => memory,
                None => {
                    if recycled.has_dropped {
                        // Memory freed in stream order stays taken until the stream gets there.
                        session.memory.give_back();
                    }
                    session.memory.allocate(len_bytes)?
                }
            };
            arena.address = memory.address();
            let Memory::Own(memory) = arena.memory.insert(Memory::Own(memory)) else {
                unreachable!("just put there")
            };
            memory.reuse()?;
        }
        Ok(arena)
    }

    /// An arena in the window, at a place without other users.
    pub(super) fn in_window(
        session: &Arc<CudaSession>,
        window: &Arc<DeviceWindow>,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<Self, DeviceError> {
        let mut arena = Self::new(session, len_bytes);
        if len_bytes > 0 {
            window.reuse(&session.copies)?;
            arena.address = window.address_of(offset_bytes, len_bytes);
            arena.memory = Some(Memory::Part(Arc::clone(window)));
        }
        Ok(arena)
    }

    /// True if the memory may be in use without a known end.
    fn has_unknown_users(&self) -> bool {
        let is_exposed = self.is_exposed.load(Ordering::Acquire);
        is_exposed && !self.is_ordered.load(Ordering::Acquire) || self.is_in_doubt.load(Ordering::Acquire)
    }

    /// Orders freeing or reuse of the memory behind all work queued for it. Waits only if the
    /// driver refuses. False if that is refused too: then the memory may be in use for ever.
    fn order_end(&self, memory: &DeviceMemory) -> bool {
        let ordered = match self.ready.get() {
            Some(ready) => self.session.memory.frees().wait_for(ready),
            None => memory.free_after_copies(),
        };
        let is_filled = ordered.is_ok() || self.session.copies.drain();
        // The caller's kernels may read it, in streams that are not known here.
        is_filled && (!self.has_unknown_users() || self.session.context.drain())
    }

    /// Frees the memory or passes it to the next layer, in stream order. Memory that went to the
    /// pool has to be settled.
    fn give_up(&mut self) -> Freed {
        let was_gone = std::mem::replace(&mut self.is_gone, true);
        if self.is_callers {
            return Freed::Lent;
        }
        if was_gone {
            return Freed::Unconfirmed;
        }
        let pool = &self.session.idle;
        let Some(memory) = self.memory.take() else {
            pool.give(None, self.len_bytes);
            return Freed::Returned;
        };
        if !self.order_end(memory.whole()) {
            // It is never used again nor freed, so it stays counted.
            if let Memory::Part(window) = &memory {
                window.mark_unusable();
            }
            std::mem::forget(memory);
            return Freed::Unconfirmed;
        }
        let mut memory = match memory {
            Memory::Own(memory) => memory,
            Memory::Part(window) => return window.give_up(),
        };
        let freed = if pool.is_open() && memory.mark_idle().is_ok() {
            // If the pool was closed meanwhile, it returns the memory.
            let Some(memory) = pool.give(Some(memory), self.len_bytes) else { return Freed::Recycled };
            memory.free()
        } else {
            let freed = memory.free();
            pool.give(None, self.len_bytes);
            freed
        };
        match freed {
            // The caller's event or stream is not waited for.
            Freed::ToPool if self.is_ordered.load(Ordering::Acquire) => Freed::Queued,
            freed => freed,
        }
    }
}

impl Drop for CudaArena {
    fn drop(&mut self) {
        if !self.is_gone && self.give_up() == Freed::ToPool {
            self.session.memory.give_back();
        }
    }
}

impl ArenaPool for CudaSession {
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
                    // The device may still read it.
                    std::mem::forget(buffer);
                }
                return Err(error.into());
            }
        }
        arena.ready.set(self.copies.mark()?).expect("an arena that was just made");
        Ok(Arc::new(CudaResident { arena: Arc::new(arena) }))
    }
}

/// Queues a copy of a piece, whose owner keeps it until the stream has passed the copy, or for
/// ever.
fn copy_piece(stream: &Stream, piece: &[u8], address: u64) -> Result<(), DeviceError> {
    let _entered = stream.context().enter()?;
    // SAFETY: the source is kept until the stream has passed the copy, or for ever (the caller's
    // promise). The target lies in an arena that the stream has allocated or waits for, and that is
    // freed behind the copy.
    let answer =
        unsafe { sys::cuMemcpyHtoDAsync_v2(address, piece.as_ptr().cast(), piece.len(), stream.raw()) };
    call("cuMemcpyHtoDAsync_v2", answer)
}

/// Device memory of one layer whose copies are all queued.
#[derive(Debug)]
pub(crate) struct CudaResident {
    pub(super) arena: Arc<CudaArena>,
}

impl CudaResident {
    fn ready(&self) -> &Event {
        self.arena.ready.get().expect("a resident layer is sealed")
    }
}

impl Resident for CudaResident {
    fn target(&self) -> Target {
        let ordinal = u32::try_from(self.arena.session.context.device());
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

    fn arena_pool(&self) -> Option<Arc<dyn ArenaPool>> {
        let session = Arc::clone(&self.arena.session);
        Some(session)
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
            unsafe { self.arena.session.read_back(self.ready(), self.arena.address + offset_bytes, target) };
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
        let stream = unsafe { Stream::of_caller(stream, &self.arena.session.context) };
        stream.wait_for(self.ready())
    }

    unsafe fn release_after(&self, after: After) -> Result<(), DeviceError> {
        let session = &self.arena.session;
        let frees = session.memory.frees();
        let ordered = match after {
            // SAFETY: the caller's promise.
            After::Event(event) => unsafe { frees.wait_for_event_of_caller(event) },
            After::Stream(stream) => {
                // SAFETY: the caller's promise; the value does not outlive this call.
                let stream = unsafe { Stream::of_caller(stream, &session.context) };
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
            // The caller has its memory again: nothing of the load may write to it any more.
            let ready = self.ready();
            if ready.wait().is_err() {
                self.arena.session.copies.drain();
            }
        }
    }
}
