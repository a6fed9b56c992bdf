//! Functions of the simulation that no driver has.

use std::ffi::{CStr, c_char};

use crate::sim::{configure, lock, to_u64};

/// Applies settings, as lines of `NAME=value` without the prefix `CUDA_SIM_`, over those of the
/// environment. Call it before any other function. Returns 0, or 1 if it is too late or the text is
/// not UTF-8.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuda_sim_configure(text: *const c_char) -> u32 {
    // SAFETY: the caller gives a C string.
    let text = unsafe { CStr::from_ptr(text) };
    let is_taken = text.to_str().is_ok_and(configure);
    u32::from(!is_taken)
}

/// Writes the report so far into a buffer, cut to its length. Returns the full length.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuda_sim_report(buffer: *mut u8, len: u64) -> u64 {
    let report = lock().report();
    let shown = report.len().min(usize::try_from(len).unwrap_or(usize::MAX));
    // SAFETY: the caller gives `len` bytes; the report is our memory.
    unsafe { std::ptr::copy_nonoverlapping(report.as_ptr(), buffer, shown) };
    to_u64(report.len())
}

/// Writes the report so far to the file of `CUDA_SIM_REPORT`, for programs that will be killed.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_write_report() {
    lock().write_report();
}
