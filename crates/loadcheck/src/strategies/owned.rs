//! Memory that a loader owns: one anonymous mapping for a tensor or a file, as the allocator makes
//! for large blocks. It starts on a page, so that direct reads can write into it.

use onelayer_system::units::to_u64;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use memmap2::MmapMut;

use super::{Event, Observe, StrategyError, failed};

/// Bytes between two reports of progress: a read call costs far less than this many bytes.
const CHUNK_BYTES: usize = 16 << 20;

/// Anonymous memory; empty for no bytes.
#[derive(Debug)]
pub(crate) struct Owned {
    memory: Option<MmapMut>,
    start: usize,
    len: usize,
}

impl Owned {
    /// Room for `len_bytes`, not filled yet.
    ///
    /// # Errors
    /// [`StrategyError::Memory`] if there is none.
    pub(crate) fn new(len_bytes: u64) -> Result<Self, StrategyError> {
        let no_memory = |source| StrategyError::Memory { len_bytes, source };
        let len =
            usize::try_from(len_bytes).map_err(|_| no_memory(io::Error::from(io::ErrorKind::OutOfMemory)))?;
        let memory = (len > 0).then(|| MmapMut::map_anon(len)).transpose().map_err(no_memory)?;
        Ok(Self { memory, start: 0, len })
    }

    /// Only these bytes of it count.
    pub(crate) fn narrow(mut self, start: usize, len: usize) -> Self {
        debug_assert!(start + len <= self.len, "what counts lies inside");
        (self.start, self.len) = (self.start + start, len);
        self
    }

    /// Reads a file from `offset_bytes` on, until the bytes at `wanted` are there. Reads in blocks
    /// bring bytes of neighbours too; those do not count as arrived.
    ///
    /// # Errors
    /// [`StrategyError`].
    pub(crate) fn fill(
        &mut self,
        file: &File,
        path: &Path,
        offset_bytes: u64,
        wanted: Range<usize>,
        observe: &mut Observe<'_>,
    ) -> Result<(), StrategyError> {
        let room = self.memory.as_deref_mut().unwrap_or_default();
        let mut done = 0_usize;
        while done < wanted.end {
            let end = room.len().min(done + CHUNK_BYTES);
            let at = offset_bytes + to_u64(done);
            let count = match file.read_at(&mut room[done..end], at) {
                Ok(0) => {
                    let end_bytes = offset_bytes + to_u64(wanted.end);
                    return Err(StrategyError::EndOfFile { path: path.to_owned(), end_bytes });
                }
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(failed("read", path, error)),
            };
            let before = done.clamp(wanted.start, wanted.end);
            done += count;
            observe(Event::Arrived(to_u64(done.clamp(wanted.start, wanted.end) - before)))?;
        }
        Ok(())
    }

    /// Its bytes.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> &[u8] {
        self.memory.as_deref().map_or(&[], |memory| &memory[self.start..self.start + self.len])
    }
}

/// A whole file.
pub(super) fn file(path: &Path, observe: &mut Observe<'_>) -> Result<Owned, StrategyError> {
    let file = File::open(path).map_err(|source| failed("open", path, source))?;
    let len_bytes = file.metadata().map_err(|source| failed("look up", path, source))?.len();
    let mut owned = Owned::new(len_bytes)?;
    let wanted = 0..owned.len;
    owned.fill(&file, path, 0, wanted, observe)?;
    Ok(owned)
}
