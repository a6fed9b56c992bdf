//! Reads a part of a file from front to back, through a buffer of 64 KiB.

use std::os::unix::fs::FileExt;

use super::super::CheckpointError;
use super::super::format::Input;
use crate::units::{ByteRange, to_u64, to_usize};

/// An error behind a pointer: the functions that read single bytes return it.
pub(super) type Fault = Box<CheckpointError>;

/// The most bytes that [`Stream::take`] gives at once.
pub(super) const TAKE_BYTES_MAX: usize = 64 << 10;

/// The longest line of text: names of modules and classes, numbers in digits.
const LINE_BYTES_MAX: usize = 4 << 10;

pub(super) struct Stream<'a> {
    input: Input<'a>,
    buffer: Vec<u8>,
    /// Bytes of the buffer that were given out.
    at: usize,
    /// Bytes of the buffer that hold text.
    filled: usize,
    /// The offset of the byte behind the filled ones in the file.
    next: u64,
    end: u64,
    ran_out: bool,
}

impl<'a> Stream<'a> {
    pub(super) fn new(input: &Input<'a>, text: ByteRange) -> Self {
        let buffer_bytes = text.len_bytes().min(to_u64(TAKE_BYTES_MAX));
        let buffer = vec![0; to_usize(buffer_bytes)];
        Self { input: *input, buffer, at: 0, filled: 0, next: text.start(), end: text.end(), ran_out: false }
    }

    /// The offset of the next byte in the file.
    #[inline]
    pub(super) fn offset(&self) -> u64 {
        self.next - to_u64(self.filled - self.at)
    }

    /// Bytes to the end.
    pub(super) fn remaining(&self) -> u64 {
        self.end - self.offset()
    }

    /// An error about the next byte.
    pub(super) fn invalid(&self, reason: impl Into<String>) -> Fault {
        Box::new(self.input.invalid(self.offset(), reason))
    }

    pub(super) fn input(&self) -> &Input<'a> {
        &self.input
    }

    #[inline]
    pub(super) fn byte(&mut self) -> Result<u8, Fault> {
        if self.at == self.filled {
            self.refill(1)?;
        }
        let byte = self.buffer[self.at];
        self.at += 1;
        Ok(byte)
    }

    #[inline]
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let taken = self.take(N)?;
        Ok(taken.try_into().expect("the slice has N bytes"))
    }

    /// The next bytes, at most [`TAKE_BYTES_MAX`].
    #[inline]
    pub(super) fn take(&mut self, count: usize) -> Result<&[u8], Fault> {
        assert!(count <= TAKE_BYTES_MAX, "callers ask for no more");
        if self.filled - self.at < count {
            self.refill(count)?;
        }
        let start = self.at;
        self.at += count;
        Ok(&self.buffer[start..self.at])
    }

    #[inline]
    pub(super) fn skip(&mut self, count: u64) -> Result<(), Fault> {
        let buffered = to_u64(self.filled - self.at);
        if count <= buffered {
            self.at += to_usize(count);
            return Ok(());
        }
        if count > self.remaining() {
            return Err(self.short(count));
        }
        self.next += count - buffered;
        (self.at, self.filled) = (0, 0);
        Ok(())
    }

    /// The next line, without its end.
    pub(super) fn line(&mut self) -> Result<&[u8], Fault> {
        let find = |bytes: &[u8]| bytes.iter().take(LINE_BYTES_MAX + 1).position(|&byte| byte == b'\n');
        let mut found = find(&self.buffer[self.at..self.filled]);
        if found.is_none() && self.filled - self.at <= LINE_BYTES_MAX {
            let wanted = self.remaining().min(to_u64(LINE_BYTES_MAX + 1));
            self.refill(to_usize(wanted))?;
            found = find(&self.buffer[self.at..self.filled]);
        }
        let Some(len) = found else {
            self.ran_out = self.remaining() <= to_u64(LINE_BYTES_MAX);
            return Err(self.invalid(format!("expected a line of at most {LINE_BYTES_MAX} bytes")));
        };
        let start = self.at;
        self.at += len + 1;
        Ok(&self.buffer[start..start + len])
    }

    /// True if more was asked for than is there.
    pub(super) fn ran_out(&self) -> bool {
        self.ran_out
    }

    fn short(&mut self, wanted: u64) -> Fault {
        self.ran_out = true;
        let found = self.remaining();
        self.invalid(format!("expected {wanted} more bytes, found {found} before the end"))
    }

    /// Reads until the buffer holds `wanted` unread bytes.
    #[cold]
    fn refill(&mut self, wanted: usize) -> Result<(), Fault> {
        if to_u64(wanted) > self.remaining() {
            return Err(self.short(to_u64(wanted)));
        }
        self.buffer.copy_within(self.at..self.filled, 0);
        self.filled -= self.at;
        self.at = 0;
        while self.filled < wanted {
            let room = to_u64(self.buffer.len() - self.filled).min(self.end - self.next);
            let target = &mut self.buffer[self.filled..self.filled + to_usize(room)];
            let count = match self.input.file.read_at(target, self.next) {
                Ok(0) => return Err(self.invalid("the file became shorter while it was read")),
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(source) => return Err(Box::new(self.input.io(source))),
            };
            self.filled += count;
            self.next += to_u64(count);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::with_file;
    use super::*;

    #[test]
    fn bytes_arrive_in_order_across_buffers() {
        let bytes: Vec<u8> = (0..300_000_u32).map(|at| u8::try_from(at % 251).unwrap()).collect();
        with_file(&bytes, |input| {
            let mut stream = Stream::new(input, ByteRange::new(3, 299_000).unwrap());
            let at = |offset: u64| bytes[to_usize(offset)];
            for step in [1_u64, 7, 1000, 65_535, 65_536, 70_000, 3] {
                let offset = stream.offset();
                assert_eq!(stream.byte().unwrap(), at(offset));
                let taken = stream.take(usize::try_from(step.min(65_536)).unwrap()).unwrap();
                assert_eq!(
                    (taken[0], taken[taken.len() - 1]),
                    (at(offset + 1), at(offset + step.min(65_536)))
                );
                let offset = stream.offset();
                if step < 60_000 {
                    stream.skip(step).unwrap();
                    assert_eq!(stream.offset(), offset + step);
                }
            }
            let rest = stream.remaining();
            assert!(stream.skip(rest + 1).is_err() && stream.ran_out());
            stream.skip(rest - 2).unwrap();
            assert_eq!(stream.array::<2>().unwrap(), [at(298_998), at(298_999)]);
            assert!(stream.byte().unwrap_err().to_string().contains("at byte 299000: expected 1 more bytes"));
        });
    }

    #[test]
    fn lines_end_within_the_limit() {
        let text =
            [b"a\n\n".as_slice(), &b"x".repeat(LINE_BYTES_MAX), b"\n", &b"y".repeat(5000), b"\n"].concat();
        with_file(&text, |input| {
            let mut stream = Stream::new(input, ByteRange::new(0, input.len_bytes).unwrap());
            assert_eq!(
                (stream.line().unwrap().to_vec(), stream.line().unwrap().to_vec()),
                (vec![b'a'], vec![])
            );
            assert_eq!(stream.line().unwrap().len(), LINE_BYTES_MAX);
            assert!(stream.line().unwrap_err().to_string().contains("a line of at most 4096 bytes"));
        });
        with_file(b"no end", |input| {
            let mut stream = Stream::new(input, ByteRange::new(0, 6).unwrap());
            assert!(stream.line().is_err() && stream.ran_out());
        });
    }

    #[test]
    fn a_file_that_became_shorter_is_an_error() {
        with_file(b"abc", |input| {
            let mut stream = Stream::new(input, ByteRange::new(0, 5).unwrap());
            assert!(stream.take(5).unwrap_err().to_string().contains("the file became shorter"));
        });
    }
}
