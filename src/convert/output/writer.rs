//! Threads that write aligned pieces of files past the page cache.
//!
//! ```text
//!            buffer (full)                    pwrite                      buffer (empty), outcome
//!  packer ---------------------> writers --------------------> file      ------------------------> packer
//! ```
//!
//! A file system that refuses direct writes is written through the page cache, whose pages are
//! flushed and dropped on the way. The report names this mode.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, unbounded};
use rustix::fs::{Advice, FallocateFlags, OFlags};
use rustix::io::Errno;

use super::super::target_directory::PartialFile;
use super::super::{ConvertError, WriteMode};
use crate::staging::{Empty, Filled, Slot};
use crate::units::{Alignment, to_u64};

/// Offsets, lengths and addresses of direct writes are multiples of this. A file system with larger
/// blocks refuses such writes, and is written through the page cache.
pub(super) const BLOCK: Alignment = Alignment::PAGE;
/// Most dirty bytes in the page cache before they are flushed.
const DIRTY_BYTES_MAX: u64 = 16 << 20;

/// A file of tensors while it is written.
#[derive(Debug)]
pub(super) struct OutputFile {
    pub(super) partial: PartialFile,
    /// Its length once it is whole.
    pub(super) len_bytes: u64,
    /// Bytes written through the page cache since the last flush.
    dirty_bytes: AtomicU64,
    mode: Arc<ModeCell>,
}

/// How files are written: directly until the file system refuses, then through the page cache for
/// the rest of the conversion. Holds the reason.
#[derive(Debug, Default)]
pub(super) struct ModeCell(OnceLock<String>);

impl ModeCell {
    pub(super) fn mode(&self) -> WriteMode {
        self.0.get().map_or(WriteMode::Direct, |reason| WriteMode::DropBehind { reason: reason.clone() })
    }
}

impl OutputFile {
    /// Reserves the space of a new file and makes it direct.
    ///
    /// # Errors
    /// [`ConvertError::Write`], for example if there is no room.
    pub(super) fn new(
        partial: PartialFile,
        len_bytes: u64,
        mode: &Arc<ModeCell>,
    ) -> Result<Self, ConvertError> {
        let file = Self { partial, len_bytes, dirty_bytes: AtomicU64::new(0), mode: Arc::clone(mode) };
        file.reserve().map_err(|source| file.failed("reserve space for the file", source))?;
        if file.mode.0.get().is_none()
            && let Err(error) = set_direct(file.partial.file(), true)
        {
            file.leave_direct(&format!("O_DIRECT was refused: {error}"))
                .map_err(|source| file.failed("write to the file", source))?;
        }
        Ok(file)
    }

    /// Reserves blocks for every byte: a full disk is noticed now, and the file is not fragmented.
    fn reserve(&self) -> io::Result<()> {
        if self.len_bytes == 0 {
            return Ok(());
        }
        let file = self.partial.file();
        let reserved = rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(file, FallocateFlags::empty(), 0, self.len_bytes)
        });
        match reserved {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(self.len_bytes),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn failed(&self, operation: &'static str, source: io::Error) -> ConvertError {
        ConvertError::Write { path: self.partial.full_path(), operation, source }
    }

    /// Writes a piece whose length is `len`; in `bytes` it is padded to the next multiple of
    /// [`BLOCK`].
    fn write(&self, bytes: &[u8], len: usize, offset_bytes: u64) -> io::Result<()> {
        let file = self.partial.file();
        if self.mode.0.get().is_none() {
            match file.write_all_at(bytes, offset_bytes) {
                Err(error)
                    if matches!(Errno::from_io_error(&error), Some(Errno::INVAL | Errno::OPNOTSUPP)) =>
                {
                    self.leave_direct(&format!("a direct write was refused: {error}"))?;
                }
                outcome => return outcome,
            }
        }
        // Another thread may have left direct writes; this descriptor may still be direct.
        set_direct(file, false)?;
        file.write_all_at(&bytes[..len], offset_bytes)?;
        let dirty_bytes = self.dirty_bytes.fetch_add(to_u64(len), Ordering::Relaxed) + to_u64(len);
        if dirty_bytes >= DIRTY_BYTES_MAX {
            self.dirty_bytes.store(0, Ordering::Relaxed);
            self.flush_cache()?;
        }
        Ok(())
    }

    fn flush_cache(&self) -> io::Result<()> {
        rustix::fs::fdatasync(self.partial.file())?;
        // A file system may ignore the advice.
        let _ = rustix::fs::fadvise(self.partial.file(), 0, None::<NonZeroU64>, Advice::DontNeed);
        Ok(())
    }

    fn leave_direct(&self, reason: &str) -> io::Result<()> {
        // Two threads may be refused at once: either reason will do.
        let _ = self.mode.0.set(reason.to_owned());
        set_direct(self.partial.file(), false)
    }

    /// Cuts off the padding of the last direct write.
    pub(super) fn cut_to_length(&self) -> Result<(), ConvertError> {
        let cut = self.partial.file().set_len(self.len_bytes);
        cut.map_err(|source| self.failed("cut the file to its length", source))?;
        if self.mode.0.get().is_some() {
            self.flush_cache().map_err(|source| self.failed("sync the file", source))?;
        }
        Ok(())
    }
}

fn set_direct(file: &File, is_direct: bool) -> io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, is_direct);
    Ok(rustix::fs::fcntl_setfl(file, flags)?)
}

/// One piece to write.
pub(super) struct Piece {
    pub(super) file: Arc<OutputFile>,
    pub(super) buffer: Slot<Filled>,
    /// Bytes of it that belong to the file.
    pub(super) len: usize,
    pub(super) offset_bytes: u64,
}

/// A buffer that is free again, and the outcome of its write.
pub(super) struct Written {
    pub(super) buffer: Slot<Empty>,
    pub(super) outcome: Result<(), ConvertError>,
}

/// The threads that write. Dropping them waits until their pieces are written.
#[derive(Debug)]
pub(super) struct Writers {
    pieces: Option<Sender<Piece>>,
    written: Receiver<Written>,
    threads: Vec<JoinHandle<()>>,
}

impl Writers {
    /// Starts `count` threads.
    pub(super) fn start(count: u32) -> io::Result<Self> {
        let (pieces, piece_receiver) = unbounded::<Piece>();
        let (written_sender, written) = unbounded();
        let mut writers = Self { pieces: Some(pieces), written, threads: Vec::new() };
        for number in 0..count {
            let (pieces, written) = (piece_receiver.clone(), written_sender.clone());
            let thread = thread::Builder::new().name(format!("onelayer-write-{number}"));
            writers.threads.push(thread.spawn(move || write_all(&pieces, &written))?);
        }
        Ok(writers)
    }

    /// Sends a piece to be written.
    pub(super) fn write(&self, piece: Piece) {
        let pieces = self.pieces.as_ref().expect("only dropping takes it");
        // Threads end after their channel is closed.
        let _ = pieces.send(piece);
    }

    /// The next piece that is written.
    ///
    /// # Panics
    /// If all threads have ended, which only their panic can cause.
    pub(super) fn next_written(&self) -> Written {
        self.written.recv().expect("writers end after the packer")
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        drop(self.pieces.take());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn write_all(pieces: &Receiver<Piece>, written: &Sender<Written>) {
    for Piece { file, buffer, len, offset_bytes } in pieces {
        let padded = BLOCK.up(to_u64(len)).expect("a piece fits a buffer");
        let outcome = file.write(buffer.part(0, padded), len, offset_bytes);
        let outcome = outcome.map_err(|source| file.failed("write to the file", source));
        // The packer waits for every piece of a file before it lets go of it.
        drop(file);
        if written.send(Written { buffer: buffer.into_empty(), outcome }).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::budget::MemoryBudget;
    use crate::convert::target_directory::TargetDirectory;
    use crate::plan::RingShape;
    use crate::staging::Ring;

    #[test]
    fn writers_that_are_dropped_have_written_what_they_had() {
        const PIECES: u8 = 64;
        let shape = RingShape { slots: PIECES.into(), slot_bytes: 64 << 10, readers: 1 };
        let reservation = MemoryBudget::new(shape.bytes()).reserve("pieces", shape.bytes()).unwrap();
        let ring = Ring::new(shape, reservation, None).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let partial = TargetDirectory::create(folder.path()).unwrap().create_file("a").unwrap();
        let len_bytes = u64::from(PIECES) * shape.slot_bytes;
        let file = Arc::new(OutputFile::new(partial, len_bytes, &Arc::default()).unwrap());
        let writers = Writers::start(2).unwrap();
        for number in 0..PIECES {
            let mut slot = ring.try_take().unwrap();
            slot.bytes_mut().fill(number + 1);
            let (len, offset_bytes) = (slot.bytes_mut().len(), u64::from(number) * shape.slot_bytes);
            writers.write(Piece { file: Arc::clone(&file), buffer: slot.into_filled(), len, offset_bytes });
        }
        drop(writers);
        let _file = Arc::into_inner(file).expect("the writers have ended");
        let bytes = fs::read(folder.path().join(".a.partial")).unwrap();
        assert!(bytes.chunks_exact(64 << 10).map(|piece| piece[0]).eq(1..=PIECES));
        assert_eq!(ring.free_slots(), usize::from(PIECES));
    }
}
