//! The exported functions of the driver API, by subject. Handles are numbers and are never
//! dereferenced.
//!
//! Arguments are those of the driver API reference. A panic in a function aborts the process
//! (`extern "C"`).
#![allow(unsafe_code, reason = "exports C functions and writes to their callers' addresses")]
#![allow(non_snake_case, reason = "the names are the driver's")]

use crate::code::{Answer, Code};

mod context;
mod copy;
mod driver;
mod event;
mod memory;
mod own;
mod pool;
mod stream;

/// Writes a result to the caller's address; refuses null, like drivers.
///
/// # Safety
/// `target` is null, or writable for a `T` (the contract of every function with a result).
pub(crate) unsafe fn put<T>(target: *mut T, value: T) -> Answer {
    if target.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null, so the caller's promise holds.
    unsafe { target.write(value) };
    Ok(())
}

/// Writes a NUL-terminated string, cut to `len` bytes.
///
/// # Safety
/// `target` is null, or writable for `len` bytes.
pub(crate) unsafe fn put_text(target: *mut u8, len: i32, text: &str) -> Answer {
    let Ok(len) = usize::try_from(len) else { return Err(Code::INVALID_VALUE) };
    if target.is_null() || len == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let shown = &text.as_bytes()[..text.len().min(len - 1)];
    for (at, &byte) in shown.iter().chain(&[0]).enumerate() {
        // SAFETY: `at` is below `len`, and the caller promises as many bytes.
        unsafe { target.wrapping_add(at).write(byte) };
    }
    Ok(())
}
