//! The ring's memory, registered with the driver: its pages stay where they are, and the device reads them by itself.
#![allow(unsafe_code, reason = "calls the driver; each block says why its arguments are valid")]

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;

use super::{Context, call, insist};
use crate::staging::{PinRefused, Pinned, Pinner};

/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context, the caller's own too.
const CU_MEMHOSTREGISTER_PORTABLE: u32 = 1;

/// Registers memory with the driver of a context.
#[derive(Debug)]
pub(crate) struct Registrar(pub(crate) Arc<Context>);

impl Pinner for Registrar {
    unsafe fn pin(&self, start: NonNull<u8>, len_bytes: usize) -> Result<Box<dyn Pinned>, PinRefused> {
        let refused = |error: crate::device::DeviceError| PinRefused(error.to_string());
        let _entered = self.0.enter().map_err(refused)?;
        // SAFETY: live memory of that length (the caller's promise), which stays mapped until `Registration` is dropped.
        let answer = unsafe {
            sys::cuMemHostRegister_v2(start.as_ptr().cast(), len_bytes, CU_MEMHOSTREGISTER_PORTABLE)
        };
        call("cuMemHostRegister_v2", answer).map_err(refused)?;
        Ok(Box::new(Registration { start, is_given_up: false, context: Arc::clone(&self.0) }))
    }
}

/// Memory that the driver has pinned, until this is dropped.
#[derive(Debug)]
struct Registration {
    start: NonNull<u8>,
    is_given_up: bool,
    context: Arc<Context>,
}

// SAFETY: the address is only given to the driver, whose functions may be called from any thread.
unsafe impl Send for Registration {}
// SAFETY: as above; the fields never change.
unsafe impl Sync for Registration {}

impl Pinned for Registration {
    fn unpin(&mut self) -> bool {
        if self.is_given_up {
            return true;
        }
        let entered = self.context.enter().or_else(|_| self.context.enter());
        // SAFETY: registered by `pin`, and still mapped: the ring drops this before its memory. No copy is in flight: each
        // holds a slot, and each slot the ring.
        self.is_given_up = insist(|| unsafe { sys::cuMemHostUnregister(self.start.as_ptr().cast()) });
        drop(entered);
        self.is_given_up
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.unpin();
    }
}
