//! `pread` through the page cache: what works on every file system, and what the other two fall
//! back to.

use std::fs::File;
use std::io;

use rustix::fs::Advice;

use crate::checkpoint::{Shard, ShardId};
use crate::units::{ByteRange, to_u64, to_usize};

use super::files::FileSet;
use super::report::ByteCounters;
use super::system::System;
use super::{Arrival, Fallback, IoMode, IoWays, OnArrival, ReadRequest, Sealed, Source, SourceError};

/// See the [module](self).
pub(super) struct Buffered<S> {
    files: FileSet<S>,
    counters: ByteCounters,
}

impl<S: System> Buffered<S> {
    /// Opens every file once, so that one that is gone or changed is found before any byte is read.
    pub(super) fn open(system: S, shards: &[Shard]) -> Result<Self, SourceError> {
        let source = Self { files: FileSet::new(system, shards), counters: ByteCounters::default() };
        for shard in source.files.shards_from_last() {
            source.files.acquire(shard, advise_sequential)?;
        }
        Ok(source)
    }
}

impl<S: System> Sealed for Buffered<S> {}

impl<S: System> Source for Buffered<S> {
    fn mode(&self) -> IoMode {
        IoMode::Buffered
    }

    fn read(&self, request: &ReadRequest, buffer: &mut [u8]) -> Result<u64, SourceError> {
        let target = request.payload_of(buffer);
        self.files.check_end(request)?;
        let file = self.files.acquire(request.shard, advise_sequential)?;
        Ok(self.counters.buffered(read_payload(&self.files, &file, request, target)?))
    }

    fn read_in_pieces(
        &self,
        request: &ReadRequest,
        buffer: &mut [u8],
        each: &mut OnArrival<'_>,
    ) -> Result<u64, SourceError> {
        self.files.check_end(request)?;
        let file = self.files.acquire(request.shard, advise_sequential)?;
        let read = |rest: &mut [u8], offset| self.files.system.read_at(&file, rest, offset);
        Ok(self.counters.buffered(read_payload_in_pieces(&self.files, &file, request, buffer, each, read)?))
    }

    fn read_anywhere(
        &self,
        shard: ShardId,
        payload: ByteRange,
        target: &mut [u8],
    ) -> Result<Option<u64>, SourceError> {
        self.read(&ReadRequest::unaligned(shard, payload, target), target).map(Some)
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        Vec::new()
    }

    fn ways(&self) -> IoWays {
        self.counters.ways()
    }
}

/// Tells the kernel to read ahead further. A hint: where it is refused, nothing is lost but speed.
pub(super) fn advise_sequential(file: &File) {
    let _ = rustix::fs::fadvise(file, 0, None, Advice::Sequential);
}

/// Fills `target` with the payload and proves afterwards that the file is the one that was checked.
/// Returns the bytes moved.
pub(super) fn read_payload<S: System>(
    files: &FileSet<S>,
    file: &File,
    request: &ReadRequest,
    target: &mut [u8],
) -> Result<u64, SourceError> {
    let system = &files.system;
    read_payload_with(files, file, request, target, |rest, offset| system.read_at(file, rest, offset))
}

/// Bytes that are read at once where each piece is worked on: they fit the second-level cache of a
/// core with room for what comes of them, and a system call costs little beside them.
const PIECE_BYTES: usize = 256 << 10;

/// [`read_payload_with`] piece by piece. The file is proved to be the one that was checked once,
/// after the last of them.
pub(super) fn read_payload_in_pieces<S: System>(
    files: &FileSet<S>,
    file: &File,
    request: &ReadRequest,
    buffer: &mut [u8],
    each: &mut OnArrival<'_>,
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
) -> Result<u64, SourceError> {
    let (start, len) = (request.payload.start(), request.payload_of(buffer).len());
    let (mut filled, mut outcome) = (0, Ok(()));
    let mut position_bytes = start - request.extent.start();
    while filled < len {
        let (begin, end) = (filled, (filled + PIECE_BYTES).min(len));
        let target = &mut buffer[to_usize(position_bytes)..][..end - begin];
        match read_full(target, start + to_u64(filled), &mut read) {
            Ok(count) => filled += count,
            Err((count, error)) => {
                filled += count;
                outcome = Err(error);
            }
        }
        if filled < end {
            break;
        }
        let (start_bytes, len_bytes) = (to_u64(begin), to_u64(end - begin));
        position_bytes = each(buffer, Arrival { position_bytes, start_bytes, len_bytes });
    }
    finish(files, file, request, outcome.map(|()| filled).map_err(|error| (filled, error)))
}

/// [`read_payload`] with another call in the place of `pread`: it is given what is left to fill,
/// and where that begins in the file.
pub(super) fn read_payload_with<S: System>(
    files: &FileSet<S>,
    file: &File,
    request: &ReadRequest,
    target: &mut [u8],
    read: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
) -> Result<u64, SourceError> {
    let filled = read_full(target, request.payload.start(), read);
    finish(files, file, request, filled)
}

/// What a read is worth that came as far as this.
fn finish<S: System>(
    files: &FileSet<S>,
    file: &File,
    request: &ReadRequest,
    filled: Result<usize, (usize, io::Error)>,
) -> Result<u64, SourceError> {
    // A file that changed explains an error and an early end better than they explain themselves.
    files.verify(request.shard, file)?;
    match filled {
        Ok(filled) if to_u64(filled) == request.payload.len_bytes() => Ok(to_u64(filled)),
        Ok(filled) => Err(SourceError::EndOfFile {
            path: files.path(request.shard).to_owned(),
            expected_end_bytes: request.payload.end(),
            found_end_bytes: request.payload.start() + to_u64(filled),
        }),
        Err((filled, source)) => Err(SourceError::Read {
            path: files.path(request.shard).to_owned(),
            offset_bytes: request.payload.start() + to_u64(filled),
            source,
        }),
    }
}

/// Reads until `target` is full or the file ends; returns how far it came. Interruptions are
/// retried, anything else ends the read with the bytes that had arrived.
fn read_full(
    target: &mut [u8],
    offset_bytes: u64,
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
) -> Result<usize, (usize, io::Error)> {
    let mut filled = 0;
    while filled < target.len() {
        match read(&mut target[filled..], offset_bytes + to_u64(filled)) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err((filled, error)),
        }
    }
    Ok(filled)
}
