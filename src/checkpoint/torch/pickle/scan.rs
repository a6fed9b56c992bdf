//! A first pass through a pickle: where it ends, and which values it fetches from its memo.
//!
//! Picklers put nearly every value into the memo and fetch few. The machine keeps only those. So a
//! pickle of a million tensors needs a memo of a few kilobytes.

use super::super::stream::{Fault, Stream};
use super::opcode::{self, Argument, argument};
use crate::units::{to_u64, to_usize};

/// What the first pass has found.
pub(super) struct Survey {
    /// One past the last byte of the pickle, counted from the start of the file.
    pub(super) end: u64,
    pub(super) fetched: Fetched,
}

/// A set of memo indices, each with its place among them.
#[derive(Default)]
pub(super) struct Fetched {
    words: Vec<Word>,
}

#[derive(Clone, Copy, Default)]
struct Word {
    bits: u64,
    /// Indices in the words before.
    before: u32,
}

impl Fetched {
    fn insert(&mut self, index: u32) {
        let (word, bit) = split(index);
        if word >= self.words.len() {
            self.words.resize(word + 1, Word::default());
        }
        self.words[word].bits |= bit;
    }

    /// Completes the set. Returns how many indices it has.
    fn number(&mut self) -> u32 {
        let mut before = 0;
        for word in &mut self.words {
            word.before = before;
            before += word.bits.count_ones();
        }
        before
    }

    /// The place of an index among those in the set.
    pub(super) fn place(&self, index: u32) -> Option<usize> {
        let (word, bit) = split(index);
        let word = self.words.get(word).filter(|word| word.bits & bit != 0)?;
        let place = word.before + (word.bits & (bit - 1)).count_ones();
        Some(to_usize(u64::from(place)))
    }

    /// How many indices the set has.
    pub(super) fn len(&self) -> usize {
        let count = self.words.last().map_or(0, |last| last.before + last.bits.count_ones());
        to_usize(u64::from(count))
    }

    /// Memory held, in bytes.
    pub(super) fn heap_bytes(&self) -> u64 {
        to_u64(self.words.capacity() * size_of::<Word>())
    }
}

fn split(index: u32) -> (usize, u64) {
    (to_usize(u64::from(index / 64)), 1 << (index % 64))
}

/// Goes through the pickle that starts at the next byte.
pub(super) fn scan(stream: &mut Stream<'_>) -> Result<Survey, Fault> {
    let start = stream.offset();
    let mut fetched = Fetched::default();
    loop {
        let at = stream.offset();
        let opcode = stream.byte()?;
        match opcode {
            opcode::STOP => break,
            opcode::BINGET => {
                let index = stream.byte()?;
                fetched.insert(u32::from(index));
            }
            opcode::LONG_BINGET | opcode::GET => {
                let index = match opcode {
                    opcode::GET => decimal(stream)?,
                    _ => u32::from_le_bytes(stream.array()?),
                };
                // Each value that a pickle remembers takes a byte at least.
                let limit = at - start;
                if u64::from(index) > limit {
                    let reason = format!("memo index {index} behind {limit} bytes of pickle");
                    return Err(Box::new(stream.input().invalid(at, reason)));
                }
                fetched.insert(index);
            }
            opcode => match argument(opcode) {
                Some(argument) => skip(stream, argument)?,
                None => {
                    let reason = format!("expected an opcode of pickle, found byte 0x{opcode:02x}");
                    return Err(Box::new(stream.input().invalid(at, reason)));
                }
            },
        }
    }
    fetched.number();
    Ok(Survey { end: stream.offset(), fetched })
}

/// A memo index in digits.
pub(super) fn decimal(stream: &mut Stream<'_>) -> Result<u32, Fault> {
    let line = stream.line()?;
    let index = std::str::from_utf8(line).ok().and_then(|digits| digits.parse().ok());
    index.ok_or_else(|| stream.invalid("expected a memo index in digits before this"))
}

fn skip(stream: &mut Stream<'_>, argument: Argument) -> Result<(), Fault> {
    match argument {
        Argument::Bytes(count) => stream.skip(u64::from(count)),
        Argument::Counted(width) => {
            let count = count(stream, width)?;
            stream.skip(count)
        }
        Argument::Lines(count) => {
            for _ in 0..count {
                stream.line()?;
            }
            Ok(())
        }
    }
}

/// A length of `width` bytes.
pub(super) fn count(stream: &mut Stream<'_>, width: u8) -> Result<u64, Fault> {
    Ok(match width {
        1 => u64::from(stream.byte()?),
        4 => u64::from(u32::from_le_bytes(stream.array()?)),
        _ => u64::from_le_bytes(stream.array()?),
    })
}
