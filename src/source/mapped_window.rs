#![allow(unsafe_code, reason = "process_vm_readv has no safe wrapper")]
//! One window of a file's mapping, and the copy out of it that no truncation can turn into a
//! signal.
//!
//! A load instruction on a mapped page that the file no longer has raises SIGBUS. Here no
//! instruction of this process touches the pages: the kernel brings them in and copies them
//! (`process_vm_readv` on this very process), and reports a page that is gone as `EFAULT` or a
//! short count. There is no `&[u8]` over the file, so nothing can be borrowed from bytes that
//! change.
//!
//! A window lives for one read. Unmapping gives its pages back at once, and its page tables too,
//! which `MADV_DONTNEED` on a mapping of the whole file would keep on most kernels: 2 MiB per GiB
//! read. The mapping ends where the window ends, so neither fault-around nor large folios can make
//! more of the file resident. `MADV_POPULATE_READ` before the copy was measured
//! (`benches/copy_out.rs`) and gains nothing, warm or cold.

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
    /// Maps these bytes of the file, which must not be none. Nothing is read in yet.
    pub(super) fn map(file: &File, bytes: ByteRange) -> io::Result<Self> {
        // memmap2 rounds the start down to the page size of the system.
        MmapOptions::new()
            .offset(bytes.start())
            .len(to_usize(bytes.len_bytes()))
            .map_raw_read_only(file)
            .map(|mapping| Self { mapping })
    }

    /// Copies the bytes from `position` on (counted from the start of the window) into `target`, as
    /// many as there are, with one system call. Returns how many arrived, which may be fewer
    /// than asked for.
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
