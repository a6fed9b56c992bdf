//! Structures that start with their size, so that later versions can add fields.
//!
//! A program and the library may be built with different versions of the header. Fields missing in
//! a shorter structure get their default. A longer structure is refused if a byte that the library
//! does not know is not zero.
#![allow(unsafe_code, reason = "copies structures with a size stated by the caller")]

use std::ptr;

use crate::failure::Failure;

/// Longer than any version of any structure: a larger size is uninitialised memory.
const STRUCT_BYTES_MAX: usize = 4096;

/// A structure that starts with its size.
///
/// # Safety
/// `repr(C)`, the first field is its size as a `usize`, and any bytes are valid for the others.
pub(crate) unsafe trait SizedStruct: Copy {
    /// Its name in C.
    const NAME: &'static str;
    /// Size of its first version.
    const BYTES_LEAST: usize;
}

/// Reads a structure of the caller over `default`.
///
/// # Safety
/// The first field is the number of initialised bytes of the caller.
pub(crate) unsafe fn read<T: SizedStruct>(pointer: *const T, default: T) -> Result<T, Failure> {
    // SAFETY: the caller's promise, for the first field.
    let size = unsafe { size_of_callers(pointer) }?;
    let mut value = default;
    // SAFETY: both sides have that many bytes, and any bytes are valid (`SizedStruct`).
    unsafe {
        ptr::copy_nonoverlapping(
            pointer.cast::<u8>(),
            (&raw mut value).cast::<u8>(),
            size.min(size_of::<T>()),
        )
    };
    for place in size_of::<T>()..size {
        // SAFETY: within the size stated by the caller.
        let byte = unsafe { pointer.cast::<u8>().add(place) };
        // SAFETY: as above, and initialised: the caller's promise.
        let byte = unsafe { byte.read() };
        if byte != 0 {
            let (name, known) = (T::NAME, size_of::<T>());
            return Err(Failure::unsupported(format!(
                "{name} has values beyond the {known} bytes that this version of the library knows"
            )));
        }
    }
    Ok(value)
}

/// Writes as much of a structure as fits into the caller's. The caller's size field stays.
///
/// # Safety
/// The first field is the number of bytes of the caller, which nothing else uses.
pub(crate) unsafe fn write<T: SizedStruct>(pointer: *mut T, value: &T) -> Result<(), Failure> {
    // SAFETY: the caller's promise, for the first field.
    let size = unsafe { size_of_callers(pointer) }?;
    let (first, known) = (size_of::<usize>(), size_of::<T>().min(size));
    // SAFETY: within the structure (`size_of_callers` refuses ones shorter than the first version).
    let target = unsafe { pointer.cast::<u8>().add(first) };
    // SAFETY: as above.
    let source = unsafe { ptr::from_ref(value).cast::<u8>().add(first) };
    // SAFETY: both sides have `known` bytes and do not overlap: one is ours.
    unsafe { ptr::copy_nonoverlapping(source, target, known - first) };
    // SAFETY: within the structure: `known` is at most its size.
    let rest = unsafe { pointer.cast::<u8>().add(known) };
    // SAFETY: the bytes up to its size.
    unsafe { rest.write_bytes(0, size - known) };
    Ok(())
}

/// Writes a structure and its size to uninitialised memory, as much as the caller has room for.
///
/// # Safety
/// `size` bytes from `pointer` on belong to the caller, and nothing else uses them.
pub(crate) unsafe fn initialise<T: SizedStruct>(
    pointer: *mut T,
    size: usize,
    value: &T,
) -> Result<(), Failure> {
    if pointer.is_null() {
        return Err(Failure::invalid(format!("the {} is null", T::NAME)));
    }
    check::<T>(size)?;
    // SAFETY: the first field is within the caller's structure.
    unsafe { pointer.cast::<usize>().write_unaligned(size) };
    // SAFETY: the caller's promise.
    unsafe { write(pointer, value) }
}

/// The first field of a structure of the caller.
///
/// # Safety
/// Null, or a pointer to an initialised first field.
unsafe fn size_of_callers<T: SizedStruct>(pointer: *const T) -> Result<usize, Failure> {
    if pointer.is_null() {
        return Err(Failure::invalid(format!("the {} is null", T::NAME)));
    }
    // SAFETY: the first field is the size (`SizedStruct`).
    let size = unsafe { pointer.cast::<usize>().read_unaligned() };
    check::<T>(size)
}

fn check<T: SizedStruct>(size: usize) -> Result<usize, Failure> {
    if (T::BYTES_LEAST..=STRUCT_BYTES_MAX).contains(&size) {
        return Ok(size);
    }
    let (name, least) = (T::NAME, T::BYTES_LEAST);
    Err(Failure::invalid(format!(
        "the struct_size of an {name} is {size}, below {least} or beyond {STRUCT_BYTES_MAX}: set it to sizeof({name})"
    )))
}
