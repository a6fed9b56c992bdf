//! Structures whose first field says how long they are, so that they may grow.
//!
//! A program and the library may be built with different versions of the header. What a shorter
//! structure lacks has its default; of a longer one the library must know every byte that is not
//! zero.
#![allow(unsafe_code, reason = "copies structures whose length the caller names")]

use std::ptr;

use crate::failure::Failure;

/// Longer than any version of any structure: what claims to be is not initialised.
const STRUCT_BYTES_MAX: usize = 4096;

/// A structure that states its size.
///
/// # Safety
/// `repr(C)`, the first field is its size as a `usize`, and any bytes are a value of the others.
pub(crate) unsafe trait SizedStruct: Copy {
    /// Its name in C.
    const NAME: &'static str;
    /// Bytes of its first version.
    const BYTES_LEAST: usize;
}

/// Reads a structure of the caller's over `default`.
///
/// # Safety
/// As many bytes as its first field says are the caller's, and initialised.
pub(crate) unsafe fn read<T: SizedStruct>(pointer: *const T, default: T) -> Result<T, Failure> {
    // SAFETY: the caller's promise, for the first field.
    let size = unsafe { size_of_callers(pointer) }?;
    let mut value = default;
    // SAFETY: that many bytes are the caller's, and `value` has them too; any bytes are a value
    // (`SizedStruct`).
    unsafe {
        ptr::copy_nonoverlapping(
            pointer.cast::<u8>(),
            (&raw mut value).cast::<u8>(),
            size.min(size_of::<T>()),
        )
    };
    for place in size_of::<T>()..size {
        // SAFETY: inside what the caller says it has.
        let byte = unsafe { pointer.cast::<u8>().add(place) };
        // SAFETY: as above, and initialised: the caller's promise.
        let byte = unsafe { byte.read() };
        if byte != 0 {
            let (name, known) = (T::NAME, size_of::<T>());
            return Err(Failure::unsupported(format!(
                "{name} has something beyond the {known} bytes that this version of the library knows"
            )));
        }
    }
    Ok(value)
}

/// Writes a structure to the caller's, as much of it as fits there. Its size stays the caller's.
///
/// # Safety
/// As many bytes as its first field says are the caller's, and nobody else uses them.
pub(crate) unsafe fn write<T: SizedStruct>(pointer: *mut T, value: &T) -> Result<(), Failure> {
    // SAFETY: the caller's promise, for the first field.
    let size = unsafe { size_of_callers(pointer) }?;
    let (first, known) = (size_of::<usize>(), size_of::<T>().min(size));
    // SAFETY: inside the structure (`size_of_callers` refuses shorter ones than the first version).
    let target = unsafe { pointer.cast::<u8>().add(first) };
    // SAFETY: as above.
    let source = unsafe { ptr::from_ref(value).cast::<u8>().add(first) };
    // SAFETY: `known` bytes are there on both sides, and the two do not overlap: one is ours.
    unsafe { ptr::copy_nonoverlapping(source, target, known - first) };
    // SAFETY: inside the structure: `known` is no more than its size.
    let rest = unsafe { pointer.cast::<u8>().add(known) };
    // SAFETY: the bytes up to its size.
    unsafe { rest.write_bytes(0, size - known) };
    Ok(())
}

/// Writes a whole structure to where there is none yet, as much of it as the caller has room for,
/// and its size.
///
/// # Safety
/// `size` bytes from `pointer` on are the caller's, and nobody else uses them.
pub(crate) unsafe fn initialise<T: SizedStruct>(
    pointer: *mut T,
    size: usize,
    value: &T,
) -> Result<(), Failure> {
    if pointer.is_null() {
        return Err(Failure::invalid(format!("the {} is null", T::NAME)));
    }
    check::<T>(size)?;
    // SAFETY: the first field is inside the structure, which is the caller's.
    unsafe { pointer.cast::<usize>().write_unaligned(size) };
    // SAFETY: the caller's promise.
    unsafe { write(pointer, value) }
}

/// What the first field of a structure of the caller's says.
///
/// # Safety
/// Null, or the first field is the caller's, and initialised.
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
