//! What a plan asks of a source: how to read, and one read.

use std::fmt;

use crate::checkpoint::ShardId;
use crate::units::ByteRange;

/// How files are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IoMode {
    /// For each file, and for each read of a file that is partly in the page cache, the fastest of
    /// the others that leaves the page cache as it was: see [`IoDecision`](super::IoDecision).
    /// Where most is to be read past it and cast or copied on the way, that is done by queues,
    /// as [`Self::Uring`] does.
    Auto,
    /// Windows of a read-only mapping, copied out by the kernel and dropped behind the cursor.
    Mmap,
    /// `pread` through the page cache.
    Buffered,
    /// `pread` past the page cache (`O_DIRECT`).
    Direct,
    /// The same, by queues of reads (io_uring) in place of a thread for each read in flight. Where
    /// the kernel refuses queues, as [`Self::Direct`];
    /// [`LoadReport::queueing`](crate::LoadReport::queueing) tells.
    Uring,
}

/// One read, as the plan lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// The file.
    pub shard: ShardId,
    /// What an aligned source reads: both ends multiples of the plan's alignment, the end possibly
    /// past the end of the file. Byte `extent.start()` of the file belongs at byte 0 of the
    /// buffer.
    pub extent: ByteRange,
    /// What must arrive; inside `extent` and inside the file. Other bytes of the buffer may hold
    /// anything.
    pub payload: ByteRange,
}

impl fmt::Display for IoMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Mmap => "mmap",
            Self::Buffered => "buffered",
            Self::Direct => "direct",
            Self::Uring => "uring",
        })
    }
}

/// Host memory that a source may hold beside the ring, in bytes, with `readers` threads that read
/// extents of at most `read_bytes_max` at a time: the windows of a mapping, one per reader, each
/// gone when its read ends. A term of every plan. (Page tables come on top, two pages per window
/// and one per 2 MiB of it.)
#[must_use]
pub(crate) fn window_bytes(mode: IoMode, readers: u64, read_bytes_max: u64) -> u64 {
    match mode {
        IoMode::Mmap => readers.saturating_mul(read_bytes_max),
        IoMode::Auto | IoMode::Buffered | IoMode::Direct | IoMode::Uring => 0,
    }
}
