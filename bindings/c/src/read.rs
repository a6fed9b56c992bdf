//! Single tensors, read into memory of the caller's: for engines that ask for one tensor at a time.
#![allow(unsafe_code, reason = "follows pointers of the caller's; each block says what it relies on")]

use std::ffi::{c_char, c_void};
use std::ops::Range;

use crate::checkpoint::Checkpoint;
use crate::failure::{Failure, guarded};
use crate::foreign::borrowed;
use crate::status::Status;

/// More dimensions than a tensor can have that is described in a header of 100 MB.
const DIMENSIONS_MAX: usize = 1 << 26;

/// Indices of a dimension: the first one, and the one behind the last.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Indices {
    /// The first one.
    pub start: u64,
    /// The one behind the last.
    pub end: u64,
}

/// Reads a whole tensor into host memory of the program's, as the file has it: little-endian,
/// row-major. For engines that ask for one tensor at a time. Takes no memory in proportion to it;
/// big tensors are read by several threads.
///
/// OL_EINVAL if target has fewer bytes than the tensor; more stay as they are. OL_ENOTFOUND,
/// OL_EIO, OL_ECHANGED; then target holds anything.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_read_into(
    checkpoint: *const Checkpoint,
    name: *const c_char,
    target: *mut c_void,
    target_bytes: usize,
) -> Status {
    guarded(|| {
        // SAFETY: a handle of the caller's (`crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        // SAFETY: a text of the caller's (`crate`).
        let tensor = unsafe { checkpoint.find(name) }?;
        let len_bytes = tensor.extent.len_bytes();
        let fitting =
            usize::try_from(len_bytes).ok().filter(|&len| len <= target_bytes).ok_or_else(|| {
                Failure::invalid(format!(
                    "target_bytes is {target_bytes}, and tensor {:?} has {len_bytes} bytes",
                    tensor.name
                ))
            })?;
        // SAFETY: no more bytes than the caller says it has (`crate`).
        let target = unsafe { bytes_of(target, fitting) }?;
        checkpoint.reader()?.read(tensor.id, 0, target)?;
        Ok(Status::OL_OK)
    })
}

/// Reads target_bytes bytes of a tensor, from offset_bytes on. As ol_read_into(); OL_EINVAL if the
/// tensor has no such bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_read_part(
    checkpoint: *const Checkpoint,
    name: *const c_char,
    offset_bytes: u64,
    target: *mut c_void,
    target_bytes: usize,
) -> Status {
    guarded(|| {
        // SAFETY: a handle of the caller's (`crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        // SAFETY: a text of the caller's (`crate`).
        let tensor = unsafe { checkpoint.find(name) }?;
        // SAFETY: as many bytes as the caller says it has (`crate`).
        let target = unsafe { bytes_of(target, target_bytes) }?;
        checkpoint.reader()?.read(tensor.id, offset_bytes, target)?;
        Ok(Status::OL_OK)
    })
}

/// Reads a slice of a tensor: indices of its first dimensions, the outermost first; the others are
/// taken whole. The slice is row-major itself. As ol_read_into(); OL_EINVAL if there is no such
/// slice, or if target_bytes is not its length.
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
        // SAFETY: a handle of the caller's (`crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        // SAFETY: a text of the caller's (`crate`).
        let tensor = unsafe { checkpoint.find(name) }?;
        // SAFETY: as many as the caller says (`crate`).
        let ranges = unsafe { ranges_of(indices, dimensions) }?;
        // SAFETY: as many bytes as the caller says it has (`crate`).
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
    // SAFETY: not null, and as many as the caller says, which is no more than there can be.
    let indices = unsafe { std::slice::from_raw_parts(indices, dimensions) };
    Ok(indices.iter().map(|indices| indices.start..indices.end).collect())
}

/// Memory of the caller's to read into.
///
/// # Safety
/// Null, or as many bytes as `len`, that nobody else uses while the reference lives. They come from
/// a program in another language, of which this one's compiler knows nothing: they hold bytes,
/// whichever they are.
unsafe fn bytes_of<'a>(target: *mut c_void, len: usize) -> Result<&'a mut [u8], Failure> {
    if len == 0 {
        return Ok(&mut []);
    }
    if target.is_null() {
        return Err(Failure::invalid("target is null"));
    }
    if isize::try_from(len).is_err() {
        return Err(Failure::invalid(format!("target_bytes is {len}, more than any memory has")));
    }
    // SAFETY: not null, `len` bytes that are the caller's and used by nobody else, no more than there
    // can be.
    Ok(unsafe { std::slice::from_raw_parts_mut(target.cast(), len) })
}
