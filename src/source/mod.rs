//! File bytes -> a caller's buffer: mmap windows, pread, direct I/O, or whichever of them suits
//! each read.
//!
//! Every source refuses to deliver bytes of a file that is no longer the one that was checked:
//! after the bytes of a read have arrived, the open file's device, inode, length and times are
//! compared with those recorded by the checkpoint. Writing, truncating, removing and replacing a
//! file all move one of them before a reader can see the difference, so an unchanged status vouches
//! for the bytes that came before it. Two writers escape: one that stores through a shared writable
//! mapping that it dirtied before the check, and one that changes the file within the same tick of
//! the file system's clock as the check itself (before Linux 6.13, a few milliseconds). On network
//! file systems the status is as fresh as their cache of attributes.
//!
//! The control loop's reader threads call [`Source::read`], or hand their buffers to a queue of
//! reads; nothing here knows about rings or layers.
//!
//! ```text
//! ReadRequest -> FileSet (<= 16 descriptors) -> buffered | direct | mapped | queue -> FileSet::verify -> buffer
//! ```
//!
//! [`IoMode::Auto`] is made of the others: [`survey`] looks at each file before a load is planned,
//! and `auto` asks again at each read.

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
    /// One without blocks, into a target as long as the payload.
    fn unaligned(shard: ShardId, payload: ByteRange, target: &[u8]) -> Self {
        assert!(
            payload.len_bytes() == to_u64(target.len()),
            "the target holds the payload {payload} and no more"
        );
        Self { shard, extent: payload, payload }
    }

    /// Asserts what the caller promised.
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
    /// What was asked for.
    pub from: IoMode,
    /// What is used.
    pub to: IoMode,
    /// Why, with the system's error.
    pub reason: String,
}

mod sealed {
    /// Only this crate implements sources: it alone can prove what [`Source`](super::Source)
    /// promises, and it may ask more of them later.
    #[allow(
        unreachable_pub,
        reason = "named in a bound of a public trait, and out of reach for everybody else"
    )]
    pub trait Sealed {}
}
pub(crate) use self::sealed::Sealed;

/// Who sees a payload as it arrives: the buffer, and what of it is new. Returns where in the buffer
/// the next part is to go: [behind this one](Arrival::next_position_bytes), or anywhere in the
/// buffer where nothing lies that is wanted any more and as much as has just arrived has room: no
/// part is longer than the one before.
pub type OnArrival<'a> = dyn FnMut(&mut [u8], Arrival) -> u64 + 'a;

/// A part of a payload that has just arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Arrival {
    /// Where it lies in the buffer.
    pub position_bytes: u64,
    /// What of the payload came before it.
    pub start_bytes: u64,
    /// Its size.
    pub len_bytes: u64,
}

impl Arrival {
    /// A payload that arrives at once, where its request says.
    fn whole(request: &ReadRequest) -> Self {
        let position_bytes = request.payload.start() - request.extent.start();
        Self { position_bytes, start_bytes: 0, len_bytes: request.payload.len_bytes() }
    }

    /// Where the next part lies in the payload.
    #[must_use]
    pub const fn end_bytes(&self) -> u64 {
        self.start_bytes + self.len_bytes
    }

    /// Where the next part goes, if all stays where it is.
    #[must_use]
    pub const fn next_position_bytes(&self) -> u64 {
        self.position_bytes + self.len_bytes
    }
}

/// A way of reading. Shared by all reader threads. Made by [`open`]; not to be implemented
/// elsewhere.
pub trait Source: Sealed + Send + Sync {
    /// What was asked for.
    fn mode(&self) -> IoMode;

    /// Reads one request into `buffer` (at least `extent.len_bytes()` long, its address aligned for
    /// direct I/O). Returns the bytes that were moved from the file, over-read included. Short
    /// reads and EINTR are dealt with inside.
    ///
    /// # Errors
    /// [`SourceError`] naming file and offset; the buffer then holds anything. In particular
    /// `FileChanged` if, after the bytes arrived, the file is not the one that was checked.
    ///
    /// # Panics
    /// If the payload is not inside the extent, the extent is not inside the buffer, the shard is
    /// another checkpoint's, or, for direct I/O, extent or buffer are not aligned.
    fn read(&self, request: &ReadRequest, buffer: &mut [u8]) -> Result<u64, SourceError>;

    /// [`Self::read`], with somebody who sees the payload as it arrives, may change it, and says
    /// where the rest goes. What comes out of the page cache comes in pieces that are still in
    /// the core's own cache then; everything else at once. Only a read that succeeds vouches
    /// for the bytes that were seen.
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
    /// has been read, if the bytes are to go past the page cache, or this source reads blocks
    /// alone: they need aligned memory.
    ///
    /// What is small may be read through the page cache and stay there: whoever reads small pieces
    /// often wants the next one, too.
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

    /// Files that are read in another way than asked for, so far.
    fn fallbacks(&self) -> Vec<Fallback>;

    /// What a queue needs, if reads may go through one.
    #[doc(hidden)]
    #[allow(private_interfaces, reason = "only this crate implements sources, and asks")]
    fn queueable(&self) -> Option<&dyn Queueable> {
        None
    }

    /// Bytes by the way they were read, so far.
    fn ways(&self) -> IoWays;
}

/// The alignment that reads need: the largest that any file's file system reports for direct I/O,
/// and at least a memory page and [`Alignment::PAGE`].
///
/// # Errors
/// [`SourceError::Open`] or [`SourceError::Status`] for a file that is gone,
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

/// Opens a source on the files of a checkpoint. Every file is opened once, the first
/// ones stay open: at most 16 descriptors are held at any time, and files that direct I/O or
/// mapping cannot read are known as [`Source::fallbacks`] as far as opening tells.
///
/// # Errors
/// [`SourceError::Open`] for a file that cannot be opened any more, [`SourceError::FileChanged`]
/// for one that is not what was checked.
pub fn open(mode: IoMode, checkpoint: &Checkpoint) -> Result<Box<dyn Source>, SourceError> {
    open_shards(mode, checkpoint.shards())
}

/// [`open`] as a plan was made: with its decisions, where it has them.
pub(crate) fn open_planned(plan: &LoadPlan, checkpoint: &Checkpoint) -> Result<Box<dyn Source>, SourceError> {
    match (plan.io(), plan.decisions()) {
        (IoMode::Auto, decisions) if decisions.len() == checkpoint.shards().len() => {
            Ok(Box::new(Auto::open(Kernel, checkpoint.shards(), decisions)?))
        }
        (mode, _) => open(mode, checkpoint),
    }
}

/// [`open`] with what [`survey`] has found.
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
