//! Running loads: next layer, with or without a time limit; cancel; progress and report.
#![allow(unsafe_code, reason = "follows pointers of the caller; each block names its requirement")]

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

/// A running load. Its functions may be called on several threads at once. A call that waits for a
/// layer blocks others that want a layer, and ol_stream_report().
#[derive(Debug)]
pub struct Stream {
    stream: Mutex<LayerStream>,
    cancel: CancelHandle,
    progress: Progress,
    layers: usize,
}

/// The report of a load so far. Set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// sizeof(ol_report).
    pub struct_size: usize,
    /// Time since the start of the load, up to its end, in nanoseconds.
    pub elapsed_ns: u64,
    /// Time until reading began.
    pub preparing_ns: u64,
    /// Time the program waited for layers.
    pub caller_waited_ns: u64,
    /// Reading time, summed over all readers.
    pub reading_ns: u64,
    /// Number of layers handed out.
    pub layers: u64,
    /// Tensor bytes that have arrived.
    pub tensor_bytes: u64,
    /// Bytes read from files, over-read included.
    pub read_bytes: u64,
    /// Planned peak of host memory without resident layers, in bytes: at most the budget.
    pub planned_host_bytes: u64,
    /// The part of it that is pinned for the device.
    pub pinned_bytes: u64,
    /// Number of files that were not read in the requested way.
    pub fallbacks: u64,
}

// SAFETY: `repr(C)`, the size comes first, and the rest are integers.
unsafe impl SizedStruct for Report {
    const NAME: &'static str = "ol_report";
    const BYTES_LEAST: usize = 88;
}

/// Starts a load. The checkpoint may be closed before the load ends.
///
/// *out is null unless the status is OL_OK; free it with ol_stream_free(). OL_EBUDGET if the budget
/// is too small (before any tensor is read); OL_EUNSUPPORTED if there is no such device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_stream_start(
    checkpoint: *const Checkpoint,
    options: *const Options,
    out: *mut *mut Stream,
) -> Status {
    guarded(|| {
        // SAFETY: null or a variable of the caller (see `crate`).
        let mut out = unsafe { Out::new(out, std::ptr::null_mut(), "out") }?;
        // SAFETY: null or a live handle (see `crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        // SAFETY: null or options of the caller (see `crate`).
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

/// Waits for the next layer, in execution order.
///
/// *out is null unless the status is OL_OK; free it with ol_layer_free(). OL_END after the last
/// layer and after any failure. OL_ESTALLED if the program holds as many layers as may be resident.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_next_layer(stream: *const Stream, out: *mut *mut Layer) -> Status {
    // SAFETY: the caller's promise.
    guarded(|| unsafe { next(stream, Duration::MAX, out) })
}

/// Waits up to timeout_ms milliseconds for the next layer. OL_NOT_YET if it has not arrived;
/// reading continues.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_next_layer_within(
    stream: *const Stream,
    timeout_ms: u64,
    out: *mut *mut Layer,
) -> Status {
    // SAFETY: the caller's promise.
    guarded(|| unsafe { next(stream, Duration::from_millis(timeout_ms), out) })
}

/// Cancels a load, from any thread. Calls that wait for a layer, and later ones, return
/// OL_ECANCELLED. Returns at once. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_cancel(stream: *const Stream) {
    guarded(|| {
        // SAFETY: null or a live handle (see `crate`).
        unsafe { borrowed(stream, "stream") }?.cancel.cancel();
        Ok(Status::OL_OK)
    });
}

/// Number of layers in the load; 0 for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_stream_len(stream: *const Stream) -> usize {
    // SAFETY: null or a live handle (see `crate`).
    guarded_or(0, || Ok(unsafe { borrowed(stream, "stream") }?.layers))
}

/// The progress of a load: tensor bytes that have arrived, and in total. Never waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_stream_progress(
    stream: *const Stream,
    done_bytes: *mut u64,
    total_bytes: *mut u64,
) -> Status {
    guarded(|| {
        // SAFETY: null or a variable of the caller (see `crate`).
        let mut done = unsafe { Out::new(done_bytes, 0, "done_bytes") }?;
        // SAFETY: null or a variable of the caller (see `crate`).
        let mut total = unsafe { Out::new(total_bytes, 0, "total_bytes") }?;
        // SAFETY: null or a live handle (see `crate`).
        let stream = unsafe { borrowed(stream, "stream") }?;
        done.put(stream.progress.tensor_bytes_done());
        total.put(stream.progress.tensor_bytes_total());
        Ok(Status::OL_OK)
    })
}

/// The report of a load so far; final after OL_END. OL_EINVAL if report->struct_size is invalid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_stream_report(stream: *const Stream, report: *mut Report) -> Status {
    guarded(|| {
        // SAFETY: null or a live handle (see `crate`).
        let stream = unsafe { borrowed(stream, "stream") }?.lock();
        let planned_host_bytes = stream.plan().memory().budgeted_bytes();
        // SAFETY: null or a structure of the caller (see `crate`).
        unsafe { sized::write(report, &Report::new(&stream.report(), planned_host_bytes)) }?;
        Ok(Status::OL_OK)
    })
}

/// Ends a load: cancels the rest and frees its memory. Layers handed out stay valid. Null is
/// ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_stream_free(stream: *mut Stream) {
    guarded(|| {
        // SAFETY: null or a handle that is no longer used (see `crate`).
        unsafe { free(stream) };
        Ok(Status::OL_OK)
    });
}

/// # Safety
/// The promise of [`crate`].
unsafe fn next(stream: *const Stream, timeout: Duration, out: *mut *mut Layer) -> Result<Status, Failure> {
    // SAFETY: null or a variable of the caller (see `crate`).
    let mut out = unsafe { Out::new(out, std::ptr::null_mut(), "out") }?;
    // SAFETY: null or a live handle (see `crate`).
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
    /// Ignores poisoning: after a panic the stream is consistent and ends the load.
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
