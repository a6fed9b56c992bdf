//! Plain ways to read files into memory, as limits for loads. Nothing is parsed or checked.
//!
//! Threads take blocks in file order from one counter. Each copies block after block into its own
//! part of one buffer. With one block per thread the buffer stays hot in the cache; a larger one is
//! used in turn.
#![allow(unsafe_code, reason = "copies out of mappings of the bench's files")]

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::iter::Enumerate;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::slice::ChunksMut;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::{Advice, MmapMut, MmapOptions, MmapRaw};

use crate::plain::PAGE;
use crate::stream_copy::StreamCopy;

const HUGE_PAGE: usize = 2 << 20;

/// A way to read a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// `pread` with `O_DIRECT`.
    Direct,
    /// `pread` out of the page cache.
    Pread,
    /// A mapping, populated block by block, and `memcpy`.
    MapCopy,
    /// The same with non-temporal stores.
    MapStream(StreamCopy),
}

/// One way with its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) way: Way,
    pub(crate) threads: usize,
    pub(crate) block_bytes: usize,
    /// Size of the buffer; `None`: fresh memory that keeps everything.
    pub(crate) buffer_bytes: Option<usize>,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match self.way {
            Way::Direct => "direct pread",
            Way::Pread => "pread",
            Way::MapCopy => "mapped, memcpy",
            Way::MapStream(copy) => copy.name(),
        };
        let (threads, block) = (self.threads, self.block_bytes >> 10);
        match self.buffer_bytes {
            None => write!(f, "{way}, {threads} threads, {block} KiB blocks, fresh memory for all"),
            Some(bytes) if bytes == self.threads * self.block_bytes => {
                write!(f, "{way}, {threads} threads, {block} KiB blocks, a block each")
            }
            Some(bytes) => {
                write!(f, "{way}, {threads} threads, {block} KiB blocks, {} MiB in turn", bytes >> 20)
            }
        }
    }
}

/// A file, and the number of its first block.
struct Open {
    first_block: usize,
    file: File,
    map: Option<MmapRaw>,
    len: usize,
}

impl Shape {
    /// Reads at most `most_bytes` of the files into `buffer` or into fresh memory. Returns that
    /// memory and the number of bytes. Includes opening, mapping and allocation, as for any load.
    ///
    /// # Errors
    /// The error of the system.
    pub(crate) fn run(
        &self,
        paths: &[PathBuf],
        most_bytes: usize,
        buffer: &mut [u8],
    ) -> io::Result<(usize, Option<MmapMut>)> {
        let (files, blocks) = self.open(paths, most_bytes)?;
        let Some(bytes) = self.buffer_bytes else {
            let mut map = MmapMut::map_anon(blocks * self.block_bytes + HUGE_PAGE)?;
            map.advise(Advice::HugePage)?;
            let start = map.as_ptr().align_offset(HUGE_PAGE);
            let places = map[start..][..blocks * self.block_bytes].chunks_mut(self.block_bytes);
            let places = Mutex::new(places.enumerate());
            let bytes = self.on_threads((0..self.threads).map(|_| || self.keep_blocks(&files, &places)))?;
            return Ok((bytes, Some(map)));
        };
        let next = AtomicUsize::new(0);
        let (files, next) = (&files, &next);
        let parts = buffer[..bytes].chunks_mut(bytes / self.threads).take(self.threads);
        let bytes = self.on_threads(parts.map(|part| move || self.copy_blocks(files, blocks, next, part)))?;
        Ok((bytes, None))
    }

    /// Runs each work item in a separate thread and returns the sum of bytes.
    fn on_threads<W>(&self, works: impl Iterator<Item = W>) -> io::Result<usize>
    where
        W: FnOnce() -> io::Result<usize> + Send,
    {
        std::thread::scope(|scope| {
            let threads: Vec<_> = works.map(|work| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().expect("a reader does not panic")).sum()
        })
    }

    fn open(&self, paths: &[PathBuf], most_bytes: usize) -> io::Result<(Vec<Open>, usize)> {
        let (mut files, mut blocks, mut left) = (Vec::new(), 0, most_bytes);
        for path in paths {
            let direct = self.way == Way::Direct;
            let flags = if direct { rustix::fs::OFlags::DIRECT } else { rustix::fs::OFlags::empty() };
            let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
            let len = usize::try_from(file.metadata()?.len()).expect("64-bit addresses").min(left);
            if len == 0 {
                break;
            }
            let mapped = matches!(self.way, Way::MapCopy | Way::MapStream(_));
            let map = if mapped { Some(MmapOptions::new().len(len).map_raw_read_only(&file)?) } else { None };
            files.push(Open { first_block: blocks, file, map, len });
            blocks += len.div_ceil(self.block_bytes);
            left -= len;
        }
        Ok((files, blocks))
    }

    /// Copies blocks, in turn, into a part of the buffer.
    fn copy_blocks(
        &self,
        files: &[Open],
        blocks: usize,
        next: &AtomicUsize,
        part: &mut [u8],
    ) -> io::Result<usize> {
        let mut bytes = 0;
        for place in (0..part.len() / self.block_bytes).cycle() {
            let block = next.fetch_add(1, Ordering::Relaxed);
            if block >= blocks {
                break;
            }
            bytes +=
                self.copy_block(files, block, &mut part[place * self.block_bytes..][..self.block_bytes])?;
        }
        Ok(bytes)
    }

    /// Copies each block to its own place.
    fn keep_blocks(&self, files: &[Open], places: &Mutex<Enumerate<ChunksMut<'_, u8>>>) -> io::Result<usize> {
        let mut bytes = 0;
        loop {
            let taken = places.lock().expect("no reader panics").next();
            let Some((block, place)) = taken else { break };
            bytes += self.copy_block(files, block, place)?;
        }
        Ok(bytes)
    }

    fn copy_block(&self, files: &[Open], block: usize, place: &mut [u8]) -> io::Result<usize> {
        let file = &files[files.partition_point(|file| file.first_block <= block) - 1];
        let offset = (block - file.first_block) * self.block_bytes;
        let target = &mut place[..self.block_bytes.min(file.len - offset)];
        if let Some(map) = &file.map {
            map.advise_range(Advice::PopulateRead, offset, target.len())?;
            let source = map.as_ptr().wrapping_add(offset);
            let copy = match self.way {
                Way::MapStream(copy) => copy,
                _ => StreamCopy::Plain,
            };
            // SAFETY: the mapping has these bytes and does not overlap the buffer; the files of a
            // bench are not truncated.
            unsafe { copy.copy(source, target.as_mut_ptr(), target.len()) };
            return Ok(target.len());
        }
        let mut filled = 0;
        // Direct reads cover whole pages, so a partial last page is left out.
        let whole = target.len() / PAGE * PAGE;
        let wanted = if self.way == Way::Direct { whole } else { target.len() };
        while filled < wanted {
            match file.file.read_at(&mut target[filled..wanted], (offset + filled) as u64)? {
                0 => break,
                count => filled += count,
            }
        }
        Ok(filled)
    }
}
