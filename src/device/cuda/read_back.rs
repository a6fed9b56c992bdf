//! Bytes of the device, copied to the host: for checking and hashing what has arrived.
#![allow(unsafe_code, reason = "calls the driver; each block says why its arguments are valid")]

use std::sync::Arc;

use cudarc::driver::sys;

use super::{Context, Event, Stream, call};
use crate::device::DeviceError;
use crate::staging::memory::AnonymousMemory;
use crate::units::{MIB, to_u64, to_usize};

/// Bytes that are copied at once.
const PIECE_BYTES: u64 = MIB;

/// A stream of its own and a buffer.
#[derive(Debug)]
pub(super) struct ReadBack {
    stream: Stream,
    /// The device writes here and not into the caller's memory: this can be leaked if nobody can
    /// say whether a copy is over. `None` until it is needed. On the list of what is allocated.
    buffer: Option<AnonymousMemory>,
}

impl ReadBack {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        Ok(Self { stream: Stream::new(context)?, buffer: None })
    }

    /// Gives the buffer back: the next read makes another.
    pub(super) fn free_buffer(&mut self) {
        self.buffer = None;
    }

    /// Copies the bytes from `address` on once the event is over.
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

    /// Copies at most [`PIECE_BYTES`] by way of the buffer.
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
