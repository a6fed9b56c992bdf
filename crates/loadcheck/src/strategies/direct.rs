//! One tensor at a time, by `pread`: through the page cache, or past it in whole blocks.
//!
//! A file system that refuses direct reads is read through its cache, with a note.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use onelayer::units::{Alignment, ByteRange};
use rustix::fs::OFlags;

use super::{Event, Observe, Owned, StrategyError, failed};

/// An open file.
#[derive(Debug)]
pub(super) struct Reader {
    file: File,
    path: PathBuf,
    alignment: Alignment,
}

impl Reader {
    /// Opens a file; past the page cache if that is wanted and possible.
    pub(super) fn open(
        path: &Path,
        wants_direct: bool,
        observe: &mut Observe<'_>,
    ) -> Result<Self, StrategyError> {
        let of = |file, alignment| Self { file, path: path.to_owned(), alignment };
        if wants_direct {
            match open_direct(path) {
                Ok(file) => return Ok(of(file, Alignment::PAGE)),
                Err(error) if is_refusal(&error) => observe(Event::Note(refused(path, &error)))?,
                Err(error) => return Err(failed("open", path, error)),
            }
        }
        let file = File::open(path).map_err(|source| failed("open", path, source))?;
        Ok(of(file, Alignment::ONE))
    }

    /// The bytes of one tensor, in new memory.
    pub(super) fn tensor(
        &mut self,
        extent: ByteRange,
        observe: &mut Observe<'_>,
    ) -> Result<Owned, StrategyError> {
        match self.read(extent, observe) {
            // Some file systems refuse only the read.
            Err(StrategyError::File { source, .. })
                if self.alignment != Alignment::ONE && is_refusal(&source) =>
            {
                observe(Event::Note(refused(&self.path, &source)))?;
                self.file = File::open(&self.path).map_err(|source| failed("open", &self.path, source))?;
                self.alignment = Alignment::ONE;
                self.read(extent, observe)
            }
            result => result,
        }
    }

    fn read(&self, extent: ByteRange, observe: &mut Observe<'_>) -> Result<Owned, StrategyError> {
        let blocks = extent.align_outward(self.alignment).unwrap_or(extent);
        let position = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let before = position(extent.start() - blocks.start());
        let len = position(extent.len_bytes());
        let mut owned = Owned::new(blocks.len_bytes())?;
        if len > 0 {
            owned.fill(&self.file, &self.path, blocks.start(), before..before + len, observe)?;
        }
        Ok(owned.narrow(before, len))
    }
}

fn open_direct(path: &Path) -> io::Result<File> {
    let flags = i32::try_from(OFlags::DIRECT.bits()).expect("open flags are a C int");
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

fn is_refusal(error: &io::Error) -> bool {
    matches!(
        rustix::io::Errno::from_io_error(error),
        Some(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP)
    )
}

fn refused(path: &Path, error: &io::Error) -> String {
    format!("direct: {} was read through the page cache: {error}", path.display())
}
