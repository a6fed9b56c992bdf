//! Pointers of the caller's: null is refused here, and everything else believed.
#![allow(unsafe_code, reason = "follows pointers of the caller's; each function says what it relies on")]

use std::ffi::{CStr, c_char};

use crate::failure::Failure;

/// What a handle points to.
///
/// # Safety
/// Null, or a live handle of this type that nobody frees before the reference is gone.
pub(crate) unsafe fn borrowed<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }.ok_or_else(|| is_null(what))
}

/// A text.
///
/// # Safety
/// Null, or a text that ends with a zero and stays as it is before the reference is gone.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a CStr, Failure> {
    // SAFETY: the caller's promise.
    unsafe { optional_text(pointer) }.ok_or_else(|| is_null(what))
}

/// A text that may be null.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn optional_text<'a>(pointer: *const c_char) -> Option<&'a CStr> {
    // SAFETY: not null, and so a text: the caller's promise.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) })
}

/// The UTF-8 of a text: names in checkpoints are.
pub(crate) fn name<'a>(text: &'a CStr, what: &str) -> Result<&'a str, Failure> {
    text.to_str().map_err(|_| Failure::invalid(format!("{what} is not UTF-8: {text:?}")))
}

/// Where a result goes.
#[derive(Debug)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Somewhere to write to; holds `empty` until something is put there.
    ///
    /// # Safety
    /// Null, or a variable of the caller's that nobody else uses while the value returned is.
    pub(crate) unsafe fn new(pointer: *mut T, empty: T, what: &str) -> Result<Self, Failure> {
        if pointer.is_null() {
            return Err(is_null(what));
        }
        let mut out = Self(pointer);
        out.put(empty);
        Ok(out)
    }

    pub(crate) fn put(&mut self, value: T) {
        // SAFETY: a variable of the caller's, which need not hold a value yet: the promise of `new`.
        unsafe { self.0.write(value) };
    }
}

/// Gives a handle to the caller.
pub(crate) fn handle<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// Takes a handle back and drops it. Null is none.
///
/// # Safety
/// Null, or what [`handle`] gave, which nobody uses any more.
pub(crate) unsafe fn free<T>(pointer: *mut T) {
    if !pointer.is_null() {
        // SAFETY: made by `handle`, and freed once: the caller's promise.
        drop(unsafe { Box::from_raw(pointer) });
    }
}

fn is_null(what: &str) -> Failure {
    Failure::invalid(format!("{what} is null"))
}
