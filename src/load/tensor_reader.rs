//! Reads tensors, and parts of them, on demand into memory of the caller. Needs no ring, arena or
//! plan.
//!
//! ```text
//! runs of bytes --> pieces, at most 2 MiB of a file --> the caller's thread and helper threads
//!                      | in the page cache, or small: directly into the target
//!                      + past the page cache, or with gaps: through a read buffer, of which there are few
//! ```
//!
//! The helpers of a call are threads and not tasks of a rayon pool, because they wait for the disk.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use memmap2::MmapMut;

use super::error::LoadError;
use super::io_choice::default_readers;
use crate::checkpoint::{Checkpoint, ShardId, TensorId};
use crate::device::Target;
use crate::plan::{IoMode, IoWays, ReadRequest};
use crate::slices::{Runs, SliceError};
use crate::source::{self, Source};
use crate::staging::StagingError;
use crate::staging::copy::copy_past_cache;
use crate::units::{Alignment, ByteRange, KIB, MIB, to_u64, to_usize};

/// Most bytes of a file that are read at once.
const PIECE_BYTES: u64 = 2 * MIB;
/// A gap between two runs of up to this size is read through: a disk moves it in the time of one
/// more request.
const GAP_BYTES_MAX: u64 = 128 * KIB;
/// Longer runs are read one by one.
const GATHERED_RUN_BYTES_MAX: u64 = 512 * KIB;
/// Most read buffers of a reader, and most threads of one call.
const BUFFERS_MAX: u32 = 8;
/// Each thread of a call has at least this many bytes to read.
const THREAD_BYTES_MIN: u64 = 2 * PIECE_BYTES;

/// Reads tensors of a checkpoint, and slices of them, into the caller's memory. Cheap to clone; all
/// clones, and all threads, share its files and its scratch memory.
///
/// Files are read as [`IoMode::Auto`] reads them, with the same checks: a file that has changed
/// since it was opened is an error. Bytes in the page cache are copied from there into the target.
/// Other large reads go past the page cache; reads of up to 128 KiB go through it. Large reads are
/// shared by a few threads, which end with the call.
///
/// Beside the target it holds at most eight pieces of 2 MiB, however many threads call it, and only
/// during calls. At most 16 files are open at once.
///
/// # Example
/// ```
/// use onelayer::{Checkpoint, TensorReader};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/checkpoints/llama");
/// let checkpoint = Checkpoint::open(path)?;
/// let reader = TensorReader::open(&checkpoint)?;
/// let tensor = checkpoint.find("model.embed_tokens.weight").expect("the model has an embedding");
///
/// let mut bytes = vec![0; usize::try_from(tensor.extent.len_bytes())?];
/// reader.read(tensor.id, 0, &mut bytes)?;
///
/// // Rows 0 to 2, the second half of their columns.
/// let columns = tensor.shape[1];
/// let ranges = [0..2, columns / 2..columns];
/// let mut part = vec![0; usize::try_from(reader.slice_bytes(tensor.id, &ranges)?)?];
/// reader.read_slice(tensor.id, &ranges, &mut part)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct TensorReader {
    shared: Arc<Shared>,
}

struct Shared {
    checkpoint: Checkpoint,
    source: Box<dyn Source>,
    alignment: Alignment,
    threads: u32,
    buffers: ReadBuffers,
}

impl TensorReader {
    /// Looks at the files of a checkpoint. Reads no tensor bytes.
    ///
    /// # Errors
    /// [`LoadError::Source`] if a file is gone, or no longer the one that was checked.
    pub fn open(checkpoint: &Checkpoint) -> Result<Self, LoadError> {
        let survey = source::survey(checkpoint)?;
        let source = source::open_surveyed(&survey, checkpoint)?;
        let threads = default_readers(IoMode::Auto, &survey.decisions, Target::None).clamp(1, BUFFERS_MAX);
        let (checkpoint, alignment) = (checkpoint.clone(), survey.alignment);
        let shared = Shared { checkpoint, source, alignment, threads, buffers: ReadBuffers::default() };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The checkpoint that is read.
    #[must_use]
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.shared.checkpoint
    }

    /// Fills `target` with the bytes of a tensor from `offset_bytes` on, as they are in the file:
    /// little-endian, row-major.
    ///
    /// # Errors
    /// [`LoadError::Slice`] if the tensor has no such bytes; [`LoadError::Source`] if they cannot
    /// be read, or if the file changed. `target` then holds anything.
    ///
    /// # Panics
    /// If `tensor` comes from another checkpoint and is out of range.
    pub fn read(&self, tensor: TensorId, offset_bytes: u64, target: &mut [u8]) -> Result<(), LoadError> {
        let entry = self.shared.checkpoint.tensor(tensor);
        let (len_bytes, tensor_bytes) = (to_u64(target.len()), entry.len_bytes());
        if offset_bytes.checked_add(len_bytes).is_none_or(|end| end > tensor_bytes) {
            let tensor = entry.name.to_owned();
            return Err(SliceError::BeyondEnd { tensor, offset_bytes, len_bytes, tensor_bytes }.into());
        }
        if entry.strides.is_empty() {
            let runs = Runs::contiguous(offset_bytes, len_bytes);
            return self.shared.fill(entry.shard, entry.extent, &runs, 0, target);
        }
        let runs = Runs::of_slice(&entry, &[])?;
        self.shared.fill(entry.shard, entry.extent, &runs, offset_bytes, target)
    }

    /// The length of a slice in bytes: that of the target of [`Self::read_slice`].
    ///
    /// # Errors
    /// [`LoadError::Slice`] if there is no such slice.
    ///
    /// # Panics
    /// If `tensor` comes from another checkpoint and is out of range.
    pub fn slice_bytes(&self, tensor: TensorId, ranges: &[Range<u64>]) -> Result<u64, LoadError> {
        Ok(Runs::of_slice(&self.shared.checkpoint.tensor(tensor), ranges)?.len_bytes())
    }

    /// Fills `target` with a slice: `ranges` are of elements, one for each dimension, the outermost
    /// first; dimensions without one are taken whole. The bytes of the slice are row-major
    /// themselves.
    ///
    /// A range of the outermost dimension is read as it is. Others are gathered: gaps of up to 128
    /// KiB between what is wanted are read through.
    ///
    /// # Errors
    /// [`LoadError::Slice`] if there is no such slice, if it would cut a byte (types of less than 8
    /// bits), or if the target is not [as long](Self::slice_bytes) as it; [`LoadError::Source`]
    /// if it cannot be read, or if the file changed. `target` then holds
    /// anything. [`LoadError::Staging`] if the system has no memory for a piece of 2 MiB.
    ///
    /// # Panics
    /// If `tensor` comes from another checkpoint and is out of range.
    pub fn read_slice(
        &self,
        tensor: TensorId,
        ranges: &[Range<u64>],
        target: &mut [u8],
    ) -> Result<(), LoadError> {
        let entry = self.shared.checkpoint.tensor(tensor);
        let runs = Runs::of_slice(&entry, ranges)?;
        let (expected_bytes, found_bytes) = (runs.len_bytes(), to_u64(target.len()));
        if expected_bytes != found_bytes {
            let tensor = entry.name.to_owned();
            return Err(SliceError::WrongTargetLength { tensor, expected_bytes, found_bytes }.into());
        }
        self.shared.fill(entry.shard, entry.extent, &runs, 0, target)
    }

    /// Bytes that were read so far, by the way they were read. Includes gaps and alignment.
    #[must_use]
    pub fn ways(&self) -> IoWays {
        self.shared.source.ways()
    }
}

impl fmt::Debug for TensorReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorReader")
            .field("files", &self.shared.checkpoint.shards().len())
            .field("threads", &self.shared.threads)
            .field("alignment", &self.shared.alignment)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Fills `target` with the bytes of runs, from `offset_bytes` on. The runs are those of a tensor
    /// that lies at `extent` of a file.
    fn fill(
        &self,
        shard: ShardId,
        extent: ByteRange,
        runs: &Runs,
        offset_bytes: u64,
        target: &mut [u8],
    ) -> Result<(), LoadError> {
        let helpers = u64::from(self.threads).min(to_u64(target.len()) / THREAD_BYTES_MIN).saturating_sub(1);
        let (next_run, done_bytes) = match runs.run_bytes() {
            0 => (0, 0),
            run_bytes => (offset_bytes / run_bytes, offset_bytes % run_bytes),
        };
        let pieces = Mutex::new(Pieces { extent, runs, next_run, done_bytes, rest: target });
        if helpers == 0 {
            return self.read_all(shard, &pieces);
        }
        thread::scope(|scope| {
            let start = |number| {
                let work = || self.read_all(shard, &pieces);
                thread::Builder::new()
                    .name(format!("onelayer-tensor-{number}"))
                    .spawn_scoped(scope, work)
                    .ok()
            };
            // If a helper does not start, the others do its work.
            let helpers: Vec<_> = (0..helpers).map_while(start).collect();
            let own = self.read_all(shard, &pieces);
            helpers.into_iter().fold(own, |outcome, helper| {
                let helped = helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                outcome.and(helped)
            })
        })
    }

    /// Reads pieces until none are left. An error leaves none for the other threads either.
    fn read_all(&self, shard: ShardId, pieces: &Mutex<Pieces<'_>>) -> Result<(), LoadError> {
        let mut buffer = None;
        loop {
            let piece = lock(pieces).next();
            let Some(piece) = piece else { return Ok(()) };
            if let Err(error) = self.read_piece(shard, piece, &mut buffer) {
                lock(pieces).rest = &mut [];
                return Err(error);
            }
        }
    }

    fn read_piece<'a>(
        &'a self,
        shard: ShardId,
        piece: Piece<'_>,
        buffer: &mut Option<ReadBuffer<'a>>,
    ) -> Result<(), LoadError> {
        let Piece { payload, target, spread } = piece;
        if spread.is_none() && self.source.read_anywhere(shard, payload, target)?.is_some() {
            return Ok(());
        }
        let buffer = match buffer {
            Some(buffer) => buffer,
            None => buffer.insert(self.buffers.take(self.alignment)?),
        };
        let memory = buffer.bytes(self.alignment);
        let len = to_usize(payload.len_bytes());
        let is_there = spread.is_some() && {
            let start = &mut memory[..len];
            self.source.read_anywhere(shard, payload, start)?.is_some()
        };
        let arrived = if is_there {
            &memory[..len]
        } else {
            let extent = payload.align_outward(self.alignment).expect("a file ends below the largest offset");
            self.source.read(&ReadRequest { shard, extent, payload }, memory)?;
            &memory[to_usize(payload.start() - extent.start())..][..len]
        };
        match spread {
            None => copy_past_cache(target, arrived),
            Some(spread) => spread.gather(arrived, target),
        }
        Ok(())
    }
}

/// The rest of one slice to read.
struct Pieces<'a> {
    /// The tensor in its file.
    extent: ByteRange,
    runs: &'a Runs,
    next_run: u64,
    /// Bytes of that run that are taken.
    done_bytes: u64,
    /// The target of the rest.
    rest: &'a mut [u8],
}

/// A stretch of a file, and the target of its bytes.
struct Piece<'a> {
    payload: ByteRange,
    target: &'a mut [u8],
    /// The wanted bytes; all of them if `None`.
    spread: Option<Spread<'a>>,
}

/// Several runs in a stretch of a file, which begins with the first of them.
struct Spread<'a> {
    runs: &'a Runs,
    first_run: u64,
}

impl Spread<'_> {
    fn gather(&self, arrived: &[u8], target: &mut [u8]) {
        let (run_bytes, first) = (to_usize(self.runs.run_bytes()), self.runs.start_of(self.first_run));
        for (run, target) in (self.first_run..).zip(target.chunks_exact_mut(run_bytes)) {
            let start = to_usize(self.runs.start_of(run) - first);
            target.copy_from_slice(&arrived[start..start + run_bytes]);
        }
    }
}

impl<'a> Pieces<'a> {
    fn next(&mut self) -> Option<Piece<'a>> {
        if self.rest.is_empty() {
            return None;
        }
        let run_bytes = self.runs.run_bytes();
        let is_whole = self.done_bytes == 0 && to_u64(self.rest.len()) >= run_bytes;
        if self.runs.count() > 1 && run_bytes <= GATHERED_RUN_BYTES_MAX && is_whole {
            return Some(self.next_gathered());
        }
        let start = self.extent.start() + self.runs.start_of(self.next_run) + self.done_bytes;
        // The next piece begins on a multiple of the size of a piece, so that no block is read
        // twice.
        let to_cut = PIECE_BYTES - start % PIECE_BYTES;
        let len_bytes = to_cut.min(run_bytes - self.done_bytes).min(to_u64(self.rest.len()));
        self.done_bytes += len_bytes;
        if self.done_bytes == run_bytes {
            (self.next_run, self.done_bytes) = (self.next_run + 1, 0);
        }
        Some(Piece { payload: at(start, len_bytes), target: self.take(len_bytes), spread: None })
    }

    /// As many whole runs as are close together and fit a piece: at least one.
    fn next_gathered(&mut self) -> Piece<'a> {
        let (run_bytes, first_run) = (self.runs.run_bytes(), self.next_run);
        let first = self.runs.start_of(first_run);
        let mut end = first + run_bytes;
        self.next_run += 1;
        while self.next_run < self.runs.count() {
            let start = self.runs.start_of(self.next_run);
            let is_full = to_u64(self.rest.len()) < (self.next_run + 1 - first_run) * run_bytes;
            let gap_bytes = start.checked_sub(end);
            let is_near = gap_bytes.is_some_and(|bytes| bytes <= GAP_BYTES_MAX);
            if is_full || !is_near || start + run_bytes - first > PIECE_BYTES {
                break;
            }
            end = start + run_bytes;
            self.next_run += 1;
        }
        let count = self.next_run - first_run;
        let spread = (count > 1).then_some(Spread { runs: self.runs, first_run });
        Piece {
            payload: at(self.extent.start() + first, end - first),
            target: self.take(count * run_bytes),
            spread,
        }
    }

    fn take(&mut self, len_bytes: u64) -> &'a mut [u8] {
        let (taken, rest) = std::mem::take(&mut self.rest).split_at_mut(to_usize(len_bytes));
        self.rest = rest;
        taken
    }
}

fn at(start: u64, len_bytes: u64) -> ByteRange {
    ByteRange::with_len(start, len_bytes).expect("a tensor lies inside its file")
}

/// Limits the number of read buffers.
#[derive(Default)]
struct ReadBuffers {
    taken: Mutex<u32>,
    returned: Condvar,
}

/// Memory for one piece.
struct ReadBuffer<'a> {
    buffers: &'a ReadBuffers,
    memory: MmapMut,
}

impl ReadBuffers {
    /// Waits for a read buffer. A thread takes one at a time and waits for no other thread while it
    /// has it.
    fn take(&self, alignment: Alignment) -> Result<ReadBuffer<'_>, LoadError> {
        let is_full = |taken: &mut u32| *taken >= BUFFERS_MAX;
        let taken = self.returned.wait_while(lock(&self.taken), is_full);
        *taken.unwrap_or_else(PoisonError::into_inner) += 1;
        // A block more at both ends, and one to align the start.
        let len_bytes = PIECE_BYTES + 3 * alignment.bytes();
        match MmapMut::map_anon(to_usize(len_bytes)) {
            Ok(memory) => Ok(ReadBuffer { buffers: self, memory }),
            Err(source) => {
                self.give_back();
                Err(StagingError::Piece { bytes: len_bytes, source }.into())
            }
        }
    }

    fn give_back(&self) {
        *lock(&self.taken) -= 1;
        self.returned.notify_one();
    }
}

impl ReadBuffer<'_> {
    /// Its memory from an aligned address on. Pages that are not touched are not resident.
    fn bytes(&mut self, alignment: Alignment) -> &mut [u8] {
        let skipped = self.memory.as_ptr().align_offset(to_usize(alignment.bytes()));
        &mut self.memory[skipped..]
    }
}

impl Drop for ReadBuffer<'_> {
    fn drop(&mut self) {
        self.buffers.give_back();
    }
}

/// No update under these locks can panic halfway.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
