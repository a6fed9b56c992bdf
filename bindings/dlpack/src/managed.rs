//! Exported tensors and what deletes them.
//!
//! An export is one allocation: the structure that the consumer sees, the shape and the strides it
//! points to, and the owner of the memory. The deleter frees all of it.
#![allow(unsafe_code, reason = "gives memory to another language and takes it back; each block says why")]

use std::ffi::c_void;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};

use crate::abi::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor, FLAG_READ_ONLY, VERSION,
};
use crate::error::ExportError;

/// A tensor on its way to a consumer. Dropping it deletes it.
pub struct ManagedTensor {
    raw: NonNull<DLManagedTensorVersioned>,
}

// SAFETY: the owner inside is `Send`; everything else is plain data that only this value points to.
unsafe impl Send for ManagedTensor {}

/// What an export allocates. The consumer sees a pointer to its first field, which is one to the
/// whole.
#[repr(C)]
struct Export<Owner> {
    managed: DLManagedTensorVersioned,
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    owner: Owner,
}

/// What a tensor is, and not who owns it.
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
        // SAFETY: `raw` came from a box a moment ago, and nothing else refers to it.
        let export = unsafe { &mut *raw };
        // The boxes do not move when what holds them does, and nothing but the consumer touches them from
        // here on.
        export.managed.dl_tensor.shape = export.shape.as_mut_ptr();
        export.managed.dl_tensor.strides = export.strides.as_mut_ptr();
        export.managed.manager_ctx = raw.cast();
        Self { raw: NonNull::new(raw.cast()).expect("a box is somewhere") }
    }

    /// What the consumer will see.
    #[must_use]
    pub fn tensor(&self) -> &DLTensor {
        &self.managed().dl_tensor
    }

    /// The structure that the consumer will get.
    #[must_use]
    pub fn managed(&self) -> &DLManagedTensorVersioned {
        // SAFETY: this value alone refers to the structure until `into_raw` or its drop.
        unsafe { self.raw.as_ref() }
    }

    /// Gives the tensor away. Whoever gets it calls its `deleter` with it, once, on any thread.
    #[must_use = "a tensor that nobody deletes is never freed"]
    pub fn into_raw(self) -> NonNull<DLManagedTensorVersioned> {
        let raw = self.raw;
        std::mem::forget(self);
        raw
    }

    /// Gives the tensor away in the structure from before version 1, for consumers that ask for no
    /// version.
    ///
    /// # Errors
    /// [`ExportError::ReadOnly`] for a tensor that must not be written to, which that structure
    /// cannot say.
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
        // SAFETY: made by `new`, and given to nobody: `into_raw` forgets the value.
        unsafe { delete_any(self.raw.as_ptr()) };
    }
}

impl fmt::Debug for ManagedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ManagedTensor").field("managed", self.managed()).finish()
    }
}

/// Deletes an export by its own deleter.
///
/// # Safety
/// Made by [`ManagedTensor::new`], alive, and used by nobody else.
unsafe fn delete_any(raw: *mut DLManagedTensorVersioned) {
    // SAFETY: alive: the caller's promise.
    let deleter = unsafe { (*raw).deleter };
    if let Some(deleter) = deleter {
        // SAFETY: the deleter that `new` has set for the type of this very export.
        unsafe { deleter(raw) };
    }
}

/// The deleter of an export.
///
/// # Safety
/// `raw` is an export of this type that nobody uses any more, or null.
unsafe extern "C" fn delete<Owner>(raw: *mut DLManagedTensorVersioned) {
    if raw.is_null() {
        return;
    }
    // SAFETY: `new` made it from a box of this type and gave that type's deleter along; the structure
    // is its first field.
    let export = unsafe { Box::from_raw(raw.cast::<Export<Owner>>()) };
    // A panic must not cross into C. What an owner leaks by panicking is the owner's.
    drop(catch_unwind(AssertUnwindSafe(|| drop(export))));
}

/// The deleter of an export in the structure from before version 1.
///
/// # Safety
/// `raw` came from [`ManagedTensor::into_unversioned`] and nobody uses it any more, or it is null.
unsafe extern "C" fn delete_unversioned(raw: *mut DLManagedTensor) {
    if raw.is_null() {
        return;
    }
    // SAFETY: `into_unversioned` made it from a box.
    let unversioned = unsafe { Box::from_raw(raw) };
    // SAFETY: the export that `into_unversioned` put there, whose only user was this structure.
    unsafe { delete_any(unversioned.manager_ctx.cast()) };
}
