//! How much of a file is in the page cache, and getting it out: what `cold` and `warm` stand on.
//!
//! Residency comes from `cachestat` (kernel 6.5; asks by descriptor, maps nothing) and else from `mincore` on
//! a mapping. Neither is believed blindly:
//!
//! * on an overlay file system `cachestat` looks at the upper inode, which never holds pages, and answers 0
//!   (observed on 6.18): there `mincore` is used, whose mapping belongs to the real file;
//! * `mincore` answers "all resident" to callers that neither own the file nor may write to it (since 5.2): to
//!   them it is unavailable;
//! * direct-access (DAX) and FUSE files in direct mode have no page cache; 0 is true for them.
//!
//! `POSIX_FADV_DONTNEED` skips pages that are dirty, locked or mapped by somebody, and says nothing about it.
//! So dirty pages are written first and what is left is counted afterwards.
#![allow(unsafe_code, reason = "cachestat and mincore have no safe wrapper; mincore needs a mapping")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use memmap2::MmapOptions;
use rustix::fs::{Access, Advice, AtFlags, Mode, OFlags};
use serde::Serialize;

use super::host::FileSystem;
use super::{Measured, ProbeError, Reason};
use crate::units::{MIB, to_u64, to_usize};

/// `cachestat(2)`: the same number on every architecture that shares the common table.
#[cfg(not(any(target_arch = "mips", target_arch = "mips64")))]
const CACHESTAT: libc::c_long = 451;

/// Where a residency comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ResidencyMethod {
    /// Asked by descriptor.
    Cachestat,
    /// Asked for the pages of a mapping.
    Mincore,
}

/// How much of a file is in the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Residency {
    /// The file's length.
    pub file_bytes: u64,
    /// What of it is cached, in whole pages, never more than `file_bytes`.
    pub resident_bytes: u64,
    /// How it was found.
    pub method: ResidencyMethod,
}

/// What [`drop_cache`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CacheDrop {
    /// Before.
    pub before: Measured<Residency>,
    /// After: the check. Unavailable means unchecked.
    pub after: Measured<Residency>,
}

impl CacheDrop {
    /// True if it was checked that nothing of the file is cached any more; `None` if that cannot be told
    /// here.
    #[must_use]
    pub fn is_cold(&self) -> Option<bool> {
        self.after.value().map(|residency| residency.resident_bytes == 0)
    }
}

/// How much of the file at `path` is in the page cache.
#[must_use]
pub fn residency(path: &Path) -> Measured<Residency> {
    open(path)
        .map_err(|error| Reason::unreadable("the file", &error))
        .and_then(|file| residency_of(&file, path))
        .into()
}

/// Drops the file's cached pages, dirty ones after writing them, and counts what is left.
///
/// Pages that are mapped or locked by any process stay; `after` shows them.
///
/// # Errors
/// [`ProbeError::PageCache`] if the file cannot be opened, written out or advised upon.
pub fn drop_cache(path: &Path) -> Result<CacheDrop, ProbeError> {
    let failed = |action: &'static str| {
        let path = path.to_path_buf();
        move |source: io::Error| ProbeError::PageCache { action, path, source }
    };
    let file = open(path).map_err(failed("open"))?;
    let before: Measured<Residency> = residency_of(&file, path).into();
    // A descriptor opened for reading may be synced as well.
    rustix::fs::fdatasync(&file).map_err(|errno| failed("flush")(errno.into()))?;
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)
        .map_err(|errno| failed("drop the cached pages of")(errno.into()))?;
    Ok(CacheDrop { before, after: residency_of(&file, path).into() })
}

/// Never waits: a pipe without a writer is opened at once, and then refused for what it is.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(path, flags, Mode::empty())?))
}

fn residency_of(file: &File, path: &Path) -> Result<Residency, Reason> {
    let metadata = file.metadata().map_err(|error| Reason::unreadable("the file", &error))?;
    if !metadata.is_file() {
        return Err(Reason::NotHere("only regular files have a page cache of their own"));
    }
    let file_bytes = metadata.len();
    let is_overlay = FileSystem::of_file(file).is_ok_and(|kind| kind.is_overlay());
    let (pages, method) = if is_overlay {
        (resident_pages_by_mincore(file, path, file_bytes)?, ResidencyMethod::Mincore)
    } else {
        match resident_pages_by_cachestat(file) {
            Ok(pages) => (pages, ResidencyMethod::Cachestat),
            Err(_) => (resident_pages_by_mincore(file, path, file_bytes)?, ResidencyMethod::Mincore),
        }
    };
    let resident_bytes = pages.saturating_mul(page_bytes()).min(file_bytes);
    Ok(Residency { file_bytes, resident_bytes, method })
}

fn page_bytes() -> u64 {
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

#[cfg(not(any(target_arch = "mips", target_arch = "mips64")))]
fn resident_pages_by_cachestat(file: &File) -> io::Result<u64> {
    // A length of 0 means to the end of the file.
    let range = CachestatRange { offset: 0, len: 0 };
    let mut counts = Cachestat::default();
    let no_flags: libc::c_uint = 0;
    // SAFETY: cachestat(fd, range, counts, flags): both structures live across the call and have the kernel's
    // layout; the kernel reads the first and writes only within the second.
    let status =
        unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut counts, no_flags) };
    if status == 0 { Ok(counts.cached) } else { Err(io::Error::last_os_error()) }
}

#[cfg(any(target_arch = "mips", target_arch = "mips64"))]
fn resident_pages_by_cachestat(_: &File) -> io::Result<u64> {
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}

/// Asks for 256 MiB at a time: a vector of 64 Ki bytes with small pages.
const MINCORE_WINDOW_BYTES: u64 = 256 * MIB;

fn resident_pages_by_mincore(file: &File, path: &Path, file_bytes: u64) -> Result<u64, Reason> {
    let owner =
        rustix::fs::fstat(file).map_err(|errno| Reason::unreadable("the file", &errno.into()))?.st_uid;
    let me = rustix::process::geteuid();
    let may_write =
        || rustix::fs::accessat(rustix::fs::CWD, path, Access::WRITE_OK, AtFlags::EACCESS).is_ok();
    if !me.is_root() && me.as_raw() != owner && !may_write() {
        return Err(Reason::NotHere(
            "the kernel tells residency only to those who own the file or may write to it",
        ));
    }
    let window_bytes = MINCORE_WINDOW_BYTES.next_multiple_of(page_bytes());
    let mut flags =
        vec![0_u8; to_usize((window_bytes / page_bytes()).min(file_bytes.div_ceil(page_bytes())))];
    let (mut offset, mut pages) = (0, 0_u64);
    while offset < file_bytes {
        let len = window_bytes.min(file_bytes - offset);
        let unmappable = |error: io::Error| Reason::unreadable("the mapping of the file", &error);
        // The mapping is never read, only asked about, so a file that changes meanwhile cannot break it.
        let map = MmapOptions::new()
            .offset(offset)
            .len(to_usize(len))
            .map_raw_read_only(file)
            .map_err(unmappable)?;
        let count = to_usize(len.div_ceil(page_bytes()));
        // SAFETY: the address is the start of a mapping of `map.len()` bytes that lives across the call, and
        // the vector has a byte for each of its pages, which is all that mincore writes.
        let status =
            unsafe { libc::mincore(map.as_mut_ptr().cast(), map.len(), flags[..count].as_mut_ptr()) };
        if status != 0 {
            return Err(unmappable(io::Error::last_os_error()));
        }
        pages += to_u64(flags[..count].iter().filter(|flag| **flag & 1 == 1).count());
        offset += len;
    }
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file_of(mib: usize) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        for _ in 0..mib {
            file.write_all(&vec![3; 1 << 20]).unwrap();
        }
        file.write_all(&[1; 100]).unwrap();
        file
    }

    /// Temporary files live on tmpfs on some machines: what is dropped there would be lost, so nothing is.
    fn is_on_disk(file: &tempfile::NamedTempFile) -> bool {
        let kind = FileSystem::of_file(file.as_file()).unwrap();
        let on_disk = kind.name() != Some("tmpfs");
        if !on_disk {
            println!("SKIPPED: temporary files live in memory here");
        }
        on_disk
    }

    #[test]
    fn a_pipe_is_refused_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::RUSR).unwrap();
        assert!(matches!(residency(&pipe), Measured::Unavailable(Reason::NotHere(_))));
        assert!(drop_cache(&pipe).is_err());
    }

    #[test]
    fn dirty_pages_are_written_dropped_and_counted() {
        let file = file_of(4);
        if !is_on_disk(&file) {
            return;
        }
        let warm = residency(file.path()).value().unwrap();
        assert_eq!(warm.resident_bytes, warm.file_bytes, "just written");
        assert_eq!(warm.file_bytes, 4 * MIB + 100);
        let dropped = drop_cache(file.path()).unwrap();
        assert_eq!(dropped.before, Measured::Value(warm));
        assert_eq!(dropped.is_cold(), Some(true), "{dropped:?}");
        assert_eq!(std::fs::read(file.path()).unwrap().len(), (4 << 20) + 100, "nothing was lost");
        assert_eq!(residency(file.path()).value().unwrap().resident_bytes, warm.file_bytes);
    }

    #[test]
    fn both_methods_agree() {
        let file = file_of(3);
        if !is_on_disk(&file) {
            return;
        }
        drop_cache(file.path()).unwrap();
        let mut part = vec![0; 1 << 20];
        rustix::fs::fadvise(file.as_file(), 0, None, Advice::Random).unwrap();
        rustix::io::pread(file.as_file(), &mut part, 1 << 20).unwrap();
        let file_bytes = file.as_file().metadata().unwrap().len();
        let by_mincore = resident_pages_by_mincore(file.as_file(), file.path(), file_bytes).unwrap();
        assert!((1..file_bytes / page_bytes()).contains(&by_mincore), "{by_mincore}");
        match resident_pages_by_cachestat(file.as_file()) {
            Ok(by_cachestat) => assert_eq!(by_cachestat, by_mincore),
            Err(error) => println!("SKIPPED: no cachestat here ({error})"),
        }
    }

    #[test]
    fn pages_that_somebody_maps_stay_and_are_reported() {
        let file = file_of(2);
        if !is_on_disk(&file) {
            return;
        }
        // SAFETY: the file belongs to this test alone and keeps its length while it is mapped.
        let map = unsafe { MmapOptions::new().populate().map(file.as_file()) }.unwrap();
        let sum: u64 = map.chunks(4096).map(|page| u64::from(page[0])).sum();
        assert!(sum > 0);
        let dropped = drop_cache(file.path()).unwrap();
        assert_eq!(dropped.is_cold(), Some(false), "{dropped:?}");
        drop(map);
        assert_eq!(drop_cache(file.path()).unwrap().is_cold(), Some(true));
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        assert!(residency(directory.path()).reason().is_some());
        let missing = drop_cache(&directory.path().join("none")).unwrap_err();
        assert!(matches!(missing, ProbeError::PageCache { action: "open", .. }), "{missing}");
        let empty = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(residency(empty.path()).value().unwrap().resident_bytes, 0);
    }
}
