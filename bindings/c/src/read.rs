//! Reads single tensors into memory of the caller, for engines that load one tensor at a time.
#![allow(unsafe_code, reason = "follows pointers of the caller; each block names its requirement")]

use std::ffi::{c_char, c_void};
use std::ops::Range;

use crate::checkpoint::Checkpoint;
use crate::failure::{Failure, guarded};
use crate::foreign::borrowed;
use crate::status::Status;

/// More dimensions than a tensor in a header of 100 MB can have.
const DIMENSIONS_MAX: usize = 1 << 26;

/// A range of indices of one dimension.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Indices {
    /// The first index.
    pub start: u64,
    /// One past the last index.
    pub end: u64,
}

/// Reads a whole tensor into host memory, in the format of the file: little-endian, row-major. Uses
/// no extra memory in proportion to the tensor. Several threads read big tensors.
///
/// OL_EINVAL if target has fewer bytes than the tensor; extra bytes are not changed. After
/// OL_ENOTFOUND, OL_EIO or OL_ECHANGED the contents of target are undefined.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_read_into(
    checkpoint: *const Checkpoint,
    name: *const c_char,
    target: *mut c_void,
    target_bytes: usize,
) -> Status {
    guarded(|| {
        // SAFETY: null or a live handle (see `crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        // SAFETY: null or a string of the caller (see `crate`).
        let tensor = unsafe { checkpoint.find(name) }?;
        let len_bytes = tensor.len_bytes();
        let fitting =
            usize::try_from(len_bytes).ok().filter(|&len| len <= target_bytes).ok_or_else(|| {
                Failure::invalid(format!(
                    "target_bytes is {target_bytes}, but tensor {:?} has {len_bytes} bytes",
                    tensor.name
                ))
            })?;
        // SAFETY: at most as many bytes as the caller states (see `crate`).
        let target = unsafe { bytes_of(target, fitting) }?;
        checkpoint.reader()?.read(tensor.id, 0, target)?;
        Ok(Status::OL_OK)
    })
}

/// Reads target_bytes bytes of a tensor, from offset_bytes on; otherwise like ol_read_into().
/// OL_EINVAL if the tensor has no such bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_read_part(
    checkpoint: *const Checkpoint,
    name: *const c_char,
    offset_bytes: u64,
    target: *mut c_void,
    target_bytes: usize,
) -> Status {
    guarded(|| {
        // SAFETY: null or a live handle (see `crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        // SAFETY: null or a string of the caller (see `crate`).
        let tensor = unsafe { checkpoint.find(name) }?;
        // SAFETY: as many bytes as the caller states (see `crate`).
        let target = unsafe { bytes_of(target, target_bytes) }?;
        checkpoint.reader()?.read(tensor.id, offset_bytes, target)?;
        Ok(Status::OL_OK)
    })
}

/// Reads a slice of a tensor: index ranges of its first dimensions, outermost first; the others are
/// read whole. The result is row-major; otherwise like ol_read_into(). OL_EINVAL if there is no
/// such slice or target_bytes is not its length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_read_slice(
    checkpoint: *const Checkpoint,
    name: *const c_char,
    indices: *const Indices,
    dimensions: usize,
    target: *mut c_void,
    target_bytes: usize,
) -> Status {
    guarded(|| {
        // SAFETY: null or a live handle (see `crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        // SAFETY: null or a string of the caller (see `crate`).
        let tensor = unsafe { checkpoint.find(name) }?;
        // SAFETY: as many indices as the caller states (see `crate`).
        let ranges = unsafe { ranges_of(indices, dimensions) }?;
        // SAFETY: as many bytes as the caller states (see `crate`).
        let target = unsafe { bytes_of(target, target_bytes) }?;
        checkpoint.reader()?.read_slice(tensor.id, &ranges, target)?;
        Ok(Status::OL_OK)
    })
}

/// Indices as ranges.
///
/// # Safety
/// Null, or as many indices as there are dimensions.
unsafe fn ranges_of(indices: *const Indices, dimensions: usize) -> Result<Vec<Range<u64>>, Failure> {
    if dimensions == 0 {
        return Ok(Vec::new());
    }
    if indices.is_null() {
        return Err(Failure::invalid("indices is null"));
    }
    if dimensions > DIMENSIONS_MAX {
        return Err(Failure::invalid(format!("no tensor has {dimensions} dimensions")));
    }
    // SAFETY: not null, and as many as the caller states, checked against the maximum.
    let indices = unsafe { std::slice::from_raw_parts(indices, dimensions) };
    Ok(indices.iter().map(|indices| indices.start..indices.end).collect())
}

/// The caller's buffer.
///
/// # Safety
/// Null, or `len` bytes that nothing else uses while the reference lives. They come from a program
/// in another language, so the compiler treats them as initialised bytes.
unsafe fn bytes_of<'a>(target: *mut c_void, len: usize) -> Result<&'a mut [u8], Failure> {
    if len == 0 {
        return Ok(&mut []);
    }
    if target.is_null() {
        return Err(Failure::invalid("target is null"));
    }
    if isize::try_from(len).is_err() {
        return Err(Failure::invalid(format!("target_bytes is {len}, more than any address space has")));
    }
    // SAFETY: not null, and `len` bytes of the caller that nothing else uses, at most `isize::MAX`.
    Ok(unsafe { std::slice::from_raw_parts_mut(target.cast(), len) })
}
