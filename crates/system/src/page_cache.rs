//! Which bytes of an open file are in the page cache. There are three ways to ask, and each has
//! limits that the caller must know:
//!
//! * `cachestat` (Linux 6.5) counts by descriptor and maps nothing. Do not use it on an overlay
//!   file system: it looks at the upper inode, which never holds pages, and answers 0 (observed on
//!   6.18). Later kernels refuse callers that neither own the file nor may write to it.
//! * `mincore` counts on a mapping. Since 5.2 it answers "all resident" to callers that neither own
//!   the file nor may write to it: see [`may_tell`].
//! * A read of one byte that must not wait (`RWF_NOWAIT`, 4.14) tells any caller about one page, if
//!   the file system supports such reads. The kernel starts to read a missing page, with its
//!   readahead: ask only on a descriptor that was advised that access is random.
#![allow(unsafe_code, reason = "cachestat and mincore have no safe wrapper; mincore needs a mapping")]

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;

use memmap2::MmapOptions;
use rustix::fs::{Access, AtFlags};
use rustix::io::{Errno, ReadWriteFlags};

use crate::units::{ByteRange, MIB, to_u64, to_usize};

/// `cachestat(2)`: the same number on every architecture that shares the common table.
#[cfg(not(any(target_arch = "mips", target_arch = "mips64")))]
const CACHESTAT: libc::c_long = 451;

/// Bytes in a small page.
pub fn page_bytes() -> u64 {
    to_u64(rustix::param::page_size())
}

/// `struct cachestat_range` and `struct cachestat` of `linux/mman.h`.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Pages of these bytes that are cached, by `cachestat`.
#[cfg(not(any(target_arch = "mips", target_arch = "mips64")))]
pub fn pages_by_cachestat(file: &File, bytes: ByteRange) -> io::Result<u64> {
    if bytes.is_empty() {
        return Ok(0); // to the kernel, no length means to the end of the file
    }
    let range = CachestatRange { offset: bytes.start(), len: bytes.len_bytes() };
    let mut counts = Cachestat::default();
    let no_flags: libc::c_uint = 0;
    // SAFETY: cachestat(fd, range, counts, flags): both structures live across the call and have the
    // kernel's layout; the kernel reads the first and writes only within the second.
    let status =
        unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut counts, no_flags) };
    if status == 0 { Ok(counts.cached) } else { Err(io::Error::last_os_error()) }
}

#[cfg(any(target_arch = "mips", target_arch = "mips64"))]
pub fn pages_by_cachestat(_: &File, _: ByteRange) -> io::Result<u64> {
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}

/// True if `mincore` tells this process the truth about the file: the process owns it or may write
/// to it.
pub fn may_tell(file: &File) -> io::Result<bool> {
    let owner = rustix::fs::fstat(file)?.st_uid;
    let me = rustix::process::geteuid();
    // The open file itself, not its path.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let may_write =
        || rustix::fs::accessat(rustix::fs::CWD, path, Access::WRITE_OK, AtFlags::EACCESS).is_ok();
    Ok(me.is_root() || me.as_raw() == owner || may_write())
}

/// Bytes per `mincore` call: 256 MiB need a vector of 64 Ki bytes with small pages.
const MINCORE_WINDOW_BYTES: u64 = 256 * MIB;

/// Pages of these bytes that are cached, by `mincore`. The range must end inside the file.
pub fn pages_by_mincore(file: &File, bytes: ByteRange) -> io::Result<u64> {
    let window_bytes = MINCORE_WINDOW_BYTES.next_multiple_of(page_bytes());
    let pages_most = window_bytes.min(bytes.len_bytes()).div_ceil(page_bytes()) + 1;
    let mut flags = vec![0_u8; to_usize(pages_most)];
    let (mut offset, mut pages) = (bytes.start() / page_bytes() * page_bytes(), 0_u64);
    while offset < bytes.end() {
        let len = window_bytes.min(bytes.end() - offset);
        // The mapping is never read, so a file that changes meanwhile does no harm.
        let map = MmapOptions::new().offset(offset).len(to_usize(len)).map_raw_read_only(file)?;
        let count = to_usize(len.div_ceil(page_bytes()));
        let flags = &mut flags[..count];
        // SAFETY: the address is the start of a mapping of `map.len()` bytes that lives across the call,
        // and the vector has a byte for each of its pages, which is all that mincore writes.
        let status = unsafe { libc::mincore(map.as_mut_ptr().cast(), map.len(), flags.as_mut_ptr()) };
        if status != 0 {
            return Err(io::Error::last_os_error());
        }
        pages += to_u64(flags.iter().filter(|flag| **flag & 1 == 1).count());
        offset += len;
    }
    Ok(pages)
}

/// True if the byte at this offset can be read without waiting. See the [module](self) for its side
/// effect.
pub fn is_byte_at_hand(file: &File, offset_bytes: u64) -> io::Result<bool> {
    let mut byte = [0_u8];
    let mut buffers = [IoSliceMut::new(&mut byte)];
    match rustix::io::preadv2(file, &mut buffers, offset_bytes, ReadWriteFlags::NOWAIT) {
        Ok(count) => Ok(count == 1),
        Err(Errno::AGAIN) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
