//! The fastest simple reader, without parsing, checking or this library. For benches and examples.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::{Advice, MmapMut};

/// The unit of direct reads.
pub(crate) const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;

/// Touched memory that starts on a huge page, in huge pages if available.
pub(crate) struct HugeBuffer {
    map: MmapMut,
    start: usize,
    len: usize,
}

impl HugeBuffer {
    /// `len` bytes.
    ///
    /// # Errors
    /// The error of the system.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let mut map = MmapMut::map_anon(len + HUGE_PAGE)?;
        let start = map.as_ptr().align_offset(HUGE_PAGE);
        map.advise_range(Advice::HugePage, start, len)?;
        map[start..][..len].fill(1);
        Ok(Self { map, start, len })
    }

    /// All of it.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        &mut self.map[self.start..][..self.len]
    }
}

/// How to read.
pub(crate) struct Plain {
    /// With `O_DIRECT`.
    pub(crate) direct: bool,
    /// Number of threads, each with its part of the buffer.
    pub(crate) threads: usize,
    /// Bytes per read, a multiple of [`PAGE`].
    pub(crate) block_bytes: usize,
}

impl Plain {
    /// Reads every file once and returns the number of bytes. Includes opening, as for any reader.
    pub(crate) fn read(&self, paths: &[PathBuf], buffer: &mut [u8]) -> io::Result<u64> {
        let mut files = Vec::new();
        let mut blocks = 0;
        for path in paths {
            let flags = if self.direct { rustix::fs::OFlags::DIRECT } else { rustix::fs::OFlags::empty() };
            let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
            let len = usize::try_from(file.metadata()?.len()).expect("64-bit addresses");
            files.push((blocks, file));
            blocks += len.div_ceil(self.block_bytes);
        }
        let next = AtomicUsize::new(0);
        let part_bytes = buffer.len() / self.threads / PAGE * PAGE;
        std::thread::scope(|scope| {
            let readers: Vec<_> = buffer
                .chunks_mut(part_bytes)
                .take(self.threads)
                .map(|part| scope.spawn(|| read_blocks(&files, blocks, &next, self, part)))
                .collect();
            readers.into_iter().map(|reader| reader.join().expect("a reader does not panic")).sum()
        })
    }
}

fn read_blocks(
    files: &[(usize, File)],
    blocks: usize,
    next: &AtomicUsize,
    reader: &Plain,
    part: &mut [u8],
) -> io::Result<u64> {
    let (direct, block_bytes) = (reader.direct, reader.block_bytes);
    let mut bytes = 0;
    for place in (0..part.len() / block_bytes).cycle() {
        let block = next.fetch_add(1, Ordering::Relaxed);
        if block >= blocks {
            break;
        }
        let (first, file) = &files[files.partition_point(|(first, _)| *first <= block) - 1];
        let offset = (block - first) * block_bytes;
        let target = &mut part[place * block_bytes..][..block_bytes];
        let mut filled = 0;
        // Zero, or a direct read that ends inside a page, is the end of the file.
        while filled < target.len() && (!direct || filled.is_multiple_of(PAGE)) {
            let from = u64::try_from(offset + filled).expect("64-bit offsets");
            match file.read_at(&mut target[filled..], from)? {
                0 => break,
                count => filled += count,
            }
        }
        bytes += u64::try_from(filled).expect("64-bit lengths");
    }
    Ok(bytes)
}
