//! The state of one file in [`Auto`](super::Auto): how it is read, and the lookups of its pages in
//! the page cache just before a read.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::plan::{CacheEffect, IoDecision, IoMode, IoReason, ResidencyBy};
use crate::source::buffered::advise_sequential;
use crate::source::survey::{advise_random, resident_bytes};
use crate::source::system::System;
use crate::source::uncached::UncachedReads;
use crate::units::{ByteRange, KIB, MIB};

/// A range is read through the page cache if at most this part of it is missing: a sixteenth. Holes
/// are read one after the other, each with its own wait; with more of them, one direct read of the
/// whole range is faster.
const MISSING_SHARE: u64 = 16;
/// How far the kernel may read ahead of a marked page: two read-ahead windows, of up to 8 MiB each
/// where the device is set to read far ahead.
const READ_AHEAD_BYTES: u64 = 16 * MIB;
/// Bytes behind a range that are looked up at once, and remembered. Most reads then look up their
/// own range alone.
const LOOKED_UP_AHEAD_BYTES: u64 = 8 * READ_AHEAD_BYTES;
/// A read that takes longer per byte (below 1 GB/s) has waited for a disk: copies are several times
/// as fast.
const SLOW_NS_PER_BYTE: u64 = 1;
/// So many reads in a row have to be slow: a single one may have waited for a busy processor.
const SLOW_READS: u64 = 2;
/// Shorter reads are too short to time.
const TIMED_BYTES_MIN: u64 = 256 * KIB;

/// How one file is read, and what was learned of it while reading.
pub(super) struct FileState {
    pub(super) policy: Policy,
    /// How every read of the file was planned. `None` for a file that is partly resident: its reads
    /// were not planned.
    pub(super) planned: Option<IoMode>,
    pub(super) uncached: UncachedReads,
    /// All of the file was in the page cache, and no page has been missing since.
    pub(super) is_trusted: AtomicBool,
    /// A range that was in the page cache when it was looked up.
    known_resident: Mutex<ByteRange>,
    /// Nothing is looked up far ahead in front of this offset: a hole was found there.
    look_near_until: AtomicU64,
    /// Slow reads in a row.
    slow_reads: AtomicU64,
    /// Buffered reads were slow, so the file is read direct whatever the lookups say.
    is_slow: AtomicBool,
}

#[derive(Clone, Copy)]
pub(super) enum Policy {
    /// The file system is memory: the page cache is the file.
    Memory,
    /// Always through the page cache, leaving no pages there.
    Uncached,
    /// Direct or buffered, by what a lookup finds. `None`: nothing can be looked up.
    LookUp(Option<ResidencyBy>),
}

/// How much of a range is in the page cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    Whole,
    /// All but a sixteenth at most.
    Nearly,
    /// Less, or nothing.
    Partly,
    Unknown,
}

/// The result of a lookup.
#[derive(Clone, Copy)]
pub(super) struct Lookup {
    pub(super) found: Found,
    /// The lookup may be wrong, so the read is timed.
    pub(super) is_doubted: bool,
    pub(super) goes_direct: bool,
}

impl FileState {
    pub(super) fn new<S: System>(system: &S, file: &File, decision: &IoDecision) -> Self {
        let policy = match decision.reason {
            IoReason::Memory => Policy::Memory,
            IoReason::Small | IoReason::Network | IoReason::Program | IoReason::NoDirectIo => {
                Policy::Uncached
            }
            IoReason::Cold | IoReason::Resident | IoReason::PartlyResident | IoReason::ResidencyUnknown => {
                Policy::LookUp(decision.residency_by)
            }
        };
        policy.advise(file);
        let uncached = UncachedReads::new(decision.residency_by);
        if matches!(policy, Policy::Uncached) {
            uncached.find_absent(system, file, decision.file_bytes);
        }
        if matches!(decision.cache_effect, CacheEffect::DroppedBehind | CacheEffect::Kept) {
            uncached.refuse();
        }
        // A single missing page anywhere could make a buffered read start the kernel's read-ahead.
        let is_all_resident = decision.reason == IoReason::Resident
            && decision.resident_share().is_some_and(|share| share >= 1.0);
        Self {
            policy,
            planned: (decision.reason != IoReason::PartlyResident).then_some(decision.mode),
            uncached,
            is_trusted: AtomicBool::new(is_all_resident),
            known_resident: Mutex::default(),
            look_near_until: AtomicU64::new(0),
            slow_reads: AtomicU64::new(0),
            is_slow: AtomicBool::new(false),
        }
    }

    pub(super) fn is_looked_up(&self) -> bool {
        matches!(self.policy, Policy::LookUp(_))
    }

    fn known_resident(&self) -> MutexGuard<'_, ByteRange> {
        // One assignment writes the range, so a panic elsewhere leaves it valid.
        self.known_resident.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes how long a buffered read took whose bytes were not known to be in the page cache.
    pub(super) fn time(&self, bytes: u64, took: Duration) {
        if bytes < TIMED_BYTES_MIN {
            return;
        }
        let most_ns = u128::from(bytes) * u128::from(SLOW_NS_PER_BYTE);
        if took.as_nanos() <= most_ns {
            self.slow_reads.store(0, Ordering::Relaxed);
        } else if self.slow_reads.fetch_add(1, Ordering::Relaxed) + 1 >= SLOW_READS {
            self.is_slow.store(true, Ordering::Relaxed);
        }
    }

    /// Looks up a range of a file of `file_bytes`, and decides how it is read.
    pub(super) fn look_up<S: System>(
        &self,
        system: &S,
        file: &File,
        range: ByteRange,
        file_bytes: u64,
    ) -> Lookup {
        if self.is_trusted.load(Ordering::Relaxed) {
            return Lookup { found: Found::Whole, is_doubted: false, goes_direct: false };
        }
        let found = self.find(system, file, range, file_bytes);
        let is_there = match found {
            Found::Whole | Found::Unknown => true,
            Found::Nearly => self.uncached.is_supported(),
            Found::Partly => false,
        };
        let is_doubted = found == Found::Unknown
            || matches!(self.policy, Policy::LookUp(Some(ResidencyBy::Mincore | ResidencyBy::ReadNowait)));
        let goes_direct = !is_there || (is_doubted && self.is_slow.load(Ordering::Relaxed));
        Lookup { found, is_doubted, goes_direct }
    }

    fn find<S: System>(&self, system: &S, file: &File, range: ByteRange, file_bytes: u64) -> Found {
        let Policy::LookUp(Some(by)) = self.policy else { return Found::Unknown };
        let wanted_bytes = range.len_bytes();
        match resident_bytes(system, by, file, range) {
            None => Found::Unknown,
            // A cold range costs one lookup.
            Some(bytes) if bytes < wanted_bytes - wanted_bytes / MISSING_SHARE => Found::Partly,
            Some(_) if self.starts_read_ahead(system, by, file, range.end(), file_bytes) => Found::Partly,
            Some(bytes) if bytes >= wanted_bytes => Found::Whole,
            Some(_) => Found::Nearly,
        }
    }

    /// True if pages behind a range, from `start` on, are missing. The kernel marks pages that it
    /// has read ahead. Reading a marked page makes it read on from the next missing page, if that
    /// is near, whatever was advised. Later reads would find those pages, and the next mark: a cold
    /// file would be read through the page cache to its end.
    fn starts_read_ahead<S: System>(
        &self,
        system: &S,
        by: ResidencyBy,
        file: &File,
        start: u64,
        file_bytes: u64,
    ) -> bool {
        let behind = |len_bytes: u64| ByteRange::new(start, file_bytes.min(start.saturating_add(len_bytes)));
        let Some(needed) = behind(READ_AHEAD_BYTES).filter(|needed| !needed.is_empty()) else { return false };
        if self.known_resident().contains(needed) {
            return false;
        }
        let missing_max = needed.len_bytes() / (4 * MISSING_SHARE);
        let is_there = |range: &ByteRange| {
            let resident = resident_bytes(system, by, file, *range);
            resident.is_some_and(|bytes| bytes >= range.len_bytes() - missing_max)
        };
        let looks_far = start >= self.look_near_until.load(Ordering::Relaxed);
        if let Some(far) = behind(LOOKED_UP_AHEAD_BYTES).filter(|_| looks_far) {
            if is_there(&far) {
                *self.known_resident() = far;
                return false;
            }
            // The next reads would find the same hole again.
            self.look_near_until.store(far.end(), Ordering::Relaxed);
        }
        if is_there(&needed) {
            *self.known_resident() = needed;
            return false;
        }
        true
    }
}

impl Policy {
    pub(super) fn advise(self, file: &File) {
        match self {
            Self::Memory => {}
            Self::Uncached => advise_sequential(file),
            Self::LookUp(_) => advise_random(file),
        }
    }
}
