//! Exported tensors and their deleters.
//!
//! An export is one allocation: the structure for the consumer, its shape and strides, and the
//! owner of the memory. The deleter frees all of it.
#![allow(unsafe_code, reason = "passes memory to another language and back; each block says why")]

use std::ffi::c_void;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};

use crate::abi::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor, FLAG_READ_ONLY, VERSION,
};
use crate::error::ExportError;

/// An exported tensor not yet given to a consumer. Dropping it deletes it.
pub struct ManagedTensor {
    raw: NonNull<DLManagedTensorVersioned>,
}

// SAFETY: the owner inside is `Send`; everything else is plain data that only this value points to.
unsafe impl Send for ManagedTensor {}

/// The allocation of an export. The consumer gets a pointer to its first field.
#[repr(C)]
struct Export<Owner> {
    managed: DLManagedTensorVersioned,
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    owner: Owner,
}

/// The description of a tensor, without its owner.
pub(crate) struct Parts {
    pub(crate) data: *mut c_void,
    pub(crate) device: DLDevice,
    pub(crate) dtype: DLDataType,
    pub(crate) shape: Box<[i64]>,
    pub(crate) strides: Box<[i64]>,
    pub(crate) dimensions: i32,
    pub(crate) flags: u64,
}

impl ManagedTensor {
    pub(crate) fn new<Owner: Send + 'static>(parts: Parts, owner: Owner) -> Self {
        let Parts { data, device, dtype, shape, strides, dimensions, flags } = parts;
        let tensor = DLTensor {
            data,
            device,
            ndim: dimensions,
            dtype,
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        };
        let managed = DLManagedTensorVersioned {
            version: VERSION,
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete::<Owner>),
            flags,
            dl_tensor: tensor,
        };
        let raw = Box::into_raw(Box::new(Export { managed, shape, strides, owner }));
        // SAFETY: `raw` has just come from a box, and nothing else refers to it.
        let export = unsafe { &mut *raw };
        // The boxes do not move with their holder, and only the consumer accesses them from here
        // on.
        export.managed.dl_tensor.shape = export.shape.as_mut_ptr();
        export.managed.dl_tensor.strides = export.strides.as_mut_ptr();
        export.managed.manager_ctx = raw.cast();
        Self { raw: NonNull::new(raw.cast()).expect("a box is somewhere") }
    }

    /// The tensor as the consumer will see it.
    #[must_use]
    pub fn tensor(&self) -> &DLTensor {
        &self.managed().dl_tensor
    }

    /// The structure for the consumer.
    #[must_use]
    pub fn managed(&self) -> &DLManagedTensorVersioned {
        // SAFETY: only this value refers to the structure until `into_raw` or its drop.
        unsafe { self.raw.as_ref() }
    }

    /// Returns the raw tensor. The consumer must call its `deleter` once, on any thread.
    #[must_use = "a tensor that nobody deletes is never freed"]
    pub fn into_raw(self) -> NonNull<DLManagedTensorVersioned> {
        let raw = self.raw;
        std::mem::forget(self);
        raw
    }

    /// Returns the tensor in the structure from before version 1, for consumers that request no
    /// version.
    ///
    /// # Errors
    /// [`ExportError::ReadOnly`] for a read-only tensor, which that structure cannot express.
    pub fn into_unversioned(self) -> Result<NonNull<DLManagedTensor>, ExportError> {
        if self.managed().flags & FLAG_READ_ONLY != 0 {
            return Err(ExportError::ReadOnly);
        }
        let tensor = *self.tensor();
        let unversioned = Box::new(DLManagedTensor {
            dl_tensor: tensor,
            manager_ctx: self.into_raw().as_ptr().cast(),
            deleter: Some(delete_unversioned),
        });
        Ok(NonNull::from(Box::leak(unversioned)))
    }
}

impl Drop for ManagedTensor {
    fn drop(&mut self) {
        // SAFETY: made by `new` and not handed out: `into_raw` forgets the value.
        unsafe { delete_any(self.raw.as_ptr()) };
    }
}

impl fmt::Debug for ManagedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ManagedTensor").field("managed", self.managed()).finish()
    }
}

/// Deletes an export with its own deleter.
///
/// # Safety
/// Made by [`ManagedTensor::new`], alive, and not used elsewhere.
unsafe fn delete_any(raw: *mut DLManagedTensorVersioned) {
    // SAFETY: alive: the caller's promise.
    let deleter = unsafe { (*raw).deleter };
    if let Some(deleter) = deleter {
        // SAFETY: the deleter that `new` has set for the type of this export.
        unsafe { deleter(raw) };
    }
}

/// The deleter of an export.
///
/// # Safety
/// `raw` is null, or an export of this type that is no longer used.
unsafe extern "C" fn delete<Owner>(raw: *mut DLManagedTensorVersioned) {
    if raw.is_null() {
        return;
    }
    // SAFETY: `new` made it from a box of this type, with the deleter of that type. The structure
    // is its first field.
    let export = unsafe { Box::from_raw(raw.cast::<Export<Owner>>()) };
    // A panic must not cross into C. An owner that panics may leak.
    drop(catch_unwind(AssertUnwindSafe(|| drop(export))));
}

/// The deleter of an export in the structure from before version 1.
///
/// # Safety
/// `raw` is null, or came from [`ManagedTensor::into_unversioned`] and is no longer used.
unsafe extern "C" fn delete_unversioned(raw: *mut DLManagedTensor) {
    if raw.is_null() {
        return;
    }
    // SAFETY: `into_unversioned` made it from a box.
    let unversioned = unsafe { Box::from_raw(raw) };
    // SAFETY: the export that `into_unversioned` put there, used only by this structure.
    unsafe { delete_any(unversioned.manager_ctx.cast()) };
}
