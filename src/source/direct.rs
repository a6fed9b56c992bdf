//! `pread` past the page cache (`O_DIRECT`). A file that refuses direct I/O, when it is opened or
//! at a read, is read buffered from then on, and listed in [`Source::fallbacks`].
//!
//! `O_DIRECT` is set on the descriptor that was opened and checked, not by opening the path again:
//! so there is no second open to race with, and after a refusal the flag is just cleared.

use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::io::Errno;

use crate::checkpoint::{Shard, ShardId};
use crate::units::{Alignment, to_u64, to_usize};

use super::extent::{ExtentRead, Next, Outcome};
use super::files::{FileSet, OpenFile};
use super::queue::{Begun, Queueable};
use super::report::{ByteCounters, Fallbacks};
use super::system::{DirectSupport, System};
use super::{Fallback, IoMode, IoWays, ReadRequest, Sealed, Source, SourceError, buffered};

/// See the [module](self).
pub(super) struct Direct<S> {
    /// The requested mode. [`IoMode::Uring`] is the same, but its reads go through queues.
    mode: IoMode,
    files: FileSet<S>,
    fallbacks: Fallbacks,
    /// Alignment of offsets and lengths that every file accepts.
    block: Alignment,
    /// Alignment of addresses that every file accepts.
    memory: Alignment,
    counters: ByteCounters,
}

impl<S: System> Direct<S> {
    /// Opens every file once, so that a missing or changed file, or a file system without direct
    /// I/O, is found before any byte is read.
    pub(super) fn open(system: S, mode: IoMode, shards: &[Shard]) -> Result<Self, SourceError> {
        let files = FileSet::new(system, shards);
        let mut source = Self::unopened(mode, files, Alignment::ONE, Alignment::PAGE);
        let (mut block, mut memory) = (source.block, source.memory);
        for shard in source.files.shards_from_last() {
            source.files.acquire(shard, |file| {
                let (file_memory, file_block) = source.prepare(shard, file);
                (memory, block) = (memory.max(file_memory), block.max(file_block));
            })?;
        }
        (source.memory, source.block) = (memory, block);
        Ok(source)
    }

    /// The same on files that were already checked, none of them open here yet. `memory` and
    /// `block` are the largest alignments of the files that will be read.
    pub(super) fn unopened(mode: IoMode, files: FileSet<S>, memory: Alignment, block: Alignment) -> Self {
        let fallbacks = Fallbacks::new(mode, files.len());
        Self { mode, files, fallbacks, block, memory, counters: ByteCounters::default() }
    }

    /// Reads direct, or returns `None` if the file refuses direct I/O, now or earlier: then nothing
    /// was read through the page cache.
    pub(super) fn read_or_refuse(
        &self,
        request: &ReadRequest,
        buffer: &mut [u8],
    ) -> Result<Option<u64>, SourceError> {
        let file = self.wait_for(request, buffer)?;
        self.read_direct(&file, request, buffer)
    }

    /// True if this file has refused direct I/O.
    pub(super) fn has_fallen_back(&self, shard: ShardId) -> bool {
        self.fallbacks.contains(shard)
    }

    /// Sets `O_DIRECT` on a file that was just opened, or records why not. Returns its alignment of
    /// addresses, and of offsets and lengths.
    fn prepare(&self, shard: ShardId, file: &File) -> (Alignment, Alignment) {
        if !self.fallbacks.contains(shard) {
            match self.enable(file) {
                Ok(alignments) => return alignments,
                Err(reason) => self.fallbacks.record(shard, reason),
            }
        }
        buffered::advise_sequential(file);
        (Alignment::ONE, Alignment::ONE)
    }

    fn enable(&self, file: &File) -> Result<(Alignment, Alignment), String> {
        let alignments = match self.files.system.direct_support(file) {
            Ok(DirectSupport::None) => return Err("its file system has no direct i/o".to_owned()),
            Ok(DirectSupport::Aligned { memory, offset }) => (memory, offset),
            Ok(DirectSupport::Unknown) => (Alignment::PAGE, Alignment::PAGE),
            Err(error) => return Err(format!("its direct i/o alignment cannot be read: {error}")),
        };
        match self.files.system.set_direct(file, true) {
            Ok(()) => Ok(alignments),
            Err(error) => Err(format!("O_DIRECT was refused: {error}")),
        }
    }

    /// Checks the promises that only direct reads need.
    fn check(&self, request: &ReadRequest, buffer: &[u8]) {
        request.check(buffer);
        assert!(
            self.block.divides(request.extent.start()) && self.block.divides(request.extent.end()),
            "the extent {} is aligned to {} bytes",
            request.extent,
            self.block.bytes()
        );
        assert!(
            self.memory.divides(to_u64(buffer.as_ptr().addr())),
            "the buffer at {:p} is aligned to {} bytes",
            buffer,
            self.memory.bytes()
        );
    }

    /// Reads a file that has fallen back. Clears the flag every time: this descriptor may have been
    /// opened direct before another thread's descriptor was refused. Direct reads in flight are not
    /// affected: they stay aligned, which suits buffered reads too.
    fn read_buffered(
        &self,
        file: &File,
        request: &ReadRequest,
        buffer: &mut [u8],
    ) -> Result<u64, SourceError> {
        self.files
            .system
            .set_direct(file, false)
            .map_err(|source| self.read_error(request, request.payload.start(), source))?;
        let target = request.payload_of(buffer);
        Ok(self.counters.buffered(buffered::read_payload(&self.files, file, request, target)?))
    }

    /// Checks the request and opens its file. `None` if it would have to wait for a descriptor and
    /// must not.
    fn admit(
        &self,
        request: &ReadRequest,
        buffer: &[u8],
        may_wait: bool,
    ) -> Result<Option<Arc<OpenFile>>, SourceError> {
        self.check(request, buffer);
        self.files.check_end(request)?;
        self.files.acquire_if(request.shard, may_wait, |file| {
            self.prepare(request.shard, file);
        })
    }

    /// Opens the file for a queued read; `None` if the file refuses direct I/O.
    pub(super) fn begin_or_refuse(
        &self,
        request: &ReadRequest,
        buffer: &[u8],
        may_wait: bool,
    ) -> Result<Option<Begun>, SourceError> {
        let Some(file) = self.admit(request, buffer, may_wait)? else { return Ok(Some(Begun::Busy)) };
        let is_refused = self.fallbacks.contains(request.shard);
        Ok((!is_refused).then(|| Begun::Read(file, ExtentRead::new(request, self.block))))
    }

    fn wait_for(&self, request: &ReadRequest, buffer: &[u8]) -> Result<Arc<OpenFile>, SourceError> {
        Ok(self.admit(request, buffer, true)?.expect("it was to wait for a descriptor"))
    }

    /// Reads the extent piece by piece. `None` if the file refuses direct I/O.
    fn read_direct(
        &self,
        file: &OpenFile,
        request: &ReadRequest,
        buffer: &mut [u8],
    ) -> Result<Option<u64>, SourceError> {
        if self.fallbacks.contains(request.shard) {
            return Ok(None);
        }
        let target = &mut buffer[..to_usize(request.extent.len_bytes())];
        let mut extent = ExtentRead::new(request, self.block);
        let mut next = extent.next();
        loop {
            match next {
                Next::Read(piece) => {
                    let target = &mut target[to_usize(piece.position_bytes)..];
                    next = extent.on_answer(self.files.system.read_at(file, target, piece.offset_bytes));
                }
                Next::Over(outcome) => return self.settle(outcome, file, request),
            }
        }
    }

    /// The bytes that were moved from the checked file. `None` if direct I/O on this file is given
    /// up.
    pub(super) fn settle(
        &self,
        outcome: Outcome,
        file: &OpenFile,
        request: &ReadRequest,
    ) -> Result<Option<u64>, SourceError> {
        self.files.verify(request.shard, file)?;
        let reason = match outcome {
            Outcome::Filled { moved_bytes } => return Ok(Some(self.counters.direct(moved_bytes))),
            Outcome::Stuck { offset_bytes } => {
                format!("a direct read ended inside a block at byte {offset_bytes}")
            }
            Outcome::Failed { offset_bytes, error } => match Errno::from_io_error(&error) {
                Some(Errno::INVAL | Errno::OPNOTSUPP) => {
                    format!("a direct read at byte {offset_bytes} was refused: {error}")
                }
                _ => return Err(self.read_error(request, offset_bytes, error)),
            },
        };
        self.fallbacks.record(request.shard, reason);
        buffered::advise_sequential(file);
        Ok(None)
    }

    fn read_error(&self, request: &ReadRequest, offset_bytes: u64, source: io::Error) -> SourceError {
        SourceError::Read { path: self.files.path(request.shard).to_owned(), offset_bytes, source }
    }
}

impl<S: System> Sealed for Direct<S> {}

impl<S: System> Source for Direct<S> {
    fn mode(&self) -> IoMode {
        self.mode
    }

    fn read(&self, request: &ReadRequest, buffer: &mut [u8]) -> Result<u64, SourceError> {
        let file = self.wait_for(request, buffer)?;
        match self.read_direct(&file, request, buffer)? {
            Some(moved_bytes) => Ok(moved_bytes),
            None => self.read_buffered(&file, request, buffer),
        }
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        self.fallbacks.list()
    }

    fn queueable(&self) -> Option<&dyn Queueable> {
        (self.mode == IoMode::Uring).then_some(self)
    }

    fn ways(&self) -> IoWays {
        self.counters.ways()
    }
}

impl<S: System> Queueable for Direct<S> {
    fn refusal(&self) -> Option<String> {
        let refused = self.fallbacks.list();
        let is_none_left = refused.len() == self.files.len();
        refused.into_iter().next().filter(|_| is_none_left).map(|fallback| fallback.reason)
    }

    fn registers(&self) -> bool {
        true
    }

    fn begin(&self, request: &ReadRequest, buffer: &mut [u8], may_wait: bool) -> Result<Begun, SourceError> {
        if let Some(begun) = self.begin_or_refuse(request, buffer, may_wait)? {
            return Ok(begun);
        }
        let Some(file) = self.admit(request, buffer, may_wait)? else { return Ok(Begun::Busy) };
        Ok(Begun::Done { moved_bytes: self.read_buffered(&file, request, buffer)? })
    }

    fn read_at(&self, file: &File, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        self.files.system.read_at(file, buffer, offset_bytes)
    }

    fn answered(&self, buffer: &mut [u8], answer: io::Result<usize>) -> io::Result<usize> {
        self.files.system.answered(buffer, answer)
    }

    fn finish(
        &self,
        outcome: Outcome,
        file: &OpenFile,
        request: &ReadRequest,
        buffer: &mut [u8],
    ) -> Result<u64, SourceError> {
        match self.settle(outcome, file, request)? {
            Some(moved_bytes) => Ok(moved_bytes),
            None => self.read_buffered(file, request, buffer),
        }
    }
}
