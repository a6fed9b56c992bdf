//! Writes the files of a checkpoint with several threads, in constant memory and bypassing the page
//! cache.
//!
//! All files are one sequence of blocks. A thread takes the next block, generates its bytes in its
//! own buffer and writes them. The thread that finishes the last block of a file cuts it to length
//! and syncs it. Memory is one block per thread for any size of the model. If the file system
//! refuses direct writes, files are written through the page cache; writeback starts at once and
//! written pages are dropped, so that pages do not pile up in a container. The threads mostly wait
//! for the disk, so they are scoped threads and not a `rayon` pool.

use onelayer_system::units::to_u64;
use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::MmapMut;
use onelayer_system::FloatType;
use rustix::fs::{Advice, FallocateFlags, OFlags};

use super::directory::{Part, TargetDirectory};
use super::error::SynthError;
use super::random::TensorBytes;
use super::shards::{Shard, ShardPlan};

/// Bytes that a thread generates and writes at a time; a multiple of every block size of direct
/// writes.
const BLOCK_BYTES: u64 = 4 << 20;

/// Alignment of offset, length and buffer address of direct writes.
const ALIGNMENT_BYTES: u64 = 4096;

/// Blocks written through the page cache between two flushes.
const BLOCKS_PER_FLUSH: u64 = 8;

/// A checkpoint to write.
pub(super) struct WriteJob<'a> {
    pub(super) plan: &'a ShardPlan,
    pub(super) target: &'a TargetDirectory,
    pub(super) dtype: FloatType,
    pub(super) seed: u64,
    pub(super) thread_count: usize,
    /// Set by the caller to stop early.
    pub(super) cancel: &'a AtomicBool,
}

/// The finished parts, in the order of the shards.
pub(super) struct Written {
    pub(super) parts: Vec<Part>,
    /// Whether every file bypassed the page cache.
    pub(super) direct: bool,
}

/// Writes and syncs every shard. `progress` gets the bytes written and the total, on the caller's
/// thread.
pub(super) fn write(job: &WriteJob, progress: &mut dyn FnMut(u64, u64)) -> Result<Written, SynthError> {
    let total_bytes = job.plan.file_bytes();
    let queue = Queue::new(job);
    let mut written_bytes = 0;
    progress(0, total_bytes);
    let result = std::thread::scope(|scope| {
        let (sender, receiver) = channel();
        let mut workers = Vec::new();
        for _ in 0..job.thread_count.max(1) {
            let (sender, queue) = (sender.clone(), &queue);
            let thread = std::thread::Builder::new().name("synth-write".to_owned());
            match thread.spawn_scoped(scope, move || queue.work(&sender)) {
                Ok(worker) => workers.push(worker),
                Err(source) if workers.is_empty() => return Err(SynthError::Thread { source }),
                // The started threads do all the work.
                Err(_) => break,
            }
        }
        drop(sender);
        for block_bytes in receiver {
            written_bytes += block_bytes;
            progress(written_bytes, total_bytes);
        }
        let mut result = Ok(());
        for worker in workers {
            match worker.join() {
                Ok(outcome) => result = result.and(outcome),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        result
    });
    result?;
    if job.cancel.load(Ordering::Relaxed) {
        return Err(SynthError::Interrupted { written_bytes, total_bytes });
    }
    Ok(queue.into_written())
}

/// The remaining blocks, shared by the threads.
struct Queue<'a> {
    job: &'a WriteJob<'a>,
    files: Vec<ShardFile<'a>>,
    next_block: AtomicU64,
    block_count: u64,
    failed: AtomicBool,
}

/// One file of the queue.
struct ShardFile<'a> {
    shard: &'a Shard,
    /// Position of its first block in the sequence of all blocks.
    first_block: u64,
    blocks_left: AtomicU64,
    state: Mutex<FileState>,
}

#[derive(Default)]
struct FileState {
    open: Option<Arc<OpenFile>>,
    finished: Option<(Part, bool)>,
}

struct OpenFile {
    file: File,
    part: Part,
    direct: AtomicBool,
}

impl<'a> Queue<'a> {
    fn new(job: &'a WriteJob<'a>) -> Self {
        let mut block_count = 0;
        let files = job.plan.shards.iter().map(|shard| {
            let blocks = shard.file_bytes.div_ceil(BLOCK_BYTES);
            let first_block = block_count;
            block_count += blocks;
            ShardFile { shard, first_block, blocks_left: AtomicU64::new(blocks), state: Mutex::default() }
        });
        let files = files.collect();
        Self { job, files, next_block: AtomicU64::new(0), block_count, failed: AtomicBool::new(false) }
    }

    /// Takes blocks until none is left, a thread fails, or the caller stops the run.
    fn work(&self, sender: &Sender<u64>) -> Result<(), SynthError> {
        let result = self.work_until_done(sender);
        if result.is_err() {
            self.failed.store(true, Ordering::Relaxed);
        }
        result
    }

    fn work_until_done(&self, sender: &Sender<u64>) -> Result<(), SynthError> {
        let largest = self.files.iter().map(|file| file.shard.file_bytes).max().unwrap_or(0);
        let buffer_bytes = largest.min(BLOCK_BYTES).next_multiple_of(ALIGNMENT_BYTES);
        let mut buffer = usize::try_from(buffer_bytes)
            .map_err(|error| std::io::Error::other(error.to_string()))
            .and_then(MmapMut::map_anon)
            .map_err(|error| self.job.target.error("map a buffer to write", "", error))?;
        loop {
            if self.failed.load(Ordering::Relaxed) || self.job.cancel.load(Ordering::Relaxed) {
                return Ok(());
            }
            let block = self.next_block.fetch_add(1, Ordering::Relaxed);
            if block >= self.block_count {
                return Ok(());
            }
            // Every file has at least a header, so first blocks strictly increase.
            let number = self.files.partition_point(|file| file.first_block <= block) - 1;
            let bytes = self.write_block(&self.files[number], block, &mut buffer)?;
            // The receiver lives until every sender is gone.
            let _ = sender.send(bytes);
        }
    }

    /// Generates and writes one block, and finishes the file if it was its last one. Returns the
    /// block's length.
    fn write_block(&self, file: &ShardFile, block: u64, buffer: &mut [u8]) -> Result<u64, SynthError> {
        let open = self.open(file)?;
        let begin = (block - file.first_block) * BLOCK_BYTES;
        let end = (begin + BLOCK_BYTES).min(file.shard.file_bytes);
        let length = to_usize(end - begin);
        fill_range(file.shard, begin, &mut buffer[..length], |index| {
            TensorBytes::new(self.job.seed, index, self.job.dtype)
        });
        let padded = to_usize((end - begin).next_multiple_of(ALIGNMENT_BYTES));
        buffer[length..padded].fill(0);
        open.write_at(begin, &buffer[..padded], length)
            .map_err(|error| self.job.target.error("write", &open.part.name, error))?;
        drop(open);
        if file.blocks_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.finish(file)?;
        }
        Ok(end - begin)
    }

    /// The file, created with its first block: a checkpoint may have more files than a process may
    /// open.
    fn open(&self, file: &ShardFile) -> Result<Arc<OpenFile>, SynthError> {
        let mut state = file.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = &state.open {
            return Ok(Arc::clone(open));
        }
        let target = self.job.target;
        let (handle, part, direct) = target.create_part(&file.shard.name, true)?;
        let padded = file.shard.file_bytes.next_multiple_of(ALIGNMENT_BYTES);
        match rustix::io::retry_on_intr(|| rustix::fs::fallocate(&handle, FallocateFlags::empty(), 0, padded))
        {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {}
            Err(error) => return Err(target.error("reserve space for", &part.name, error.into())),
        }
        let open = Arc::new(OpenFile { file: handle, part, direct: AtomicBool::new(direct) });
        state.open = Some(Arc::clone(&open));
        Ok(open)
    }

    /// Cuts the padding off, syncs and closes the file.
    fn finish(&self, file: &ShardFile) -> Result<(), SynthError> {
        let mut state = file.state.lock().unwrap_or_else(PoisonError::into_inner);
        let open = state.open.take().expect("a file whose blocks were written is open");
        let open =
            Arc::into_inner(open).expect("every other thread gave up its handle before it counted down");
        let error = |action, error| self.job.target.error(action, &open.part.name, error);
        open.file.set_len(file.shard.file_bytes).map_err(|source| error("cut to length", source))?;
        open.file.sync_all().map_err(|source| error("sync", source))?;
        let direct = open.direct.load(Ordering::Relaxed);
        if !direct {
            drop_from_cache(&open.file, 0, None);
        }
        state.finished = Some((open.part, direct));
        Ok(())
    }

    /// All parts, once every block has been written.
    fn into_written(self) -> Written {
        let mut written = Written { parts: Vec::with_capacity(self.files.len()), direct: true };
        for file in self.files {
            let state = file.state.into_inner().unwrap_or_else(PoisonError::into_inner);
            let (part, direct) = state.finished.expect("the last block of every file finishes it");
            written.direct &= direct;
            written.parts.push(part);
        }
        written
    }
}

impl OpenFile {
    /// Writes a block: padded to the alignment for a direct write, else its exact length.
    fn write_at(&self, offset_bytes: u64, padded: &[u8], length: usize) -> std::io::Result<()> {
        if self.direct.load(Ordering::Relaxed) {
            match self.file.write_all_at(padded, offset_bytes) {
                // Some file systems accept the flag and refuse the first direct write, or need a
                // coarser alignment. Use the page cache from here on.
                Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => self.leave_direct()?,
                result => return result,
            }
        }
        self.file.write_all_at(&padded[..length], offset_bytes)?;
        let block = offset_bytes / BLOCK_BYTES;
        // The advice starts writeback of dirty pages and drops clean ones. The sync bounds dirty
        // pages.
        drop_from_cache(&self.file, offset_bytes, NonZeroU64::new(BLOCK_BYTES));
        if block % BLOCKS_PER_FLUSH == BLOCKS_PER_FLUSH - 1 {
            self.file.sync_data()?;
            drop_from_cache(&self.file, 0, NonZeroU64::new(offset_bytes + BLOCK_BYTES));
        }
        Ok(())
    }

    fn leave_direct(&self) -> std::io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&self.file)?;
        rustix::fs::fcntl_setfl(&self.file, flags - OFlags::DIRECT)?;
        self.direct.store(false, Ordering::Relaxed);
        Ok(())
    }
}

/// Asks the kernel to drop cached pages. Some file systems ignore the advice.
fn drop_from_cache(file: &File, offset_bytes: u64, len_bytes: Option<NonZeroU64>) {
    let _ = rustix::fs::fadvise(file, offset_bytes, len_bytes, Advice::DontNeed);
}

/// Fills `target` with the bytes of a file from `begin` on. `target` must end inside the file.
fn fill_range(shard: &Shard, begin: u64, target: &mut [u8], bytes_of: impl Fn(u64) -> TensorBytes) {
    let mut position = begin;
    let mut rest = target;
    let head_bytes = to_u64(shard.head.len());
    if position < head_bytes {
        let head = &shard.head[to_usize(position)..];
        let (now, later) = rest.split_at_mut(head.len().min(rest.len()));
        now.copy_from_slice(&head[..now.len()]);
        position += to_u64(now.len());
        rest = later;
    }
    let first = shard.tensors.partition_point(|placed| placed.begin_bytes + placed.len_bytes <= position);
    for placed in &shard.tensors[first..] {
        if rest.is_empty() {
            break;
        }
        let skipped = position - placed.begin_bytes;
        let left = usize::try_from(placed.len_bytes - skipped).unwrap_or(usize::MAX);
        let (now, later) = rest.split_at_mut(left.min(rest.len()));
        bytes_of(placed.index).fill(skipped, now);
        position += to_u64(now.len());
        rest = later;
    }
    assert!(rest.is_empty(), "tensors fill the file to its end");
}

/// A length that is at most a block.
fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a block fits memory")
}

#[cfg(test)]
mod tests {
    use super::super::shards::Placed;
    use super::*;

    /// A file cut anywhere into blocks has the bytes of the file made at once.
    #[test]
    fn a_range_equals_that_part_of_the_file() {
        let head = b"12345678header  ".to_vec();
        let lengths = [10_u64, 2, 9000, 6, 20_000, 2];
        let mut tensors = Vec::new();
        let mut position = 16;
        for (index, len_bytes) in (0..).zip(lengths) {
            tensors.push(Placed { index, begin_bytes: position, len_bytes });
            position += len_bytes;
        }
        let shard = Shard { name: "x".to_owned(), head, tensors, file_bytes: position };
        let make = |begin: u64, end: u64| {
            let mut bytes = vec![0; to_usize(end - begin)];
            fill_range(&shard, begin, &mut bytes, |index| TensorBytes::new(5, index, FloatType::Bf16));
            bytes
        };
        let whole = make(0, position);
        assert!(whole.starts_with(b"12345678header  "));
        for step in [7, 16, 100, 4096, 5000] {
            let mut pieces = Vec::new();
            let mut begin = 0;
            while begin < position {
                let end = (begin + step).min(position);
                pieces.extend(make(begin, end));
                begin = end;
            }
            assert!(pieces == whole, "pieces of {step}");
        }
        let mut third = vec![0; 9000];
        TensorBytes::new(5, 2, FloatType::Bf16).fill(0, &mut third);
        assert!(whole[28..9028] == third);
    }
}
