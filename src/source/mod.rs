//! File bytes -> a caller's buffer: mmap windows, pread, direct I/O.
//!
//! Every source refuses to deliver bytes of a file that is no longer the one that was checked.

use crate::checkpoint::{Checkpoint, ShardId};
use crate::units::{Alignment, ByteRange};

pub use self::error::SourceError;

mod error;

/// How files are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IoMode {
    /// Windows of a read-only mapping, copied out by the kernel and dropped behind the cursor.
    Mmap,
    /// `pread` through the page cache.
    Buffered,
    /// `pread` past the page cache (`O_DIRECT`).
    Direct,
}

/// One read, as the plan lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// The file.
    pub shard: ShardId,
    /// What an aligned source reads: both ends multiples of the plan's alignment, the end possibly past the
    /// end of the file. Byte `extent.start()` of the file belongs at byte 0 of the buffer.
    pub extent: ByteRange,
    /// What must arrive; inside `extent` and inside the file. Other bytes of the buffer may hold anything.
    pub payload: ByteRange,
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

/// A way of reading. Shared by all reader threads.
pub trait Source: Send + Sync {
    /// What was asked for.
    fn mode(&self) -> IoMode;

    /// Reads one request into `buffer` (at least `extent.len_bytes()` long, its address aligned for direct I/O). Returns the bytes
    /// that were moved from the file, over-read included. Short reads and EINTR are dealt with inside.
    ///
    /// # Errors
    /// [`SourceError`] naming file and offset; the buffer then holds anything. In particular `FileChanged` if, after the bytes arrived, the
    /// file is not the one that was checked.
    fn read(&self, request: &ReadRequest, buffer: &mut [u8]) -> Result<u64, SourceError>;

    /// Files that are read in another way than asked for, so far.
    fn fallbacks(&self) -> Vec<Fallback>;
}

/// Host memory that a source may hold beside the ring, in bytes, with `readers` threads that read at most `read_bytes_max` at a time:
/// the windows of a mapping. A term of every plan.
#[must_use]
pub fn window_bytes(mode: IoMode, readers: u64, read_bytes_max: u64) -> u64 {
    match mode {
        IoMode::Mmap => readers.saturating_mul(read_bytes_max),
        IoMode::Buffered | IoMode::Direct => 0,
    }
}

/// The alignment that reads need: the largest that any file's file system reports for direct I/O, at least
/// [`Alignment::PAGE`].
pub fn alignment(_checkpoint: &Checkpoint) -> Result<Alignment, SourceError> {
    Ok(Alignment::PAGE)
}

/// Opens a source on the files of a checkpoint.
pub fn open(_mode: IoMode, _checkpoint: &Checkpoint) -> Result<Box<dyn Source>, SourceError> {
    unimplemented!()
}
