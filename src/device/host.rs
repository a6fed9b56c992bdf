//! Host memory as a device: one mapping per layer, recycled while streaming, given back at the end.
//!
//! It moves bytes with `memcpy` on the calling thread, so its copies are complete when they return. Everything
//! else (arenas, windows, recycling, freeing) behaves as on a device with memory of its own.
#![allow(unsafe_code, reason = "reader threads write disjoint parts of one arena; each block says why")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::none::CompletedCopy;
use super::{Arena, Backend, DeviceError};
use crate::plan::Copies;
use crate::staging::memory::AnonymousMemory;
use crate::staging::{Filled, Slot};

/// Allocates arenas in host memory.
#[derive(Debug)]
pub(crate) struct HostBackend {
    pool: Arc<Pool>,
}

/// Arenas that a stream will use again. While it is open it holds at most the arenas of the window: an arena comes
/// here only from a layer that has left it.
#[derive(Debug)]
struct Pool {
    /// `None` once closed: arenas then go straight back to the system.
    idle: Mutex<Option<Vec<AnonymousMemory>>>,
}

impl HostBackend {
    /// A backend that recycles the arenas of dropped layers (for a stream) or frees them at once (for a load).
    pub(crate) fn new(recycle: bool) -> Self {
        Self { pool: Arc::new(Pool { idle: Mutex::new(recycle.then(Vec::new)) }) }
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Option<Vec<AnonymousMemory>>> {
        // Pushing and removing cannot be left half done.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The smallest idle arena that is large enough. If none is, all are given back first: what is resident
    /// must never be more than the layers of one window.
    fn take(&self, len_bytes: u64) -> Option<AnonymousMemory> {
        let mut idle = self.lock();
        let arenas = idle.as_mut()?;
        let fitting = arenas.iter().enumerate().filter(|(_, memory)| memory.len_bytes() >= len_bytes);
        match fitting.min_by_key(|(_, memory)| memory.len_bytes()).map(|(index, _)| index) {
            Some(index) => Some(arenas.swap_remove(index)),
            None => {
                arenas.clear();
                None
            }
        }
    }

    fn give(&self, memory: AnonymousMemory) {
        if let Some(arenas) = self.lock().as_mut() {
            arenas.push(memory);
        }
    }
}

/// Host memory of one layer.
#[derive(Debug)]
pub(crate) struct HostArena {
    len_bytes: u64,
    /// `None` for a layer without bytes, and while being dropped.
    memory: Option<AnonymousMemory>,
    pool: Arc<Pool>,
}

impl Arena for HostArena {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn host_bytes(&self) -> Option<&[u8]> {
        let Some(memory) = &self.memory else { return Some(&[]) };
        // SAFETY: callers only ask once every copy into the arena has completed; nothing writes to it afterwards.
        Some(unsafe { memory.part(0, self.len_bytes) })
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.give(memory);
        }
    }
}

impl Backend for HostBackend {
    type Arena = HostArena;
    type Pending = CompletedCopy;

    fn allocate(&self, len_bytes: u64) -> Result<Arc<HostArena>, DeviceError> {
        let memory = match len_bytes {
            0 => None,
            _ => Some(self.recycled_or_new(len_bytes)?),
        };
        Ok(Arc::new(HostArena { len_bytes, memory, pool: Arc::clone(&self.pool) }))
    }

    fn copy_async(
        &self,
        arena: &Arc<HostArena>,
        slot: Slot<Filled>,
        copies: Copies<'_>,
    ) -> Result<CompletedCopy, DeviceError> {
        for copy in copies {
            let memory =
                arena.memory.as_ref().expect("a layer with copies has bytes, and so an arena with memory");
            let source = slot.part(copy.slot_offset_bytes, copy.len_bytes);
            // SAFETY: the plan gives every byte of a tensor to exactly one copy and every tensor a place of its own, so no
            // two copies touch the same bytes, and nothing reads the arena before all of them are complete.
            let target = unsafe { memory.part_mut(copy.arena_offset_bytes, copy.len_bytes) };
            target.copy_from_slice(source);
        }
        Ok(CompletedCopy(slot))
    }

    fn trim(&self) {
        *self.pool.lock() = None;
    }
}

impl HostBackend {
    fn recycled_or_new(&self, len_bytes: u64) -> Result<AnonymousMemory, DeviceError> {
        let failed = |source| DeviceError::HostAllocation { bytes: len_bytes, source };
        let Some(memory) = self.pool.take(len_bytes) else {
            return AnonymousMemory::new(len_bytes).map_err(failed);
        };
        // What the last layer touched beyond this one's end would count as resident.
        // SAFETY: an idle arena has no owner, so nothing refers to its bytes.
        unsafe { memory.release_from(len_bytes) }.map_err(failed)?;
        Ok(memory)
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MIB;

    #[test]
    fn a_dropped_arena_is_used_again_until_the_trim() {
        let backend = HostBackend::new(true);
        let address = |arena: &HostArena| arena.host_bytes().unwrap().as_ptr().addr();
        let first = backend.allocate(4 * MIB).unwrap();
        let place = address(&first);
        drop(first);
        let second = backend.allocate(2 * MIB).unwrap();
        assert_eq!((address(&second), second.len_bytes()), (place, 2 * MIB));
        backend.trim();
        drop(second);
        assert!(backend.pool.lock().is_none());
    }

    #[test]
    fn an_arena_that_is_too_small_is_given_back_first() {
        let backend = HostBackend::new(true);
        drop(backend.allocate(2 * MIB).unwrap());
        let larger = backend.allocate(4 * MIB).unwrap();
        assert_eq!(backend.pool.lock().as_ref().map(Vec::len), Some(0));
        drop(larger);
    }

    #[test]
    fn a_layer_without_bytes_needs_no_memory() {
        let arena = HostBackend::new(false).allocate(0).unwrap();
        assert_eq!(arena.host_bytes(), Some(&[][..]));
    }
}
