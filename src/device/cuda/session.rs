//! The state of one load on its device: a stream for copies, a stream for frees, the pool of its
//! arenas.
//!
//! ```text
//! copies   allocate -- copies of slots -- moves -- "ready"
//!                                                   |  (the caller's kernels, in its streams)
//! frees                                             +--> wait -- free, or recycle
//! ```
#![allow(unsafe_code, reason = "the contract of reading back")]

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::memory::DevicePool;
use super::read_back::ReadBack;
use super::{Context, Event, Stream};
use crate::device::idle::IdleArenas;
use crate::device::{Destinations, DeviceError};

/// Options of a session.
#[derive(Default)]
pub(crate) struct SessionOptions {
    /// The stream for copies; a new one if `None`.
    pub(crate) copies: Option<Stream>,
    /// The caller's memory for layers that should not get an arena.
    pub(crate) destinations: Option<Arc<Destinations>>,
    /// Arenas of dropped layers are reused while streaming; all arenas together hold at most this
    /// many bytes.
    pub(crate) recycle_bytes_max: Option<u64>,
}

/// The state of one load on its device.
pub(crate) struct CudaSession {
    /// Idle arenas. The first field: they are freed through the fields below.
    pub(super) idle: IdleArenas<super::memory::DeviceMemory>,
    pub(super) memory: Arc<DevicePool>,
    pub(super) copies: Arc<Stream>,
    /// Made by the first read. One thread reads at a time.
    read_back: Mutex<Option<ReadBack>>,
    /// True once the load has ended. Layers keep the session alive, but should not keep the buffer
    /// of a read.
    has_ended: AtomicBool,
    pub(super) destinations: Option<Arc<Destinations>>,
    pub(super) context: Arc<Context>,
}

impl CudaSession {
    /// Makes the streams and the pool of a load.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`] if the driver refuses one of them.
    pub(crate) fn new(context: &Arc<Context>, options: SessionOptions) -> Result<Arc<Self>, DeviceError> {
        let copies = match options.copies {
            Some(stream) => stream,
            None => Stream::new(context)?,
        };
        let copies = Arc::new(copies);
        Ok(Arc::new(Self {
            idle: options.recycle_bytes_max.map_or_else(IdleArenas::closed, IdleArenas::open),
            memory: Arc::new(DevicePool::new(&copies)?),
            copies,
            read_back: Mutex::new(None),
            has_ended: AtomicBool::new(false),
            destinations: options.destinations,
            context: Arc::clone(context),
        }))
    }

    /// Ends the load: frees the buffer of reads, from now on after each read.
    pub(super) fn end(&self) {
        self.has_ended.store(true, Ordering::SeqCst);
        if let Some(read_back) = &mut *self.read_back.lock().unwrap_or_else(PoisonError::into_inner) {
            read_back.free_buffer();
        }
    }

    /// Copies bytes to the host once the event is over.
    ///
    /// # Safety
    /// The bytes are device memory of this context that nobody writes to or frees meanwhile.
    pub(super) unsafe fn read_back(
        &self,
        ready: &Event,
        address: u64,
        target: &mut [u8],
    ) -> Result<(), DeviceError> {
        // The next read overwrites whatever a panic has left.
        let mut read_back = self.read_back.lock().unwrap_or_else(PoisonError::into_inner);
        if read_back.is_none() {
            *read_back = Some(ReadBack::new(&self.context)?);
        }
        let read_back = read_back.as_mut().expect("made above");
        // SAFETY: the caller's promise.
        let read = unsafe { read_back.read(ready, address, target) };
        if self.has_ended.load(Ordering::SeqCst) {
            read_back.free_buffer();
        }
        read
    }
}

impl fmt::Debug for CudaSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaSession").field("context", &self.context).finish_non_exhaustive()
    }
}
