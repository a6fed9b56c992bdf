//! One thread that turns slots, which come in any order, into the bytes of a file: in order,
//! hashed, packed into aligned buffers.
//!
//! ```text
//!  slots (any order) --> wait for their turn --> hash: tensor, file --> buffers --(full)--> writers
//! ```
//!
//! A conversion makes one file at a time. Since reads are issued in the order of the file and each
//! takes a slot first, the slot whose turn it is always comes. When the load has failed it may not:
//! then [`Message::GiveUp`] frees those that wait.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::{Receiver, Sender};

use super::super::ConvertError;
use super::super::digest::{Digest, Hashes};
use super::super::header::Header;
use super::kernel_copy::Written;
use super::writer::{BLOCK, OutputFile, Piece, Writers};
use super::{FileSet, FinishedFile};
use crate::plan::CopyOp;
use crate::staging::{Empty, Filled, Slot};
use crate::units::{to_u64, to_usize};

/// What the packer is told.
pub(super) enum Message {
    /// A file begins.
    Begin { index: usize, file: Arc<OutputFile>, written: Written },
    /// Bytes of it. The slot comes back when they are packed, or is lost with an error.
    Copy { slot: Slot<Filled>, copies: Vec<CopyOp>, done: Sender<Slot<Empty>> },
    /// All its bytes have been sent.
    End { done: Sender<()> },
    /// No more bytes that are missing will come.
    GiveUp,
}

/// What went wrong first. Whoever waits only learns that something did.
#[derive(Debug, Default)]
pub(super) struct Failure(Mutex<Option<ConvertError>>);

impl Failure {
    pub(super) fn set(&self, error: ConvertError) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    pub(super) fn take(&self) -> Option<ConvertError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The thread's state.
pub(super) struct Packer {
    pub(super) files: Arc<FileSet>,
    pub(super) writers: Writers,
    /// Buffers that are free.
    pub(super) idle: Vec<Slot<Empty>>,
    pub(super) finished: Sender<FinishedFile>,
    pub(super) failure: Arc<Failure>,
    pub(super) with_sha256: bool,
}

/// The file that is being made.
struct Current {
    index: usize,
    file: Arc<OutputFile>,
    /// What the kernel has copied.
    written: Written,
    /// Where the buffer's bytes go in the file; without a buffer, where the next byte goes.
    written_bytes: u64,
    /// Place in the arena of the next byte to be packed.
    packed_bytes: u64,
    buffer: Option<Buffer>,
    /// Pieces that the writers have.
    in_flight: usize,
    /// Slots that wait for an earlier one, by their place in the arena.
    early: BTreeMap<u64, Waiting>,
    file_digest: Digest,
    tensor_digest: Digest,
    /// Of the first tensors.
    tensors: Vec<Hashes>,
}

/// A buffer that is not full.
struct Buffer {
    slot: Slot<Empty>,
    len: usize,
}

struct Waiting {
    slot: Slot<Filled>,
    copies: Vec<CopyOp>,
    done: Sender<Slot<Empty>>,
}

impl Packer {
    /// Runs until the channel is closed.
    pub(super) fn run(mut self, messages: &Receiver<Message>) {
        let mut current = None;
        if let Err(error) = self.pack_files(messages, &mut current) {
            self.failure.set(error);
        }
        if let Some(current) = current {
            self.abandon(current);
        }
        // What still comes is dropped: slots go back to the ring, and whoever waits learns that nothing
        // came.
        messages.iter().for_each(drop);
    }

    /// Makes one file after the other, until no more is wanted.
    fn pack_files(
        &mut self,
        messages: &Receiver<Message>,
        current: &mut Option<Current>,
    ) -> Result<(), ConvertError> {
        for message in messages {
            match message {
                Message::Begin { index, file, written } => {
                    *current = Some(self.begin(index, file, written)?);
                }
                Message::Copy { slot, copies, done } => {
                    let current = current.as_mut().expect("a file begins before its bytes come");
                    self.copy(current, Waiting { slot, copies, done })?;
                }
                Message::End { done } => {
                    let finished = self.end(current.take().expect("a file begins before it ends"))?;
                    // The converter takes it when the load says that the file is ready. One that has gone
                    // takes nothing.
                    let _ = self.finished.send(finished);
                    let _ = done.send(());
                }
                Message::GiveUp => return Ok(()),
            }
        }
        Ok(())
    }

    fn begin(
        &mut self,
        index: usize,
        file: Arc<OutputFile>,
        written: Written,
    ) -> Result<Current, ConvertError> {
        let placements = self.files.placements(index);
        let mut current = Current {
            index,
            file,
            written,
            written_bytes: 0,
            packed_bytes: 0,
            buffer: None,
            in_flight: 0,
            early: BTreeMap::new(),
            file_digest: Digest::new(self.with_sha256),
            tensor_digest: Digest::new(self.with_sha256),
            tensors: Vec::with_capacity(placements.len()),
        };
        let files = Arc::clone(&self.files);
        let outcome = files.header(index).write(&mut HeaderBytes { packer: self, current: &mut current });
        outcome.map_err(|source| match source.downcast::<ConvertError>() {
            Ok(error) => error,
            Err(source) => current.file.failed("write the header of the file", source),
        })?;
        Ok(current)
    }

    /// Packs the copies of a slot, and those of all that waited for it.
    fn copy(&mut self, current: &mut Current, slot: Waiting) -> Result<(), ConvertError> {
        let place = slot.copies.first().expect("a read has bytes").arena_offset_bytes;
        current.early.insert(place, slot);
        while let Some(entry) = current.early.first_entry() {
            if *entry.key() != current.packed_bytes {
                return Ok(());
            }
            let Waiting { slot, copies, done } = entry.remove();
            for copy in &copies {
                assert_eq!(
                    copy.arena_offset_bytes, current.packed_bytes,
                    "the tensors of a file have no gaps"
                );
                let bytes = slot.part(copy.slot_offset_bytes, copy.len_bytes);
                self.hash_tensors(current, bytes);
                current.file_digest.update(bytes);
                self.pack(current, bytes)?;
                current.packed_bytes += copy.len_bytes;
            }
            // Whoever waits for it may have gone.
            let _ = done.send(slot.into_empty());
        }
        Ok(())
    }

    /// Hashes bytes as those of the next tensors.
    fn hash_tensors(&self, current: &mut Current, mut bytes: &[u8]) {
        let placements = self.files.placements(current.index);
        let mut at = current.packed_bytes;
        while !bytes.is_empty() {
            let placement = &placements[current.tensors.len()];
            let end = placement.arena_offset_bytes + placement.len_bytes();
            let (now, later) = bytes.split_at(bytes.len().min(to_usize(end - at)));
            current.tensor_digest.update(now);
            at += to_u64(now.len());
            bytes = later;
            if at == end {
                current.tensors.push(current.tensor_digest.take());
            }
        }
    }

    /// Appends bytes to the file; what the kernel has copied is there already.
    fn pack(&mut self, current: &mut Current, mut bytes: &[u8]) -> Result<(), ConvertError> {
        while !bytes.is_empty() {
            let at = current.written_bytes + current.buffer.as_ref().map_or(0, |buffer| to_u64(buffer.len));
            let (len_bytes, is_there) = current.written.at(at);
            let len = usize::try_from(len_bytes).unwrap_or(usize::MAX).min(bytes.len());
            let (now, later) = bytes.split_at(len);
            bytes = later;
            if !is_there {
                self.put(current, now)?;
                continue;
            }
            // Ranges that the kernel has copied begin on a block.
            if let Some(buffer) = current.buffer.take() {
                self.send(current, buffer);
            }
            current.written_bytes += to_u64(len);
        }
        Ok(())
    }

    /// Puts bytes into buffers, and sends those that are full.
    fn put(&mut self, current: &mut Current, mut bytes: &[u8]) -> Result<(), ConvertError> {
        while !bytes.is_empty() {
            let mut buffer = match current.buffer.take() {
                Some(buffer) => buffer,
                None => Buffer { slot: self.take_buffer(current)?, len: 0 },
            };
            let room = &mut buffer.slot.bytes_mut()[buffer.len..];
            let (now, later) = bytes.split_at(bytes.len().min(room.len()));
            room[..now.len()].copy_from_slice(now);
            let is_full = now.len() == room.len();
            buffer.len += now.len();
            bytes = later;
            if is_full {
                self.send(current, buffer);
            } else {
                current.buffer = Some(buffer);
            }
        }
        Ok(())
    }

    /// A free buffer; waits for the writers if there is none.
    fn take_buffer(&mut self, current: &mut Current) -> Result<Slot<Empty>, ConvertError> {
        loop {
            if let Some(slot) = self.idle.pop() {
                return Ok(slot);
            }
            self.wait_for_one(current)?;
        }
    }

    fn wait_for_one(&mut self, current: &mut Current) -> Result<(), ConvertError> {
        let written = self.writers.next_written();
        current.in_flight -= 1;
        self.idle.push(written.buffer);
        written.outcome
    }

    fn send(&self, current: &mut Current, mut buffer: Buffer) {
        let padded = to_usize(BLOCK.up(to_u64(buffer.len)).expect("a buffer ends on a block"));
        buffer.slot.bytes_mut()[buffer.len..padded].fill(0);
        let offset_bytes = current.written_bytes;
        current.written_bytes += to_u64(buffer.len);
        current.in_flight += 1;
        let file = Arc::clone(&current.file);
        self.writers.write(Piece { file, buffer: buffer.slot.into_filled(), len: buffer.len, offset_bytes });
    }

    /// Waits until every byte is written.
    fn end(&mut self, mut current: Current) -> Result<FinishedFile, ConvertError> {
        if let Some(buffer) = current.buffer.take() {
            self.send(&mut current, buffer);
        }
        let mut outcome = Ok(());
        while current.in_flight > 0 {
            outcome = outcome.and(self.wait_for_one(&mut current));
        }
        outcome?;
        assert_eq!(current.written_bytes, current.file.len_bytes, "the plan knows the length of every file");
        current.file.cut_to_length()?;
        // What has no bytes stands at the end, and nothing came for it.
        let tensors = self.files.placements(current.index).len();
        current.tensors.resize_with(tensors, || current.tensor_digest.take());
        let file = Arc::into_inner(current.file).expect("the writers have let go of it");
        let hashes = current.file_digest.take();
        Ok(FinishedFile { index: current.index, partial: file.partial, hashes, tensors: current.tensors })
    }

    /// Takes back what the writers have of a file that is not wanted any more.
    fn abandon(&mut self, mut current: Current) {
        self.idle.extend(current.buffer.take().map(|buffer| buffer.slot));
        while current.in_flight > 0 {
            if let Err(error) = self.wait_for_one(&mut current) {
                self.failure.set(error);
            }
        }
    }
}

/// Takes the header into the file and its hash.
struct HeaderBytes<'a> {
    packer: &'a mut Packer,
    current: &'a mut Current,
}

impl Write for HeaderBytes<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.current.file_digest.update(bytes);
        self.packer.pack(self.current, bytes).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl FileSet {
    fn header(&self, index: usize) -> Header<'_> {
        self.headers.of(index, &self.plan, self.placements(index))
    }
}
