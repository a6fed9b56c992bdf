//! Asks the allocator for the free memory it keeps.
//!
//! glibc gives the end of its heap back only above a threshold that it raises by itself to up to 64
//! MiB, once large blocks have been freed. Thus all that a load of a million tensors knew about
//! them can be free and still resident, and "given back" would measure the allocator's habit.
#![allow(unsafe_code, reason = "the allocator's own interface is C")]

/// Gives free memory back to the system, where the allocator can be asked.
pub(crate) fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim(3) takes the allocator's own locks and touches only memory that is free.
    unsafe {
        libc::malloc_trim(0);
    }
}
