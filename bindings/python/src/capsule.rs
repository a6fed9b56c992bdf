//! DLPack structures in Python capsules. A consumer renames a capsule when it takes the tensor.
//!
//! Source: <https://dmlc.github.io/dlpack/latest/python_spec.html>.
#![allow(unsafe_code, reason = "the protocol passes raw pointers in capsules; each block says why")]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use onelayer_dlpack::{DLManagedTensor, DLManagedTensorVersioned, ManagedTensor};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// The name of a capsule that was not consumed.
const VERSIONED: &CStr = c"dltensor_versioned";
/// The same, for the structure from before version 1.
const UNVERSIONED: &CStr = c"dltensor";

/// A capsule for a consumer that knows version 1.
pub(crate) fn versioned(py: Python<'_>, tensor: ManagedTensor) -> PyResult<Bound<'_, PyAny>> {
    let raw = tensor.into_raw();
    new(py, raw.cast(), VERSIONED, delete_versioned).inspect_err(|_| {
        // SAFETY: no capsule was made, so the structure has no other owner.
        unsafe { delete_structure(raw) };
    })
}

/// A capsule for a consumer that requested no version.
pub(crate) fn unversioned(py: Python<'_>, tensor: ManagedTensor) -> PyResult<Bound<'_, PyAny>> {
    let raw = tensor.into_unversioned().map_err(|error| PyBufferError::new_err(error.to_string()))?;
    new(py, raw.cast(), UNVERSIONED, delete_unversioned).inspect_err(|_| {
        // SAFETY: no capsule was made, so the structure has no other owner.
        unsafe { delete_unversioned_structure(raw) };
    })
}

fn new<'py>(
    py: Python<'py>,
    raw: NonNull<c_void>,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: attached to the interpreter; pointer and name are not null, and the name is static.
    let capsule = unsafe { ffi::PyCapsule_New(raw.as_ptr(), name.as_ptr(), Some(destructor)) };
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// Frees a tensor that was not consumed.
unsafe extern "C" fn delete_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter calls this with the freed capsule.
    if let Some(raw) = unsafe { untaken(capsule, VERSIONED) } {
        // SAFETY: `versioned` put it there, and its name shows that it was not consumed.
        unsafe { delete_structure(raw.cast()) };
    }
}

unsafe extern "C" fn delete_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter calls this with the freed capsule.
    if let Some(raw) = unsafe { untaken(capsule, UNVERSIONED) } {
        // SAFETY: `unversioned` put it there, and its name shows that it was not consumed.
        unsafe { delete_unversioned_structure(raw.cast()) };
    }
}

/// The contents of a capsule that was not consumed.
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
/// Alive, and not used elsewhere.
unsafe fn delete_structure(raw: NonNull<DLManagedTensorVersioned>) {
    // SAFETY: alive: the caller's promise.
    let deleter = unsafe { raw.as_ref() }.deleter;
    if let Some(deleter) = deleter {
        // SAFETY: its own deleter, called once.
        unsafe { deleter(raw.as_ptr()) };
    }
}

/// # Safety
/// Alive, and not used elsewhere.
unsafe fn delete_unversioned_structure(raw: NonNull<DLManagedTensor>) {
    // SAFETY: alive: the caller's promise.
    let deleter = unsafe { raw.as_ref() }.deleter;
    if let Some(deleter) = deleter {
        // SAFETY: its own deleter, called once.
        unsafe { deleter(raw.as_ptr()) };
    }
}
