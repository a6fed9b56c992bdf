#![allow(unsafe_code, reason = "process_vm_readv has no safe wrapper")]
//! A mapped window of a file, and a copy out of it that a truncation cannot turn into a signal.
//!
//! A load instruction on a mapped page that the file has lost raises SIGBUS. So no instruction of
//! this process touches the pages: the kernel brings them in and copies them (`process_vm_readv` on
//! this process), and reports a lost page as `EFAULT` or a short count. There is no `&[u8]` over
//! the file, so no borrow of bytes that may change.
//!
//! A window lives for one read. Unmapping frees its pages at once, and its page tables too; most
//! kernels would keep those after `MADV_DONTNEED` on a mapping of the whole file: 2 MiB per GiB
//! read. The mapping ends with the window, so neither fault-around nor large folios make more of
//! the file resident. `MADV_POPULATE_READ` before the copy gains nothing, warm or cold
//! (`benches/copy_out.rs`).

use std::fs::File;
use std::io;

use memmap2::{MmapOptions, MmapRaw};

use crate::units::{ByteRange, to_usize};

/// A read-only shared mapping of some bytes of a file. Its pages are resident from the first
/// [`copy_out`](Self::copy_out) until it is dropped.
pub(super) struct MappedWindow {
    mapping: MmapRaw,
}

impl MappedWindow {
    /// Maps these bytes of the file; the range must not be empty. Nothing is read yet.
    pub(super) fn map(file: &File, bytes: ByteRange) -> io::Result<Self> {
        // memmap2 rounds the start down to the page size of the system.
        MmapOptions::new()
            .offset(bytes.start())
            .len(to_usize(bytes.len_bytes()))
            .map_raw_read_only(file)
            .map(|mapping| Self { mapping })
    }

    /// Copies bytes from `position` (counted from the start of the window) into `target` with one
    /// system call. Returns the number of bytes copied, which may be smaller than `target`.
    ///
    /// # Errors
    /// `EFAULT` if the first byte cannot be read: the file was truncated, or its device failed.
    /// `EPERM` and `ENOSYS` where a sandbox forbids the call.
    pub(super) fn copy_out(&self, position: usize, target: &mut [u8]) -> io::Result<usize> {
        let len = target.len().min(self.mapping.len() - position);
        let local = libc::iovec { iov_base: target.as_mut_ptr().cast(), iov_len: len };
        let start = self.mapping.as_ptr().wrapping_add(position);
        let remote = libc::iovec { iov_base: start.cast_mut().cast(), iov_len: len };
        let this_process = rustix::process::getpid().as_raw_nonzero().get();
        // SAFETY: `local` is `len` bytes of `target`, borrowed exclusively until the call returns, and any
        // byte is a valid u8, so whatever the kernel writes is fine. `remote` is only read, and by
        // the kernel with its own fault handling (process_vm_readv(2): EFAULT, or a partial count),
        // never through a Rust reference; it lies inside the mapping that `self` keeps alive. Both
        // lists hold one element, as the counts say, and live until the call returns.
        let copied = unsafe { libc::process_vm_readv(this_process, &local, 1, &remote, 1, 0) };
        // Negative is -1 and errno; std's Error reads it before anything else can change it.
        usize::try_from(copied).map_err(|_| io::Error::last_os_error())
    }
}
