//! Chooses for each read: buffered if its bytes are in the page cache, direct if not.
//!
//! How a file is read follows from its [`IoDecision`]. A file on a local disk with direct I/O is
//! looked up just before each read. So a partly resident file is split by range, and a decision
//! that was wrong, or has become wrong, is corrected during the load. A lookup costs microseconds,
//! a read hundreds of them.
//!
//! ```text
//! file system is memory -----------------------------------------> pread
//! network, FUSE, no direct I/O, small ---------------------------> `uncached`: pread that leaves no pages
//! resident ------------------------------------------------------> pread with RWF_NOWAIT; after a missing page as below
//! others: look up      -- all resident --------------------------> pread
//!                      -- all but a sixteenth, RWF_DONTCACHE ----> `uncached`
//!                      -- else ----------------------------------> direct; if refused, `uncached`
//!                      -- unknown or doubtful -------------------> pread, timed; direct after two slow reads in a row
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

/// Each of the two sets of descriptors, with and without `O_DIRECT`, gets half of a source's limit.
const OPEN_FILES_EACH: usize = OPEN_FILES_MAX / 2;
/// Unaligned reads up to this size always go through the page cache.
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
    /// Opens every file once, so that a missing or changed file is found before any byte is read.
    /// `decisions` has one decision per file.
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

    /// Reads bytes from the page cache (in pieces, if wanted), and whatever of them is missing
    /// after all.
    ///
    /// A trusted file is not looked up: that costs a sixth of the time of such reads. The first
    /// page that the kernel reports missing ends the trust.
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
                    // A missing page, the end of the file, or a system that does not know the call.
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

    /// Reads after a lookup. `None`, and nothing was read, if the bytes should be read direct and
    /// `has_blocks` is false: neither the request nor the buffer is aligned.
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
            // Lock order: plain descriptors before direct ones.
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
        // Behind the timing: the callback's time does not count.
        show_all(request, buffer, each);
        Ok(moved)
    }

    /// [`Self::read_looked_up`], or the way of the file's policy.
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

/// The same callback, with its time added up.
fn timed<'a>(each: &'a mut OnArrival<'_>, took: &'a mut Duration) -> impl FnMut(&mut [u8], Arrival) -> u64 {
    move |buffer, arrival| {
        let started = Instant::now();
        let next_position_bytes = each(buffer, arrival);
        *took += started.elapsed();
        next_position_bytes
    }
}

/// Passes a payload that arrived as one part to the callback.
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

/// Direct reads go through a queue. Bytes in the page cache are copied by the thread that begins
/// the read, while the disk works on its reads in flight.
impl<S: System> Queueable for Auto<S> {
    fn refusal(&self) -> Option<String> {
        let mut looked_up = self.cached.shards_from_last().filter(|&shard| self.state(shard).is_looked_up());
        if looked_up.any(|shard| !self.direct.has_fallen_back(shard)) {
            return None;
        }
        let refused = self.direct.fallbacks().into_iter().next().map(|fallback| fallback.reason);
        Some(refused.unwrap_or_else(|| "no file is to be read past the page cache".to_owned()))
    }

    /// Registered buffers would lock memory, and are not faster.
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
    /// Drops pages that the kernel read ahead and nobody read.
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
