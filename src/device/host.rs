//! Host memory as a device: one mapping per layer, recycled while streaming, returned at the end.
//!
//! Copies run on the calling thread, so they are complete when they return. Arenas, windows,
//! recycling and freeing work as on other devices.
#![allow(unsafe_code, reason = "reader threads write disjoint parts of one arena; each block says why")]

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::idle::IdleArenas;
use super::none::CompletedCopy;
use super::prefault::{Prefaulter, Prefaulting};
use super::spare::SpareMemory;
use super::{
    ArenaPlace, ArenaPool, Backend, DeviceError, Fill, Freed, Resident, Target, Unfilled, refill_pieces,
};
use crate::live::{Entry, MemoryUse};
use crate::plan::{Copies, MoveOp, PlannedLayer};
use crate::staging::copy::copy_past_cache;
use crate::staging::memory::AnonymousMemory;
use crate::staging::{Filled, Slot};
use crate::units::to_usize;

/// Allocates arenas in host memory.
#[derive(Debug)]
pub(crate) struct HostBackend {
    pool: Arc<IdleArenas<AnonymousMemory>>,
    /// The memory that layers share. `None` if each has its own arena, and after the trim.
    window: Mutex<Option<Arc<HostWindow>>>,
    /// Touches fresh arenas ahead of the readers.
    prefaulter: Option<Prefaulter>,
}

impl HostBackend {
    /// A backend that frees the arenas of dropped layers at once.
    pub(crate) fn new() -> Self {
        Self { pool: Arc::new(IdleArenas::closed()), window: Mutex::default(), prefaulter: None }
    }

    /// A backend whose layers share a window of `bytes`, except those that get their own arena.
    /// `layers` arenas at once need no allocation, however late they come.
    pub(crate) fn with_window(bytes: u64, layers: usize) -> Result<Self, DeviceError> {
        let backend = Self::new();
        if bytes > 0 {
            let memory = AnonymousMemory::new(bytes);
            let memory = memory.map_err(|source| DeviceError::HostAllocation { bytes, source })?;
            memory.live().note(MemoryUse::Window, None);
            *backend.window() = Some(Arc::new(HostWindow::new(memory, layers)));
        }
        Ok(backend)
    }

    fn window(&self) -> MutexGuard<'_, Option<Arc<HostWindow>>> {
        // Every update is one assignment.
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A backend that reuses the arenas of dropped layers until it is trimmed. All its arenas
    /// together, used or idle, hold at most `resident_bytes_max`, or the layers in use if that is
    /// more.
    pub(crate) fn recycling(resident_bytes_max: u64) -> Self {
        let pool = Arc::new(IdleArenas::open(resident_bytes_max));
        Self { pool, window: Mutex::default(), prefaulter: None }
    }

    /// A backend whose arenas come from spare memory and go back to it.
    pub(crate) fn sharing(spare: &SpareMemory) -> Self {
        Self { pool: spare.pool(), window: Mutex::default(), prefaulter: None }
    }

    /// The same, with a thread that touches fresh arenas ahead of readers that wait for a disk.
    pub(crate) fn prefaulting(self) -> Self {
        Self { prefaulter: Prefaulter::start(), ..self }
    }

    fn arena(&self, len_bytes: u64) -> Result<Arc<HostArena>, DeviceError> {
        HostArena::new(&self.pool, self.prefaulter.as_ref(), len_bytes).map(Arc::new)
    }
}

/// The memory that the layers of a stream share.
#[derive(Debug)]
struct HostWindow {
    memory: AnonymousMemory,
    /// Empty arenas of dropped layers, for the next layers: so no pass allocates any. Never more
    /// than there were layers at once.
    blanks: Mutex<Vec<Arc<HostArena>>>,
}

impl HostWindow {
    fn new(memory: AnonymousMemory, layers: usize) -> Self {
        let blank = || {
            let (memory, prefaulting, pool) = (None, None, None);
            Arc::new(HostArena { len_bytes: 0, is_sealed: false, memory, prefaulting, pool })
        };
        let blanks = std::iter::repeat_with(blank).take(layers).collect();
        Self { memory, blanks: Mutex::new(blanks) }
    }

    fn blanks(&self) -> MutexGuard<'_, Vec<Arc<HostArena>>> {
        // Every update adds or removes one.
        self.blanks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An arena at a place without other users.
    fn arena(
        self: &Arc<Self>,
        start_bytes: u64,
        len_bytes: u64,
        pool: &Arc<IdleArenas<AnonymousMemory>>,
    ) -> Arc<HostArena> {
        let end = start_bytes.checked_add(len_bytes);
        assert!(end.is_some_and(|end| end <= self.memory.len_bytes()), "a place outside the window");
        let memory = (len_bytes > 0).then(|| Memory::Part { window: Arc::clone(self), start_bytes });
        let pool = Some(Arc::clone(pool));
        let arena = HostArena { len_bytes, memory, prefaulting: None, is_sealed: false, pool };
        let mut blank = self.blanks().pop();
        match blank.as_mut().and_then(Arc::get_mut) {
            Some(place) => *place = arena,
            None => return Arc::new(arena),
        }
        blank.expect("just filled")
    }
}

/// Host memory of one layer.
#[derive(Debug)]
pub(crate) struct HostArena {
    len_bytes: u64,
    /// True once it is complete: the loader no longer writes to it.
    is_sealed: bool,
    /// `None` for a layer without bytes, and while being made or dropped.
    memory: Option<Memory>,
    /// Dropped before the memory gets another user.
    prefaulting: Option<Prefaulting>,
    /// `None` once it was freed.
    pool: Option<Arc<IdleArenas<AnonymousMemory>>>,
}

/// The memory of one arena.
#[derive(Debug)]
enum Memory {
    Own(AnonymousMemory),
    /// A part of the window, from this offset on.
    Part {
        window: Arc<HostWindow>,
        start_bytes: u64,
    },
}

impl Memory {
    /// The mapping, and the offset in it.
    fn parts(&self) -> (&AnonymousMemory, u64) {
        match self {
            Self::Own(memory) => (memory, 0),
            Self::Part { window, start_bytes } => (&window.memory, *start_bytes),
        }
    }

    fn live(&self) -> &Entry {
        self.parts().0.live()
    }

    fn pointer_to(&self, offset_bytes: u64, len_bytes: u64) -> NonNull<u8> {
        let (memory, start_bytes) = self.parts();
        memory.pointer_to(start_bytes + offset_bytes, len_bytes)
    }

    /// # Safety
    /// As [`AnonymousMemory::part`].
    unsafe fn part(&self, offset_bytes: u64, len_bytes: u64) -> &[u8] {
        let (memory, start_bytes) = self.parts();
        // SAFETY: the caller's promise.
        unsafe { memory.part(start_bytes + offset_bytes, len_bytes) }
    }

    /// # Safety
    /// As [`AnonymousMemory::part_mut`].
    #[expect(clippy::mut_from_ref, reason = "the caller proves that parts are disjoint")]
    unsafe fn part_mut(&self, offset_bytes: u64, len_bytes: u64) -> &mut [u8] {
        let (memory, start_bytes) = self.parts();
        // SAFETY: the caller's promise.
        unsafe { memory.part_mut(start_bytes + offset_bytes, len_bytes) }
    }
}

impl HostArena {
    fn new(
        pool: &Arc<IdleArenas<AnonymousMemory>>,
        prefaulter: Option<&Prefaulter>,
        len_bytes: u64,
    ) -> Result<Self, DeviceError> {
        let failed = |source| DeviceError::HostAllocation { bytes: len_bytes, source };
        let recycled = pool.take(len_bytes).memory;
        // From here on, the arena's drop undoes the pool's count, whatever fails below.
        let pool = Some(Arc::clone(pool));
        let mut arena = Self { len_bytes, memory: None, prefaulting: None, is_sealed: false, pool };
        match recycled {
            // Pages beyond this layer that the last one touched would count as resident.
            Some(memory) => {
                memory.live().note(MemoryUse::Filling, None);
                // SAFETY: an arena that was idle has no other owner, so nothing refers to its bytes.
                let released = unsafe { memory.release_from(len_bytes) };
                arena.memory = Some(Memory::Own(memory));
                released.map_err(failed)?;
            }
            None if len_bytes == 0 => {}
            None => {
                let memory = AnonymousMemory::new(len_bytes).map_err(failed)?;
                memory.choose_page_size();
                memory.live().note(MemoryUse::Filling, None);
                arena.prefaulting = prefaulter.and_then(|prefaulter| prefaulter.touch(&memory, len_bytes));
                arena.memory = Some(Memory::Own(memory));
            }
        }
        Ok(arena)
    }

    fn give_up(&mut self) -> Freed {
        drop(self.prefaulting.take());
        let Some(pool) = self.pool.take() else { return Freed::Unconfirmed };
        let own = match self.memory.take() {
            Some(Memory::Part { window, .. }) => return give_up_part(window),
            Some(Memory::Own(memory)) => Some(memory),
            None => None,
        };
        if let Some(memory) = &own {
            memory.live().note(MemoryUse::Idle, None);
        }
        let had_memory = own.is_some();
        match pool.give(own, self.len_bytes).map(AnonymousMemory::unmap) {
            Some(Ok(())) => Freed::Returned,
            Some(Err(_)) => Freed::Unconfirmed,
            None if had_memory => Freed::Recycled,
            None => Freed::Returned,
        }
    }
}

/// Frees a part of a window. The last part of a trimmed window frees the window.
fn give_up_part(window: Arc<HostWindow>) -> Freed {
    match Arc::into_inner(window).map(|window| window.memory.unmap()) {
        Some(Ok(())) => Freed::Returned,
        Some(Err(_)) => Freed::Unconfirmed,
        None => Freed::Recycled,
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        self.give_up();
    }
}

impl ArenaPool for IdleArenas<AnonymousMemory> {
    fn pool_bytes(&self) -> Option<u64> {
        None
    }

    fn settle(&self) -> bool {
        true
    }

    fn refill(
        self: Arc<Self>,
        layer: &PlannedLayer,
        fill: &mut Fill<'_>,
    ) -> Result<Arc<dyn Resident>, Unfilled> {
        let mut arena = HostArena::new(&self, None, layer.arena_bytes)?;
        for (offset_bytes, len_bytes) in refill_pieces(layer.arena_bytes) {
            let memory = arena.memory.as_ref().expect("an arena with bytes has memory");
            // SAFETY: the arena was made here and nobody else has it.
            let target = unsafe { memory.part_mut(offset_bytes, len_bytes) };
            fill(offset_bytes, target).map_err(Unfilled::Bytes)?;
        }
        arena.is_sealed = true;
        Ok(Arc::new(arena))
    }
}

impl Resident for HostArena {
    fn target(&self) -> Target {
        Target::Host
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn free(self: Arc<Self>) -> Freed {
        let mut owner = self;
        let Some(arena) = Arc::get_mut(&mut owner) else { return Freed::Unconfirmed };
        let window = match &arena.memory {
            Some(Memory::Part { window, .. }) => Arc::clone(window),
            _ => return arena.give_up(),
        };
        arena.give_up();
        window.blanks().push(owner);
        give_up_part(window)
    }

    fn arena_pool(&self) -> Option<Arc<dyn ArenaPool>> {
        // Arenas in a window too: when a parked layer is restored, it gets its own memory.
        let pool = self.pool.clone()?;
        Some(pool)
    }

    fn live(&self) -> Option<&Entry> {
        self.memory.as_ref().map(Memory::live)
    }

    fn host_bytes(&self) -> Option<&[u8]> {
        assert!(self.is_sealed, "an arena is read once it is complete");
        let Some(memory) = &self.memory else { return Some(&[]) };
        // SAFETY: sealing takes an arena that has one owner, so no copy was under way; none starts into one
        // that is sealed (`copy_async` refuses it).
        Some(unsafe { memory.part(0, self.len_bytes) })
    }

    fn host_address(&self) -> Option<NonNull<u8>> {
        self.memory.as_ref().map(|memory| memory.pointer_to(0, self.len_bytes))
    }

    fn read(&self, offset_bytes: u64, target: &mut [u8]) -> Result<bool, DeviceError> {
        let bytes = self.host_bytes().expect("the host reads its own memory");
        let start = to_usize(offset_bytes);
        target.copy_from_slice(&bytes[start..start + target.len()]);
        Ok(true)
    }
}

impl Backend for HostBackend {
    type Arena = HostArena;
    type Resident = HostArena;
    type Pending = CompletedCopy;

    const IS_ASYNCHRONOUS: bool = false;

    fn allocate(&self, layer: &PlannedLayer, place: ArenaPlace) -> Result<Arc<HostArena>, DeviceError> {
        match (place, &*self.window()) {
            (ArenaPlace::InWindow { offset_bytes }, Some(window)) => {
                Ok(window.arena(offset_bytes, layer.arena_bytes, &self.pool))
            }
            (ArenaPlace::Own | ArenaPlace::InWindow { .. }, _) => self.arena(layer.arena_bytes),
        }
    }

    fn copy_async(
        &self,
        arena: &Arc<HostArena>,
        slot: Slot<Filled>,
        copies: Copies<'_>,
    ) -> Result<CompletedCopy, DeviceError> {
        assert!(!arena.is_sealed, "a complete layer is not written to");
        for copy in copies {
            let memory =
                arena.memory.as_ref().expect("a layer with copies has bytes, and so an arena with memory");
            let source = slot.part(copy.slot_offset_bytes, copy.len_bytes);
            // SAFETY: a plan gives every tensor a place of its own in the arena of its layer and every byte
            // of a tensor to exactly one read, and the loader copies each read once; so no two
            // copies touch the same bytes. Nothing reads an arena before it is sealed: see
            // `host_bytes`.
            let target = unsafe { memory.part_mut(copy.arena_offset_bytes, copy.len_bytes) };
            copy_past_cache(target, source);
        }
        Ok(CompletedCopy(slot))
    }

    fn seal(&self, arena: Arc<HostArena>, moves: &[MoveOp]) -> Result<Arc<HostArena>, DeviceError> {
        assert!(moves.is_empty(), "on the host every tensor lands in its place");
        let mut owner = arena;
        let arena = Arc::get_mut(&mut owner);
        let arena = arena.expect("copies are over when they return, so that none shares the arena");
        drop(arena.prefaulting.take());
        arena.is_sealed = true;
        Ok(owner)
    }

    fn trim(&self) {
        self.pool.close();
        // The window stays until its last layer is dropped.
        drop(self.window().take());
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::MemoryBudget;
    use crate::checkpoint::TensorId;
    use crate::device::PendingCopy;
    use crate::plan::{Placement, RingShape};
    use crate::staging::Ring;
    use crate::units::{ByteRange, KIB, MIB};
    #[cfg(not(miri))]
    use onelayer_system::page_cache::page_bytes;
    #[cfg(not(miri))]
    use std::time::{Duration, Instant};

    fn address(arena: &HostArena) -> Option<usize> {
        // SAFETY: nothing writes to the arenas of these tests.
        arena.memory.as_ref().map(|memory| unsafe { memory.part(0, 1) }.as_ptr().addr())
    }

    #[test]
    fn a_dropped_arena_is_used_again_until_the_trim() {
        let backend = HostBackend::recycling(4 * MIB);
        let first = backend.arena(4 * MIB).unwrap();
        let place = address(&first);
        drop(first);
        let second = backend.arena(2 * MIB).unwrap();
        assert_eq!(address(&second), place);
        assert_eq!(backend.seal(second, &[]).unwrap().len_bytes(), 2 * MIB);
        assert_eq!(backend.pool.idle_bytes(), 2 * MIB);
        let third = backend.arena(2 * MIB).unwrap();
        backend.trim();
        assert_eq!(backend.pool.idle_bytes(), 0);
        drop(third);
        assert_eq!(backend.pool.idle_bytes(), 0, "an arena that comes late goes to the system");
    }

    /// Two threads fill one arena from two slots at once, then the whole is read: what happens in
    /// every load, small enough for miri.
    #[test]
    fn disjoint_parts_are_filled_at_once() {
        let shape = RingShape { slots: 2, slot_bytes: 8 * KIB, readers: 2 };
        let reservation = MemoryBudget::new(shape.bytes()).reserve("ring", shape.bytes()).unwrap();
        let ring = Ring::new(shape, reservation, None).unwrap();
        let backend = HostBackend::recycling(u64::MAX);
        let arena = backend.arena(16 * KIB).unwrap();
        std::thread::scope(|scope| {
            for part in 0..2_u64 {
                let (backend, arena, ring) = (&backend, &arena, &ring);
                scope.spawn(move || {
                    let mut slot = ring.try_take().unwrap();
                    slot.bytes_mut().fill(if part == 0 { 5 } else { 6 });
                    let extent = ByteRange::with_len(0, 8 * KIB).unwrap();
                    let place = Placement {
                        tensor: TensorId(0),
                        extent,
                        arena_offset_bytes: part * 8 * KIB,
                        cast: None,
                        gather: None,
                        permuted_unit_bytes: None,
                        quantised: None,
                    };
                    let copies = Copies::of_one_tensor(&place);
                    drop(backend.copy_async(arena, slot.into_filled(), copies).unwrap().wait().unwrap());
                });
            }
        });
        let resident = backend.seal(arena, &[]).unwrap();
        let bytes = resident.host_bytes().unwrap();
        assert!(bytes[..8192].iter().all(|&byte| byte == 5) && bytes[8192..].iter().all(|&byte| byte == 6));
        assert_eq!(ring.free_slots(), 2);
    }

    #[test]
    fn spare_memory_goes_from_one_load_to_the_next_up_to_its_limit() {
        let spare = SpareMemory::new(6 * MIB);
        let arena = |len_bytes| {
            let backend = HostBackend::sharing(&spare);
            let arena = backend.arena(len_bytes).unwrap();
            // The end of a load.
            backend.trim();
            arena
        };
        let (first, second) = (arena(4 * MIB), arena(4 * MIB));
        drop(first);
        assert_eq!(spare.idle_bytes(), 0, "the other one is in use: both would be more than the limit");
        drop(second);
        assert_eq!(spare.idle_bytes(), 4 * MIB);
        let third = arena(3 * MIB);
        assert_eq!(spare.idle_bytes(), 0, "taken");
        drop(third);
        spare.free();
        assert_eq!(spare.idle_bytes(), 0);
        drop(arena(2 * MIB));
        assert_eq!(spare.idle_bytes(), 2 * MIB, "kept again");
    }

    #[test]
    fn a_load_keeps_no_arena() {
        let backend = HostBackend::new();
        drop(backend.arena(2 * MIB).unwrap());
        assert_eq!(backend.pool.idle_bytes(), 0);
    }

    #[test]
    #[cfg(not(miri))] // miri knows no madvise
    fn an_arena_is_touched_ahead_and_given_back_meanwhile() {
        let backend = HostBackend::new().prefaulting();
        let arena = backend.arena(64 * MIB).unwrap();
        let is_resident = || arena.memory.as_ref().unwrap().parts().0.resident_bytes() == 64 * MIB;
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is_resident() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(is_resident() || !knows_how_to_touch(), "nobody else has touched it");
        drop(arena);
        // Unmapped while it is touched, handed over while it is touched, dropped with the backend.
        for turn in 0..40 {
            let arena = backend.arena(8 * MIB).unwrap();
            match turn % 2 {
                0 => drop(arena),
                _ => drop(backend.seal(arena, &[]).unwrap()),
            }
        }
        let _late = backend.arena(64 * MIB).unwrap();
        drop(backend);
    }

    /// Linux 5.14 and later.
    #[cfg(not(miri))]
    fn knows_how_to_touch() -> bool {
        let memory = AnonymousMemory::new(page_bytes()).unwrap();
        let start = memory.pointer_to(0, page_bytes());
        let advice = rustix::mm::Advice::LinuxPopulateWrite;
        // SAFETY: one page of a live private mapping, whose contents stay.
        unsafe { rustix::mm::madvise(start.as_ptr().cast(), to_usize(page_bytes()), advice) }.is_ok()
    }

    #[test]
    fn a_layer_without_bytes_needs_no_memory() {
        let backend = HostBackend::new();
        let arena = backend.arena(0).unwrap();
        assert_eq!(backend.seal(arena, &[]).unwrap().host_bytes(), Some(&[][..]));
    }

    #[test]
    #[cfg(not(miri))] // miri ends when memory does
    fn an_allocation_that_fails_is_not_counted() {
        let backend = HostBackend::recycling(u64::MAX);
        let refused = backend.arena(1 << 62).unwrap_err().to_string();
        assert!(refused.starts_with("cannot allocate an arena of 4194304 TiB"), "{refused}");
        assert_eq!(backend.pool.used_bytes(), 0);
    }

    #[test]
    fn what_is_recycled_holds_no_more_than_its_new_layer() {
        let backend = HostBackend::recycling(64 * KIB);
        let mut arena = Arc::into_inner(backend.arena(64 * KIB).unwrap()).unwrap();
        // SAFETY: the only reference to the arena's bytes.
        unsafe { arena.memory.as_mut().unwrap().part_mut(0, 64 * KIB) }.fill(7);
        drop(arena);
        let arena = backend.arena(4 * KIB).unwrap();
        // SAFETY: nothing writes to the arena.
        let bytes = unsafe { arena.memory.as_ref().unwrap().part(0, 64 * KIB) };
        assert!(bytes[4096..].iter().all(|&byte| byte == 0), "the tail went back to the system");
        assert!(backend.seal(arena, &[]).unwrap().host_bytes().unwrap().len() == 4096);
    }
}
