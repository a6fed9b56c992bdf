//! Running loads: the next layer, with or without a time to wait, cancelling, and what was done.
#![allow(unsafe_code, reason = "follows pointers of the caller's; each block says what it relies on")]

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onelayer::{Awaited, CancelHandle, LayerStream, LoadReport, Progress};

use crate::checkpoint::Checkpoint;
use crate::failure::{Failure, guarded, guarded_or};
use crate::foreign::{Out, borrowed, free, handle};
use crate::layer::Layer;
use crate::options::Options;
use crate::sized::{self, SizedStruct};
use crate::status::Status;

/// A running load. Its functions may be called on several threads at once; one that waits for a
/// layer holds up others that want one, and ol_stream_report().
#[derive(Debug)]
pub struct Stream {
    stream: Mutex<LayerStream>,
    cancel: CancelHandle,
    progress: Progress,
    layers: usize,
}

/// What a load did so far. Set struct_size before it is filled in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// sizeof(ol_report).
    pub struct_size: usize,
    /// From the start of the load to its end, or to now, in nanoseconds.
    pub elapsed_ns: u64,
    /// Of it, until reading began.
    pub preparing_ns: u64,
    /// Time that the program waited for layers.
    pub caller_waited_ns: u64,
    /// Time that all readers together spent reading.
    pub reading_ns: u64,
    /// Layers that were handed out.
    pub layers: u64,
    /// Bytes of tensors that arrived.
    pub tensor_bytes: u64,
    /// Bytes moved from files, over-read included.
    pub read_bytes: u64,
    /// Host memory that the plan holds at most beside resident layers, in bytes: no more than the
    /// budget.
    pub planned_host_bytes: u64,
    /// Bytes of it that are pinned for the device.
    pub pinned_bytes: u64,
    /// Files that were not read the way that was asked for.
    pub fallbacks: u64,
}

// SAFETY: `repr(C)`, the size comes first, and the rest are integers.
unsafe impl SizedStruct for Report {
    const NAME: &'static str = "ol_report";
    const BYTES_LEAST: usize = 88;
}

/// Starts a load. The checkpoint may be closed before the load is over.
///
/// *out is null unless it is OL_OK; ol_stream_free() gives it back. OL_EBUDGET if the budget cannot
/// work, which no byte is read for; OL_EUNSUPPORTED if there is no such device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_stream_start(
    checkpoint: *const Checkpoint,
    options: *const Options,
    out: *mut *mut Stream,
) -> Status {
    guarded(|| {
        // SAFETY: a variable of the caller's (`crate`).
        let mut out = unsafe { Out::new(out, std::ptr::null_mut(), "out") }?;
        // SAFETY: a handle of the caller's (`crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        // SAFETY: options of the caller's (`crate`).
        let options = unsafe { Options::read(options) }?;
        let stream = options.builder()?.build()?.stream(&checkpoint.opened)?;
        out.put(handle(Stream {
            cancel: stream.cancel_handle(),
            progress: stream.progress(),
            layers: stream.plan().layers().len(),
            stream: Mutex::new(stream),
        }));
        Ok(Status::OL_OK)
    })
}

/// The next layer, in execution order. Waits for it.
///
/// *out is null unless it is OL_OK; ol_layer_free() gives it back. OL_END after the last one, and
/// after any failure. OL_ESTALLED if the program itself holds all that may be resident.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_next_layer(stream: *const Stream, out: *mut *mut Layer) -> Status {
    // SAFETY: the caller's promise.
    guarded(|| unsafe { next(stream, Duration::MAX, out) })
}

/// The next layer, if it comes within timeout_ms milliseconds; OL_NOT_YET if it does not. It is
/// read meanwhile all the same.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_next_layer_within(
    stream: *const Stream,
    timeout_ms: u64,
    out: *mut *mut Layer,
) -> Status {
    // SAFETY: the caller's promise.
    guarded(|| unsafe { next(stream, Duration::from_millis(timeout_ms), out) })
}

/// Cancels a load, from any thread: who waits for a layer gets OL_ECANCELLED, and so does who asks
/// for the next one. Returns at once. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_cancel(stream: *const Stream) {
    guarded(|| {
        // SAFETY: a handle of the caller's (`crate`).
        unsafe { borrowed(stream, "stream") }?.cancel.cancel();
        Ok(Status::OL_OK)
    });
}

/// Layers of the load; 0 for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_stream_len(stream: *const Stream) -> usize {
    // SAFETY: a handle of the caller's (`crate`).
    guarded_or(0, || Ok(unsafe { borrowed(stream, "stream") }?.layers))
}

/// How far a load is: bytes of tensors that have arrived, and of all there are. Waits for nobody.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_stream_progress(
    stream: *const Stream,
    done_bytes: *mut u64,
    total_bytes: *mut u64,
) -> Status {
    guarded(|| {
        // SAFETY: a variable of the caller's (`crate`).
        let mut done = unsafe { Out::new(done_bytes, 0, "done_bytes") }?;
        // SAFETY: a variable of the caller's (`crate`).
        let mut total = unsafe { Out::new(total_bytes, 0, "total_bytes") }?;
        // SAFETY: a handle of the caller's (`crate`).
        let stream = unsafe { borrowed(stream, "stream") }?;
        done.put(stream.progress.tensor_bytes_done());
        total.put(stream.progress.tensor_bytes_total());
        Ok(Status::OL_OK)
    })
}

/// What a load did so far; final after OL_END. OL_EINVAL if report->struct_size is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_stream_report(stream: *const Stream, report: *mut Report) -> Status {
    guarded(|| {
        // SAFETY: a handle of the caller's (`crate`).
        let stream = unsafe { borrowed(stream, "stream") }?.lock();
        let planned_host_bytes = stream.plan().memory().budgeted_bytes();
        // SAFETY: a structure of the caller's (`crate`).
        unsafe { sized::write(report, &Report::new(&stream.report(), planned_host_bytes)) }?;
        Ok(Status::OL_OK)
    })
}

/// Ends a load: cancels what is not done, and gives its memory back. Layers that were taken stay as
/// they are. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_stream_free(stream: *mut Stream) {
    guarded(|| {
        // SAFETY: a handle that nobody uses any more (`crate`).
        unsafe { free(stream) };
        Ok(Status::OL_OK)
    });
}

/// # Safety
/// As [`crate`] promises.
unsafe fn next(stream: *const Stream, timeout: Duration, out: *mut *mut Layer) -> Result<Status, Failure> {
    // SAFETY: a variable of the caller's (`crate`).
    let mut out = unsafe { Out::new(out, std::ptr::null_mut(), "out") }?;
    // SAFETY: a handle of the caller's (`crate`).
    let stream = unsafe { borrowed(stream, "stream") }?;
    let status = match stream.lock().next_within(timeout)? {
        Awaited::Layer(layer) => {
            out.put(handle(Layer::new(layer)));
            Status::OL_OK
        }
        Awaited::NotYet => Status::OL_NOT_YET,
        Awaited::Ended => Status::OL_END,
    };
    Ok(status)
}

impl Stream {
    /// A thread that panicked with the lock left a stream that is whole: it ends the load by
    /// itself.
    fn lock(&self) -> MutexGuard<'_, LayerStream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Report {
    fn new(report: &LoadReport, planned_host_bytes: u64) -> Self {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self {
            struct_size: size_of::<Self>(),
            elapsed_ns: ns(report.elapsed),
            preparing_ns: ns(report.preparing),
            caller_waited_ns: ns(report.caller_waited),
            reading_ns: ns(report.reading),
            layers: report.layers,
            tensor_bytes: report.tensor_bytes,
            read_bytes: report.read_bytes,
            planned_host_bytes,
            pinned_bytes: report.pinned_bytes,
            fallbacks: u64::try_from(report.fallbacks.len()).unwrap_or(u64::MAX),
        }
    }
}
