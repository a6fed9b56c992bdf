//! A small file, read to its end in pieces, by whoever copies or hashes it. It has to stand still
//! meanwhile.

use std::fs::File;
use std::io::Read as _;
use std::num::NonZeroU64;
use std::path::Path;

use rustix::fs::Advice;

use crate::checkpoint::{FileIdentity, FileKind, OpenFault, open_regular};
use crate::units::{to_u64, to_usize};

/// Bytes that are read at once.
const PIECE_BYTES: usize = 64 << 10;
/// Bytes after which the page cache of what was read is dropped.
const DROPPED_BYTES: u64 = 8 << 20;

/// Why a file was not read to its end.
#[derive(Debug)]
pub(super) enum PieceFault<E> {
    /// The system refused.
    Io(&'static str, std::io::Error),
    /// There is something else than a file.
    NotRegular(FileKind),
    /// It changed while it was read: before and after.
    Changed(Box<(FileIdentity, FileIdentity)>),
    /// Whoever got the pieces failed.
    Consumer(E),
}

/// Reads a regular file to its end, 64 KiB at a time, and drops it from the page cache behind the
/// cursor if it is large. Returns its length.
pub(super) fn read_pieces<E>(
    path: &Path,
    mut consume: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<u64, PieceFault<E>> {
    let (mut file, was) = open_regular(path).map_err(|fault| match fault {
        OpenFault::Io(source) => PieceFault::Io("open", source),
        OpenFault::NotRegular(found) => PieceFault::NotRegular(found),
    })?;
    let mut piece = vec![0; PIECE_BYTES.min(to_usize(was.len_bytes).max(1))];
    let (mut bytes, mut dropped) = (0, 0);
    loop {
        let len = match file.read(&mut piece) {
            Ok(0) => break,
            Ok(len) => len,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(source) => return Err(PieceFault::Io("read", source)),
        };
        consume(&piece[..len]).map_err(PieceFault::Consumer)?;
        bytes += to_u64(len);
        if bytes - dropped >= DROPPED_BYTES {
            drop_behind(&file, dropped, bytes);
            dropped = bytes;
        }
        // A file that grows as fast as it is read has no end.
        if bytes > was.len_bytes {
            break;
        }
    }
    if dropped > 0 {
        drop_behind(&file, dropped, bytes);
    }
    let now = FileIdentity::of(&file).map_err(|source| PieceFault::Io("stat", source))?;
    if now != was || bytes != was.len_bytes {
        return Err(PieceFault::Changed(Box::new((was, now))));
    }
    Ok(bytes)
}

/// An advice: what becomes of it is up to the system.
fn drop_behind(file: &File, start: u64, end: u64) {
    let len = NonZeroU64::new(end - start);
    if len.is_some() {
        let _ = rustix::fs::fadvise(file, start, len, Advice::DontNeed);
    }
}
