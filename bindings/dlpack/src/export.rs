//! From tensors of a layer, and from memory that somebody else owns, to exports.
#![allow(unsafe_code, reason = "handles and addresses of the caller's are promises; each says which")]

use std::ffi::c_void;
use std::ptr;

use onelayer::{DType, LoadError, LoadedTensor};

use crate::abi::DLDevice;
use crate::element;
use crate::error::ExportError;
use crate::managed::{ManagedTensor, Parts};

/// Memory that holds a tensor, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'a> {
    /// The tensor's name, for messages.
    pub name: &'a str,
    /// Its first byte, an address of the device; ignored for a tensor without elements.
    pub data: *mut c_void,
    /// Type of its elements.
    pub dtype: DType,
    /// Elements per dimension, outermost first, as a checkpoint counts them.
    pub shape: &'a [u64],
    /// Where it lies.
    pub device: DLDevice,
    /// [`FLAG_READ_ONLY`](crate::FLAG_READ_ONLY), [`FLAG_IS_COPIED`](crate::FLAG_IS_COPIED), or
    /// nothing.
    pub flags: u64,
}

/// Exports a tensor. Waits until it has arrived, so that a consumer needs to wait for nothing.
///
/// # Errors
/// [`ExportError`] if DLPack cannot describe it, or if a copy to the device has failed.
pub fn export(tensor: LoadedTensor) -> Result<ManagedTensor, ExportError> {
    export_once_ready(tensor, LoadedTensor::wait_ready)
}

/// Exports a tensor to a consumer that will use it in a CUDA stream: what is queued there from now
/// on waits until the tensor has arrived. Returns at once. On the host there is nothing to wait
/// for.
///
/// # Errors
/// [`ExportError`] if DLPack cannot describe it, or if the driver refuses.
///
/// # Safety
/// That of [`LoadedTensor::let_wait`]: a live stream (`CUstream`) of the context that was loaded
/// in.
pub unsafe fn export_for_stream(tensor: LoadedTensor, stream: u64) -> Result<ManagedTensor, ExportError> {
    // SAFETY: the caller's promise.
    export_once_ready(tensor, |tensor| unsafe { tensor.let_wait(stream) })
}

/// Exports memory with whoever owns it: `owner` is dropped when the tensor is deleted, on whichever
/// thread that is.
///
/// # Errors
/// [`ExportError`] if DLPack cannot describe the tensor.
///
/// # Safety
/// `memory.data` points to as many bytes as the shape and the type need, on `memory.device`. Until
/// `owner` is dropped they stay there, and unless the flags say that the tensor is read-only,
/// anybody may write to them.
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

/// Where a tensor starts, on whichever device it is.
fn address(tensor: &LoadedTensor) -> *mut c_void {
    if let Some(start) = tensor.host_pointer() {
        return start.as_ptr().cast();
    }
    let address = tensor.device_pointer().and_then(|address| usize::try_from(address).ok());
    // An address of a device is none that this program can follow.
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
