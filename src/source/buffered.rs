//! `pread` through the page cache: what works on every file system, and what the other two fall back to.

use std::fs::File;
use std::io;

use rustix::fs::Advice;

use crate::checkpoint::Shard;
use crate::units::to_u64;

use super::files::FileSet;
use super::system::System;
use super::tally::Tally;
use super::{Fallback, IoMode, IoWays, ReadRequest, Sealed, Source, SourceError};

/// See the [module](self).
pub(super) struct Buffered<S> {
    files: FileSet<S>,
    tally: Tally,
}

impl<S: System> Buffered<S> {
    /// Opens every file once, so that one that is gone or changed is found before any byte is read.
    pub(super) fn open(system: S, shards: &[Shard]) -> Result<Self, SourceError> {
        let source = Self { files: FileSet::new(system, shards), tally: Tally::default() };
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
        Ok(self.tally.buffered(read_payload(&self.files, &file, request, target)?))
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        Vec::new()
    }

    fn ways(&self) -> IoWays {
        self.tally.ways()
    }
}

/// Tells the kernel to read ahead further. A hint: where it is refused, nothing is lost but speed.
pub(super) fn advise_sequential(file: &File) {
    let _ = rustix::fs::fadvise(file, 0, None, Advice::Sequential);
}

/// Fills `target` with the payload and proves afterwards that the file is the one that was checked. Returns
/// the bytes moved.
pub(super) fn read_payload<S: System>(
    files: &FileSet<S>,
    file: &File,
    request: &ReadRequest,
    target: &mut [u8],
) -> Result<u64, SourceError> {
    let system = &files.system;
    read_payload_with(files, file, request, target, |rest, offset| system.read_at(file, rest, offset))
}

/// [`read_payload`] with another call in the place of `pread`: it is given what is left to fill, and where that begins in the
/// file.
pub(super) fn read_payload_with<S: System>(
    files: &FileSet<S>,
    file: &File,
    request: &ReadRequest,
    target: &mut [u8],
    read: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
) -> Result<u64, SourceError> {
    let filled = read_full(target, request.payload.start(), read);
    // A file that changed explains an error and an early end better than they explain themselves.
    files.verify(request.shard, file)?;
    match filled {
        Ok(filled) if filled == target.len() => Ok(to_u64(filled)),
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

/// Reads until `target` is full or the file ends; returns how far it came. Interruptions are retried,
/// anything else ends the read with the bytes that had arrived.
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
