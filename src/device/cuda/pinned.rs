//! The ring's memory, registered with the driver: its pages are pinned, and the device reads them
//! by DMA.
#![allow(unsafe_code, reason = "calls the driver; each block says why its arguments are valid")]

use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread;

use cudarc::driver::sys;
use rustix::mm::Advice;

use super::{Context, call, numa};
use crate::staging::{PinRefused, Pinned, Pinner};

/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context, the caller's own too.
const CU_MEMHOSTREGISTER_PORTABLE: u32 = 1;

/// More threads do not touch pages faster.
const TOUCHING_THREADS_MAX: usize = 4;

/// Registers memory with the driver of a context.
#[derive(Debug)]
pub(crate) struct Registrar(pub(crate) Arc<Context>);

impl Pinner for Registrar {
    unsafe fn prepare(&self, start: NonNull<u8>, len_bytes: usize) {
        // The first touch decides the NUMA node of a page.
        let node = self.0.pci_bus_id().ok().and_then(|id| numa::node_of(&id, Path::new("/sys")));
        if let Some(node) = node {
            // SAFETY: a live mapping (the caller's promise), of whole pages.
            unsafe { numa::prefer(node, start, len_bytes) };
        }
        // SAFETY: as above.
        unsafe { touch(start, len_bytes) };
    }

    unsafe fn pin(&self, start: NonNull<u8>, len_bytes: usize) -> Result<Box<dyn Pinned>, PinRefused> {
        let refused = |error: crate::device::DeviceError| PinRefused(error.to_string());
        let _entered = self.0.enter().map_err(refused)?;
        // SAFETY: live memory of that length (the caller's promise), which stays mapped until
        // `Registration` is dropped.
        let answer = unsafe {
            sys::cuMemHostRegister_v2(start.as_ptr().cast(), len_bytes, CU_MEMHOSTREGISTER_PORTABLE)
        };
        call("cuMemHostRegister_v2", answer).map_err(refused)?;
        Ok(Box::new(Registration { start, is_given_up: false, context: Arc::clone(&self.0) }))
    }
}

/// Touches pages with several threads. Zeroing them is most of the cost of pinning a ring, and the
/// driver would do it on one thread. Pages that stay untouched here are touched there.
///
/// # Safety
/// `len_bytes` bytes from `start` are a mapping of this process, `start` on a page.
unsafe fn touch(start: NonNull<u8>, len_bytes: usize) {
    const PIECE_BYTES_MIN: usize = 4 << 20;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let pieces = cores.min(TOUCHING_THREADS_MAX).min(len_bytes / PIECE_BYTES_MIN);
    if pieces < 2 {
        return;
    }
    let piece_bytes = len_bytes.div_ceil(pieces).next_multiple_of(2 << 20);
    let address = start.as_ptr().expose_provenance();
    thread::scope(|scope| {
        for offset in (0..len_bytes).step_by(piece_bytes) {
            let len_bytes = piece_bytes.min(len_bytes - offset);
            let work = move || {
                let piece = std::ptr::with_exposed_provenance_mut(address + offset);
                // SAFETY: a part of the mapping (the caller's promise); faults its pages in and changes no
                // byte.
                let _ = unsafe { rustix::mm::madvise(piece, len_bytes, Advice::LinuxPopulateWrite) };
            };
            let _ = thread::Builder::new().name("onelayer-touch".to_owned()).spawn_scoped(scope, work);
        }
    });
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
        // SAFETY: registered by `pin`, and still mapped: the ring drops this before its memory. No copy is
        // in flight: each holds a slot, and each slot the ring.
        let unregister = || unsafe { sys::cuMemHostUnregister(self.start.as_ptr().cast()) };
        self.is_given_up = self.context.give_back(unregister);
        self.is_given_up
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.unpin();
    }
}
