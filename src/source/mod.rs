//! File bytes to a caller's buffer: by mapped windows, `pread`, direct I/O, or whichever suits each
//! read.
//!
//! A source delivers bytes of the checked file alone. After the bytes of a read have arrived, the
//! open file's device, inode, length and times are compared with those that the checkpoint
//! recorded. Writing, truncating, removing and replacing a file change one of them before a reader
//! can see the difference, so an unchanged status proves the bytes that came before it. Two kinds
//! of writers escape: one that stores through a shared writable mapping whose pages were dirty
//! before the check, and one that changes the file within the same tick of the file system's clock
//! as the check (a few milliseconds before Linux 6.13). On network file systems the status is as
//! fresh as their attribute cache.
//!
//! The reader threads of a load call [`Source::read`], or hand their buffers to a queue of reads.
//! Sources know nothing of rings and layers.
//!
//! ```text
//! ReadRequest -> FileSet (<= 16 descriptors) -> buffered | direct | mapped | queue -> FileSet::verify -> buffer
//! ```
//!
//! [`IoMode::Auto`] combines the others: [`survey`] looks at each file before a load is planned,
//! and `auto` looks again at each read.
//!
//! The files, in the order of what they need of each other: `mapped_window`, `system` (system
//! calls), `error`, `files` (open files), `extent`, `report`, `queue`; then the sources `buffered`,
//! `mapped` and `direct`; then `survey`, `uncached` and `auto`.

use std::fs::File;
use std::path::Path;

use crate::checkpoint::{Checkpoint, Shard, ShardId};
use crate::plan::LoadPlan;
use crate::units::{Alignment, ByteRange, to_u64, to_usize};
use onelayer_system::page_cache;

use self::auto::Auto;
use self::buffered::Buffered;
use self::direct::Direct;
use self::mapped::Mapped;
use self::queue::Queueable;
use self::system::{DirectSupport, Kernel, System};

pub use self::error::SourceError;
pub use self::queue::Queueing;
pub(crate) use self::queue::{QueueingCell, ReadBuffer, ReadQueue};
pub use self::survey::{Survey, survey};
pub use crate::plan::{IoDecision, IoMode, IoWays, ReadRequest};

mod auto;
mod buffered;
#[cfg(test)]
mod conformance;
mod direct;
mod error;
mod extent;
mod files;
mod mapped;
mod mapped_window;
mod queue;
mod report;
mod survey;
mod system;
mod uncached;

impl ReadRequest {
    /// A request without alignment, into a target as long as the payload.
    fn unaligned(shard: ShardId, payload: ByteRange, target: &[u8]) -> Self {
        assert!(
            payload.len_bytes() == to_u64(target.len()),
            "the target holds the payload {payload} and no more"
        );
        Self { shard, extent: payload, payload }
    }

    /// Checks the caller's promises.
    fn check(&self, buffer: &[u8]) {
        assert!(
            self.extent.contains(self.payload),
            "the payload {} lies inside the extent {}",
            self.payload,
            self.extent
        );
        assert!(
            self.extent.len_bytes() <= to_u64(buffer.len()),
            "the buffer of {} bytes holds the extent {}",
            buffer.len(),
            self.extent
        );
    }

    /// The part of `buffer` where the payload belongs.
    fn payload_of<'a>(&self, buffer: &'a mut [u8]) -> &'a mut [u8] {
        self.check(buffer);
        let start = to_usize(self.payload.start() - self.extent.start());
        &mut buffer[start..start + to_usize(self.payload.len_bytes())]
    }
}

/// A file that is not read the way that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fallback {
    /// The file.
    pub shard: ShardId,
    /// The requested mode.
    pub from: IoMode,
    /// The mode in use.
    pub to: IoMode,
    /// The reason, with the system's error.
    pub reason: String,
}

mod sealed {
    /// Only this crate implements sources: it alone can keep the promises of
    /// [`Source`](super::Source), and may add more later.
    #[allow(
        unreachable_pub,
        reason = "named in a bound of a public trait, and out of reach for everybody else"
    )]
    pub trait Sealed {}
}
pub(crate) use self::sealed::Sealed;

/// Called with each part of a payload as it arrives: the buffer, and the new part. Returns where in
/// the buffer the next part goes: [directly behind this one](Arrival::next_position_bytes), or to
/// any free part of the buffer that is large enough. No part is longer than the one before.
pub type OnArrival<'a> = dyn FnMut(&mut [u8], Arrival) -> u64 + 'a;

/// A part of a payload that has just arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Arrival {
    /// Where it lies in the buffer.
    pub position_bytes: u64,
    /// Bytes of the payload before it.
    pub start_bytes: u64,
    /// Its size.
    pub len_bytes: u64,
}

impl Arrival {
    /// A payload that arrives as one part, at the place of its request.
    fn whole(request: &ReadRequest) -> Self {
        let position_bytes = request.payload.start() - request.extent.start();
        Self { position_bytes, start_bytes: 0, len_bytes: request.payload.len_bytes() }
    }

    /// Offset of the next part in the payload.
    #[must_use]
    pub const fn end_bytes(&self) -> u64 {
        self.start_bytes + self.len_bytes
    }

    /// Where the next part goes if nothing is moved.
    #[must_use]
    pub const fn next_position_bytes(&self) -> u64 {
        self.position_bytes + self.len_bytes
    }
}

/// A way of reading files, shared by all reader threads. Made by [`open`]; not implemented
/// elsewhere.
pub trait Source: Sealed + Send + Sync {
    /// The requested mode.
    fn mode(&self) -> IoMode;

    /// Reads one request into `buffer`, which is at least `extent.len_bytes()` long and aligned for
    /// direct I/O. Returns the bytes moved from the file, over-read included. Short reads and EINTR
    /// are handled inside.
    ///
    /// # Errors
    /// [`SourceError`] with file and offset; the buffer then holds anything. `FileChanged` if,
    /// after the bytes arrived, the file is not the one that was checked.
    ///
    /// # Panics
    /// If the payload is not inside the extent, the extent is not inside the buffer, the shard is
    /// another checkpoint's, or, for direct I/O, extent or buffer are not aligned.
    fn read(&self, request: &ReadRequest, buffer: &mut [u8]) -> Result<u64, SourceError>;

    /// [`Self::read`] with a callback that sees the payload as it arrives, may change it, and says
    /// where the rest goes. Bytes from the page cache come in pieces that are still in the core's
    /// cache; all others come at once. Only a read that succeeds proves the bytes that were seen.
    ///
    /// # Errors
    /// # Panics
    /// As [`Self::read`].
    fn read_in_pieces(
        &self,
        request: &ReadRequest,
        buffer: &mut [u8],
        each: &mut OnArrival<'_>,
    ) -> Result<u64, SourceError> {
        let moved = self.read(request, buffer)?;
        each(buffer, Arrival::whole(request));
        Ok(moved)
    }

    /// [`Self::read`] of a payload into memory at any address, which it fills. `None`, and nothing
    /// was read, if the bytes should bypass the page cache or this source only reads blocks: both
    /// need aligned memory.
    ///
    /// A small read may go through the page cache and leave its pages there: the next small read is
    /// often near.
    ///
    /// # Errors
    /// As [`Self::read`].
    ///
    /// # Panics
    /// If the target is not as long as the payload, or the shard is another checkpoint's.
    fn read_anywhere(
        &self,
        shard: ShardId,
        payload: ByteRange,
        target: &mut [u8],
    ) -> Result<Option<u64>, SourceError> {
        let _ = (shard, payload, target);
        Ok(None)
    }

    /// Files that are read in another mode than requested, so far.
    fn fallbacks(&self) -> Vec<Fallback>;

    /// The interface for queues, if reads may go through one.
    #[doc(hidden)]
    #[allow(private_interfaces, reason = "only this crate implements sources, and asks")]
    fn queueable(&self) -> Option<&dyn Queueable> {
        None
    }

    /// Bytes by the way they were read, so far.
    fn ways(&self) -> IoWays;
}

/// The alignment of reads: the largest that the file system of any file reports for direct I/O, but
/// at least a memory page and [`Alignment::PAGE`].
///
/// # Errors
/// [`SourceError::Open`] or [`SourceError::Status`] for a file that is gone.
/// [`SourceError::FileChanged`] is left to [`open`].
pub fn alignment(checkpoint: &Checkpoint) -> Result<Alignment, SourceError> {
    alignment_of(&Kernel, checkpoint.shards().iter().map(|shard| shard.path.as_path()))
}

fn alignment_of<'a, S: System>(
    system: &S,
    paths: impl Iterator<Item = &'a Path>,
) -> Result<Alignment, SourceError> {
    let mut largest = alignment_least();
    for path in paths {
        let (file, _) = system.open(path).map_err(|fault| SourceError::from_open(path, fault))?;
        largest = largest.max(direct_support(system, &file, path)?.alignment());
    }
    Ok(largest)
}

fn alignment_least() -> Alignment {
    let page = Alignment::new(page_cache::page_bytes()).expect("pages are powers of two");
    Alignment::PAGE.max(page)
}

fn direct_support<S: System>(system: &S, file: &File, path: &Path) -> Result<DirectSupport, SourceError> {
    system.direct_support(file).map_err(|source| SourceError::Status { path: path.to_owned(), source })
}

/// Opens a source on the files of a checkpoint. Every file is opened once, and the first ones stay
/// open: at most 16 descriptors are open at a time. Files that direct I/O or mapping cannot read
/// are listed in [`Source::fallbacks`].
///
/// # Errors
/// [`SourceError::Open`] for a file that can no longer be opened, [`SourceError::FileChanged`] for
/// a file that is not the one that was checked.
pub fn open(mode: IoMode, checkpoint: &Checkpoint) -> Result<Box<dyn Source>, SourceError> {
    open_shards(mode, checkpoint.shards())
}

/// [`open`] for a plan, with its decisions if it has them.
pub(crate) fn open_planned(plan: &LoadPlan, checkpoint: &Checkpoint) -> Result<Box<dyn Source>, SourceError> {
    match (plan.io(), plan.decisions()) {
        (IoMode::Auto, decisions) if decisions.len() == checkpoint.shards().len() => {
            Ok(Box::new(Auto::open(Kernel, checkpoint.shards(), decisions)?))
        }
        (mode, _) => open(mode, checkpoint),
    }
}

/// [`open`] with the decisions of a [`survey`].
pub(crate) fn open_surveyed(
    survey: &Survey,
    checkpoint: &Checkpoint,
) -> Result<Box<dyn Source>, SourceError> {
    Ok(Box::new(Auto::open(Kernel, checkpoint.shards(), &survey.decisions)?))
}

/// [`open`] on a list of files.
pub(crate) fn open_shards(mode: IoMode, shards: &[Shard]) -> Result<Box<dyn Source>, SourceError> {
    open_with(Kernel, mode, shards)
}

fn open_with<S: System + Clone + 'static>(
    system: S,
    mode: IoMode,
    shards: &[Shard],
) -> Result<Box<dyn Source>, SourceError> {
    Ok(match mode {
        IoMode::Auto => {
            let survey = survey::survey_with(&system, shards)?;
            Box::new(Auto::open(system, shards, &survey.decisions)?)
        }
        IoMode::Mmap => Box::new(Mapped::open(system, shards)?),
        IoMode::Buffered => Box::new(Buffered::open(system, shards)?),
        IoMode::Direct | IoMode::Uring => Box::new(Direct::open(system, mode, shards)?),
    })
}
