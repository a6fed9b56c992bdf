//! One thread that packs slots into the aligned buffers of writes. Slots come in any order; their
//! bytes are hashed and packed in file order.
//!
//! ```text
//!  slots (any order) --> wait for their turn --> hash: tensor, file --> buffers --> writers
//! ```
//!
//! A conversion makes one file at a time. Since reads are issued in the order of the file and each
//! takes a slot first, the next slot in order always comes. If the load failed it may not come:
//! then [`Message::GiveUp`] frees the slots that wait.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::{Receiver, Sender};

use super::super::ConvertError;
use super::super::hash::{FileDigest, Hashes};
use super::kernel_copy::CopiedRanges;
use super::writer::{BLOCK, OutputFile, Piece, Writers};
use super::{FileSet, FinishedFile};
use crate::plan::CopyOp;
use crate::staging::{Empty, Filled, Slot};
use crate::units::{to_u64, to_usize};

/// A message to the packer.
pub(super) enum Message {
    /// A file begins.
    Begin { index: usize, file: Arc<OutputFile>, copied: CopiedRanges },
    /// Bytes of it. The slot is sent back once they are packed, or dropped after an error.
    Copy { slot: Slot<Filled>, copies: Vec<CopyOp>, done: Sender<Slot<Empty>> },
    /// All its bytes have been sent.
    End { done: Sender<()> },
    /// The missing bytes will not come.
    GiveUp,
}

/// The first error of the output. The load only learns that the output failed.
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
    /// The ranges that the kernel copied.
    copied: CopiedRanges,
    /// The offset of the buffer in the file; without a buffer, that of the next byte.
    written_bytes: u64,
    /// The offset in the arena of the next byte.
    packed_bytes: u64,
    buffer: Option<Buffer>,
    /// Pieces that the writers have.
    in_flight: usize,
    /// Slots that wait for an earlier one, by their offset in the arena.
    early: BTreeMap<u64, Waiting>,
    digest: FileDigest,
    /// Of the tensors that are complete.
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
        // Later messages are dropped: slots go back to the ring, and the load learns of the
        // failure.
        messages.iter().for_each(drop);
    }

    /// Makes one file after the other, until the channel is closed.
    fn pack_files(
        &mut self,
        messages: &Receiver<Message>,
        current: &mut Option<Current>,
    ) -> Result<(), ConvertError> {
        for message in messages {
            match message {
                Message::Begin { index, file, copied } => {
                    *current = Some(self.begin(index, file, copied)?);
                }
                Message::Copy { slot, copies, done } => {
                    let current = current.as_mut().expect("a file begins before its bytes come");
                    self.copy(current, Waiting { slot, copies, done })?;
                }
                Message::End { done } => {
                    let finished = self.end(current.take().expect("a file begins before it ends"))?;
                    // The conversion takes it once the load has the layer ready, unless it has
                    // failed.
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
        copied: CopiedRanges,
    ) -> Result<Current, ConvertError> {
        let placements = self.files.placements(index);
        let mut current = Current {
            index,
            file,
            copied,
            written_bytes: 0,
            packed_bytes: 0,
            buffer: None,
            in_flight: 0,
            early: BTreeMap::new(),
            digest: FileDigest::new(self.with_sha256),
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

    /// Packs the copies of a slot, and of the slots that waited for it.
    fn copy(&mut self, current: &mut Current, slot: Waiting) -> Result<(), ConvertError> {
        let offset = slot.copies.first().expect("a read has bytes").arena_offset_bytes;
        current.early.insert(offset, slot);
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
                let (placements, tensors) = (self.files.placements(current.index), &mut current.tensors);
                current.digest.update(bytes, placements, &mut |_, hashes| tensors.push(hashes));
                self.pack(current, bytes)?;
                current.packed_bytes += copy.len_bytes;
            }
            // A load that failed does not wait for it.
            let _ = done.send(slot.into_empty());
        }
        Ok(())
    }

    /// Appends bytes to the file. Ranges that the kernel copied are passed over.
    fn pack(&mut self, current: &mut Current, mut bytes: &[u8]) -> Result<(), ConvertError> {
        while !bytes.is_empty() {
            let at = current.written_bytes + current.buffer.as_ref().map_or(0, |buffer| to_u64(buffer.len));
            let (len_bytes, is_copied) = current.copied.at(at);
            let len = usize::try_from(len_bytes).unwrap_or(usize::MAX).min(bytes.len());
            let (now, later) = bytes.split_at(len);
            bytes = later;
            if !is_copied {
                self.put(current, now)?;
                continue;
            }
            // Copied ranges begin on a block, so the buffer ends on one.
            if let Some(buffer) = current.buffer.take() {
                self.send(current, buffer);
            }
            current.written_bytes += to_u64(len);
        }
        Ok(())
    }

    /// Puts bytes into buffers, and sends full buffers to the writers.
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
        let Current { index, file, digest, mut tensors, .. } = current;
        let hashes = digest.finish(self.files.placements(index), &mut |_, hashes| tensors.push(hashes));
        let file = Arc::into_inner(file).expect("the writers have let go of it");
        Ok(FinishedFile { index, partial: file.partial, hashes, tensors })
    }

    /// Takes back the buffers of a file that will not be finished.
    fn abandon(&mut self, mut current: Current) {
        self.idle.extend(current.buffer.take().map(|buffer| buffer.slot));
        while current.in_flight > 0 {
            if let Err(error) = self.wait_for_one(&mut current) {
                self.failure.set(error);
            }
        }
    }
}

/// Packs the header of a file, and hashes it.
struct HeaderBytes<'a> {
    packer: &'a mut Packer,
    current: &'a mut Current,
}

impl Write for HeaderBytes<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.current.digest.update_header(bytes);
        self.packer.pack(self.current, bytes).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
