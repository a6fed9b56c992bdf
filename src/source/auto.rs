//! The way that suits each read: out of the page cache what is there, past it what is not.
//!
//! What a file is read with follows from its [`IoDecision`]. A file on a local disk that takes
//! direct I/O is asked about at each read, just before it: so a file that is partly in the page
//! cache is split by range, and a decision that was wrong, or has become wrong meanwhile, is
//! corrected while the load runs. Asking costs microseconds where reading costs hundreds.
//!
//! ```text
//! made of memory ------------------------------------------------> pread
//! network, FUSE, no direct I/O, small ---------------------------> `behind`: pread that leaves no pages
//! resident ------------------------------------------------------> pread that does not wait; if it would, from then on as others
//! others: is it there? -- all of it -----------------------------> pread
//!                      -- but for a sixteenth, `behind` forgets -> `behind`
//!                      -- else ----------------------------------> direct; if refused, as if it had no direct I/O
//!         nobody tells, mincore, an estimate --> tried: two slow reads in a row, and the file is read direct from then on
//! ```

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::behind::Behind;
use super::buffered::{advise_sequential, read_payload_in_pieces, read_payload_with};
use super::direct::Direct;
use super::extent::Outcome;
use super::files::{FileSet, OPEN_FILES_MAX, OpenFile};
use super::queue::{Begun, Queueable};
use super::survey::{advise_random, resident_bytes};
use super::system::{DirectSupport, System};
use super::tally::Tally;
use super::{Arrival, Each, Fallback, IoDecision, IoMode, IoWays, ReadRequest, Sealed, Source, SourceError};
use crate::checkpoint::{Shard, ShardId};
use crate::plan::{CacheManners, IoReason, ResidencyBy};
use crate::units::{Alignment, ByteRange, KIB, MIB};

/// Each of the two sets of descriptors, one with the flag `O_DIRECT` and one without, gets half of
/// what a source may have.
const OPEN_FILES_EACH: usize = OPEN_FILES_MAX / 2;
/// What may be missing of a range that is read through the page cache nevertheless: a sixteenth.
/// Holes are read one after the other, each with a wait of its own; with more of them the whole
/// range comes in sooner past the page cache.
const MISSING_MOST: u64 = 16;
/// How far behind a mark the kernel reads on: two windows of reading ahead, of up to 8 MiB where it
/// was told to read far.
const READ_AHEAD_BYTES: u64 = 16 * MIB;
/// What lies behind a range is asked about this far at once, and remembered: so most reads ask
/// about their own range alone.
const ASKED_AHEAD_BYTES: u64 = 8 * READ_AHEAD_BYTES;
/// A read that takes more than this for each byte (less than 1 GB/s) has waited for a disk: copies
/// are several times as fast.
const SLOW_NS_PER_BYTE: u64 = 1;
/// Reads in a row that have to be slow: one alone may have waited for its turn on a busy processor.
const SLOW_READS: u64 = 2;
/// Reads up to this that come without blocks go through the page cache, whatever is there.
const SMALL_READ_BYTES: u64 = 128 * KIB;
/// Shorter reads say nothing about speed.
const TIMED_BYTES_MIN: u64 = 256 * KIB;

/// See the [module](self).
pub(super) struct Auto<S: System> {
    /// Descriptors without `O_DIRECT`.
    cached: FileSet<S>,
    direct: Direct<S>,
    ways: Box<[Way]>,
    tally: Tally,
}

/// How one file is read.
struct Way {
    kind: Kind,
    /// The way of every read, as far as it was planned: of a file that is partly resident it was
    /// not.
    planned: Option<IoMode>,
    behind: Behind,
    /// All of it was there, and nothing has been missing since.
    is_trusted: AtomicBool,
    /// A stretch that was there when it was asked about.
    known_behind: Mutex<ByteRange>,
    /// Up to here it is not asked about far ahead: something was missing there.
    asked_near_until: AtomicU64,
    /// Slow reads in a row.
    slow_reads: AtomicU64,
    /// Read direct whatever anybody tells: it was tried.
    is_slow: AtomicBool,
}

#[derive(Clone, Copy)]
enum Kind {
    /// The page cache is the file.
    Memory,
    /// Always through the page cache, leaving nothing there.
    Behind,
    /// As it comes. `None`: nobody tells.
    Asked(Option<ResidencyBy>),
}

/// What is known of a range just before it is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    /// All of it is there.
    Whole,
    /// All but a little is.
    Nearly,
    /// Less is, or nothing.
    Partly,
    Unknown,
}

/// What is known of a range, and what follows from it.
#[derive(Clone, Copy)]
struct Look {
    found: Found,
    /// Whoever told may be wrong: it is seen from the time that it takes.
    is_doubted: bool,
    goes_direct: bool,
}

impl Way {
    fn new<S: System>(system: &S, file: &File, decision: &IoDecision) -> Self {
        let kind = match decision.reason {
            IoReason::Memory => Kind::Memory,
            IoReason::Small | IoReason::Network | IoReason::Program | IoReason::NoDirectIo => Kind::Behind,
            IoReason::Cold | IoReason::Resident | IoReason::PartlyResident | IoReason::ResidencyUnknown => {
                Kind::Asked(decision.residency_by)
            }
        };
        kind.advise(file);
        let behind = Behind::new(decision.residency_by);
        if matches!(kind, Kind::Behind) {
            behind.look(system, file, decision.file_bytes);
        }
        if matches!(decision.manners, CacheManners::DroppedBehind | CacheManners::Kept) {
            behind.refuse();
        }
        Self {
            kind,
            planned: (decision.reason != IoReason::PartlyResident).then_some(decision.mode),
            behind,
            // With a page missing anywhere, reading could set off reading ahead behind a mark.
            is_trusted: AtomicBool::new(
                decision.reason == IoReason::Resident
                    && decision.resident_share().is_some_and(|share| share >= 1.0),
            ),
            known_behind: Mutex::default(),
            asked_near_until: AtomicU64::new(0),
            slow_reads: AtomicU64::new(0),
            is_slow: AtomicBool::new(false),
        }
    }

    fn is_asked(&self) -> bool {
        matches!(self.kind, Kind::Asked(_))
    }

    fn known_behind(&self) -> MutexGuard<'_, ByteRange> {
        // Two numbers are written at once, so a panic in another reader does not spoil them.
        self.known_behind.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes how long a read through the page cache took that was not known to be there.
    fn time(&self, bytes: u64, took: Duration) {
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
}

impl Kind {
    fn advise(self, file: &File) {
        match self {
            Self::Memory => {}
            Self::Behind => advise_sequential(file),
            Self::Asked(_) => advise_random(file),
        }
    }
}

impl<S: System + Clone> Auto<S> {
    /// Opens every file once, so that one that is gone or changed is found before any byte is read.
    /// `decisions` has one for each file.
    pub(super) fn open(system: S, shards: &[Shard], decisions: &[IoDecision]) -> Result<Self, SourceError> {
        assert_eq!(shards.len(), decisions.len(), "each file has a decision");
        let cached = FileSet::with_most(system.clone(), shards, OPEN_FILES_EACH);
        let (mut memory, mut block) = (Alignment::ONE, Alignment::PAGE);
        let mut ways = Vec::with_capacity(shards.len());
        for shard in cached.shards_from_last() {
            cached.acquire(shard, |file| {
                let way = Way::new(&system, file, &decisions[shard.index()]);
                if let (Kind::Asked(_), Ok(DirectSupport::Aligned { memory: address, offset })) =
                    (way.kind, system.direct_support(file))
                {
                    (memory, block) = (memory.max(address), block.max(offset));
                }
                ways.push(way);
            })?;
        }
        ways.reverse();
        let direct_files = FileSet::with_most(system, shards, OPEN_FILES_EACH);
        let direct = Direct::unopened(IoMode::Direct, direct_files, memory, block);
        Ok(Self { cached, direct, ways: ways.into(), tally: Tally::default() })
    }
}

impl<S: System> Auto<S> {
    fn way(&self, shard: ShardId) -> &Way {
        &self.ways[shard.index()]
    }

    /// What of the payload is there, as far as the one who is asked tells.
    fn find(&self, way: &Way, file: &File, request: &ReadRequest) -> Found {
        let Kind::Asked(Some(by)) = way.kind else { return Found::Unknown };
        let wanted_bytes = request.payload.len_bytes();
        let resident = resident_bytes(&self.cached.system, by, file, request.payload);
        match resident {
            None => Found::Unknown,
            // Nothing is asked twice of a range that is cold.
            Some(bytes) if bytes < wanted_bytes - wanted_bytes / MISSING_MOST => Found::Partly,
            Some(_) if self.sets_off_reading_ahead(way, by, file, request) => Found::Partly,
            Some(bytes) if bytes >= wanted_bytes => Found::Whole,
            Some(_) => Found::Nearly,
        }
    }

    /// Reads what is in the page cache, which is what comes in pieces, and what follows it at once.
    ///
    /// Nobody is asked about a file that is trusted: asking costs a sixth of the time that such
    /// reads take. The kernel itself says at the first page that is not there, which ends the
    /// trust.
    fn read_resident(
        &self,
        way: &Way,
        file: &File,
        request: &ReadRequest,
        buffer: &mut [u8],
        each: Option<&mut Each<'_>>,
    ) -> Result<u64, SourceError> {
        let system = &self.cached.system;
        let read = |rest: &mut [u8], offset_bytes| {
            if way.is_trusted.load(Ordering::Relaxed) {
                match system.read_at_hand(file, rest, offset_bytes) {
                    Ok(count) if count > 0 => return Ok(count),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err(error),
                    // A page that is not there, the end of the file, or a system that does not know the call.
                    _ => way.is_trusted.store(false, Ordering::Relaxed),
                }
            }
            system.read_at(file, rest, offset_bytes)
        };
        Ok(self.tally.buffered(match each {
            Some(each) => read_payload_in_pieces(&self.cached, file, request, buffer, each, read)?,
            None => read_payload_with(&self.cached, file, request, request.payload_of(buffer), read)?,
        }))
    }

    /// True if what comes behind the range is missing. Pages that were once read ahead carry a
    /// mark; whoever reads one has the kernel read on from the next page that is missing, if
    /// that is near, whatever was advised. Those pages would be found at the next reads, which
    /// would find the next mark: a cold file would be read through the page cache to its end.
    fn sets_off_reading_ahead(&self, way: &Way, by: ResidencyBy, file: &File, request: &ReadRequest) -> bool {
        let start = request.payload.end();
        let file_end = self.cached.len_bytes(request.shard);
        let behind = |len_bytes: u64| ByteRange::new(start, file_end.min(start.saturating_add(len_bytes)));
        let Some(needed) = behind(READ_AHEAD_BYTES).filter(|needed| !needed.is_empty()) else { return false };
        if way.known_behind().contains(needed) {
            return false;
        }
        let is_there = |range: &ByteRange| {
            let resident = resident_bytes(&self.cached.system, by, file, *range);
            resident.is_some_and(|bytes| bytes >= range.len_bytes() - needed.len_bytes() / (4 * MISSING_MOST))
        };
        let far = behind(ASKED_AHEAD_BYTES).filter(|_| start >= way.asked_near_until.load(Ordering::Relaxed));
        if let Some(far) = far {
            if is_there(&far) {
                *way.known_behind() = far;
                return false;
            }
            // The same hole would be found at each of the next reads.
            way.asked_near_until.store(far.end(), Ordering::Relaxed);
        }
        if is_there(&needed) {
            *way.known_behind() = needed;
            return false;
        }
        true
    }

    /// What a file says of a range, and what follows from it.
    fn look(&self, way: &Way, file: &File, request: &ReadRequest) -> Look {
        if way.is_trusted.load(Ordering::Relaxed) {
            return Look { found: Found::Whole, is_doubted: false, goes_direct: false };
        }
        let found = self.find(way, file, request);
        let is_there = match found {
            Found::Whole => true,
            Found::Nearly => way.behind.has_uncached_reads(),
            Found::Partly => false,
            Found::Unknown => true,
        };
        let is_doubted = found == Found::Unknown
            || matches!(way.kind, Kind::Asked(Some(ResidencyBy::Mincore | ResidencyBy::ReadNowait)));
        let goes_direct = !is_there || (is_doubted && way.is_slow.load(Ordering::Relaxed));
        Look { found, is_doubted, goes_direct: goes_direct && !self.direct.has_fallen_back(request.shard) }
    }

    /// `None`, and nothing has been read, if the bytes are to go past the page cache and
    /// `has_blocks` is false: neither the request nor the buffer is made for that.
    fn read_asked(
        &self,
        way: &Way,
        request: &ReadRequest,
        buffer: &mut [u8],
        has_blocks: bool,
        each: Option<&mut Each<'_>>,
    ) -> Result<Option<u64>, SourceError> {
        let mut file = self.cached.acquire(request.shard, |file| way.kind.advise(file))?;
        let look = self.look(way, &file, request);
        if look.goes_direct {
            if !has_blocks {
                return Ok(None);
            }
            // Whoever waits for a descriptor without the flag may hold some with it, and nobody who waits for
            // one with it holds one without: so none waits for another that waits for it.
            drop(file);
            if let Some(moved) = self.direct.read_or_refuse(request, buffer)? {
                show_all(request, buffer, each);
                self.note_correction(way, IoMode::Direct, moved);
                return Ok(Some(moved));
            }
            file = self.cached.acquire(request.shard, |file| way.kind.advise(file))?;
        }
        self.read_cached(way, &file, look, request, buffer, each).map(Some)
    }

    /// Reads through the page cache.
    fn read_cached(
        &self,
        way: &Way,
        file: &File,
        look: Look,
        request: &ReadRequest,
        buffer: &mut [u8],
        mut each: Option<&mut Each<'_>>,
    ) -> Result<u64, SourceError> {
        let (started, mut elsewhere) = (Instant::now(), Duration::ZERO);
        let moved = if look.found == Found::Whole {
            let mut timed = each.take().map(|each| timed(each, &mut elsewhere));
            let each = timed.as_mut().map(|each| -> &mut Each<'_> { each });
            self.read_resident(way, file, request, buffer, each)?
        } else {
            way.behind.read(&self.cached, file, request, buffer, &self.tally)?
        };
        if look.is_doubted {
            way.time(moved, started.elapsed().saturating_sub(elsewhere));
        }
        self.note_correction(way, IoMode::Buffered, moved);
        // Timed without what is done with the bytes.
        show_all(request, buffer, each);
        Ok(moved)
    }

    /// As [`Self::read_asked`], whatever the kind of the file.
    fn read_with(
        &self,
        request: &ReadRequest,
        buffer: &mut [u8],
        has_blocks: bool,
        each: Option<&mut Each<'_>>,
    ) -> Result<Option<u64>, SourceError> {
        request.check(buffer);
        self.cached.check_end(request)?;
        let way = self.way(request.shard);
        let is_small = !has_blocks && request.payload.len_bytes() <= SMALL_READ_BYTES;
        match way.kind {
            _ if is_small => {
                let file = self.cached.acquire(request.shard, |file| way.kind.advise(file))?;
                self.read_resident(way, &file, request, buffer, each).map(Some)
            }
            Kind::Asked(_) => self.read_asked(way, request, buffer, has_blocks, each),
            Kind::Memory => {
                let file = self.cached.acquire(request.shard, |_| {})?;
                self.read_resident(way, &file, request, buffer, each).map(Some)
            }
            Kind::Behind => {
                let file = self.cached.acquire(request.shard, advise_sequential)?;
                let moved = way.behind.read(&self.cached, &file, request, buffer, &self.tally)?;
                show_all(request, buffer, each);
                Ok(Some(moved))
            }
        }
    }

    fn read_blocks(
        &self,
        request: &ReadRequest,
        buffer: &mut [u8],
        each: Option<&mut Each<'_>>,
    ) -> Result<u64, SourceError> {
        Ok(self.read_with(request, buffer, true, each)?.expect("what has blocks is read"))
    }

    fn note_correction(&self, way: &Way, mode: IoMode, bytes: u64) {
        if way.planned.is_some_and(|planned| planned != mode) {
            self.tally.corrected(bytes);
        }
    }
}

/// The same, with the time that it takes added up.
fn timed<'a>(each: &'a mut Each<'_>, took: &'a mut Duration) -> impl FnMut(&mut [u8], Arrival) -> u64 {
    move |buffer, arrival| {
        let started = Instant::now();
        let next_position_bytes = each(buffer, arrival);
        *took += started.elapsed();
        next_position_bytes
    }
}

/// Shows a payload that has arrived at once.
fn show_all(request: &ReadRequest, buffer: &mut [u8], each: Option<&mut Each<'_>>) {
    if let Some(each) = each {
        each(buffer, Arrival::whole(request));
    }
}

impl<S: System> Sealed for Auto<S> {}

impl<S: System> Source for Auto<S> {
    fn mode(&self) -> IoMode {
        IoMode::Auto
    }

    fn read(&self, request: &ReadRequest, buffer: &mut [u8]) -> Result<u64, SourceError> {
        self.read_blocks(request, buffer, None)
    }

    fn read_in_pieces(
        &self,
        request: &ReadRequest,
        buffer: &mut [u8],
        each: &mut Each<'_>,
    ) -> Result<u64, SourceError> {
        self.read_blocks(request, buffer, Some(each))
    }

    fn read_anywhere(
        &self,
        shard: ShardId,
        payload: ByteRange,
        target: &mut [u8],
    ) -> Result<Option<u64>, SourceError> {
        self.read_with(&ReadRequest::unaligned(shard, payload, target), target, false, None)
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        self.direct.fallbacks()
    }

    fn queueable(&self) -> Option<&dyn Queueable> {
        Some(self)
    }

    fn ways(&self) -> IoWays {
        let (direct, own) = (self.direct.ways(), self.tally.ways());
        IoWays {
            direct_bytes: direct.direct_bytes,
            buffered_bytes: direct.buffered_bytes + own.buffered_bytes,
            ..own
        }
    }
}

/// What is to go past the page cache goes through a queue. What is in it is copied by the thread
/// that begins the read, while the disk works on those that it has in flight.
impl<S: System> Queueable for Auto<S> {
    fn refusal(&self) -> Option<String> {
        let mut asked = self.cached.shards_from_last().filter(|&shard| self.way(shard).is_asked());
        if asked.any(|shard| !self.direct.has_fallen_back(shard)) {
            return None;
        }
        let refused = self.direct.fallbacks().into_iter().next().map(|fallback| fallback.reason);
        Some(refused.unwrap_or_else(|| "no file is to be read past the page cache".to_owned()))
    }

    /// Nobody has asked for memory to be locked, nor is it faster.
    fn registers(&self) -> bool {
        false
    }

    fn begin(&self, request: &ReadRequest, buffer: &mut [u8], may_wait: bool) -> Result<Begun, SourceError> {
        request.check(buffer);
        self.cached.check_end(request)?;
        let way = self.way(request.shard);
        if way.is_asked() {
            let file = self.cached.acquire(request.shard, |file| way.kind.advise(file))?;
            let look = self.look(way, &file, request);
            if !look.goes_direct {
                let moved_bytes = self.read_cached(way, &file, look, request, buffer, None)?;
                return Ok(Begun::Done { moved_bytes });
            }
            drop(file);
            if let Some(begun) = self.direct.begin_or_refuse(request, buffer, may_wait)? {
                return Ok(begun);
            }
        }
        Ok(Begun::Done { moved_bytes: self.read_blocks(request, buffer, None)? })
    }

    fn read_at(&self, file: &File, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        self.direct.read_at(file, buffer, offset_bytes)
    }

    fn answered(&self, buffer: &mut [u8], answer: io::Result<usize>) -> io::Result<usize> {
        self.direct.answered(buffer, answer)
    }

    fn finish(
        &self,
        outcome: Outcome,
        file: &OpenFile,
        request: &ReadRequest,
        buffer: &mut [u8],
    ) -> Result<u64, SourceError> {
        let Some(moved) = self.direct.settle(outcome, file, request)? else {
            return self.read_blocks(request, buffer, None);
        };
        self.note_correction(self.way(request.shard), IoMode::Direct, moved);
        Ok(moved)
    }
}

impl<S: System> Drop for Auto<S> {
    /// Nothing is read any more: what reading ahead has brought in for nobody goes, too.
    fn drop(&mut self) {
        for shard in self.cached.shards_from_last() {
            let behind = &self.way(shard).behind;
            if behind.has_rest()
                && let Ok(file) = self.cached.acquire(shard, |_| {})
            {
                behind.drop_rest(&self.cached.system, &file);
            }
        }
    }
}
