//! The system calls of this stage, behind one trait: tests replace it to inject short reads,
//! interruptions, refusals and files that change.
//!
//! [`Kernel`] is the only implementation outside tests. It does not retry, loop or interpret.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{Advice, AtFlags, OFlags, Statx, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags};

use crate::checkpoint::{FileIdentity, OpenFault, open_regular};
use crate::units::{Alignment, ByteRange};
use onelayer_system::file_system::FileSystem;
use onelayer_system::page_cache;

use super::mapped_window::MappedWindow;

/// What a file system says about direct I/O on one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DirectSupport {
    /// `STATX_DIOALIGN` was answered with zeros.
    None,
    /// Both alignments, for memory addresses and for offsets and lengths.
    Aligned { memory: Alignment, offset: Alignment },
    /// An older kernel, or a file system that does not report. 4096 is assumed; a read that is
    /// refused falls back.
    Unknown,
}

impl DirectSupport {
    /// Alignment of reads, for addresses and for offsets; one byte if unknown.
    pub(super) fn alignment(self) -> Alignment {
        match self {
            Self::Aligned { memory, offset } => memory.max(offset),
            Self::None | Self::Unknown => Alignment::ONE,
        }
    }
}

/// The system calls of this stage.
pub(super) trait System: Send + Sync {
    /// Opens a regular file for reading.
    fn open(&self, path: &Path) -> Result<(File, FileIdentity), OpenFault>;

    /// The identity of the open file now.
    fn identity(&self, file: &File) -> io::Result<FileIdentity>;

    /// One `pread`.
    fn read_at(&self, file: &File, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize>;

    /// Passes on the answer to a queued read into `buffer`. Tests inject faults here.
    fn answered(&self, buffer: &mut [u8], answer: io::Result<usize>) -> io::Result<usize> {
        let _ = buffer;
        answer
    }

    /// Sets or clears `O_DIRECT` on an open file.
    fn set_direct(&self, file: &File, direct: bool) -> io::Result<()>;

    /// What the file system says about direct I/O on this file.
    fn direct_support(&self, file: &File) -> io::Result<DirectSupport>;

    /// Maps some bytes of a file; see [`MappedWindow::map`].
    fn map(&self, file: &File, bytes: ByteRange) -> io::Result<MappedWindow>;

    /// Copies out of a window once; see [`MappedWindow::copy_out`].
    fn copy_out(&self, window: &MappedWindow, position: usize, target: &mut [u8]) -> io::Result<usize>;

    /// The file system that holds the file.
    fn file_system(&self, file: &File) -> io::Result<FileSystem>;

    /// Pages of these bytes that are in the page cache, by `cachestat`.
    fn pages_by_cachestat(&self, file: &File, bytes: ByteRange) -> io::Result<u64>;

    /// The same by `mincore`; `EPERM` if `mincore` would not tell this process the truth.
    fn pages_by_mincore(&self, file: &File, bytes: ByteRange) -> io::Result<u64>;

    /// True if this byte can be read without waiting; see [`page_cache::is_byte_at_hand`].
    fn is_byte_at_hand(&self, file: &File, offset_bytes: u64) -> io::Result<bool>;

    /// One `pread` of bytes in the page cache (`RWF_NOWAIT`), up to the first missing page;
    /// `EAGAIN` if the first page is missing. `EOPNOTSUPP` where the kernel or file system does not
    /// know the flag.
    fn read_at_hand(&self, file: &File, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize>;

    /// One `pread` whose new pages the kernel drops afterwards (`RWF_DONTCACHE`, Linux 6.14).
    /// `EOPNOTSUPP` where the kernel or file system does not know the flag.
    fn read_uncached(&self, file: &File, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize>;

    /// Drops whole pages of the range from the page cache, unless they are in use.
    fn drop_pages(&self, file: &File, bytes: ByteRange) -> io::Result<()>;
}

/// `RWF_DONTCACHE` of `linux/fs.h`.
const DONTCACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);

/// The real system.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kernel;

impl System for Kernel {
    fn open(&self, path: &Path) -> Result<(File, FileIdentity), OpenFault> {
        open_regular(path)
    }

    fn identity(&self, file: &File) -> io::Result<FileIdentity> {
        FileIdentity::of(file)
    }

    fn read_at(&self, file: &File, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        file.read_at(buffer, offset_bytes)
    }

    fn set_direct(&self, file: &File, direct: bool) -> io::Result<()> {
        let mut flags = rustix::fs::fcntl_getfl(file)?;
        flags.set(OFlags::DIRECT, direct);
        Ok(rustix::fs::fcntl_setfl(file, flags)?)
    }

    fn direct_support(&self, file: &File) -> io::Result<DirectSupport> {
        let status = match rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
            Ok(status) => status,
            // A kernel or sandbox without statx reports nothing either.
            Err(Errno::NOSYS | Errno::PERM) => return Ok(DirectSupport::Unknown),
            Err(error) => return Err(error.into()),
        };
        Ok(support_of(&status))
    }

    fn map(&self, file: &File, bytes: ByteRange) -> io::Result<MappedWindow> {
        MappedWindow::map(file, bytes)
    }

    fn copy_out(&self, window: &MappedWindow, position: usize, target: &mut [u8]) -> io::Result<usize> {
        window.copy_out(position, target)
    }

    fn file_system(&self, file: &File) -> io::Result<FileSystem> {
        FileSystem::holding(file)
    }

    fn pages_by_cachestat(&self, file: &File, bytes: ByteRange) -> io::Result<u64> {
        page_cache::pages_by_cachestat(file, bytes)
    }

    fn pages_by_mincore(&self, file: &File, bytes: ByteRange) -> io::Result<u64> {
        if !page_cache::may_tell(file)? {
            return Err(Errno::PERM.into());
        }
        page_cache::pages_by_mincore(file, bytes)
    }

    fn is_byte_at_hand(&self, file: &File, offset_bytes: u64) -> io::Result<bool> {
        page_cache::is_byte_at_hand(file, offset_bytes)
    }

    fn read_uncached(&self, file: &File, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        let mut buffers = [IoSliceMut::new(buffer)];
        Ok(rustix::io::preadv2(file, &mut buffers, offset_bytes, DONTCACHE)?)
    }

    fn read_at_hand(&self, file: &File, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        let mut buffers = [IoSliceMut::new(buffer)];
        Ok(rustix::io::preadv2(file, &mut buffers, offset_bytes, ReadWriteFlags::NOWAIT)?)
    }

    fn drop_pages(&self, file: &File, bytes: ByteRange) -> io::Result<()> {
        // A missing length would mean up to the end of the file.
        match NonZeroU64::new(bytes.len_bytes()) {
            None => Ok(()),
            len_bytes => Ok(rustix::fs::fadvise(file, bytes.start(), len_bytes, Advice::DontNeed)?),
        }
    }
}

/// Reads the two fields as statx(2) defines them.
fn support_of(status: &Statx) -> DirectSupport {
    if status.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return DirectSupport::Unknown;
    }
    let alignment = |bytes: u32| Alignment::new(u64::from(bytes));
    match (alignment(status.stx_dio_mem_align), alignment(status.stx_dio_offset_align)) {
        (Some(memory), Some(offset)) => DirectSupport::Aligned { memory, offset },
        _ => DirectSupport::None,
    }
}
