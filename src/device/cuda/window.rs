//! One allocation on the device that the layers of a stream share. A layer gets a part of it, and
//! the next layer the same part once all uses of it are over on the device.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::memory::DeviceMemory;
use super::{Event, Stream};
use crate::device::{DeviceError, Freed};
use crate::live::MemoryUse;

/// The window of one stream.
#[derive(Debug)]
pub(super) struct DeviceWindow {
    /// `None` once it was freed.
    memory: Option<DeviceMemory>,
    /// An event behind every use of the freed parts: frees are one stream, so the last event covers
    /// the ones before.
    given_up: Mutex<Option<Event>>,
    /// True once the end of a use of some part is unknown.
    is_unusable: AtomicBool,
}

impl DeviceWindow {
    /// The window in unused memory.
    pub(super) fn new(memory: DeviceMemory) -> Self {
        memory.live().note(MemoryUse::Window, None);
        Self { memory: Some(memory), given_up: Mutex::default(), is_unusable: AtomicBool::new(false) }
    }

    /// The whole allocation.
    pub(super) fn memory(&self) -> &DeviceMemory {
        self.memory.as_ref().expect("only dropping frees it")
    }

    /// The address of a part.
    ///
    /// # Panics
    /// If it does not lie in the window.
    pub(super) fn address_of(&self, offset_bytes: u64, len_bytes: u64) -> u64 {
        let end = offset_bytes.checked_add(len_bytes);
        assert!(end.is_some_and(|end| end <= self.memory().len_bytes()), "a place outside the window");
        self.memory().address() + offset_bytes
    }

    /// Makes freed parts usable for work queued in the stream of copies from now on.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`] if the driver refuses to wait, [`DeviceError::WindowInDoubt`] if it
    /// has refused to report when some part is free.
    pub(super) fn reuse(&self, copies: &Stream) -> Result<(), DeviceError> {
        if self.is_unusable.load(Ordering::Acquire) {
            return Err(DeviceError::WindowInDoubt);
        }
        match &*self.given_up.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(event) => copies.wait_for(event),
            None => Ok(()),
        }
    }

    /// The end of a use is unknown: no part is handed out any more.
    pub(super) fn mark_unusable(&self) {
        self.is_unusable.store(true, Ordering::Release);
    }

    /// Takes back a part whose users the stream of frees waits for.
    pub(super) fn give_up(self: Arc<Self>) -> Freed {
        match self.memory().mark_frees() {
            Ok(event) => *self.given_up.lock().unwrap_or_else(PoisonError::into_inner) = Some(event),
            // Without the event, later work cannot wait on the device, so this thread waits now.
            Err(_) if self.memory().drain_frees() => {}
            Err(_) => {
                self.mark_unusable();
                // Nor can it be freed.
                std::mem::forget(self);
                return Freed::Unconfirmed;
            }
        }
        // The last part of a trimmed window frees the window.
        Arc::into_inner(self).map_or(Freed::Recycled, |mut window| window.free())
    }

    /// Frees the allocation. No part may be in use.
    fn free(&mut self) -> Freed {
        let Some(memory) = self.memory.take() else { return Freed::Unconfirmed };
        // It was allocated in the stream of copies, even if no copy followed.
        if memory.free_after_copies().is_err() && !memory.drain_copies() {
            std::mem::forget(memory);
            return Freed::Unconfirmed;
        }
        memory.free()
    }
}

impl Drop for DeviceWindow {
    fn drop(&mut self) {
        self.free();
    }
}
