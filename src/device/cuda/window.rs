//! One piece of device memory that the layers of a stream share: a layer gets a part of it, and the
//! next one the same part once everything that used it is over on the device.

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
    /// Behind every use of what was given up so far: frees are one stream, so that the last event
    /// covers those before it.
    given_up: Mutex<Option<Event>>,
    /// True once nobody can say when a use of some part is over.
    is_unusable: AtomicBool,
}

impl DeviceWindow {
    /// The window in memory that nobody has used.
    pub(super) fn new(memory: DeviceMemory) -> Self {
        memory.live().note(MemoryUse::Window, None);
        Self { memory: Some(memory), given_up: Mutex::default(), is_unusable: AtomicBool::new(false) }
    }

    /// The whole of it.
    pub(super) fn memory(&self) -> &DeviceMemory {
        self.memory.as_ref().expect("only dropping frees it")
    }

    /// Where a part starts.
    ///
    /// # Panics
    /// If it does not lie in the window.
    pub(super) fn address_of(&self, offset_bytes: u64, len_bytes: u64) -> u64 {
        let end = offset_bytes.checked_add(len_bytes);
        assert!(end.is_some_and(|end| end <= self.memory().len_bytes()), "a place outside the window");
        self.memory().address() + offset_bytes
    }

    /// Makes what was given up usable for what is queued in the stream of copies from now on.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`] if the driver refuses to wait, or has refused to say when some part is
    /// free.
    pub(super) fn reuse(&self, copies: &Stream) -> Result<(), DeviceError> {
        if self.is_unusable.load(Ordering::Acquire) {
            return Err(DeviceError::WindowInDoubt);
        }
        match &*self.given_up.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(event) => copies.wait_for(event),
            None => Ok(()),
        }
    }

    /// Nobody knows when some part is free: no part is handed out any more.
    pub(super) fn mark_unusable(&self) {
        self.is_unusable.store(true, Ordering::Release);
    }

    /// Takes back a part whose users the stream of frees waits for.
    pub(super) fn give_up(self: Arc<Self>) -> Freed {
        match self.memory().mark_frees() {
            Ok(event) => *self.given_up.lock().unwrap_or_else(PoisonError::into_inner) = Some(event),
            // Without the mark nobody can wait for them in the order of the device; so now.
            Err(_) if self.memory().drain_frees() => {}
            Err(_) => {
                self.mark_unusable();
                // Nor can it be freed.
                std::mem::forget(self);
                return Freed::Unconfirmed;
            }
        }
        // The last part of a window that was trimmed meanwhile takes it along.
        Arc::into_inner(self).map_or(Freed::Recycled, |mut window| window.free())
    }

    /// Frees all of it, once nothing lies in it any more.
    fn free(&mut self) -> Freed {
        let Some(memory) = self.memory.take() else { return Freed::Unconfirmed };
        // It was allocated in the order of the copies, whether any of them came or not.
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
