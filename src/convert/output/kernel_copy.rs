//! Lets the kernel copy bytes that do not change, where that is faster than writing them.
//!
//! | where | how | why |
//! |---|---|---|
//! | source and target on one file system that shares blocks (btrfs, xfs, bcachefs, ...) | `FICLONERANGE` | no byte is written, and none takes space twice |
//! | both on one network file system (NFS, SMB, Ceph) | `copy_file_range` | the server copies; no byte goes back over the wire |
//! | anywhere else | not at all | `copy_file_range` would pass every byte through the page cache: slower than writing past it |
//!
//! The bytes are read all the same, since they are hashed. Blocks can be shared only where a
//! stretch has the same offset within a block of 4096 bytes in both files. The data of each file
//! starts on a block, and most tensors are multiples of one. The report has the first reason why
//! bytes were not copied this way.
#![allow(unsafe_code, reason = "FICLONERANGE has no safe wrapper")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::sync::Mutex;
use std::sync::PoisonError;

use rustix::io::Errno;

use super::super::{KernelCopied, KernelCopy};
use super::writer::BLOCK;
use crate::checkpoint::{Checkpoint, ShardId, open_regular};
use crate::plan::Placement;
use crate::units::to_usize;

/// Shortest stretch that is copied: calls for a shorter one cost more than they save.
const STRETCH_BYTES_MIN: u64 = 64 << 10;

/// A range of bytes that is the same in a file of the source and in a file of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    shard: ShardId,
    source_start: u64,
    target_start: u64,
    len_bytes: u64,
}

/// The stretches of a file whose data starts at `data_start`, in its order.
pub(super) fn stretches(checkpoint: &Checkpoint, placements: &[Placement], data_start: u64) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    let is_the_same = |placement: &&Placement| {
        placement.cast.is_none() && placement.quantised.is_none() && !placement.extent.is_empty()
    };
    for placement in placements.iter().filter(is_the_same) {
        let next = Stretch {
            shard: checkpoint.tensor(placement.tensor).shard,
            source_start: placement.extent.start(),
            target_start: data_start + placement.arena_offset_bytes,
            len_bytes: placement.extent.len_bytes(),
        };
        match stretches.last_mut() {
            Some(last) if last.is_continued_by(&next) => last.len_bytes += next.len_bytes,
            _ => stretches.push(next),
        }
    }
    stretches
}

impl Stretch {
    fn is_continued_by(&self, next: &Self) -> bool {
        self.shard == next.shard
            && self.source_start + self.len_bytes == next.source_start
            && self.target_start + self.len_bytes == next.target_start
    }

    /// The whole blocks of the target in it.
    fn blocks(self) -> Option<Self> {
        let start = BLOCK.up(self.target_start)?;
        let end = BLOCK.down(self.target_start + self.len_bytes);
        let source_start = self.source_start + (start - self.target_start);
        let len_bytes = end.checked_sub(start).filter(|&bytes| bytes > 0)?;
        Some(Self { source_start, target_start: start, len_bytes, ..self })
    }

    /// True if blocks of the target are blocks of the source.
    fn is_block_aligned(&self) -> bool {
        BLOCK.divides(self.source_start.abs_diff(self.target_start))
    }

    fn target(&self) -> Range<u64> {
        self.target_start..self.target_start + self.len_bytes
    }
}

/// The copies of the kernel in one conversion.
#[derive(Debug)]
pub(super) struct KernelCopier {
    mode: KernelCopy,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    copied: KernelCopied,
    cannot_clone: bool,
    cannot_copy: bool,
}

impl KernelCopier {
    pub(super) fn new(mode: KernelCopy) -> Self {
        Self { mode, state: Mutex::default() }
    }

    /// The bytes that were copied so far.
    pub(super) fn copied(&self) -> KernelCopied {
        self.lock().copied.clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // An update cannot be left half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies stretches where that is faster. Returns the ranges of the target that were copied:
    /// whole blocks, ascending. A failure is not an error: those bytes are written instead.
    pub(super) fn copy(
        &self,
        checkpoint: &Checkpoint,
        stretches: &[Stretch],
        target: &File,
    ) -> Vec<Range<u64>> {
        let mut done = Vec::new();
        if self.mode == KernelCopy::Never {
            return done;
        }
        for stretch in stretches.iter().filter(|stretch| stretch.len_bytes >= STRETCH_BYTES_MIN) {
            let mut state = self.lock();
            if state.cannot_clone && state.cannot_copy {
                break;
            }
            // Whole blocks only, for copies too: the ends are written by the block.
            let Some(blocks) = stretch.blocks() else { continue };
            match self.copy_one(&mut state, checkpoint, &blocks, target) {
                Ok(Some(range)) => done.push(range),
                Ok(None) => {}
                Err(reason) => {
                    state.copied.fallback.get_or_insert(reason);
                }
            }
        }
        done
    }

    fn copy_one(
        &self,
        state: &mut State,
        checkpoint: &Checkpoint,
        blocks: &Stretch,
        target: &File,
    ) -> Result<Option<Range<u64>>, String> {
        let shard = checkpoint.shard(blocks.shard);
        let opened = open_regular(&shard.path);
        let Ok((source, identity)) = opened else { return Ok(None) };
        if identity != shard.identity {
            // The reader of the file returns the error.
            return Ok(None);
        }
        if !state.cannot_clone && !blocks.is_block_aligned() {
            let reason = "source and target have the bytes at other offsets within 4096-byte blocks";
            state.copied.fallback.get_or_insert_with(|| reason.to_owned());
        } else if !state.cannot_clone {
            match clone_range(&source, target, blocks) {
                Ok(()) => {
                    state.copied.cloned_bytes += blocks.len_bytes;
                    return Ok(Some(blocks.target()));
                }
                Err(error) => {
                    state.cannot_clone = true;
                    state.copied.fallback = Some(format!("blocks cannot be shared: {error}"));
                }
            }
        }
        if state.cannot_copy || !self.may_copy(&source, target) {
            state.cannot_copy = true;
            return Ok(None);
        }
        match copy_range(&source, target, blocks) {
            Ok(()) => {
                state.copied.copied_bytes += blocks.len_bytes;
                Ok(Some(blocks.target()))
            }
            Err(error) => {
                state.cannot_copy = true;
                Err(format!("copy_file_range was refused: {error}"))
            }
        }
    }

    /// True if a server copies the bytes itself.
    fn may_copy(&self, source: &File, target: &File) -> bool {
        /// NFS, SMB 1, SMB 2, Ceph: `statfs(2)`.
        const SERVERS: [u32; 4] = [0x6969, 0xFF53_4D42, 0xFE53_4D42, 0x00C3_6400];
        if self.mode == KernelCopy::Always {
            return true;
        }
        let device = |file: &File| rustix::fs::fstat(file).map(|stat| stat.st_dev);
        let Ok(system) = rustix::fs::fstatfs(target) else { return false };
        // The field's type is not the same everywhere; its low half identifies the file system.
        let kind = u32::try_from(system.f_type & 0xFFFF_FFFF);
        kind.is_ok_and(|kind| SERVERS.contains(&kind))
            && matches!((device(source), device(target)), (Ok(a), Ok(b)) if a == b)
    }
}

/// `FICLONERANGE`: ioctl_ficlonerange(2).
fn clone_range(source: &File, target: &File, range: &Stretch) -> io::Result<()> {
    let argument = libc::file_clone_range {
        src_fd: i64::from(source.as_raw_fd()),
        src_offset: range.source_start,
        src_length: range.len_bytes,
        dest_offset: range.target_start,
    };
    // SAFETY: the descriptor is open for as long as `target` is borrowed.
    // SAFETY: the request takes a pointer to this structure, and only reads it.
    let outcome = unsafe { libc::ioctl(target.as_raw_fd(), libc::FICLONERANGE, &raw const argument) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn copy_range(source: &File, target: &File, range: &Stretch) -> io::Result<()> {
    let (mut from, mut to) = (range.source_start, range.target_start);
    let end = range.target().end;
    while to < end {
        let left = to_usize(end - to);
        match rustix::fs::copy_file_range(source, Some(&mut from), target, Some(&mut to), left) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The ranges of a file that the kernel copied: they need not be written.
#[derive(Debug, Default)]
pub(super) struct CopiedRanges {
    /// Ascending.
    ranges: Vec<Range<u64>>,
}

impl CopiedRanges {
    pub(super) fn new(mut ranges: Vec<Range<u64>>) -> Self {
        ranges.sort_by_key(|range| range.start);
        Self { ranges }
    }

    /// The length of the run of bytes from `offset_bytes` on that are all copied or all not, and
    /// whether they are copied.
    pub(super) fn at(&self, offset_bytes: u64) -> (u64, bool) {
        let next = self.ranges.partition_point(|range| range.end <= offset_bytes);
        match self.ranges.get(next) {
            None => (u64::MAX, false),
            Some(range) if range.start > offset_bytes => (range.start - offset_bytes, false),
            Some(range) => (range.end - offset_bytes, true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stretch(source_start: u64, target_start: u64, len_bytes: u64) -> Stretch {
        Stretch { shard: ShardId(0), source_start, target_start, len_bytes }
    }

    #[test]
    fn only_whole_aligned_blocks_are_shared() {
        assert_eq!(stretch(4096, 8192, 8192).blocks(), Some(stretch(4096, 8192, 8192)));
        assert_eq!(stretch(4000, 8096, 8292).blocks(), Some(stretch(4096, 8192, 8192)));
        assert_eq!(stretch(7, 8191, 4098).blocks(), Some(stretch(8, 8192, 4096)));
        assert_eq!(stretch(1, 1, 4094).blocks(), None);
        assert!(stretch(4096, 8192, 1).is_block_aligned() && !stretch(8, 8192, 1).is_block_aligned());
    }

    #[test]
    fn copied_bytes_are_told_from_others() {
        let written = CopiedRanges::new(vec![20..30, 5..10]);
        let cases = [(0, (5, false)), (5, (5, true)), (9, (1, true)), (10, (10, false)), (25, (5, true))];
        for (offset, expected) in cases {
            assert_eq!(written.at(offset), expected, "{offset}");
        }
        assert_eq!(written.at(30), (u64::MAX, false));
    }

    #[test]
    fn a_range_is_copied_by_the_kernel() {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> =
            (0..100_000_u32).map(|at| at.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
        std::fs::write(folder.path().join("a"), &bytes).unwrap();
        let source = File::open(folder.path().join("a")).unwrap();
        let target = File::create_new(folder.path().join("b")).unwrap();
        copy_range(&source, &target, &stretch(1000, 5000, 90_000)).unwrap();
        let copied = std::fs::read(folder.path().join("b")).unwrap();
        assert!(copied[5000..] == bytes[1000..91_000]);
        assert!(copy_range(&source, &target, &stretch(99_000, 0, 5000)).is_err(), "beyond the end");
    }
}
