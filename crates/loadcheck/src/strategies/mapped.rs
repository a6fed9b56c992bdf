//! Maps a whole file and touches every page of its tensors, as `mmap` loaders do once their tensors
//! are used.
//!
//! A file that is truncated meanwhile kills the process with SIGBUS. Only a worker runs this.
#![allow(unsafe_code, reason = "touching a mapping that may change needs volatile reads")]

use std::fs::File;
use std::path::Path;

use memmap2::{MmapOptions, MmapRaw};
use onelayer::units::ByteRange;

use super::{Event, Observe, StrategyError, failed};

/// Bytes between two reports of progress.
const CHUNK_BYTES: usize = 16 << 20;

/// A mapping of a whole file; nothing for an empty one.
#[derive(Debug)]
pub(crate) struct Mapping {
    mapping: Option<MmapRaw>,
}

impl Mapping {
    /// Maps a file.
    ///
    /// # Errors
    /// [`StrategyError::File`].
    pub(crate) fn of_file(path: &Path) -> Result<Self, StrategyError> {
        let file = File::open(path).map_err(|source| failed("open", path, source))?;
        let len_bytes = file.metadata().map_err(|source| failed("look up", path, source))?.len();
        if len_bytes == 0 {
            return Ok(Self { mapping: None });
        }
        let mapping =
            MmapOptions::new().map_raw_read_only(&file).map_err(|source| failed("map", path, source))?;
        Ok(Self { mapping: Some(mapping) })
    }

    /// Touches every page that holds one of these bytes of the file.
    ///
    /// # Errors
    /// [`StrategyError::EndOfFile`] if the mapping ends before, [`StrategyError::Cancelled`].
    pub(crate) fn touch(
        &self,
        bytes: ByteRange,
        path: &Path,
        observe: &mut Observe<'_>,
    ) -> Result<(), StrategyError> {
        let too_short = || StrategyError::EndOfFile { path: path.to_owned(), end_bytes: bytes.end() };
        let (start, end) = usize::try_from(bytes.start())
            .ok()
            .zip(usize::try_from(bytes.end()).ok())
            .ok_or_else(too_short)?;
        let len = self.mapping.as_ref().map_or(0, MmapRaw::len);
        if end > len {
            return Err(too_short());
        }
        let mut position = start;
        while position < end {
            let chunk_end = end.min(position.saturating_add(CHUNK_BYTES));
            self.touch_pages(position, chunk_end);
            observe(Event::Arrived(u64::try_from(chunk_end - position).unwrap_or(u64::MAX)))?;
            position = chunk_end;
        }
        Ok(())
    }

    /// Reads one byte of every page from `start` to before `end`, both inside the mapping.
    fn touch_pages(&self, start: usize, end: usize) {
        let Some(mapping) = &self.mapping else { return };
        assert!(start <= end && end <= mapping.len(), "only pages of the mapping are touched");
        let page_len = rustix::param::page_size();
        let mut position = start;
        while position < end {
            let byte = mapping.as_ptr().wrapping_add(position);
            // SAFETY: `position` lies below `mapping.len()`, as asserted, so the byte is in a mapping that
            // can be read and lives as long as `self`; any value is a valid u8. The file may be
            // changed by others at any time: the read is volatile, through a raw pointer, and its
            // value is not used.
            let _ = unsafe { byte.read_volatile() };
            // The first byte of the next page.
            position = (position / page_len + 1).saturating_mul(page_len);
        }
    }
}
