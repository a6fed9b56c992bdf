//! The bytes of a GGUF header, in order, through one buffer of 64 KiB.
//!
//! Every read and skip is compared with the end of the file and with the limit on headers first, so
//! lengths that lie cost nothing.

use std::os::unix::fs::FileExt;

use super::super::CheckpointError;
use super::super::format::Input;
use crate::units::{to_u64, to_usize};

const BUFFER_BYTES: u64 = 64 << 10;

pub(super) struct Cursor<'a> {
    input: &'a Input<'a>,
    buffer: Vec<u8>,
    /// Where the buffer starts in the file.
    start: u64,
    /// Of the next byte, in the file.
    offset: u64,
    is_big_endian: bool,
}

impl<'a> Cursor<'a> {
    /// Starts at `offset` of the file.
    pub(super) fn new(input: &'a Input<'a>, offset: u64, is_big_endian: bool) -> Self {
        Self { input, buffer: Vec::new(), start: offset, offset, is_big_endian }
    }

    /// Of the next byte, in the file.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes from here to the end of the file.
    pub(super) fn rest_bytes(&self) -> u64 {
        self.input.len_bytes - self.offset
    }

    /// Skips bytes.
    pub(super) fn skip(&mut self, len_bytes: u64, what: &str) -> Result<(), CheckpointError> {
        self.check(len_bytes, what)?;
        self.offset += len_bytes;
        Ok(())
    }

    /// The next 4 bytes as a number.
    pub(super) fn u32(&mut self, what: &str) -> Result<u32, CheckpointError> {
        let bytes = self.bytes::<4>(what)?;
        Ok(if self.is_big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
    }

    /// The next 8 bytes as a number.
    pub(super) fn u64(&mut self, what: &str) -> Result<u64, CheckpointError> {
        let bytes = self.bytes::<8>(what)?;
        Ok(if self.is_big_endian { u64::from_be_bytes(bytes) } else { u64::from_le_bytes(bytes) })
    }

    /// The next bytes, in the order of little-endian numbers.
    pub(super) fn number<const LEN: usize>(&mut self, what: &str) -> Result<[u8; LEN], CheckpointError> {
        let mut bytes = self.bytes::<LEN>(what)?;
        if self.is_big_endian {
            bytes.reverse();
        }
        Ok(bytes)
    }

    fn bytes<const LEN: usize>(&mut self, what: &str) -> Result<[u8; LEN], CheckpointError> {
        let mut bytes = [0; LEN];
        bytes.copy_from_slice(self.take(LEN, what)?);
        Ok(bytes)
    }

    /// The next `len` bytes, at most 64 KiB.
    pub(super) fn take(&mut self, len: usize, what: &str) -> Result<&[u8], CheckpointError> {
        let len_bytes = to_u64(len);
        assert!(len_bytes <= BUFFER_BYTES, "{len} bytes of {what} at once");
        self.check(len_bytes, what)?;
        let end = self.start + to_u64(self.buffer.len());
        if self.offset < self.start || self.offset + len_bytes > end {
            let wanted = self.rest_bytes().min(BUFFER_BYTES);
            self.buffer.resize(to_usize(wanted), 0);
            self.start = self.offset;
            let read = self.input.file.read_exact_at(&mut self.buffer, self.start);
            read.map_err(|source| {
                let path = self.input.path.to_owned();
                CheckpointError::Io { path, operation: "read the header of", source }
            })?;
        }
        let at = to_usize(self.offset - self.start);
        self.offset += len_bytes;
        Ok(&self.buffer[at..at + len])
    }

    /// Refuses bytes behind the end of the file or the limit.
    fn check(&self, len_bytes: u64, what: &str) -> Result<(), CheckpointError> {
        if len_bytes > self.rest_bytes() {
            let rest_bytes = self.rest_bytes();
            let reason = format!("expected {len_bytes} bytes of {what}, found {rest_bytes} up to the end");
            return Err(self.input.invalid(self.offset, reason));
        }
        let limit_bytes = self.input.options.header_bytes_max;
        let found_bytes = self.offset + len_bytes;
        if found_bytes > limit_bytes {
            let (path, what) = (self.input.path.to_owned(), "header");
            return Err(CheckpointError::OverLimit { path, what, found_bytes, limit_bytes });
        }
        Ok(())
    }
}
