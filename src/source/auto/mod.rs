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
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use self::file::{FileState, Found, Lookup, Policy};
use super::buffered::{advise_sequential, read_payload_in_pieces, read_payload_with};
use super::direct::Direct;
use super::extent::Outcome;
use super::files::{FileSet, OPEN_FILES_MAX, OpenFile};
use super::queue::{Begun, Queueable};
use super::report::ByteCounters;
use super::system::{DirectSupport, System};
use super::{
    Arrival, Fallback, IoDecision, IoMode, IoWays, OnArrival, ReadRequest, Sealed, Source, SourceError,
};
use crate::checkpoint::{Shard, ShardId};
use crate::units::{Alignment, ByteRange, KIB};

mod file;

/// Each of the two sets of descriptors, one with the flag `O_DIRECT` and one without, gets half of
/// what a source may have.
const OPEN_FILES_EACH: usize = OPEN_FILES_MAX / 2;
/// Reads up to this that come without blocks go through the page cache, whatever is there.
const SMALL_READ_BYTES: u64 = 128 * KIB;
/// See the [module](self).
pub(super) struct Auto<S: System> {
    /// Descriptors without `O_DIRECT`.
    cached: FileSet<S>,
    direct: Direct<S>,
    files: Box<[FileState]>,
    counters: ByteCounters,
}

impl<S: System + Clone> Auto<S> {
    /// Opens every file once, so that one that is gone or changed is found before any byte is read.
    /// `decisions` has one for each file.
    pub(super) fn open(system: S, shards: &[Shard], decisions: &[IoDecision]) -> Result<Self, SourceError> {
        assert_eq!(shards.len(), decisions.len(), "each file has a decision");
        let cached = FileSet::with_most(system.clone(), shards, OPEN_FILES_EACH);
        let (mut memory, mut block) = (Alignment::ONE, Alignment::PAGE);
        let mut files = Vec::with_capacity(shards.len());
        for shard in cached.shards_from_last() {
            cached.acquire(shard, |file| {
                let state = FileState::new(&system, file, &decisions[shard.index()]);
                if let (Policy::LookUp(_), Ok(DirectSupport::Aligned { memory: address, offset })) =
                    (state.policy, system.direct_support(file))
                {
                    (memory, block) = (memory.max(address), block.max(offset));
                }
                files.push(state);
            })?;
        }
        files.reverse();
        let direct_files = FileSet::with_most(system, shards, OPEN_FILES_EACH);
        let direct = Direct::unopened(IoMode::Direct, direct_files, memory, block);
        Ok(Self { cached, direct, files: files.into(), counters: ByteCounters::default() })
    }
}

impl<S: System> Auto<S> {
    fn state(&self, shard: ShardId) -> &FileState {
        &self.files[shard.index()]
    }

    /// Reads what is in the page cache, which is what comes in pieces, and what follows it at once.
    ///
    /// Nobody is asked about a file that is trusted: asking costs a sixth of the time that such
    /// reads take. The kernel itself says at the first page that is not there, which ends the
    /// trust.
    fn read_resident(
        &self,
        state: &FileState,
        file: &File,
        request: &ReadRequest,
        buffer: &mut [u8],
        each: Option<&mut OnArrival<'_>>,
    ) -> Result<u64, SourceError> {
        let system = &self.cached.system;
        let read = |rest: &mut [u8], offset_bytes| {
            if state.is_trusted.load(Ordering::Relaxed) {
                match system.read_at_hand(file, rest, offset_bytes) {
                    Ok(count) if count > 0 => return Ok(count),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err(error),
                    // A page that is not there, the end of the file, or a system that does not know the call.
                    _ => state.is_trusted.store(false, Ordering::Relaxed),
                }
            }
            system.read_at(file, rest, offset_bytes)
        };
        Ok(self.counters.buffered(match each {
            Some(each) => read_payload_in_pieces(&self.cached, file, request, buffer, each, read)?,
            None => read_payload_with(&self.cached, file, request, request.payload_of(buffer), read)?,
        }))
    }

    /// Looks up the payload. A file that refused direct I/O is never read direct.
    fn look_up(&self, state: &FileState, file: &File, request: &ReadRequest) -> Lookup {
        let file_bytes = self.cached.len_bytes(request.shard);
        let lookup = state.look_up(&self.cached.system, file, request.payload, file_bytes);
        let goes_direct = lookup.goes_direct && !self.direct.has_fallen_back(request.shard);
        Lookup { goes_direct, ..lookup }
    }

    /// `None`, and nothing has been read, if the bytes are to go past the page cache and
    /// `has_blocks` is false: neither the request nor the buffer is made for that.
    fn read_looked_up(
        &self,
        state: &FileState,
        request: &ReadRequest,
        buffer: &mut [u8],
        has_blocks: bool,
        each: Option<&mut OnArrival<'_>>,
    ) -> Result<Option<u64>, SourceError> {
        let mut file = self.cached.acquire(request.shard, |file| state.policy.advise(file))?;
        let lookup = self.look_up(state, &file, request);
        if lookup.goes_direct {
            if !has_blocks {
                return Ok(None);
            }
            // Whoever waits for a descriptor without the flag may hold some with it, and nobody who waits for
            // one with it holds one without: so none waits for another that waits for it.
            drop(file);
            if let Some(moved) = self.direct.read_or_refuse(request, buffer)? {
                show_all(request, buffer, each);
                self.note_correction(state, IoMode::Direct, moved);
                return Ok(Some(moved));
            }
            file = self.cached.acquire(request.shard, |file| state.policy.advise(file))?;
        }
        self.read_cached(state, &file, lookup, request, buffer, each).map(Some)
    }

    /// Reads through the page cache.
    fn read_cached(
        &self,
        state: &FileState,
        file: &File,
        lookup: Lookup,
        request: &ReadRequest,
        buffer: &mut [u8],
        mut each: Option<&mut OnArrival<'_>>,
    ) -> Result<u64, SourceError> {
        let (started, mut elsewhere) = (Instant::now(), Duration::ZERO);
        let moved = if lookup.found == Found::Whole {
            let mut timed = each.take().map(|each| timed(each, &mut elsewhere));
            let each = timed.as_mut().map(|each| -> &mut OnArrival<'_> { each });
            self.read_resident(state, file, request, buffer, each)?
        } else {
            state.uncached.read(&self.cached, file, request, buffer, &self.counters)?
        };
        if lookup.is_doubted {
            state.time(moved, started.elapsed().saturating_sub(elsewhere));
        }
        self.note_correction(state, IoMode::Buffered, moved);
        // Timed without what is done with the bytes.
        show_all(request, buffer, each);
        Ok(moved)
    }

    /// As [`Self::read_looked_up`], whatever the kind of the file.
    fn read_with(
        &self,
        request: &ReadRequest,
        buffer: &mut [u8],
        has_blocks: bool,
        each: Option<&mut OnArrival<'_>>,
    ) -> Result<Option<u64>, SourceError> {
        request.check(buffer);
        self.cached.check_end(request)?;
        let state = self.state(request.shard);
        let is_small = !has_blocks && request.payload.len_bytes() <= SMALL_READ_BYTES;
        match state.policy {
            _ if is_small => {
                let file = self.cached.acquire(request.shard, |file| state.policy.advise(file))?;
                self.read_resident(state, &file, request, buffer, each).map(Some)
            }
            Policy::LookUp(_) => self.read_looked_up(state, request, buffer, has_blocks, each),
            Policy::Memory => {
                let file = self.cached.acquire(request.shard, |_| {})?;
                self.read_resident(state, &file, request, buffer, each).map(Some)
            }
            Policy::Uncached => {
                let file = self.cached.acquire(request.shard, advise_sequential)?;
                let moved = state.uncached.read(&self.cached, &file, request, buffer, &self.counters)?;
                show_all(request, buffer, each);
                Ok(Some(moved))
            }
        }
    }

    fn read_blocks(
        &self,
        request: &ReadRequest,
        buffer: &mut [u8],
        each: Option<&mut OnArrival<'_>>,
    ) -> Result<u64, SourceError> {
        Ok(self.read_with(request, buffer, true, each)?.expect("what has blocks is read"))
    }

    fn note_correction(&self, state: &FileState, mode: IoMode, bytes: u64) {
        if state.planned.is_some_and(|planned| planned != mode) {
            self.counters.corrected(bytes);
        }
    }
}

/// The same, with the time that it takes added up.
fn timed<'a>(each: &'a mut OnArrival<'_>, took: &'a mut Duration) -> impl FnMut(&mut [u8], Arrival) -> u64 {
    move |buffer, arrival| {
        let started = Instant::now();
        let next_position_bytes = each(buffer, arrival);
        *took += started.elapsed();
        next_position_bytes
    }
}

/// Shows a payload that has arrived at once.
fn show_all(request: &ReadRequest, buffer: &mut [u8], each: Option<&mut OnArrival<'_>>) {
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
        each: &mut OnArrival<'_>,
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
        let (direct, own) = (self.direct.ways(), self.counters.ways());
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
        let mut looked_up = self.cached.shards_from_last().filter(|&shard| self.state(shard).is_looked_up());
        if looked_up.any(|shard| !self.direct.has_fallen_back(shard)) {
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
        let state = self.state(request.shard);
        if state.is_looked_up() {
            let file = self.cached.acquire(request.shard, |file| state.policy.advise(file))?;
            let lookup = self.look_up(state, &file, request);
            if !lookup.goes_direct {
                let moved_bytes = self.read_cached(state, &file, lookup, request, buffer, None)?;
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
        self.note_correction(self.state(request.shard), IoMode::Direct, moved);
        Ok(moved)
    }
}

impl<S: System> Drop for Auto<S> {
    /// Nothing is read any more: what reading ahead has brought in for nobody goes, too.
    fn drop(&mut self) {
        for shard in self.cached.shards_from_last() {
            let uncached = &self.state(shard).uncached;
            if uncached.has_rest()
                && let Ok(file) = self.cached.acquire(shard, |_| {})
            {
                uncached.drop_rest(&self.cached.system, &file);
            }
        }
    }
}
