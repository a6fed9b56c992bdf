//! The fast path: reads tokens that are whole in the buffer, without a check for its end at every
//! byte.
//!
//! A [`Cursor`] looks ahead. If it finds a whole entry, [`JsonReader::advance_to`] consumes it.
//! Otherwise the careful reader of the parent reads the same bytes: only it knows the whole grammar
//! and makes errors. So the cursor must never accept a text that the careful reader would refuse.

use super::JsonReader;

/// Digits that always fit in 64 bits.
const DIGITS_MAX: usize = 19;

impl<R> JsonReader<R> {
    /// A cursor at the next byte.
    #[inline]
    pub(in super::super) fn cursor(&self) -> Cursor<'_> {
        Cursor { bytes: &self.buffer[..self.filled], at: self.next }
    }

    /// Consumes the bytes that a cursor has read: whole values, or entries of an object.
    #[inline]
    pub(in super::super) fn advance_to(&mut self, place: usize) {
        debug_assert!((self.next..=self.filled).contains(&place), "a place of this cursor's buffer");
        self.next = place;
    }
}

/// Reads ahead in the buffer. After `None`, the careful reader takes over and the cursor is
/// discarded.
pub(in super::super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// Its position, for [`JsonReader::advance_to`].
    #[inline]
    pub(in super::super) fn place(&self) -> usize {
        self.at
    }

    /// The bytes read since it was at `place`.
    #[inline]
    pub(in super::super) fn since(&self, place: usize) -> &'a [u8] {
        &self.bytes[place..self.at]
    }

    /// Skips these bytes if they come next.
    #[inline]
    pub(in super::super) fn skip(&mut self, expected: &[u8]) -> bool {
        let is_next = self.bytes.get(self.at..).is_some_and(|rest| rest.starts_with(expected));
        self.at += if is_next { expected.len() } else { 0 };
        is_next
    }

    /// Skips whitespace and then this byte.
    #[inline]
    pub(in super::super) fn token(&mut self, expected: u8) -> Option<()> {
        let byte = self.peek_token()?;
        self.at += 1;
        (byte == expected).then_some(())
    }

    /// Reads a string without escapes. Returns the bytes between its quotes, not yet checked as
    /// UTF-8.
    #[inline]
    pub(in super::super) fn string(&mut self) -> Option<&'a [u8]> {
        self.token(b'"')?;
        let start = self.at;
        self.at += plain_len(&self.bytes[start..]);
        let text = &self.bytes[start..self.at];
        self.byte(b'"')?;
        Some(text)
    }

    /// Skips this key, given with its quotes, and the colon.
    #[inline]
    pub(in super::super) fn key<const LEN: usize>(&mut self, quoted: &[u8; LEN]) -> Option<()> {
        self.peek_token()?;
        let found = self.bytes[self.at..].first_chunk() == Some(quoted);
        self.at += LEN;
        found.then_some(())?;
        self.token(b':')
    }

    /// Reads an integer of at most 19 digits, without sign, fraction or exponent.
    #[inline]
    pub(in super::super) fn unsigned(&mut self) -> Option<u64> {
        let first = self.peek_token()?;
        let start = self.at;
        let mut value = 0;
        while let Some(chunk) = self.bytes[self.at..].first_chunk() {
            let (digits, len) = leading_digits(chunk);
            self.at += len;
            if self.at - start > DIGITS_MAX {
                return None;
            }
            value = value * TENS[len] + digits;
            if len < chunk.len() {
                break;
            }
        }
        // One byte at a time near the end of the buffer.
        while let digit @ 0..=9 = self.peek()?.wrapping_sub(b'0') {
            self.at += 1;
            if self.at - start > DIGITS_MAX {
                return None;
            }
            value = value * 10 + u64::from(digit);
        }
        let len = self.at - start;
        // The next byte may belong to the number.
        let is_whole = !matches!(self.peek()?, b'.' | b'e' | b'E');
        let has_plain_digits = len == 1 || (len > 1 && first != b'0');
        (is_whole && has_plain_digits).then_some(value)
    }

    /// Reads an array of such integers and appends them to `numbers`, also on failure.
    #[inline]
    pub(in super::super) fn array(&mut self, numbers: &mut Vec<u64>) -> Option<()> {
        self.token(b'[')?;
        if self.peek_token()? != b']' {
            numbers.push(self.unsigned()?);
            while self.peek_token()? == b',' {
                self.at += 1;
                numbers.push(self.unsigned()?);
            }
        }
        self.token(b']')
    }

    #[inline]
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    #[inline]
    fn peek_token(&mut self) -> Option<u8> {
        loop {
            match self.peek()? {
                b' ' | b'\t' | b'\n' | b'\r' => self.at += 1,
                other => return Some(other),
            }
        }
    }

    #[inline]
    fn byte(&mut self, expected: u8) -> Option<()> {
        let byte = self.peek()?;
        self.at += 1;
        (byte == expected).then_some(())
    }
}

/// Powers of ten, by number of digits.
const TENS: [u64; 9] = [1, 10, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000];

/// The value of the leading digits, and their count.
///
/// Source of the method: Daniel Lemire, "Quickly parsing eight digits"
/// (<https://lemire.me/blog/2018/10/03/quickly-parsing-eight-digits/>).
#[inline]
fn leading_digits(text: &[u8; 8]) -> (u64, usize) {
    let digits = u64::from_le_bytes(*text) ^ repeated(b'0');
    // Values above 9 set the highest bit of their byte. Bytes above the first such one may be wrong
    // through a carry.
    let others = (digits.wrapping_add(repeated(0x80 - 10)) | digits) & repeated(0x80);
    let len = others.trailing_zeros() / 8;
    // Shift the digits up, with zeros in front.
    let digits = digits.checked_shl(64 - 8 * len).unwrap_or(0);
    // Combine digits to pairs, pairs to fours, fours to eights: the upper halves of products.
    let pairs = (digits.wrapping_mul((10 << 8) + 1) >> 8) & 0x00ff_00ff_00ff_00ff;
    let fours = (pairs.wrapping_mul((100 << 16) + 1) >> 16) & 0x0000_ffff_0000_ffff;
    let value = fours.wrapping_mul((10_000 << 32) + 1) >> 32;
    (value, usize::try_from(len).expect("a word has 8 bytes"))
}

/// The number of bytes before the first quote, backslash or control character.
#[inline]
pub(super) fn plain_len(bytes: &[u8]) -> usize {
    let (words, rest) = bytes.as_chunks::<8>();
    for (index, word) in words.iter().enumerate() {
        let marks = marks(u64::from_le_bytes(*word));
        if marks != 0 {
            return index * 8 + usize::try_from(marks.trailing_zeros() / 8).expect("a word has 8 bytes");
        }
    }
    let is_mark = |&byte: &u8| byte == b'"' || byte == b'\\' || byte < 0x20;
    words.len() * 8 + rest.iter().position(is_mark).unwrap_or(rest.len())
}

/// Sets the highest bit of every byte that is a mark. Only the lowest set bit is reliable, since
/// bytes above it may be wrong through a borrow.
///
/// Source of the formula: "Bit Twiddling Hacks", determine if a word has a byte less than n
/// (<https://graphics.stanford.edu/~seander/bithacks.html#HasLessInWord>).
#[inline]
fn marks(word: u64) -> u64 {
    let less_than = |word: u64, bound: u8| word.wrapping_sub(repeated(bound)) & !word;
    let equal_to = |byte: u8| less_than(word ^ repeated(byte), 1);
    (less_than(word, 0x20) | equal_to(b'"') | equal_to(b'\\')) & repeated(0x80)
}

const fn repeated(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_mark_is_found_wherever_it_stands() {
        for mark in 0..=u8::MAX {
            let is_mark = mark < 0x20 || mark == b'"' || mark == b'\\';
            for (len, at) in (0..20).flat_map(|len| (0..len).map(move |at| (len, at))) {
                let expected = if is_mark { at } else { len };
                for (plain, behind) in [(b'x', b'"'), (0xff, b'\\'), (b'!', 0), (0x80, 0x1f), (b'#', b'"')] {
                    let mut text = vec![plain; len];
                    text[at] = mark;
                    assert_eq!(plain_len(&text), expected, "{mark} at {at} of {len}");
                    text.push(behind);
                    assert_eq!(plain_len(&text), expected, "{mark} at {at} of {len}, then {behind}");
                }
            }
        }
    }

    /// The result of `take` on a text, and the rest of the text.
    fn taken<'t, T>(text: &'t str, take: impl FnOnce(&mut Cursor<'t>) -> Option<T>) -> Option<(T, &'t str)> {
        let mut cursor = Cursor { bytes: text.as_bytes(), at: 0 };
        let value = take(&mut cursor)?;
        Some((value, &text[cursor.place()..]))
    }

    #[test]
    fn numbers_are_taken_if_they_are_short_and_whole() {
        let numbers = [
            ("7]", Some((7, "]"))),
            ("7],\"data_offsets\"", Some((7, "],\"data_offsets\""))),
            ("1234567 , 12345678", Some((1_234_567, " , 12345678"))),
            ("12345678,87654321]}", Some((12_345_678, ",87654321]}"))),
            ("123456789]         ", Some((123_456_789, "]         "))),
            ("1234567890123456789012345", None),
            ("9999999999999999999,        ", Some((9_999_999_999_999_999_999, ",        "))),
            ("10000000000000000000,        ", None),
            (" \n0 ,", Some((0, " ,"))),
            ("1234567890123456789,", Some((1_234_567_890_123_456_789, ","))),
            ("9999999999999999999,", Some((9_999_999_999_999_999_999, ","))),
            ("10000000000000000000,", None),
            ("99999999999999999999,", None),
            ("01,", None),
            ("00]", None),
            ("-1,", None),
            ("1.5,", None),
            ("1e3,", None),
            ("1E3,", None),
            (",", None),
            ("12", None),
            ("", None),
            ("  ", None),
        ];
        for (text, expected) in numbers {
            assert_eq!(taken(text, Cursor::unsigned), expected, "{text}");
        }
    }

    #[test]
    fn leading_digits_are_what_they_spell() {
        let by_parsing = |text: &[u8; 8]| {
            let len = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
            (std::str::from_utf8(&text[..len]).unwrap().parse().unwrap_or(0), len)
        };
        for number in [0_u64, 1, 9, 10, 12_345_678, 87_654_321, 90_000_009, 99_999_999] {
            let text = format!("{number:08}");
            for (at, other) in (0..8).flat_map(|at| (0..=u8::MAX).map(move |other| (at, other))) {
                for behind in [b'0', b'9', b'/', b':', 0, 0xff] {
                    let mut broken: [u8; 8] = text.as_bytes().try_into().unwrap();
                    broken[at] = other;
                    broken[at + 1..].fill(behind);
                    assert_eq!(leading_digits(&broken), by_parsing(&broken), "{broken:?}");
                }
            }
        }
    }

    #[test]
    fn arrays_are_taken_whole() {
        let arrays = [
            ("[]}", Some((vec![], "}"))),
            ("[ 1 , 22,3 ] ", Some((vec![1, 22, 3], " "))),
            ("[1,]", None),
            ("[,1]", None),
            ("[1 2]", None),
            ("[1,-2]", None),
            ("[1", None),
            ("[", None),
        ];
        for (text, expected) in arrays {
            let found = taken(text, |cursor| {
                let mut numbers = Vec::new();
                cursor.array(&mut numbers).map(|()| numbers)
            });
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn strings_and_keys_are_taken_if_they_are_plain_and_whole() {
        let strings = [
            (" \"U8\",", Some((&b"U8"[..], ","))),
            ("\"\"", Some((b"", ""))),
            ("\"open", None),
            ("\"a\\n\"", None),
            ("\"a\n\"", None),
            ("a\"", None),
        ];
        for (text, expected) in strings {
            assert_eq!(taken(text, Cursor::string), expected, "{text}");
        }
        let keys = [
            ("\"ab\":1", Some(((), "1"))),
            (" \"ab\" : 1", Some(((), " 1"))),
            ("\"abc\":1", None),
            ("\"a\":1", None),
            ("\"\\u0061b\":1", None),
            ("\"ab\"", None),
            ("\"ab\" 1", None),
            ("\"ab", None),
            ("}", None),
        ];
        for (text, expected) in keys {
            assert_eq!(taken(text, |cursor| cursor.key(b"\"ab\"")), expected, "{text}");
        }
    }
}
