//! Loaded layers: names, tensors, and synchronisation with CUDA streams.
#![allow(unsafe_code, reason = "follows pointers of the caller; each block names its requirement")]

use std::ffi::c_char;
use std::ptr;

use onelayer::{After, LoadedLayer, LoadedTensor};
use onelayer_dlpack::{DLManagedTensorVersioned, ManagedTensor, export, export_for_stream};

use crate::failure::{Failure, guarded, guarded_or};
use crate::foreign::{Out, borrowed, free, name, text};
use crate::names::Names;
use crate::status::Status;

/// A resident layer. May be used on several threads at once.
#[derive(Debug)]
pub struct Layer {
    layer: LoadedLayer,
    tensors: Vec<LoadedTensor>,
    /// Names of the tensors, then the name of the layer.
    names: Names,
}

impl Layer {
    pub(crate) fn new(layer: LoadedLayer) -> Self {
        let tensors: Vec<LoadedTensor> = layer.tensors().collect();
        let names = tensors.iter().map(LoadedTensor::name).chain([layer.id().as_str()]);
        let names = Names::new(names);
        Self { layer, tensors, names }
    }

    fn tensor(&self, index: usize) -> Result<LoadedTensor, Failure> {
        let count = self.tensors.len();
        let found = self.tensors.get(index).cloned();
        found.ok_or_else(|| Failure::invalid(format!("there is no tensor {index}: the layer has {count}")))
    }
}

/// The name of the layer, valid until the layer is freed. Null for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_name(layer: *const Layer) -> *const c_char {
    guarded_or(ptr::null(), || {
        // SAFETY: null or a live handle (see `crate`).
        let layer = unsafe { borrowed(layer, "layer") }?;
        Ok(layer.names.pointer(layer.tensors.len()).unwrap_or(ptr::null()))
    })
}

/// The layer's index in execution order, from 0 on; SIZE_MAX for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_index(layer: *const Layer) -> usize {
    // SAFETY: null or a live handle (see `crate`).
    guarded_or(usize::MAX, || Ok(unsafe { borrowed(layer, "layer") }?.layer.index()))
}

/// Memory of the layer on its device, in bytes; 0 for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_resident_bytes(layer: *const Layer) -> u64 {
    // SAFETY: null or a live handle (see `crate`).
    guarded_or(0, || Ok(unsafe { borrowed(layer, "layer") }?.layer.resident_bytes()))
}

/// Number of tensors in the layer; 0 for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_len(layer: *const Layer) -> usize {
    // SAFETY: null or a live handle (see `crate`).
    guarded_or(0, || Ok(unsafe { borrowed(layer, "layer") }?.tensors.len()))
}

/// The tensor with this index, from 0 on, in file order. Waits until its bytes have arrived.
///
/// The tensor keeps the layer's memory alive, even if layer, stream and checkpoint are freed. Call
/// its deleter once, on any thread. name may be null; *name is valid until the layer is freed. *out
/// is null unless the status is OL_OK. OL_EUNSUPPORTED if DLPack has no such type, or if there is
/// no device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_tensor(
    layer: *const Layer,
    index: usize,
    name: *mut *const c_char,
    out: *mut *mut DLManagedTensorVersioned,
) -> Status {
    // SAFETY: the caller's promise.
    guarded(|| unsafe { tensor_of(layer, index, name, out, |tensor| Ok(export(tensor)?)) })
}

/// Like ol_layer_tensor(), for use in a CUDA stream. Returns at once; work queued in the stream
/// from now on waits until the bytes have arrived. cuda_stream is a live CUstream of the context of
/// the load.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_tensor_for_stream(
    layer: *const Layer,
    index: usize,
    cuda_stream: u64,
    name: *mut *const c_char,
    out: *mut *mut DLManagedTensorVersioned,
) -> Status {
    // SAFETY: a live stream: the caller's promise.
    let export = |tensor| Ok(unsafe { export_for_stream(tensor, cuda_stream) }?);
    // SAFETY: the caller's promise.
    guarded(|| unsafe { tensor_of(layer, index, name, out, export) })
}

/// The tensor with this name; otherwise like ol_layer_tensor(). OL_ENOTFOUND if it is not in this
/// layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_find(
    layer: *const Layer,
    name: *const c_char,
    out: *mut *mut DLManagedTensorVersioned,
) -> Status {
    guarded(|| {
        // SAFETY: null or a variable of the caller (see `crate`).
        let mut out = unsafe { Out::new(out, ptr::null_mut(), "out") }?;
        // SAFETY: null or a live handle (see `crate`).
        let layer = unsafe { borrowed(layer, "layer") }?;
        // SAFETY: null or a string of the caller (see `crate`).
        let wanted = self::name(unsafe { text(name, "name") }?, "the name")?;
        let found = layer.layer.tensor(wanted);
        let found = found.ok_or_else(|| {
            Failure::not_found(format!("layer {} has no tensor named {wanted:?}", layer.layer.id()))
        })?;
        out.put(export(found)?.into_raw().as_ptr());
        Ok(Status::OL_OK)
    })
}

/// Waits until every byte of the layer has arrived. Returns at once unless layers are handed out
/// early.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_wait(layer: *const Layer) -> Status {
    guarded(|| {
        // SAFETY: null or a live handle (see `crate`).
        unsafe { borrowed(layer, "layer") }?.layer.wait_ready()?;
        Ok(Status::OL_OK)
    })
}

/// Makes work queued in a CUDA stream from now on wait until the layer is ready. Returns at once.
/// cuda_stream is a live CUstream of the context of the load. Does nothing without a device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_let_wait(layer: *const Layer, cuda_stream: u64) -> Status {
    guarded(|| {
        // SAFETY: null or a live handle (see `crate`).
        let layer = unsafe { borrowed(layer, "layer") }?;
        // SAFETY: a live stream: the caller's promise.
        unsafe { layer.layer.let_wait(cuda_stream) }?;
        Ok(Status::OL_OK)
    })
}

/// Delays freeing or reusing the layer's memory until all work queued in a CUDA stream so far is
/// done. Freeing the layer and its tensors then returns at once; without this call it waits for the
/// whole context. cuda_stream as in ol_layer_let_wait(); it must have all work that uses the layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_release_after(layer: *const Layer, cuda_stream: u64) -> Status {
    guarded(|| {
        // SAFETY: null or a live handle (see `crate`).
        let layer = unsafe { borrowed(layer, "layer") }?;
        // SAFETY: a live stream with all work that uses the layer: the caller's promise.
        unsafe { layer.layer.release_after(After::Stream(cuda_stream)) }?;
        Ok(Status::OL_OK)
    })
}

/// Frees a layer. Its memory is freed once all its exported tensors are deleted too. Null is
/// ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_free(layer: *mut Layer) {
    guarded(|| {
        // SAFETY: null or a handle that is no longer used (see `crate`).
        unsafe { free(layer) };
        Ok(Status::OL_OK)
    });
}

/// # Safety
/// The promise of [`crate`].
unsafe fn tensor_of(
    layer: *const Layer,
    index: usize,
    name: *mut *const c_char,
    out: *mut *mut DLManagedTensorVersioned,
    export: impl FnOnce(LoadedTensor) -> Result<ManagedTensor, Failure>,
) -> Result<Status, Failure> {
    // SAFETY: null or a variable of the caller (see `crate`).
    let mut out = unsafe { Out::new(out, ptr::null_mut(), "out") }?;
    // SAFETY: null or a live handle (see `crate`).
    let layer = unsafe { borrowed(layer, "layer") }?;
    let exported = export(layer.tensor(index)?)?;
    if !name.is_null() {
        // SAFETY: null or a variable of the caller (see `crate`).
        let mut name = unsafe { Out::new(name, ptr::null(), "name") }?;
        name.put(layer.names.pointer(index).unwrap_or(ptr::null()));
    }
    out.put(exported.into_raw().as_ptr());
    Ok(Status::OL_OK)
}
