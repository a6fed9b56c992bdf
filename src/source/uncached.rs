//! Buffered reads that leave the page cache as they found it, for files without direct I/O.
//!
//! The kernel is asked to drop the pages itself (`RWF_DONTCACHE`). Where it cannot, they are
//! dropped after each read, but only in ranges that had no page in the page cache before the first
//! such read: other pages belong to other programs. (Pages that another program brings into such a
//! range during the load are dropped too.) Pages that the kernel read ahead and nobody read are
//! dropped when the source is.
//!
//! ```text
//! file      |resident |        absent        |partly| absent |      as it was found, in blocks of 2 MiB
//! dropped             |======================|      |========|
//! ```

use std::fs::File;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use super::buffered::read_payload_with;
use super::files::FileSet;
use super::report::ByteCounters;
use super::survey::resident_bytes;
use super::system::System;
use super::{ReadRequest, SourceError};
use crate::plan::ResidencyBy;
use crate::units::{Alignment, ByteRange};

/// At most this many absent ranges are kept; the rest is never dropped.
const RUNS_MAX: usize = 16;
/// Partly resident ranges are not halved below this size.
const BLOCK: Alignment = Alignment::HUGE_PAGE;

/// The state of such reads of one file.
#[derive(Default)]
pub(super) struct UncachedReads {
    /// The kernel refused `RWF_DONTCACHE`, or is known to.
    is_refused: AtomicBool,
    /// How pages in the page cache are found.
    by: Option<ResidencyBy>,
    /// Ranges without any page in the page cache at the first look.
    absent: OnceLock<Vec<ByteRange>>,
    is_touched: AtomicBool,
}

impl UncachedReads {
    /// For a file whose pages are found by `by`.
    pub(super) fn new(by: Option<ResidencyBy>) -> Self {
        Self { by, ..Self::default() }
    }

    /// Finds the absent ranges of a file, once. Without an exact way to find pages there are none,
    /// and nothing is ever dropped.
    pub(super) fn find_absent<S: System>(&self, system: &S, file: &File, file_bytes: u64) -> &[ByteRange] {
        self.absent.get_or_init(|| {
            let mut absent = Vec::new();
            let all = ByteRange::new(0, file_bytes).filter(|all| !all.is_empty());
            if let (Some(by @ (ResidencyBy::Cachestat | ResidencyBy::Mincore)), Some(all)) = (self.by, all) {
                collect_absent(system, by, file, all, &mut absent);
                absent.shrink_to_fit();
            }
            absent
        })
    }

    /// Notes that the kernel does not support such reads.
    pub(super) fn refuse(&self) {
        self.is_refused.store(true, Ordering::Relaxed);
    }

    /// True if the kernel drops the pages by itself, as far as is known.
    pub(super) fn is_supported(&self) -> bool {
        !self.is_refused.load(Ordering::Relaxed)
    }

    /// Reads the payload, and verifies that the file is the one that was checked.
    pub(super) fn read<S: System>(
        &self,
        files: &FileSet<S>,
        file: &File,
        request: &ReadRequest,
        buffer: &mut [u8],
        counters: &ByteCounters,
    ) -> Result<u64, SourceError> {
        self.is_touched.store(true, Ordering::Relaxed);
        let target = request.payload_of(buffer);
        let read = |rest: &mut [u8], offset_bytes| {
            if self.is_supported() {
                match files.system.read_uncached(file, rest, offset_bytes) {
                    Err(error) if is_refusal(&error) => self.refuse(),
                    other => return other,
                }
            }
            self.find_absent(&files.system, file, files.len_bytes(request.shard));
            files.system.read_at(file, rest, offset_bytes)
        };
        let moved = read_payload_with(files, file, request, target, read)?;
        if !self.is_supported() {
            self.drop_pages(&files.system, file, request.extent, counters);
        }
        Ok(counters.buffered(moved))
    }

    /// Drops the parts of `bytes` that were absent before.
    fn drop_pages<S: System>(&self, system: &S, file: &File, bytes: ByteRange, counters: &ByteCounters) {
        for run in self.absent.get().into_iter().flatten().filter_map(|run| run.intersect(bytes)) {
            // If the hint is ignored, pages stay in the cache; no byte is wrong.
            if system.drop_pages(file, run).is_ok() {
                counters.dropped_behind(run.len_bytes());
            }
        }
    }

    /// Drops the rest of the absent ranges at the end: pages that were read ahead in vain, and
    /// pages that two reads shared.
    pub(super) fn drop_rest<S: System>(&self, system: &S, file: &File) {
        for run in self.absent.get().into_iter().flatten() {
            let _ = system.drop_pages(file, *run);
        }
    }

    /// True if [`drop_rest`](Self::drop_rest) has something to do.
    pub(super) fn has_rest(&self) -> bool {
        self.is_touched.load(Ordering::Relaxed) && self.absent.get().is_some_and(|absent| !absent.is_empty())
    }
}

/// The errors of a kernel or a file system that does not know the flag. (A sandbox may refuse the
/// call.)
fn is_refusal(error: &std::io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS | Errno::PERM))
}

/// Halves partly resident ranges until they are resident, absent, or one block.
fn collect_absent<S: System>(
    system: &S,
    by: ResidencyBy,
    file: &File,
    bytes: ByteRange,
    runs: &mut Vec<ByteRange>,
) {
    let Some(resident) = resident_bytes(system, by, file, bytes) else { return };
    if resident == 0 {
        let has_room = runs.len() < RUNS_MAX;
        match runs.last_mut().filter(|last| last.end() == bytes.start()) {
            Some(last) => *last = last.join(bytes),
            None if has_room => runs.push(bytes),
            None => {}
        }
        return;
    }
    let middle = BLOCK.down(bytes.start() + bytes.len_bytes() / 2);
    if resident >= bytes.len_bytes() || middle <= bytes.start() || runs.len() == RUNS_MAX {
        return;
    }
    for half in [ByteRange::new(bytes.start(), middle), ByteRange::new(middle, bytes.end())] {
        collect_absent(system, by, file, half.expect("the middle lies between"), runs);
    }
}
