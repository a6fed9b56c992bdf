//! Single tensors on request: read into owned memory, or as views of a private mapping.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::sync::{Arc, OnceLock};
use std::thread;

use onelayer::checkpoint::{FileIdentity, Shard, TensorEntry};
use onelayer::units::ByteRange;
use onelayer::{Checkpoint, DType, SourceError, TensorReader};
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use rustix::fs::{Advice, fadvise};
use rustix::io::{ReadWriteFlags, preadv2};

use crate::errors;
use crate::memory::{FileMapping, HostMemory};
use crate::tensor::Tensor;

/// Bytes per read-ahead request. The kernel reads at most its window for sequential reads per
/// request.
const AHEAD_BYTES: u64 = 128 << 10;

/// Reads tensors and slices into owned memory. Shared by threads.
#[pyclass(frozen, module = "onelayer._native")]
pub(crate) struct NativeReader {
    reader: TensorReader,
}

impl NativeReader {
    pub(crate) fn open(py: Python<'_>, checkpoint: &Checkpoint) -> PyResult<Self> {
        let reader = py.detach(|| TensorReader::open(checkpoint));
        Ok(Self { reader: reader.map_err(|error| errors::of_load(py, &error))? })
    }
}

#[pymethods]
impl NativeReader {
    /// A whole tensor.
    fn read(&self, py: Python<'_>, name: &str) -> PyResult<Tensor> {
        let entry = find(self.reader.checkpoint(), name)?;
        let (dtype, shape) = (entry.dtype, entry.shape.to_vec());
        let memory =
            self.fill(py, &entry, entry.len_bytes(), |reader, target| reader.read(entry.id, 0, target))?;
        Ok(Tensor::of_memory(name, (dtype, entry.dtype_name), shape, memory))
    }

    /// A part of a tensor: a start and an end for each dimension, outermost first, within the
    /// shape.
    fn read_slice(&self, py: Python<'_>, name: &str, ranges: Vec<(u64, u64)>) -> PyResult<Tensor> {
        let entry = find(self.reader.checkpoint(), name)?;
        let ranges: Vec<_> = ranges.into_iter().map(|(start, end)| start..end).collect();
        let sliced = ranges.iter().map(|range| range.end - range.start);
        let shape = sliced.chain(entry.shape.iter().skip(ranges.len()).copied()).collect();
        let slice_bytes = self.reader.slice_bytes(entry.id, &ranges);
        let slice_bytes = slice_bytes.map_err(|error| errors::of_load(py, &error))?;
        let memory = self
            .fill(py, &entry, slice_bytes, |reader, target| reader.read_slice(entry.id, &ranges, target))?;
        Ok(Tensor::of_memory(name, (entry.dtype, entry.dtype_name), shape, memory))
    }

    /// Bytes of a tensor from an offset on, as a byte tensor.
    fn read_part(&self, py: Python<'_>, name: &str, offset_bytes: u64, len_bytes: u64) -> PyResult<Tensor> {
        let entry = find(self.reader.checkpoint(), name)?;
        let memory =
            self.fill(py, &entry, len_bytes, |reader, target| reader.read(entry.id, offset_bytes, target))?;
        Ok(Tensor::of_memory(name, (DType::U8, DType::U8.name()), vec![len_bytes], memory))
    }

    /// Bytes read from files so far, over-read included.
    #[getter]
    fn read_bytes(&self) -> u64 {
        let ways = self.reader.ways();
        ways.direct_bytes + ways.buffered_bytes + ways.mapped_bytes
    }
}

impl NativeReader {
    /// New memory, filled while detached from the interpreter.
    fn fill(
        &self,
        py: Python<'_>,
        entry: &TensorEntry<'_>,
        len_bytes: u64,
        read: impl FnOnce(&TensorReader, &mut [u8]) -> Result<(), onelayer::LoadError> + Send,
    ) -> PyResult<HostMemory> {
        let filled = py.detach(|| {
            let memory = HostMemory::new(len_bytes);
            memory.map(|mut memory| read(&self.reader, memory.bytes_mut()).map(|()| memory))
        });
        filled
            .map_err(|error| errors::of_memory(entry.name, len_bytes, &error))?
            .map_err(|error| errors::of_load(py, &error))
    }
}

/// Private, copy-on-write mappings of the files of a checkpoint. Writes to a tensor create private
/// pages and do not change the file; unwritten pages belong to the page cache.
///
/// Unlike readers they cannot detect a changed file: truncating it kills this process (`SIGBUS`).
#[pyclass(frozen, module = "onelayer._native")]
pub(crate) struct NativeMapping {
    checkpoint: Checkpoint,
    files: Vec<OnceLock<Arc<FileMapping>>>,
}

impl NativeMapping {
    pub(crate) fn new(checkpoint: &Checkpoint) -> Self {
        let files = checkpoint.shards().iter().map(|_| OnceLock::new()).collect();
        Self { checkpoint: checkpoint.clone(), files }
    }

    fn file(&self, tensor: &TensorEntry<'_>) -> Result<&Arc<FileMapping>, SourceError> {
        let cell = &self.files[tensor.shard.index()];
        if let Some(mapping) = cell.get() {
            return Ok(mapping);
        }
        let shard = self.checkpoint.shard(tensor.shard);
        let mapping = map(shard)?;
        // Another thread may have been faster; then this mapping is dropped.
        Ok(cell.get_or_init(|| Arc::new(mapping)))
    }
}

#[pymethods]
impl NativeMapping {
    /// A whole tensor: a view of its file, or a copy if its bytes are misaligned or not row-major.
    fn view(&self, py: Python<'_>, name: &str) -> PyResult<Tensor> {
        let entry = find(&self.checkpoint, name)?;
        if !entry.strides.is_empty() {
            return NativeReader::open(py, &self.checkpoint)?.read(py, name);
        }
        let found = py.detach(|| self.file(&entry).map(|file| file.part(entry.extent, entry.dtype)));
        let memory = match found.map_err(|error| errors::of_source(py, &error))? {
            Ok(memory) => memory,
            Err(error) => return Err(errors::of_memory(name, entry.len_bytes(), &error)),
        };
        Ok(Tensor::of_memory(name, (entry.dtype, entry.dtype_name), entry.shape.to_vec(), memory))
    }

    /// Requests read-ahead of all uncached files, one after the other. Returns at once.
    fn read_ahead(&self, py: Python<'_>) {
        let shards: Vec<(std::path::PathBuf, ByteRange)> =
            self.checkpoint.shards().iter().map(|shard| (shard.path.clone(), shard.data)).collect();
        py.detach(|| {
            let work = move || {
                for (path, data) in shards {
                    // Only advice: an error of the file shows when its pages are read.
                    let _ = File::open(path)
                        .and_then(|file| if is_cached(&file, data) { Ok(()) } else { advise(&file, data) });
                }
            };
            let _ = thread::Builder::new().name("onelayer-ahead".to_owned()).spawn(work);
        });
    }
}

/// The number of sampled positions in a file.
const PROBES: u64 = 16;

/// True if the file is cached at a few sampled positions: advice costs time for cached pages, too.
/// Reads one byte at each, only if that needs no disk.
fn is_cached(file: &File, data: ByteRange) -> bool {
    let is_there = |probe: u64| {
        let at = data.start() + data.len_bytes() / PROBES * probe;
        let mut byte = [0];
        preadv2(file, &mut [IoSliceMut::new(&mut byte)], at, ReadWriteFlags::NOWAIT).is_ok()
    };
    (0..PROBES).all(is_there)
}

fn advise(file: &File, data: ByteRange) -> io::Result<()> {
    let mut start = data.start();
    while start < data.end() {
        let len = AHEAD_BYTES.min(data.end() - start);
        fadvise(file, start, std::num::NonZeroU64::new(len), Advice::WillNeed)?;
        start += len;
    }
    Ok(())
}

/// Maps a file if it is unchanged since it was checked.
fn map(shard: &Shard) -> Result<FileMapping, SourceError> {
    let path = || shard.path.clone();
    let file = File::open(&shard.path).map_err(|source| SourceError::Open { path: path(), source })?;
    let status = |source| SourceError::Status { path: path(), source };
    let (was, now) = (shard.identity, FileIdentity::of(&file).map_err(status)?);
    if was != now {
        return Err(SourceError::FileChanged { path: path(), was: Box::new(was), now: Box::new(now) });
    }
    FileMapping::new(&file).map_err(|source| SourceError::Open { path: path(), source })
}

fn find<'a>(checkpoint: &'a Checkpoint, name: &str) -> PyResult<TensorEntry<'a>> {
    checkpoint.find(name).ok_or_else(|| PyKeyError::new_err(name.to_owned()))
}
