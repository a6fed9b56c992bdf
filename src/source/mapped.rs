//! Reads through mapped windows: a read maps its bytes, has the kernel copy them out, and unmaps
//! them. So each reader has at most one window resident, whatever the size of the file.
//!
//! A file that cannot be mapped, or whose mapping faults although the file is unchanged, is read
//! buffered from then on, and listed in [`Source::fallbacks`]. Where a sandbox forbids the copy,
//! that is every file.

use std::fs::File;
use std::io;

use rustix::io::Errno;

use crate::checkpoint::Shard;
use crate::units::to_u64;

use super::files::FileSet;
use super::report::{ByteCounters, Fallbacks};
use super::system::System;
use super::{Fallback, IoMode, IoWays, ReadRequest, Sealed, Source, SourceError, buffered};

/// See the [module](self).
pub(super) struct Mapped<S> {
    files: FileSet<S>,
    fallbacks: Fallbacks,
    counters: ByteCounters,
}

impl<S: System> Mapped<S> {
    /// Opens every file once, so that a missing or changed file is found before any byte is read.
    pub(super) fn open(system: S, shards: &[Shard]) -> Result<Self, SourceError> {
        let files = FileSet::new(system, shards);
        let fallbacks = Fallbacks::new(IoMode::Mmap, files.len());
        let source = Self { files, fallbacks, counters: ByteCounters::default() };
        for shard in source.files.shards_from_last() {
            source.files.acquire(shard, buffered::advise_sequential)?;
        }
        Ok(source)
    }

    /// Fills `target` through a window, or returns why that is not possible.
    fn copy_through_window(
        &self,
        file: &File,
        request: &ReadRequest,
        target: &mut [u8],
    ) -> Result<(), String> {
        let window = self
            .files
            .system
            .map(file, request.payload)
            .map_err(|error| format!("mapping {} was refused: {error}", request.payload))?;
        let mut filled = 0;
        while filled < target.len() {
            match self.files.system.copy_out(&window, filled, &mut target[filled..]) {
                Ok(0) => return Err(format!("the mapping of {} ended early", request.payload)),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let offset_bytes = request.payload.start() + to_u64(filled);
                    return Err(match Errno::from_io_error(&error) {
                        Some(Errno::FAULT) => {
                            format!("the mapping cannot be read at byte {offset_bytes}: {error}")
                        }
                        _ => format!("copying out of the mapping (process_vm_readv) was refused: {error}"),
                    });
                }
            }
        }
        Ok(())
    }
}

impl<S: System> Sealed for Mapped<S> {}

impl<S: System> Source for Mapped<S> {
    fn mode(&self) -> IoMode {
        IoMode::Mmap
    }

    fn read(&self, request: &ReadRequest, buffer: &mut [u8]) -> Result<u64, SourceError> {
        let target = request.payload_of(buffer);
        self.files.check_end(request)?;
        let file = self.files.acquire(request.shard, buffered::advise_sequential)?;
        // The system refuses empty mappings.
        if self.fallbacks.contains(request.shard) || target.is_empty() {
            return Ok(self.counters.buffered(buffered::read_payload(&self.files, &file, request, target)?));
        }
        let copied = self.copy_through_window(&file, request, target);
        self.files.verify(request.shard, &file)?;
        match copied {
            Ok(()) => Ok(self.counters.mapped(request.payload.len_bytes())),
            Err(reason) => {
                // The file is unchanged. Either its device failed, and a plain read reports that
                // with its own error and offset, or mapping does not work here.
                let moved = buffered::read_payload(&self.files, &file, request, target)?;
                self.fallbacks.record(request.shard, reason);
                Ok(self.counters.buffered(moved))
            }
        }
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        self.fallbacks.list()
    }

    fn ways(&self) -> IoWays {
        self.counters.ways()
    }
}
