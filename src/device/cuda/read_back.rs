//! Copies bytes of the device to the host, for checking and hashing.
#![allow(unsafe_code, reason = "calls the driver; each block says why its arguments are valid")]

use std::sync::Arc;

use cudarc::driver::sys;

use super::{Context, Event, Stream, call};
use crate::device::DeviceError;
use crate::staging::memory::AnonymousMemory;
use crate::units::{MIB, to_u64, to_usize};

/// Bytes per copy.
const PIECE_BYTES: u64 = MIB;

/// A stream and a buffer for reading back.
#[derive(Debug)]
pub(super) struct ReadBack {
    stream: Stream,
    /// The device writes here and not to the caller's memory: the buffer can be leaked if the end
    /// of a copy is unknown. `None` until needed. In the list of allocations.
    buffer: Option<AnonymousMemory>,
}

impl ReadBack {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        Ok(Self { stream: Stream::new(context)?, buffer: None })
    }

    /// Frees the buffer; the next read makes another.
    pub(super) fn free_buffer(&mut self) {
        self.buffer = None;
    }

    /// Copies bytes from `address` on, after the event.
    ///
    /// # Safety
    /// The bytes are device memory of the stream's context that nobody writes to or frees
    /// meanwhile.
    pub(super) unsafe fn read(
        &mut self,
        ready: &Event,
        address: u64,
        target: &mut [u8],
    ) -> Result<(), DeviceError> {
        self.stream.wait_for(ready)?;
        let mut address = address;
        for piece in target.chunks_mut(to_usize(PIECE_BYTES)) {
            // SAFETY: a part of what the caller has promised.
            unsafe { self.read_piece(address, piece) }?;
            address += to_u64(piece.len());
        }
        Ok(())
    }

    /// Copies at most [`PIECE_BYTES`] through the buffer.
    ///
    /// # Safety
    /// As [`Self::read`].
    unsafe fn read_piece(&mut self, address: u64, piece: &mut [u8]) -> Result<(), DeviceError> {
        let buffer = match &mut self.buffer {
            Some(buffer) => buffer,
            place => {
                let memory = AnonymousMemory::new(PIECE_BYTES);
                let failed = |source| DeviceError::HostAllocation { bytes: PIECE_BYTES, source };
                place.insert(memory.map_err(failed)?)
            }
        };
        let target = buffer.pointer_to(0, to_u64(piece.len()));
        let entered = self.stream.context().enter()?;
        // SAFETY: the source is the caller's promise. The target is the buffer, long enough; it is not
        // touched before the stream was waited for, and kept for ever if that fails.
        let answer = unsafe {
            sys::cuMemcpyDtoHAsync_v2(target.as_ptr().cast(), address, piece.len(), self.stream.raw())
        };
        drop(entered);
        let copied = call("cuMemcpyDtoHAsync_v2", answer).and_then(|()| self.stream.synchronize());
        match copied {
            Ok(()) => buffer.copy_to(0, piece),
            Err(_) if self.stream.drain() => {}
            Err(_) => std::mem::forget(self.buffer.take()),
        }
        copied
    }
}
