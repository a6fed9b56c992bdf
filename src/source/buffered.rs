//! `pread` through the page cache. It works on every file system; the other sources fall back to
//! it.

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
    /// Opens every file once, so that a missing or changed file is found before any byte is read.
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

/// Asks the kernel to read far ahead. Only a hint: an error costs speed alone.
pub(super) fn advise_sequential(file: &File) {
    let _ = rustix::fs::fadvise(file, 0, None, Advice::Sequential);
}

/// Fills `target` with the payload, and verifies afterwards that the file is the one that was
/// checked. Returns the bytes moved.
pub(super) fn read_payload<S: System>(
    files: &FileSet<S>,
    file: &File,
    request: &ReadRequest,
    target: &mut [u8],
) -> Result<u64, SourceError> {
    let system = &files.system;
    read_payload_with(files, file, request, target, |rest, offset| system.read_at(file, rest, offset))
}

/// Length of a piece where each piece is processed as it arrives: it fits a core's second-level
/// cache with room for the results, and is long enough for the system call to cost little.
const PIECE_BYTES: usize = 256 << 10;

/// [`read_payload_with`] piece by piece. The file is verified once, after the last piece.
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

/// [`read_payload`] with another call instead of `pread`: `read` gets the rest to fill, and its
/// file offset.
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

/// The result of a read, after verifying the file.
fn finish<S: System>(
    files: &FileSet<S>,
    file: &File,
    request: &ReadRequest,
    filled: Result<usize, (usize, io::Error)>,
) -> Result<u64, SourceError> {
    // A changed file is the better explanation of an error or an early end.
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

/// Reads until `target` is full or the file ends; returns the bytes read. Interruptions are
/// retried; any other error ends the read with the bytes that had arrived.
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
