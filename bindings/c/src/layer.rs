//! Layers that were handed out: their names, their tensors, and what streams of a CUDA device have
//! to know.
#![allow(unsafe_code, reason = "follows pointers of the caller's; each block says what it relies on")]

use std::ffi::c_char;
use std::ptr;

use onelayer::{After, LoadedLayer, LoadedTensor};
use onelayer_dlpack::{DLManagedTensorVersioned, ManagedTensor, export, export_for_stream};

use crate::failure::{Failure, guarded, guarded_or};
use crate::foreign::{Out, borrowed, free, name, text};
use crate::names::Names;
use crate::status::Status;

/// A layer that is resident. May be used on several threads at once.
#[derive(Debug)]
pub struct Layer {
    layer: LoadedLayer,
    tensors: Vec<LoadedTensor>,
    /// Those of the tensors, and behind them the layer's own.
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

/// The name of the layer, valid until the layer is freed; null for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_name(layer: *const Layer) -> *const c_char {
    guarded_or(ptr::null(), || {
        // SAFETY: a handle of the caller's (`crate`).
        let layer = unsafe { borrowed(layer, "layer") }?;
        Ok(layer.names.pointer(layer.tensors.len()).unwrap_or(ptr::null()))
    })
}

/// The layer's place in execution order, from 0 on; SIZE_MAX for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_index(layer: *const Layer) -> usize {
    // SAFETY: a handle of the caller's (`crate`).
    guarded_or(usize::MAX, || Ok(unsafe { borrowed(layer, "layer") }?.layer.index()))
}

/// Bytes that the layer takes on its device; 0 for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_resident_bytes(layer: *const Layer) -> u64 {
    // SAFETY: a handle of the caller's (`crate`).
    guarded_or(0, || Ok(unsafe { borrowed(layer, "layer") }?.layer.resident_bytes()))
}

/// Tensors of the layer; 0 for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_len(layer: *const Layer) -> usize {
    // SAFETY: a handle of the caller's (`crate`).
    guarded_or(0, || Ok(unsafe { borrowed(layer, "layer") }?.tensors.len()))
}

/// A tensor of the layer by its number, from 0 on, in the order of the file. Waits until its bytes
/// have arrived.
///
/// The tensor keeps the layer's memory, whatever becomes of layer, stream and checkpoint, until its
/// deleter has run: once, on any thread. *name, which may be null if nobody wants it, is valid
/// until the layer is freed. *out is null unless it is OL_OK. OL_EUNSUPPORTED if DLPack has no such
/// type, or if there is no device.
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

/// As ol_layer_tensor(), for a program that uses the tensor in a CUDA stream: what is queued there
/// from now on waits until its bytes have arrived, and the call returns at once. cuda_stream is a
/// live CUstream of the context that was loaded in.
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

/// A tensor of the layer by its name, as ol_layer_tensor(). OL_ENOTFOUND if it is not in this
/// layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_find(
    layer: *const Layer,
    name: *const c_char,
    out: *mut *mut DLManagedTensorVersioned,
) -> Status {
    guarded(|| {
        // SAFETY: a variable of the caller's (`crate`).
        let mut out = unsafe { Out::new(out, ptr::null_mut(), "out") }?;
        // SAFETY: a handle of the caller's (`crate`).
        let layer = unsafe { borrowed(layer, "layer") }?;
        // SAFETY: a text of the caller's (`crate`).
        let wanted = self::name(unsafe { text(name, "name") }?, "the name")?;
        let found = layer.layer.tensor(wanted);
        let found = found.ok_or_else(|| {
            Failure::not_found(format!("layer {} has no tensor named {wanted:?}", layer.layer.id()))
        })?;
        out.put(export(found)?.into_raw().as_ptr());
        Ok(Status::OL_OK)
    })
}

/// Waits until every byte of the layer is in its place. It is, unless layers are handed out at
/// once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_wait(layer: *const Layer) -> Status {
    guarded(|| {
        // SAFETY: a handle of the caller's (`crate`).
        unsafe { borrowed(layer, "layer") }?.layer.wait_ready()?;
        Ok(Status::OL_OK)
    })
}

/// Lets what is queued in a CUDA stream from now on wait until the layer is ready. Returns at once.
/// cuda_stream is a live CUstream of the context that was loaded in. Without a device nothing
/// happens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_let_wait(layer: *const Layer, cuda_stream: u64) -> Status {
    guarded(|| {
        // SAFETY: a handle of the caller's (`crate`).
        let layer = unsafe { borrowed(layer, "layer") }?;
        // SAFETY: a live stream: the caller's promise.
        unsafe { layer.layer.let_wait(cuda_stream) }?;
        Ok(Status::OL_OK)
    })
}

/// Lets the layer's memory be freed, or used again, only after what is queued in a CUDA stream so
/// far. Freeing the layer and its tensors waits for nothing then; otherwise it waits for the whole
/// context. cuda_stream as in ol_layer_let_wait(); whatever uses the layer is queued there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_release_after(layer: *const Layer, cuda_stream: u64) -> Status {
    guarded(|| {
        // SAFETY: a handle of the caller's (`crate`).
        let layer = unsafe { borrowed(layer, "layer") }?;
        // SAFETY: a live stream, behind all that uses the layer: the caller's promise.
        unsafe { layer.layer.release_after(After::Stream(cuda_stream)) }?;
        Ok(Status::OL_OK)
    })
}

/// Frees a layer. Its memory is free once the tensors that were taken from it are deleted too. Null
/// is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_layer_free(layer: *mut Layer) {
    guarded(|| {
        // SAFETY: a handle that nobody uses any more (`crate`).
        unsafe { free(layer) };
        Ok(Status::OL_OK)
    });
}

/// # Safety
/// As [`crate`] promises.
unsafe fn tensor_of(
    layer: *const Layer,
    index: usize,
    name: *mut *const c_char,
    out: *mut *mut DLManagedTensorVersioned,
    export: impl FnOnce(LoadedTensor) -> Result<ManagedTensor, Failure>,
) -> Result<Status, Failure> {
    // SAFETY: a variable of the caller's (`crate`).
    let mut out = unsafe { Out::new(out, ptr::null_mut(), "out") }?;
    // SAFETY: a handle of the caller's (`crate`).
    let layer = unsafe { borrowed(layer, "layer") }?;
    let exported = export(layer.tensor(index)?)?;
    if !name.is_null() {
        // SAFETY: a variable of the caller's (`crate`).
        let mut name = unsafe { Out::new(name, ptr::null(), "name") }?;
        name.put(layer.names.pointer(index).unwrap_or(ptr::null()));
    }
    out.put(exported.into_raw().as_ptr());
    Ok(Status::OL_OK)
}
