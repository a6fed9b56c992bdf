//! What one load shares on its device: a stream for copies, one for giving memory back, the pool of
//! its arenas.
//!
//! ```text
//! copies   allocate -- copies of slots -- moves -- "ready"
//!                                                   |  (the caller's kernels, in streams of its own)
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

/// How a session is made.
#[derive(Default)]
pub(crate) struct SessionOptions {
    /// Copies go to this stream instead of one of our own.
    pub(crate) copies: Option<Stream>,
    /// Where layers go that do not get an arena of ours.
    pub(crate) destinations: Option<Arc<Destinations>>,
    /// While streaming, arenas of dropped layers are used again; all of them together hold at most
    /// so many bytes.
    pub(crate) recycle_bytes_max: Option<u64>,
}

/// What one load shares on its device.
pub(crate) struct CudaSession {
    /// Arenas that wait for their next layer. First, since they are given back through what is
    /// below.
    pub(super) idle: IdleArenas<super::memory::DeviceMemory>,
    pub(super) memory: Arc<DevicePool>,
    pub(super) copies: Arc<Stream>,
    /// Made by the first read; one reads at a time.
    read_back: Mutex<Option<ReadBack>>,
    /// True once the load has ended. Its layers keep the session, and are not to keep the buffer of a
    /// read.
    has_ended: AtomicBool,
    pub(super) destinations: Option<Arc<Destinations>>,
    pub(super) context: Arc<Context>,
}

impl CudaSession {
    /// The streams and the pool of a load.
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

    /// The load has ended: what reading back needs is given back, and from now on after each read.
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
        // Whatever a panic has left behind is overwritten by the next read.
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
