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

#[cfg(test)]
mod tests {
    use super::super::super::testing::with_file;
    use super::*;
    use crate::units::ByteRange;

    fn scanned(pickle: &[u8]) -> Result<Survey, String> {
        with_file(pickle, |input| {
            let text = ByteRange::new(0, input.len_bytes).unwrap();
            scan(&mut Stream::new(input, text)).map_err(|fault| fault.to_string())
        })
    }

    #[test]
    fn what_is_fetched_has_its_place() {
        let text =
            [b"X\xc8\0\0\0".as_slice(), &[b'h'; 200], b"0h\x05h\x05h\xc8j\xc9\0\0\0g70\n.behind"].concat();
        let survey = scanned(&text).unwrap();
        assert_eq!(usize::try_from(survey.end).unwrap(), text.len() - 6);
        let places = [5, 70, 200, 201, 4, 6, 69, 300].map(|index| survey.fetched.place(index));
        assert_eq!(places, [Some(0), Some(1), Some(2), Some(3), None, None, None, None]);
        assert_eq!((survey.fetched.len(), Fetched::default().len()), (4, 0));
        assert!(survey.fetched.heap_bytes() <= 4 * 16);
    }

    #[test]
    fn all_arguments_are_skipped() {
        // Every argument holds a stop.
        let text = b"\x80.K.M..J....G........U\x01.T\x01\0\0\0.X\x01\0\0\0.\x8a\x01.\x8b\x01\0\0\0.\
            \x8c\x01.\x8d\x01\0\0\0\0\0\0\0.C\x01.B\x01\0\0\0.\x8e\x01\0\0\0\0\0\0\0.\x96\x01\0\0\0\0\0\0\0.\
            I.\nL.\nF.\nS.\nV.\nP.\np.\nc.\n.\ni.\n.\nq.r....\x82.\x83..\x84....\x95........NN.";
        assert_eq!(usize::try_from(scanned(text).unwrap().end).unwrap(), text.len());
    }

    #[test]
    fn bytes_that_are_no_opcodes_are_refused() {
        let known = (0..=255).filter(|&byte| argument(byte).is_some()).count();
        // Pickle has 68; those of out-of-band buffers are left out.
        assert_eq!(known, 66);
        assert!(
            scanned(b"N\x97.")
                .err()
                .unwrap()
                .contains("at byte 1: expected an opcode of pickle, found byte 0x97")
        );
        assert!(scanned(b"Nj\x02\0\0\0.").err().unwrap().contains("memo index 2 behind 1 bytes"));
    }
}
