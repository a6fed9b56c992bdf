//! Counts and drops the cached pages of a file. `cold` and `warm` in reports rely on it.
//!
//! Residency comes from `cachestat` where it is reliable, and else from `mincore`; see
//! [`onelayer_system::page_cache`]. Direct-access (DAX) files and FUSE files in direct mode have no
//! page cache, so 0 is right for them.
//!
//! `POSIX_FADV_DONTNEED` silently skips pages that are dirty, locked or mapped. So dirty pages are
//! written first, and the pages left are counted afterwards.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{Advice, Mode, OFlags};
use serde::Serialize;

use super::{Measured, ProbeError, Reason};
use onelayer_system::file_system::FileSystem;
use onelayer_system::page_cache::{self, page_bytes};
use onelayer_system::units::ByteRange;

/// The source of a residency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ResidencyMethod {
    /// The system call `cachestat`.
    Cachestat,
    /// The system call `mincore` on a mapping.
    Mincore,
}

/// How much of a file is in the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Residency {
    /// The file's length.
    pub file_bytes: u64,
    /// Its cached bytes, in whole pages, at most `file_bytes`.
    pub resident_bytes: u64,
    /// The source of the number.
    pub method: ResidencyMethod,
}

/// The result of [`drop_cache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CacheDrop {
    /// Cached pages before.
    pub before: Measured<Residency>,
    /// Cached pages after. Unavailable means unchecked.
    pub after: Measured<Residency>,
}

impl CacheDrop {
    /// True if a check found no cached page of the file; `None` if it cannot be checked here.
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
        .and_then(|file| residency_of(&file))
        .into()
}

/// Writes dirty pages, drops the file's cached pages, and counts the pages left.
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
    let before: Measured<Residency> = residency_of(&file).into();
    // A descriptor opened for reading may be synced as well.
    rustix::fs::fdatasync(&file).map_err(|errno| failed("flush")(errno.into()))?;
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)
        .map_err(|errno| failed("drop the cached pages of")(errno.into()))?;
    Ok(CacheDrop { before, after: residency_of(&file).into() })
}

/// Never blocks: a pipe without a writer is opened at once and refused later.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(path, flags, Mode::empty())?))
}

fn residency_of(file: &File) -> Result<Residency, Reason> {
    let metadata = file.metadata().map_err(|error| Reason::unreadable("the file", &error))?;
    if !metadata.is_file() {
        return Err(Reason::NotHere("only regular files have a page cache of their own"));
    }
    let file_bytes = metadata.len();
    let is_overlay = FileSystem::holding(file).is_ok_and(|kind| kind.is_overlay());
    let all = ByteRange::with_len(0, file_bytes).expect("a range that begins at zero");
    let counted = if is_overlay { None } else { page_cache::pages_by_cachestat(file, all).ok() };
    let (pages, method) = match counted {
        Some(pages) => (pages, ResidencyMethod::Cachestat),
        None => (pages_by_mincore(file, all)?, ResidencyMethod::Mincore),
    };
    let resident_bytes = pages.saturating_mul(page_bytes()).min(file_bytes);
    Ok(Residency { file_bytes, resident_bytes, method })
}

fn pages_by_mincore(file: &File, all: ByteRange) -> Result<u64, Reason> {
    let unreadable = |what: &'static str| move |error: io::Error| Reason::unreadable(what, &error);
    if !page_cache::may_tell(file).map_err(unreadable("the file"))? {
        return Err(Reason::NotHere(
            "the kernel reports residency only to the owner of the file or a process that may write to it",
        ));
    }
    page_cache::pages_by_mincore(file, all).map_err(unreadable("the mapping of the file"))
}

#[cfg(test)]
#[allow(unsafe_code, reason = "maps a file that stays as it is")]
mod tests {
    use std::io::Write;

    use memmap2::MmapOptions;

    use super::*;
    use onelayer_system::units::MIB;
    use onelayer_testing::skipped;

    fn file_of(mib: usize) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        for _ in 0..mib {
            file.write_all(&vec![3; 1 << 20]).unwrap();
        }
        file.write_all(&[1; 100]).unwrap();
        file
    }

    /// Temporary files are on tmpfs on some machines, where pages cannot be dropped.
    fn is_on_disk(file: &tempfile::NamedTempFile) -> bool {
        let kind = FileSystem::holding(file.as_file()).unwrap();
        let on_disk = kind.name() != Some("tmpfs");
        if !on_disk {
            skipped("temporary files live in memory here");
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
        let all = ByteRange::new(0, file_bytes).unwrap();
        let by_mincore = page_cache::pages_by_mincore(file.as_file(), all).unwrap();
        assert!((1..file_bytes / page_bytes()).contains(&by_mincore), "{by_mincore}");
        match page_cache::pages_by_cachestat(file.as_file(), all) {
            Ok(by_cachestat) => assert_eq!(by_cachestat, by_mincore),
            Err(error) => skipped(format_args!("no cachestat here ({error})")),
        }
    }

    #[test]
    #[allow(unsafe_code, reason = "a mapping of a file is what this test is about")]
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
