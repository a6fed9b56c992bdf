//! The io_uring as safe calls: it owns each buffer from the push until the kernel's answer.
//!
//! A buffer is registered at its first use: the ring of a load has more slots than a fast load
//! uses, and registering a slot touches all its pages.
#![allow(
    unsafe_code,
    reason = "the kernel writes to memory by address; each block says why that memory is ours"
)]

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::types::Fd;
use io_uring::{IoUring, opcode, squeue};

use crate::units::to_usize;

use super::super::extent::Piece;
use super::super::files::OpenFile;
use super::{Completion, ReadBuffer};

/// Limit of one read: the kernel's, rounded down to any block.
const READ_BYTES_MAX: u32 = 1 << 30;
/// Retries of waiting while the kernel is short of memory.
const TRIES_MAX: u32 = 1000;

/// An io_uring.
pub(super) struct KernelRing<B: ReadBuffer, T> {
    io: IoUring,
    /// Reads in flight by tag: the buffers that the kernel may write to, with their files.
    reads: ManuallyDrop<Vec<Option<InFlight<B, T>>>>,
    in_flight: usize,
    /// Whether each buffer is registered, by number; or why there is no table of buffers.
    registered: Result<Vec<bool>, String>,
    /// No further buffer is registered: one was refused, or none is wanted.
    is_closed: bool,
}

struct InFlight<B, T> {
    buffer: B,
    file: Arc<OpenFile>,
    rest: T,
}

impl<B: ReadBuffer, T> KernelRing<B, T> {
    /// A queue for `reads_most` reads, with a table for `buffer_count` buffers if given. Returns
    /// the reason if the kernel refuses.
    pub(super) fn new(reads_most: u32, buffer_count: Option<u32>) -> Result<Self, String> {
        let entries = reads_most.max(1);
        // This thread fetches answers anyway, so it need not be interrupted for them. Not known
        // before Linux 5.19.
        let io = IoUring::builder()
            .setup_coop_taskrun()
            .dontfork()
            .build(entries)
            .or_else(|_| IoUring::builder().dontfork().build(entries))
            .map_err(|error| format!("io_uring_setup was refused: {error}"))?;
        // Tables that are filled later exist since Linux 5.19.
        let table = |count| {
            io.submitter().register_buffers_sparse(count).map(|()| vec![false; to_usize(u64::from(count))])
        };
        let registered = buffer_count.map_or(Ok(Vec::new()), table).map_err(|error| error.to_string());
        let mut reads = Vec::new();
        reads.resize_with(to_usize(u64::from(entries)), || None);
        Ok(Self {
            io,
            reads: ManuallyDrop::new(reads),
            in_flight: 0,
            registered,
            is_closed: buffer_count.is_none(),
        })
    }

    /// Reads that were pushed and not answered.
    pub(super) fn len(&self) -> usize {
        self.in_flight
    }

    /// Registers a buffer, unless it is registered. Returns the reason of the first refusal.
    pub(super) fn register(&mut self, buffer: &mut B) -> Result<(), String> {
        let Some(number) = buffer.number().filter(|_| !self.is_closed) else { return Ok(()) };
        let place = to_usize(u64::from(number));
        let known = self.registered.as_ref().map(|known| known[place]).map_err(String::clone);
        let registered = match known {
            Ok(true) => return Ok(()),
            Ok(false) => self.tell(number, buffer.bytes_mut()).map_err(|error| error.to_string()),
            Err(reason) => Err(reason),
        };
        match (registered, &mut self.registered) {
            (Ok(()), Ok(known)) => {
                known[place] = true;
                Ok(())
            }
            (registered, _) => {
                self.is_closed = true;
                registered.map_err(|reason| format!("buffers could not be registered: {reason}"))
            }
        }
    }

    fn tell(&self, number: u32, bytes: &mut [u8]) -> io::Result<()> {
        let part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: the kernel takes its own reference on each page of these bytes, and writes to
        // them only for a read that names them; `push` names them for a buffer that has the same
        // bytes, is owned here and so exists (the promise of `ReadBuffer`). Pages that outlive
        // their mapping have no other user.
        unsafe { self.io.submitter().register_buffers_update(number, &[part], None) }
    }

    /// Adds a read; [`Self::submit`] or [`Self::wait`] begins it.
    ///
    /// # Panics
    /// If the queue is full, or the piece is not inside the buffer.
    pub(super) fn push(&mut self, mut buffer: B, file: Arc<OpenFile>, piece: Piece, rest: T) {
        let tag = self.reads.iter().position(Option::is_none).expect("no more reads than were asked for");
        let entry = self.entry(&mut buffer, &file, piece, tag);
        self.reads[tag] = Some(InFlight { buffer, file, rest });
        // SAFETY: the entry names memory of a buffer and a descriptor of a file that are owned by `reads`
        // until the answer has come; `reads` is dropped only when nothing is in flight.
        let pushed = unsafe { self.io.submission().push(&entry) };
        pushed.expect("the queue has an entry for each flight");
        self.in_flight += 1;
    }

    fn entry(&self, buffer: &mut B, file: &OpenFile, piece: Piece, tag: usize) -> squeue::Entry {
        let known = |&number: &u32| {
            let table = self.registered.as_deref();
            table.is_ok_and(|known| known.get(to_usize(u64::from(number))) == Some(&true))
        };
        let number = buffer.number().filter(known).and_then(|number| u16::try_from(number).ok());
        let start = to_usize(piece.position_bytes);
        let part = &mut buffer.bytes_mut()[start..start + to_usize(piece.len_bytes)];
        let len = u32::try_from(part.len()).unwrap_or(READ_BYTES_MAX).min(READ_BYTES_MAX);
        let (fd, start) = (Fd(file.as_raw_fd()), part.as_mut_ptr());
        let entry = match number {
            Some(number) => opcode::ReadFixed::new(fd, start, len, number).offset(piece.offset_bytes).build(),
            None => opcode::Read::new(fd, start, len).offset(piece.offset_bytes).build(),
        };
        entry.user_data(u64::try_from(tag).unwrap_or(u64::MAX))
    }

    /// Begins pushed reads. An error comes again when waiting.
    pub(super) fn submit(&self) {
        let _ = self.io.submit();
    }

    /// Waits for the next answer. `None` if nothing is in flight.
    pub(super) fn wait(&mut self) -> io::Result<Option<Completion<B, T>>> {
        let mut tries = 0;
        while self.in_flight > 0 {
            if let Some(completion) = self.take_completion() {
                return Ok(Some(completion));
            }
            match self.io.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_temporary(&error) && tries < TRIES_MAX => {
                    tries += 1;
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    fn take_completion(&mut self) -> Option<Completion<B, T>> {
        let entry = self.io.completion().next()?;
        let tag = usize::try_from(entry.user_data()).expect("a tag of ours");
        let InFlight { buffer, file, rest } = self.reads[tag].take().expect("each flight has one answer");
        self.in_flight -= 1;
        let result = entry.result();
        // Negative results are error numbers.
        let answer =
            usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(result.saturating_neg()));
        Some(Completion { buffer, file, rest, answer })
    }
}

/// True for errors of a kernel that is short of something for now.
fn is_temporary(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::AGAIN | Errno::BUSY))
}

impl<B: ReadBuffer, T> Drop for KernelRing<B, T> {
    fn drop(&mut self) {
        while let Ok(Some(completion)) = self.wait() {
            drop(completion);
        }
        if self.in_flight == 0 {
            // Closing the queue would release its buffers too, but later.
            if self.registered.as_ref().is_ok_and(|known| known.contains(&true)) {
                let _ = self.io.submitter().unregister_buffers();
            }
            // SAFETY: not used after this. Nothing is in flight, so the kernel writes to no buffer of it.
            unsafe { ManuallyDrop::drop(&mut self.reads) };
        }
        // Otherwise the kernel may still write to the buffers: they are leaked, which is sound.
    }
}
