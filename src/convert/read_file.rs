//! Reads files without the ring of a load: small files whole, parts of large ones in pieces.

use std::fs::File;
use std::io::{self, Read as _};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::Advice;

use super::ConvertError;
use crate::checkpoint::{
    Checkpoint, CheckpointError, FileIdentity, FileKind, OpenFault, ShardId, open_regular,
};
use crate::load::PARALLEL_BYTES_MIN;
use crate::units::{to_u64, to_usize};

/// Bytes of a file that are read at once: enough to be hashed by several threads.
const PIECE_BYTES: usize = PARALLEL_BYTES_MIN;
/// Bytes of a file that may stay in the page cache after they were read.
const CACHED_BYTES_MAX: u64 = 8 << 20;

/// Why a file was not read to its end.
#[derive(Debug)]
pub(super) enum ReadFault<E> {
    /// The system did not open it.
    Open(io::Error),
    /// The system refused an operation on the open file.
    Io(&'static str, io::Error),
    /// It is not a regular file.
    NotRegular(FileKind),
    /// It changed while it was read: before and after.
    Changed(Box<(FileIdentity, FileIdentity)>),
    /// The consumer of its bytes failed.
    Consumer(E),
}

impl<E: Into<ConvertError>> ReadFault<E> {
    /// The error for a file at `path`.
    pub(super) fn at(self, path: &Path) -> ConvertError {
        let path = path.to_owned();
        match self {
            Self::Open(source) => ConvertError::Read { path, operation: "open", source },
            Self::Io(operation, source) => ConvertError::Read { path, operation, source },
            Self::NotRegular(found) => CheckpointError::NotRegular { path, found }.into(),
            Self::Changed(states) => CheckpointError::FileChanged { path, states }.into(),
            Self::Consumer(error) => error.into(),
        }
    }
}

impl<E> From<OpenFault> for ReadFault<E> {
    fn from(fault: OpenFault) -> Self {
        match fault {
            OpenFault::Io(source) => Self::Open(source),
            OpenFault::NotRegular(found) => Self::NotRegular(found),
        }
    }
}

/// Reads a regular file to its end, 256 KiB at a time. Returns its length in bytes.
pub(super) fn read_file<E>(
    path: &Path,
    consume: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<u64, ReadFault<E>> {
    let (file, was) = open_regular(path)?;
    read_open_file(&file, was, consume)
}

/// Reads an open file to its end, 256 KiB at a time. Returns its length in bytes. The file must not
/// change meanwhile; of a large one, little stays in the page cache.
pub(super) fn read_open_file<E>(
    mut file: &File,
    was: FileIdentity,
    mut consume: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<u64, ReadFault<E>> {
    let mut piece = vec![0; PIECE_BYTES.min(to_usize(was.len_bytes).max(1))];
    let (mut bytes, mut dropped_bytes) = (0, 0);
    loop {
        let len = match file.read(&mut piece) {
            Ok(0) => break,
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(source) => return Err(ReadFault::Io("read", source)),
        };
        consume(&piece[..len]).map_err(ReadFault::Consumer)?;
        bytes += to_u64(len);
        if bytes - dropped_bytes >= CACHED_BYTES_MAX {
            drop_from_cache(file, dropped_bytes, bytes);
            dropped_bytes = bytes;
        }
        // A file that grows as fast as it is read has no end.
        if bytes > was.len_bytes {
            break;
        }
    }
    if dropped_bytes > 0 {
        drop_from_cache(file, dropped_bytes, bytes);
    }
    let now = FileIdentity::of(file).map_err(|source| ReadFault::Io("stat", source))?;
    if now != was || bytes != was.len_bytes {
        return Err(ReadFault::Changed(Box::new((was, now))));
    }
    Ok(bytes)
}

/// Advises the kernel to drop a range of a file from the page cache. It may keep the pages.
pub(super) fn drop_from_cache(file: &File, start: u64, end: u64) {
    // A length of zero would mean the whole file.
    if let Some(len) = NonZeroU64::new(end - start) {
        let _ = rustix::fs::fadvise(file, start, Some(len), Advice::DontNeed);
    }
}

/// A file of a checkpoint that is open, and its path for errors.
#[derive(Debug)]
pub(super) struct OpenShard {
    file: File,
    path: PathBuf,
}

impl OpenShard {
    /// Opens a file of a checkpoint.
    ///
    /// # Errors
    /// [`ConvertError::Read`], [`CheckpointError::NotRegular`].
    pub(super) fn open(checkpoint: &Checkpoint, shard: ShardId) -> Result<Self, ConvertError> {
        let path = checkpoint.shard(shard).path.clone();
        let opened = open_regular(&path).map_err(|fault| ReadFault::<ConvertError>::from(fault).at(&path));
        opened.map(|(file, _)| Self { file, path })
    }

    /// Fills `buffer` with the bytes from `offset_bytes` on.
    ///
    /// # Errors
    /// [`ConvertError::Read`].
    pub(super) fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), ConvertError> {
        self.file.read_exact_at(buffer, offset_bytes).map_err(|source| ConvertError::Read {
            path: self.path.clone(),
            operation: "read",
            source,
        })
    }
}
