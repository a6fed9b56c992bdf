//! Numbers, texts and frames.

use super::super::super::stream::TAKE_BYTES_MAX;
use super::super::arena::{Full, Item, Ref};
use super::super::opcode::{self, Argument, argument};
use super::super::scan::count;
use super::{Fault, Machine, Persistent};
use crate::units::to_usize;

/// Texts up to this length may be names; longer ones are skipped.
const TEXT_BYTES_MAX: u64 = 32 << 10;

const _: () = assert!(TEXT_BYTES_MAX <= 64 << 10 && TAKE_BYTES_MAX == 64 << 10);

impl<P: Persistent> Machine<'_, '_, P> {
    #[inline]
    fn counted(&mut self, opcode: u8) -> Result<u64, Fault> {
        let Some(Argument::Counted(width)) = argument(opcode) else {
            return Err(self.invalid("expected an opcode with a length"));
        };
        count(self.stream, width)
    }

    pub(super) fn skip_counted(&mut self, opcode: u8) -> Result<(), Fault> {
        let count = self.counted(opcode)?;
        self.stream.skip(count)
    }

    pub(super) fn text(&mut self, opcode: u8) -> Result<(), Fault> {
        let count = self.counted(opcode)?;
        if count > TEXT_BYTES_MAX {
            self.stream.skip(count)?;
            return self.push(Ref::PLAIN);
        }
        let text = self.stream.take(to_usize(count))?;
        let Ok(text) = std::str::from_utf8(text) else {
            return self.push(Ref::PLAIN);
        };
        let pushed = self.arena.push_text(text);
        let slice = pushed.map_err(|Full| self.full())?;
        self.push_item(Item::Text(slice))
    }

    /// A text of protocol 0, in quotes or to the end of the line. With escapes it is not read.
    pub(super) fn quoted(&mut self, opcode: u8) -> Result<(), Fault> {
        let line = self.stream.line()?;
        let text = match (opcode, line) {
            (opcode::STRING, [b'\'', text @ .., b'\''] | [b'"', text @ .., b'"']) => text,
            (opcode::STRING, _) => return Err(self.invalid("expected a text in quotes")),
            (_, line) => line,
        };
        let Some(text) =
            std::str::from_utf8(text).ok().filter(|text| text.is_ascii() && !text.contains('\\'))
        else {
            return self.push(Ref::PLAIN);
        };
        let pushed = self.arena.push_text(text);
        let slice = pushed.map_err(|Full| self.full())?;
        self.push_item(Item::Text(slice))
    }

    /// A number in digits.
    pub(super) fn digits(&mut self) -> Result<(), Fault> {
        let line = self.stream.line()?;
        let line = line.strip_suffix(b"L").unwrap_or(line);
        let digits = line.strip_prefix(b"-").unwrap_or(line);
        match line {
            b"00" => return self.push(Ref::FALSE),
            b"01" => return self.push(Ref::TRUE),
            _ if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) => {
                return Err(self.invalid("expected a number in digits"));
            }
            _ => {}
        }
        match std::str::from_utf8(line).ok().and_then(|line| line.parse().ok()) {
            Some(value) => self.push_int(value),
            None => self.push(Ref::PLAIN),
        }
    }

    /// A number of any length, lowest byte first, in two's complement.
    pub(super) fn long(&mut self, opcode: u8) -> Result<(), Fault> {
        let count = self.counted(opcode)?;
        // LONG4 has a signed length.
        if count > u64::from(i32::MAX.unsigned_abs()) {
            return Err(self.invalid("expected the length of a number, found a negative one"));
        }
        if count > 8 {
            self.stream.skip(count)?;
            return self.push(Ref::PLAIN);
        }
        let bytes = self.stream.take(to_usize(count))?;
        let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
        let mut value = [if negative { 0xff } else { 0 }; 8];
        value[..bytes.len()].copy_from_slice(bytes);
        self.push_int(i64::from_le_bytes(value))
    }

    /// Frames only help to read ahead; they must follow each other inside the pickle.
    pub(super) fn frame(&mut self) -> Result<(), Fault> {
        let len_bytes = u64::from_le_bytes(self.stream.array()?);
        if self.at < self.frame_end {
            return Err(self.invalid("expected the next frame behind the end of this one"));
        }
        let remaining = self.stream.remaining();
        if len_bytes > remaining {
            let reason = format!("frame of {len_bytes} bytes, of which {remaining} are there");
            return Err(self.invalid(reason));
        }
        self.frame_end = self.stream.offset() + len_bytes;
        Ok(())
    }
}
