//! Pointers of the caller. Null is refused; every other pointer is trusted.
#![allow(unsafe_code, reason = "follows pointers of the caller; each function names its requirement")]

use std::ffi::{CStr, c_char};

use crate::failure::Failure;

/// The value of a handle.
///
/// # Safety
/// Null, or a live handle of this type that is not freed while the reference lives.
pub(crate) unsafe fn borrowed<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }.ok_or_else(|| is_null(what))
}

/// A string.
///
/// # Safety
/// Null, or a NUL-terminated string that does not change while the reference lives.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a CStr, Failure> {
    // SAFETY: the caller's promise.
    unsafe { optional_text(pointer) }.ok_or_else(|| is_null(what))
}

/// A string that may be null.
///
/// # Safety
/// Like [`text`].
pub(crate) unsafe fn optional_text<'a>(pointer: *const c_char) -> Option<&'a CStr> {
    // SAFETY: not null, so a string: the caller's promise.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) })
}

/// The string as UTF-8, like all names in checkpoints.
pub(crate) fn name<'a>(text: &'a CStr, what: &str) -> Result<&'a str, Failure> {
    text.to_str().map_err(|_| Failure::invalid(format!("{what} is not UTF-8: {text:?}")))
}

/// An output variable of the caller.
#[derive(Debug)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Checks the pointer and writes `empty` to the variable.
    ///
    /// # Safety
    /// Null, or a variable of the caller that nothing else uses while the returned value lives.
    pub(crate) unsafe fn new(pointer: *mut T, empty: T, what: &str) -> Result<Self, Failure> {
        if pointer.is_null() {
            return Err(is_null(what));
        }
        let mut out = Self(pointer);
        out.put(empty);
        Ok(out)
    }

    pub(crate) fn put(&mut self, value: T) {
        // SAFETY: a variable of the caller, possibly uninitialised: the promise of `new`.
        unsafe { self.0.write(value) };
    }
}

/// Makes a handle for the caller.
pub(crate) fn handle<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// Frees a handle. Null is ignored.
///
/// # Safety
/// Null, or a pointer from [`handle`] that is no longer used.
pub(crate) unsafe fn free<T>(pointer: *mut T) {
    if !pointer.is_null() {
        // SAFETY: made by `handle`, and freed once: the caller's promise.
        drop(unsafe { Box::from_raw(pointer) });
    }
}

fn is_null(what: &str) -> Failure {
    Failure::invalid(format!("{what} is null"))
}
