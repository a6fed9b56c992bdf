//! Bytes of the device, copied to the host: for checking and hashing what has arrived.
#![allow(unsafe_code, reason = "calls the driver; each block says why its arguments are valid")]

use std::sync::Arc;

use cudarc::driver::sys;

use super::{Context, Event, Stream, call};
use crate::device::DeviceError;
use crate::units::{MIB, to_u64, to_usize};

/// Bytes that are copied at once.
const PIECE_BYTES: u64 = MIB;

/// A stream of its own and a buffer.
#[derive(Debug)]
pub(super) struct ReadBack {
    stream: Stream,
    /// The device writes here and not into the caller's memory: this can be leaked if nobody can say whether a copy is
    /// over. Empty until it is needed.
    buffer: Vec<u8>,
}

impl ReadBack {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        Ok(Self { stream: Stream::new(context)?, buffer: Vec::new() })
    }

    /// Copies the bytes from `address` on once the event is over.
    ///
    /// # Safety
    /// The bytes are device memory of the stream's context that nobody writes to or frees meanwhile.
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
            unsafe { self.read_piece(address, piece.len()) }?;
            piece.copy_from_slice(&self.buffer[..piece.len()]);
            address += to_u64(piece.len());
        }
        Ok(())
    }

    /// Copies at most [`PIECE_BYTES`] into the buffer.
    ///
    /// # Safety
    /// As [`Self::read`].
    unsafe fn read_piece(&mut self, address: u64, len: usize) -> Result<(), DeviceError> {
        if self.buffer.len() < len {
            self.buffer.resize(len, 0);
        }
        let entered = self.stream.context().enter()?;
        // SAFETY: the source is the caller's promise. The target is the buffer, long enough; it is not touched before the
        // stream was waited for, and kept for ever if that fails.
        let answer = unsafe {
            sys::cuMemcpyDtoHAsync_v2(self.buffer.as_mut_ptr().cast(), address, len, self.stream.raw())
        };
        drop(entered);
        let copied = call("cuMemcpyDtoHAsync_v2", answer).and_then(|()| self.stream.synchronize());
        if copied.is_err() && !self.stream.drain() {
            std::mem::forget(std::mem::take(&mut self.buffer));
        }
        copied
    }
}
