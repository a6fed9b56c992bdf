//! Exports tensors of a layer, and memory with any owner.
#![allow(
    unsafe_code,
    reason = "takes handles and addresses of the caller; each function names its requirement"
)]

use std::ffi::c_void;
use std::ptr;

use onelayer::{DType, LoadError, LoadedTensor};

use crate::abi::DLDevice;
use crate::element;
use crate::error::ExportError;
use crate::managed::{ManagedTensor, Parts};

/// The memory of a row-major, contiguous tensor.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'a> {
    /// The tensor's name, for messages.
    pub name: &'a str,
    /// Device address of its first byte; ignored for a tensor without elements.
    pub data: *mut c_void,
    /// Type of its elements.
    pub dtype: DType,
    /// Elements per dimension, outermost first, as in a checkpoint.
    pub shape: &'a [u64],
    /// Its device.
    pub device: DLDevice,
    /// [`FLAG_READ_ONLY`](crate::FLAG_READ_ONLY), [`FLAG_IS_COPIED`](crate::FLAG_IS_COPIED), or
    /// no flag.
    pub flags: u64,
}

/// Exports a tensor. Waits until it has arrived, so that consumers need not wait.
///
/// # Errors
/// [`ExportError`] if DLPack cannot describe it, or if a copy to the device has failed.
pub fn export(tensor: LoadedTensor) -> Result<ManagedTensor, ExportError> {
    export_once_ready(tensor, LoadedTensor::wait_ready)
}

/// Exports a tensor for use in a CUDA stream. Returns at once; work queued in the stream from now
/// on waits until the tensor has arrived. Never waits on the host.
///
/// # Errors
/// [`ExportError`] if DLPack cannot describe it, or if the driver refuses.
///
/// # Safety
/// Like [`LoadedTensor::let_wait`]: a live stream (`CUstream`) of the context of the load.
pub unsafe fn export_for_stream(tensor: LoadedTensor, stream: u64) -> Result<ManagedTensor, ExportError> {
    // SAFETY: the caller's promise.
    export_once_ready(tensor, |tensor| unsafe { tensor.let_wait(stream) })
}

/// Exports memory together with its owner. `owner` is dropped when the tensor is deleted, on any
/// thread.
///
/// # Errors
/// [`ExportError`] if DLPack cannot describe the tensor.
///
/// # Safety
/// `memory.data` points to as many bytes as shape and type need, on `memory.device`. They stay
/// valid until `owner` is dropped, and may be written to unless the tensor is flagged read-only.
pub unsafe fn export_with<Owner: Send + 'static>(
    owner: Owner,
    memory: &Memory<'_>,
) -> Result<ManagedTensor, ExportError> {
    Ok(ManagedTensor::new(parts(memory, memory.dtype.name())?, owner))
}

fn export_once_ready(
    tensor: LoadedTensor,
    make_ready: impl FnOnce(&LoadedTensor) -> Result<(), LoadError>,
) -> Result<ManagedTensor, ExportError> {
    let target = tensor.target();
    let Some(device) = element::device(target) else {
        return Err(ExportError::Nowhere { tensor: tensor.name().to_owned(), target: target.to_string() });
    };
    let memory = Memory {
        name: tensor.name(),
        data: address(&tensor),
        dtype: tensor.dtype(),
        shape: tensor.shape(),
        device,
        flags: 0,
    };
    let parts = parts(&memory, tensor.entry().dtype_name)?;
    if let Err(source) = make_ready(&tensor) {
        let tensor = tensor.name().to_owned();
        return Err(ExportError::NotReady { tensor, source: Box::new(source) });
    }
    Ok(ManagedTensor::new(parts, tensor))
}

/// The device address of a tensor.
fn address(tensor: &LoadedTensor) -> *mut c_void {
    if let Some(start) = tensor.host_pointer() {
        return start.as_ptr().cast();
    }
    let address = tensor.device_pointer().and_then(|address| usize::try_from(address).ok());
    // A device address cannot be dereferenced by the host.
    address.map_or(ptr::null_mut(), ptr::without_provenance_mut)
}

fn parts(memory: &Memory<'_>, dtype_name: &str) -> Result<Parts, ExportError> {
    let Memory { name, data, dtype, shape, device, flags } = *memory;
    let Some(data_type) = element::data_type(dtype) else {
        return Err(ExportError::UnknownElement { tensor: name.to_owned(), dtype: dtype_name.to_owned() });
    };
    let too_large = || ExportError::TooLarge { tensor: name.to_owned(), shape: shape.to_vec() };
    let dimensions = i32::try_from(shape.len()).map_err(|_| too_large())?;
    let is_empty = shape.contains(&0);
    let shape = element::shape(name, dtype, shape)?;
    let strides = element::strides(&shape).ok_or_else(too_large)?;
    Ok(Parts {
        data: if is_empty { ptr::null_mut() } else { data },
        device,
        dtype: data_type,
        shape: shape.into(),
        strides: strides.into(),
        dimensions,
        flags,
    })
}
