//! Streams and events: the order of work on a device.
#![allow(unsafe_code, reason = "calls the driver; each block says why its arguments are valid")]

use std::sync::Arc;

use cudarc::driver::sys;

use super::{Context, call, handle_of_caller, is_over};
use crate::device::{CudaCode, DeviceError};
use crate::units::to_u64;

// Values of cuda.h. The bindings have enums, which cannot be combined.
const CU_STREAM_NON_BLOCKING: u32 = 1;
const CU_EVENT_BLOCKING_SYNC: u32 = 1;
const CU_EVENT_DISABLE_TIMING: u32 = 2;

/// Work on a device that runs in the order it was queued.
#[derive(Debug)]
pub(crate) struct Stream {
    raw: sys::CUstream,
    is_own: bool,
    context: Arc<Context>,
}

// SAFETY: the driver's functions on streams may be called from any thread, at the same time too.
unsafe impl Send for Stream {}
// SAFETY: as above; the fields never change.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream. It and the legacy default stream do not wait for each other.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the call writes one handle; a context is current.
        call("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut raw, CU_STREAM_NON_BLOCKING) })?;
        Ok(Self { raw, is_own: true, context: Arc::clone(context) })
    }

    /// The caller's stream.
    ///
    /// # Safety
    /// `raw` is a `CUstream` of this context, or one of the driver's special values (0 and 1:
    /// legacy default; 2: per-thread default, for a value that stays on its thread), and lives
    /// for as long as the value returned.
    pub(crate) unsafe fn of_caller(raw: u64, context: &Arc<Context>) -> Self {
        Self { raw: handle_of_caller(raw), is_own: false, context: Arc::clone(context) }
    }

    /// Waits for everything that was queued so far.
    pub(crate) fn synchronize(&self) -> Result<(), DeviceError> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is alive: owned, or promised by the caller.
        call("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Waits until nothing queued so far is in flight. After `true`, memory that it uses may be
    /// reused or freed, whatever else went wrong.
    ///
    /// Each step is tried because the one before failed; in a lost context nothing runs any more.
    pub(crate) fn drain(&self) -> bool {
        is_over(&self.synchronize()) || is_over(&self.synchronize()) || is_over(&self.context.synchronize())
    }

    /// A new event behind everything queued so far.
    pub(super) fn mark(&self) -> Result<Event, DeviceError> {
        let event = Event::new(&self.context)?;
        event.record(self)?;
        Ok(event)
    }

    /// Makes later work wait for the event.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<(), DeviceError> {
        self.wait_for_raw(event.raw)
    }

    /// As [`Self::wait_for`].
    ///
    /// # Safety
    /// `event` is a live `CUevent`.
    pub(crate) unsafe fn wait_for_event_of_caller(&self, event: u64) -> Result<(), DeviceError> {
        self.wait_for_raw(handle_of_caller(event))
    }

    fn wait_for_raw(&self, event: sys::CUevent) -> Result<(), DeviceError> {
        let _entered = self.context.enter()?;
        // SAFETY: stream and event are alive; the event's last record is what counts, so it may be recorded
        // again later.
        call("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event, 0) })
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Its context.
    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.is_own {
            return;
        }
        // SAFETY: owned and not used after this; work that is still queued is finished by the driver
        // (driver API, `cuStreamDestroy`).
        self.context.give_back(|| unsafe { sys::cuStreamDestroy_v2(self.raw) });
    }
}

/// A mark in a stream. Waiting for it sleeps and does not spin.
#[derive(Debug)]
pub(crate) struct Event {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: the driver's functions on events may be called from any thread, at the same time too.
unsafe impl Send for Event {}
// SAFETY: as above; the fields never change.
unsafe impl Sync for Event {}

impl Event {
    /// A new event. Until it is recorded it counts as complete.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
        // SAFETY: the call writes one handle; a context is current.
        call("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags) })?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// Marks everything queued in the stream so far.
    pub(crate) fn record(&self, stream: &Stream) -> Result<(), DeviceError> {
        let _entered = self.context.enter()?;
        // SAFETY: both are alive and of the same context.
        call("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.raw) })
    }

    /// Waits until the marked work is over.
    pub(crate) fn wait(&self) -> Result<(), DeviceError> {
        let _entered = self.context.enter()?;
        // SAFETY: the event is alive.
        call("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// True if the marked work is over.
    pub(crate) fn is_complete(&self) -> Result<bool, DeviceError> {
        let _entered = self.context.enter()?;
        // SAFETY: the event is alive.
        match call("cuEventQuery", unsafe { sys::cuEventQuery(self.raw) }) {
            Ok(()) => Ok(true),
            Err(error) if error.cuda_code() == Some(CudaCode::NOT_READY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The `CUevent`, for callers.
    pub(crate) fn handle(&self) -> u64 {
        to_u64(self.raw.expose_provenance())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: owned and not used after this; the driver keeps it until waits on it are over (driver
        // API, `cuEventDestroy`).
        self.context.give_back(|| unsafe { sys::cuEventDestroy_v2(self.raw) });
    }
}
