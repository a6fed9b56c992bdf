//! The state of one direct read of an extent: the next system call, and the end. The caller makes
//! the calls.
//!
//! A read that stops inside a block (at the end of the file, or where a file system splits a
//! request) continues from the start of that block: only whole blocks can be requested.

use std::io;

use crate::units::{Alignment, to_u64};

use super::ReadRequest;

/// How the direct read of an extent ended.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The payload has arrived.
    Filled { moved_bytes: u64 },
    /// No more bytes come, although the payload is incomplete. Past the end of the file this is
    /// right; a buffered read will tell.
    Stuck { offset_bytes: u64 },
    /// The system refused.
    Failed { offset_bytes: u64, error: io::Error },
}

/// The next system call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Offset in the buffer.
    pub(super) position_bytes: u64,
    #[cfg_attr(not(feature = "uring"), expect(dead_code, reason = "only a queue needs to be told"))]
    pub(super) len_bytes: u64,
    /// Offset in the file.
    pub(super) offset_bytes: u64,
}

/// What to do next.
#[derive(Debug)]
pub(super) enum Next {
    Read(Piece),
    Over(Outcome),
}

/// An extent that is being read.
#[derive(Debug)]
pub(super) struct ExtentRead {
    start: u64,
    len_bytes: u64,
    needed: u64,
    block: Alignment,
    filled: u64,
    moved_bytes: u64,
}

impl ExtentRead {
    /// Begins a read in blocks of this size.
    pub(super) fn new(request: &ReadRequest, block: Alignment) -> Self {
        let start = request.extent.start();
        // An empty payload needs no byte, wherever in the extent it lies.
        let needed = if request.payload.is_empty() { 0 } else { request.payload.end() - start };
        Self { start, len_bytes: request.extent.len_bytes(), needed, block, filled: 0, moved_bytes: 0 }
    }

    /// What to do now.
    pub(super) fn next(&self) -> Next {
        if self.filled >= self.needed {
            return Next::Over(Outcome::Filled { moved_bytes: self.moved_bytes });
        }
        Next::Read(self.piece())
    }

    /// What to do after the answer to the last call.
    pub(super) fn on_answer(&mut self, answer: io::Result<usize>) -> Next {
        let Piece { position_bytes, offset_bytes, .. } = self.piece();
        match answer {
            Ok(count) if position_bytes + to_u64(count) > self.filled => {
                self.filled = position_bytes + to_u64(count);
                self.moved_bytes += to_u64(count);
                self.next()
            }
            Ok(_) => Next::Over(Outcome::Stuck { offset_bytes: self.start + self.filled }),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => self.next(),
            Err(error) => Next::Over(Outcome::Failed { offset_bytes, error }),
        }
    }

    fn piece(&self) -> Piece {
        let position_bytes = self.block.down(self.filled);
        let len_bytes = self.len_bytes - position_bytes;
        Piece { position_bytes, len_bytes, offset_bytes: self.start + position_bytes }
    }
}
