//! DLPack structures in capsules, as the protocol wants them: named until a consumer has taken what
//! is inside.
//!
//! Source: <https://dmlc.github.io/dlpack/latest/python_spec.html>.
#![allow(unsafe_code, reason = "the protocol passes raw pointers in capsules; each block says why")]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use onelayer_dlpack::{DLManagedTensor, DLManagedTensorVersioned, ManagedTensor};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Until it is taken; the consumer renames it.
const VERSIONED: &CStr = c"dltensor_versioned";
/// The same for the structure from before version 1.
const UNVERSIONED: &CStr = c"dltensor";

/// A capsule for a consumer that knows version 1.
pub(crate) fn versioned(py: Python<'_>, tensor: ManagedTensor) -> PyResult<Bound<'_, PyAny>> {
    let raw = tensor.into_raw();
    new(py, raw.cast(), VERSIONED, delete_versioned).inspect_err(|_| {
        // SAFETY: no capsule was made, so the structure is still nobody else's.
        unsafe { delete_structure(raw) };
    })
}

/// A capsule for a consumer that named no version.
pub(crate) fn unversioned(py: Python<'_>, tensor: ManagedTensor) -> PyResult<Bound<'_, PyAny>> {
    let raw = tensor.into_unversioned().map_err(|error| PyBufferError::new_err(error.to_string()))?;
    new(py, raw.cast(), UNVERSIONED, delete_unversioned).inspect_err(|_| {
        // SAFETY: no capsule was made, so the structure is still nobody else's.
        unsafe { delete_unversioned_structure(raw) };
    })
}

fn new<'py>(
    py: Python<'py>,
    raw: NonNull<c_void>,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: attached to the interpreter; pointer and name are not null, and the name lives for ever.
    let capsule = unsafe { ffi::PyCapsule_New(raw.as_ptr(), name.as_ptr(), Some(destructor)) };
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// Frees what nobody has taken.
unsafe extern "C" fn delete_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter calls this with the capsule that is being freed.
    if let Some(raw) = unsafe { untaken(capsule, VERSIONED) } {
        // SAFETY: `versioned` put it there, and the name says that nobody took it.
        unsafe { delete_structure(raw.cast()) };
    }
}

unsafe extern "C" fn delete_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter calls this with the capsule that is being freed.
    if let Some(raw) = unsafe { untaken(capsule, UNVERSIONED) } {
        // SAFETY: `unversioned` put it there, and the name says that nobody took it.
        unsafe { delete_unversioned_structure(raw.cast()) };
    }
}

/// What is in a capsule that still has the name of one that nobody took.
///
/// # Safety
/// A capsule, the interpreter attached.
unsafe fn untaken(capsule: *mut ffi::PyObject, name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: a capsule: the caller's promise.
    if unsafe { ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
        return None;
    }
    // SAFETY: valid under that name a line ago.
    NonNull::new(unsafe { ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) })
}

/// # Safety
/// Alive, and used by nobody else.
unsafe fn delete_structure(raw: NonNull<DLManagedTensorVersioned>) {
    // SAFETY: alive: the caller's promise.
    let deleter = unsafe { raw.as_ref() }.deleter;
    if let Some(deleter) = deleter {
        // SAFETY: its own deleter, called once.
        unsafe { deleter(raw.as_ptr()) };
    }
}

/// # Safety
/// Alive, and used by nobody else.
unsafe fn delete_unversioned_structure(raw: NonNull<DLManagedTensor>) {
    // SAFETY: alive: the caller's promise.
    let deleter = unsafe { raw.as_ref() }.deleter;
    if let Some(deleter) = deleter {
        // SAFETY: its own deleter, called once.
        unsafe { deleter(raw.as_ptr()) };
    }
}
