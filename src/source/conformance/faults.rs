//! A system that fails on purpose: short counts, interruptions, refusals, and any change that a
//! test makes to the file right before a call.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;

use super::range;
use crate::checkpoint::{FileIdentity, OpenFault};
use crate::source::mapped_window::MappedWindow;
use crate::source::system::{DirectSupport, Kernel, System};
use crate::units::{ByteRange, to_u64};
use onelayer_system::file_system::FileSystem;

/// A call that is about to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Open,
    Identity,
    ReadAt {
        direct: bool,
    },
    /// A queued read is over, and its answer was not examined yet.
    Answered,
    SetDirect(bool),
    Map,
    CopyOut,
    FileSystem,
    Cachestat,
    Mincore,
    ByteAtHand,
    ReadAtHand,
    ReadUncached,
    DropPages,
}

impl Call {
    /// True for the calls that move bytes.
    pub(super) fn moves_bytes(self) -> bool {
        matches!(
            self,
            Self::ReadAt { .. } | Self::Answered | Self::CopyOut | Self::ReadAtHand | Self::ReadUncached
        )
    }
}

/// Runs before a call, with the number of calls before it; an errno makes the call fail.
pub(super) type Hook = dyn Fn(Call, u64) -> Option<Errno> + Send + Sync;

/// See the [module](self).
#[derive(Clone, Default)]
pub(super) struct Faulty {
    /// Limits of the bytes of successive calls, in turn; empty: no limit.
    pub(super) short_bytes: &'static [usize],
    /// Every n-th call that moves bytes is interrupted first.
    pub(super) interrupt_every: Option<u64>,
    /// The answer about direct I/O, instead of the real one.
    pub(super) support: Option<DirectSupport>,
    /// The file system of every file, instead of the real one.
    pub(super) file_system: Option<FileSystem>,
    /// The number of resident pages of a range, instead of the real one.
    pub(super) resident: Option<fn(ByteRange) -> u64>,
    /// Ranges that were dropped from the page cache.
    pub(super) dropped: Arc<Mutex<Vec<ByteRange>>>,
    /// The hook of the variant under test: its refusals.
    pub(super) refuse: Option<Arc<Hook>>,
    /// The hook of a single test.
    pub(super) hook: Option<Arc<Hook>>,
    pub(super) calls: Arc<AtomicU64>,
    pub(super) moves: Arc<AtomicU64>,
}

impl Faulty {
    fn before(&self, call: Call) -> io::Result<()> {
        let count = self.calls.fetch_add(1, Ordering::SeqCst);
        for hook in [&self.refuse, &self.hook].into_iter().flatten() {
            if let Some(errno) = hook(call, count) {
                return Err(errno.into());
            }
        }
        Ok(())
    }

    /// How many of `len` bytes the next call may move; may inject an interruption.
    fn allowed(&self, len: usize) -> io::Result<usize> {
        let count = self.moves.fetch_add(1, Ordering::SeqCst);
        if self.interrupt_every.is_some_and(|every| count % every == every - 1) {
            return Err(Errno::INTR.into());
        }
        if self.short_bytes.is_empty() {
            return Ok(len);
        }
        let turn = usize::try_from(count).unwrap() % self.short_bytes.len();
        Ok(len.min(self.short_bytes[turn]))
    }
}

impl System for Faulty {
    fn open(&self, path: &Path) -> Result<(File, FileIdentity), OpenFault> {
        self.before(Call::Open).map_err(OpenFault::Io)?;
        Kernel.open(path)
    }

    fn identity(&self, file: &File) -> io::Result<FileIdentity> {
        self.before(Call::Identity)?;
        Kernel.identity(file)
    }

    fn read_at(&self, file: &File, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        let direct = rustix::fs::fcntl_getfl(file)?.contains(rustix::fs::OFlags::DIRECT);
        self.before(Call::ReadAt { direct })?;
        let allowed = self.allowed(buffer.len())?;
        if !direct {
            return Kernel.read_at(file, &mut buffer[..allowed], offset_bytes);
        }
        if let Some(DirectSupport::Aligned { memory, offset }) = self.support {
            assert!(memory.divides(to_u64(buffer.as_ptr().addr())), "{:p} for {memory:?}", buffer.as_ptr());
            assert!(offset.divides(offset_bytes), "at {offset_bytes} for {offset:?}");
            assert!(offset.divides(to_u64(buffer.len())), "{} bytes for {offset:?}", buffer.len());
        }
        // The kernel reads whole blocks; the count is cut afterwards and the rest overwritten.
        let count = Kernel.read_at(file, buffer, offset_bytes)?;
        buffer[allowed..].fill(0xEE);
        Ok(count.min(allowed))
    }

    fn answered(&self, buffer: &mut [u8], answer: io::Result<usize>) -> io::Result<usize> {
        self.before(Call::Answered)?;
        let allowed = self.allowed(buffer.len())?;
        buffer[allowed..].fill(0xEE);
        Ok(answer?.min(allowed))
    }

    fn set_direct(&self, file: &File, direct: bool) -> io::Result<()> {
        self.before(Call::SetDirect(direct))?;
        Kernel.set_direct(file, direct)
    }

    fn direct_support(&self, file: &File) -> io::Result<DirectSupport> {
        match self.support {
            Some(support) => Ok(support),
            None => Kernel.direct_support(file),
        }
    }

    fn map(&self, file: &File, bytes: ByteRange) -> io::Result<MappedWindow> {
        self.before(Call::Map)?;
        Kernel.map(file, bytes)
    }

    fn copy_out(&self, window: &MappedWindow, position: usize, target: &mut [u8]) -> io::Result<usize> {
        self.before(Call::CopyOut)?;
        let allowed = self.allowed(target.len())?;
        Kernel.copy_out(window, position, &mut target[..allowed])
    }
    fn file_system(&self, file: &File) -> io::Result<FileSystem> {
        self.before(Call::FileSystem)?;
        self.file_system.map_or_else(|| Kernel.file_system(file), Ok)
    }

    fn pages_by_cachestat(&self, file: &File, bytes: ByteRange) -> io::Result<u64> {
        self.before(Call::Cachestat)?;
        match self.resident {
            Some(resident) => Ok(resident(bytes)),
            None => Kernel.pages_by_cachestat(file, bytes),
        }
    }

    fn pages_by_mincore(&self, file: &File, bytes: ByteRange) -> io::Result<u64> {
        self.before(Call::Mincore)?;
        match self.resident {
            Some(resident) => Ok(resident(bytes)),
            None => Kernel.pages_by_mincore(file, bytes),
        }
    }

    fn is_byte_at_hand(&self, file: &File, offset_bytes: u64) -> io::Result<bool> {
        self.before(Call::ByteAtHand)?;
        match self.resident {
            Some(resident) => Ok(resident(range(offset_bytes, offset_bytes + 1)) > 0),
            None => Kernel.is_byte_at_hand(file, offset_bytes),
        }
    }

    fn read_at_hand(&self, file: &File, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        self.before(Call::ReadAtHand)?;
        let allowed = self.allowed(buffer.len())?;
        let bytes = range(offset_bytes, offset_bytes + to_u64(allowed));
        if self.resident.is_some_and(|resident| resident(bytes) < super::all_pages(bytes)) {
            return Err(Errno::AGAIN.into());
        }
        // The pages that a test claims to be resident need not be.
        match self.resident {
            Some(_) => Kernel.read_at(file, &mut buffer[..allowed], offset_bytes),
            None => Kernel.read_at_hand(file, &mut buffer[..allowed], offset_bytes),
        }
    }

    fn read_uncached(&self, file: &File, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        self.before(Call::ReadUncached)?;
        let allowed = self.allowed(buffer.len())?;
        Kernel.read_uncached(file, &mut buffer[..allowed], offset_bytes)
    }

    fn drop_pages(&self, file: &File, bytes: ByteRange) -> io::Result<()> {
        self.before(Call::DropPages)?;
        self.dropped.lock().unwrap().push(bytes);
        Kernel.drop_pages(file, bytes)
    }
}
