//! A strict JSON reader that streams: tokens come out of a small buffer, which is refilled.
//!
//! Written by hand because headers come from strangers: memory is bounded by a small buffer,
//! duplicate keys are refused at every depth, skipped fields included, and errors have byte
//! offsets. `serde_json` gives none of these. The grammar is that of RFC 8259 and nothing more:
//! UTF-8 without a byte order mark, no lone surrogates, no trailing commas, exactly one value. Time
//! and memory are linear in the text; nesting costs a counter and no stack. The callers interpret
//! the tokens: headers, indices, pipelines.

use std::io::{self, Read};

use crate::units::to_u64;

pub(super) use self::cursor::Cursor;
use self::cursor::plain_len;
pub(super) use self::fault::JsonFault;
use self::fault::describe;
pub(super) use self::keys::OpenKeys;

mod cursor;
mod fault;
mod keys;

/// The deepest nesting that is accepted, as in the reference.
pub(super) const DEPTH_MAX: u32 = 127;

/// The most bytes of a number that an error shows.
const NUMBER_SHOWN_BYTES: usize = 40;

/// A number. Only plain integers have a value here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Number {
    /// A non-negative integer without sign, fraction or exponent, below 2^64.
    Unsigned(u64),
    /// Any other number of the grammar.
    Other,
}

/// The reader.
pub(super) struct JsonReader<R> {
    source: R,
    buffer: Box<[u8]>,
    next: usize,
    filled: usize,
    /// Offset of the buffer's first byte.
    base: u64,
    depth: u32,
    /// Bytes of a string that has escapes or crosses the buffer's end.
    scratch: Vec<u8>,
    /// The first bytes of the last number.
    number: String,
}

impl<R: Read> JsonReader<R> {
    /// A reader of all bytes of `source`, which starts at byte `offset` of its file.
    pub(super) fn new(source: R, offset: u64, buffer_bytes: usize) -> Self {
        Self {
            source,
            buffer: vec![0; buffer_bytes.max(1)].into_boxed_slice(),
            next: 0,
            filled: 0,
            base: offset,
            depth: 0,
            scratch: Vec::new(),
            number: String::new(),
        }
    }

    /// Offset of the next byte.
    fn offset(&self) -> u64 {
        self.base + to_u64(self.next)
    }

    #[inline]
    fn peek(&mut self) -> Result<Option<u8>, JsonFault> {
        if self.next == self.filled && !self.refill()? {
            return Ok(None);
        }
        Ok(Some(self.buffer[self.next]))
    }

    /// False at the end of the text.
    #[cold]
    fn refill(&mut self) -> Result<bool, JsonFault> {
        self.base += to_u64(self.filled);
        (self.next, self.filled) = (0, 0);
        loop {
            match self.source.read(&mut self.buffer) {
                Ok(count) => {
                    self.filled = count;
                    return Ok(count > 0);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(JsonFault::Io(error)),
            }
        }
    }

    /// The next byte that is not whitespace. It is not consumed.
    #[inline]
    fn peek_token(&mut self) -> Result<Option<u8>, JsonFault> {
        loop {
            match self.peek()? {
                Some(b' ' | b'\t' | b'\n' | b'\r') => self.next += 1,
                other => return Ok(other),
            }
        }
    }

    /// The error for the next byte.
    pub(super) fn unexpected(&mut self, expected: &'static str) -> JsonFault {
        match self.peek() {
            Ok(byte) => self.syntax(expected, describe(byte)),
            Err(fault) => fault,
        }
    }

    /// The error for something that has just been read.
    pub(super) fn unexpected_before(&self, expected: &'static str, found: &str) -> JsonFault {
        self.syntax(expected, found.to_owned())
    }

    fn syntax(&self, expected: &'static str, found: String) -> JsonFault {
        JsonFault::Syntax { offset: self.offset(), expected, found }
    }

    #[inline]
    fn expect(&mut self, byte: u8, expected: &'static str) -> Result<(), JsonFault> {
        if self.peek_token()? == Some(byte) {
            self.next += 1;
            Ok(())
        } else {
            Err(self.unexpected(expected))
        }
    }

    /// True if the next value starts with that byte.
    pub(super) fn next_is(&mut self, byte: u8) -> Result<bool, JsonFault> {
        Ok(self.peek_token()? == Some(byte))
    }

    /// True if the next value is a number.
    pub(super) fn next_is_number(&mut self) -> Result<bool, JsonFault> {
        Ok(matches!(self.peek_token()?, Some(b'-' | b'0'..=b'9')))
    }

    /// Enters an object; [`Self::next_key`] leaves it.
    pub(super) fn open_object(&mut self, expected: &'static str) -> Result<(), JsonFault> {
        self.expect(b'{', expected)?;
        self.descend()
    }

    /// Enters an array; [`Self::next_element`] leaves it.
    pub(super) fn open_array(&mut self, expected: &'static str) -> Result<(), JsonFault> {
        self.expect(b'[', expected)?;
        self.descend()
    }

    fn descend(&mut self) -> Result<(), JsonFault> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(self.syntax("at most 127 levels of nesting", "one more".to_owned()));
        }
        Ok(())
    }

    /// Appends the next key of the open object to `key` and stops before its value. False at the
    /// end of the object. The caller passes `first` as true once and does not change it.
    pub(super) fn next_key(&mut self, first: &mut bool, key: &mut String) -> Result<bool, JsonFault> {
        match self.peek_token()? {
            Some(b'}') => {
                self.next += 1;
                self.depth -= 1;
                return Ok(false);
            }
            Some(b',') if !*first => {
                self.next += 1;
                if self.peek_token()? != Some(b'"') {
                    return Err(self.unexpected("a key in double quotes"));
                }
            }
            Some(b'"') if *first => {}
            _ if *first => return Err(self.unexpected("a key in double quotes or `}`")),
            _ => return Err(self.unexpected("`,` or `}`")),
        }
        *first = false;
        self.string(key, "a key in double quotes")?;
        self.expect(b':', "`:`")?;
        Ok(true)
    }

    /// Stops before the next element of the open array. False at the end of the array.
    pub(super) fn next_element(&mut self, first: &mut bool) -> Result<bool, JsonFault> {
        match self.peek_token()? {
            Some(b']') => {
                self.next += 1;
                self.depth -= 1;
                return Ok(false);
            }
            Some(b',') if !*first => {
                self.next += 1;
                if self.peek_token()? == Some(b']') {
                    return Err(self.unexpected("a value"));
                }
            }
            _ if *first => {}
            _ => return Err(self.unexpected("`,` or `]`")),
        }
        *first = false;
        Ok(true)
    }

    /// Appends the next value, a string, to `text`, escapes resolved.
    pub(super) fn string(&mut self, text: &mut String, expected: &'static str) -> Result<(), JsonFault> {
        self.expect(b'"', expected)?;
        let start_offset = self.offset();
        let rest = &self.buffer[self.next..self.filled];
        // Nearly every string is whole in the buffer and has no escapes.
        let end = plain_len(rest);
        if rest.get(end) == Some(&b'"') {
            text.push_str(checked_utf8(&rest[..end], start_offset)?);
            self.next += end + 1;
            return Ok(());
        }
        self.scratch.clear();
        loop {
            let rest = &self.buffer[self.next..self.filled];
            let plain = plain_len(rest);
            self.scratch.extend_from_slice(&rest[..plain]);
            self.next += plain;
            match self.peek()? {
                Some(b'"') => break,
                Some(b'\\') => {
                    self.next += 1;
                    self.escape()?;
                }
                Some(byte) if byte >= 0x20 => {}
                _ => return Err(self.unexpected("the rest of a string and its closing quote")),
            }
        }
        self.next += 1;
        text.push_str(checked_utf8(&self.scratch, start_offset)?);
        Ok(())
    }

    /// Reads the rest of an escape, behind the backslash.
    fn escape(&mut self) -> Result<(), JsonFault> {
        let plain = match self.peek()? {
            Some(byte @ (b'"' | b'\\' | b'/')) => byte,
            Some(b'b') => 0x08,
            Some(b'f') => 0x0c,
            Some(b'n') => b'\n',
            Some(b'r') => b'\r',
            Some(b't') => b'\t',
            Some(b'u') => {
                self.next += 1;
                let character = self.unicode_escape()?;
                self.scratch.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
                return Ok(());
            }
            _ => return Err(self.unexpected("one of `\"\\/bfnrtu` after a backslash")),
        };
        self.next += 1;
        self.scratch.push(plain);
        Ok(())
    }

    /// Reads the rest of a `\u` escape: one unit of UTF-16, or a pair of surrogates.
    fn unicode_escape(&mut self) -> Result<char, JsonFault> {
        let first = self.four_digits()?;
        if let Some(character) = char::from_u32(first) {
            return Ok(character);
        }
        if first >= 0xdc00 {
            return Err(self.syntax("a character", format!("the lone surrogate \\u{first:04x}")));
        }
        for byte in *b"\\u" {
            if self.peek()? != Some(byte) {
                return Err(self.syntax("a pair of surrogates", format!("the lone surrogate \\u{first:04x}")));
            }
            self.next += 1;
        }
        let second = self.four_digits()?;
        if !(0xdc00..0xe000).contains(&second) {
            return Err(self.syntax("a pair of surrogates", format!("\\u{first:04x}\\u{second:04x}")));
        }
        let code = 0x1_0000 + ((first - 0xd800) << 10) + (second - 0xdc00);
        Ok(char::from_u32(code).expect("two surrogates make a code point between 0x10000 and 0x10ffff"))
    }

    fn four_digits(&mut self) -> Result<u32, JsonFault> {
        let mut code = 0;
        for _ in 0..4 {
            let digit = match self.peek()? {
                Some(byte) => char::from(byte).to_digit(16),
                None => None,
            };
            let Some(digit) = digit else {
                return Err(self.unexpected("four hexadecimal digits"));
            };
            code = code * 16 + digit;
            self.next += 1;
        }
        Ok(code)
    }

    /// The next value, a non-negative integer below 2^64: no sign, no fraction, no exponent.
    pub(super) fn unsigned(&mut self, expected: &'static str) -> Result<u64, JsonFault> {
        if !self.next_is_number()? {
            return Err(self.unexpected(expected));
        }
        let offset = self.offset();
        match self.number()? {
            Number::Unsigned(value) => Ok(value),
            Number::Other => {
                Err(JsonFault::Syntax { offset, expected, found: format!("`{}`", self.number_text()) })
            }
        }
    }

    /// The first 40 bytes of the last number.
    pub(super) fn number_text(&self) -> &str {
        &self.number
    }

    /// The next value, a number.
    pub(super) fn number(&mut self) -> Result<Number, JsonFault> {
        self.number.clear();
        let negative = self.take_if(|byte| byte == b'-')?.is_some();
        let mut value = Some(0_u64);
        let mut digits = 0_u32;
        while let Some(byte) = self.take_if(|byte| byte.is_ascii_digit())? {
            digits = digits.saturating_add(1);
            value = value
                .and_then(|value| value.checked_mul(10))
                .and_then(|value| value.checked_add(u64::from(byte - b'0')));
            if digits == 1 && byte == b'0' {
                break;
            }
        }
        if digits == 0 {
            return Err(self.unexpected("a digit"));
        }
        let fraction = self.take_if(|byte| byte == b'.')?.is_some();
        if fraction {
            self.digits()?;
        }
        let exponent = self.take_if(|byte| matches!(byte, b'e' | b'E'))?.is_some();
        if exponent {
            self.take_if(|byte| matches!(byte, b'+' | b'-'))?;
            self.digits()?;
        }
        match value {
            Some(value) if !(negative || fraction || exponent) => Ok(Number::Unsigned(value)),
            _ => Ok(Number::Other),
        }
    }

    fn digits(&mut self) -> Result<(), JsonFault> {
        if self.take_if(|byte| byte.is_ascii_digit())?.is_none() {
            return Err(self.unexpected("a digit"));
        }
        while self.take_if(|byte| byte.is_ascii_digit())?.is_some() {}
        Ok(())
    }

    /// Consumes the next byte if it fits, and appends it to the number's text.
    #[inline]
    fn take_if(&mut self, fits: impl Fn(u8) -> bool) -> Result<Option<u8>, JsonFault> {
        match self.peek()? {
            Some(byte) if fits(byte) => {
                self.next += 1;
                if self.number.len() < NUMBER_SHOWN_BYTES {
                    self.number.push(char::from(byte));
                }
                Ok(Some(byte))
            }
            _ => Ok(None),
        }
    }

    /// Skips the next value. Duplicate keys in it are refused.
    pub(super) fn skip_value(&mut self, keys: &mut OpenKeys) -> Result<(), JsonFault> {
        let floor = keys.depth();
        self.skip_start(keys)?;
        while keys.depth() > floor {
            let Some(level) = keys.innermost() else { break };
            let more = if level.is_object {
                let more = self.next_key(level.first, level.text)?;
                if more && !keys.key_is_complete() {
                    return Err(self.syntax("less than 4 GiB of keys", "more".to_owned()));
                }
                more
            } else {
                self.next_element(level.first)?
            };
            if more {
                self.skip_start(keys)?;
            } else {
                keys.close().map_err(JsonFault::Duplicate)?;
            }
        }
        Ok(())
    }

    /// Skips a scalar, or enters an array or an object.
    fn skip_start(&mut self, keys: &mut OpenKeys) -> Result<(), JsonFault> {
        match self.peek_token()? {
            Some(b'{') => {
                self.open_object("an object")?;
                keys.open(true);
            }
            Some(b'[') => {
                self.open_array("an array")?;
                keys.open(false);
            }
            Some(b'"') => {
                let text = keys.text();
                let len = text.len();
                self.string(text, "a string")?;
                text.truncate(len);
            }
            Some(b'-' | b'0'..=b'9') => {
                self.number()?;
            }
            Some(b't') => self.word("true")?,
            Some(b'f') => self.word("false")?,
            Some(b'n') => self.word("null")?,
            _ => return Err(self.unexpected("a value")),
        }
        Ok(())
    }

    fn word(&mut self, word: &'static str) -> Result<(), JsonFault> {
        for byte in word.bytes() {
            if self.peek()? != Some(byte) {
                return Err(self.unexpected(word));
            }
            self.next += 1;
        }
        Ok(())
    }

    /// Checks that only whitespace is left.
    pub(super) fn finish(&mut self) -> Result<(), JsonFault> {
        match self.peek_token()? {
            None => Ok(()),
            Some(_) => Err(self.unexpected("nothing but whitespace after the closing brace")),
        }
    }
}

fn checked_utf8(bytes: &[u8], start_offset: u64) -> Result<&str, JsonFault> {
    std::str::from_utf8(bytes).map_err(|error| JsonFault::Syntax {
        offset: start_offset + to_u64(error.valid_up_to()),
        expected: "UTF-8",
        found: describe(bytes.get(error.valid_up_to()).copied()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The verdict on a text, read through a buffer of `buffer_bytes`.
    fn skip(text: &[u8], buffer_bytes: usize) -> Result<(), JsonFault> {
        let mut json = JsonReader::new(text, 0, buffer_bytes);
        json.skip_value(&mut OpenKeys::default())?;
        json.finish()
    }

    fn decode(text: &[u8], buffer_bytes: usize) -> Result<String, JsonFault> {
        let mut json = JsonReader::new(text, 0, buffer_bytes);
        let mut decoded = String::new();
        json.string(&mut decoded, "a string")?;
        json.finish()?;
        Ok(decoded)
    }

    #[test]
    fn verdicts_are_those_of_a_known_reader() {
        let texts: &[&[u8]] = &[
            b"{}",
            b" [1, -2.5e+3, true, false, null, \"\"] \n",
            b"{\"a\": {\"b\": [[], {}]}}",
            b"-0",
            b"01",
            b"1.",
            b".5",
            b"1e",
            b"+1",
            b"[1,]",
            b"{\"a\":1,}",
            b"{,}",
            b"{\"a\" 1}",
            b"{a:1}",
            b"nul",
            b"nulll",
            b"truefalse",
            b"[1 2]",
            b"\"\x01\"",
            b"\"\x7f\"",
            b"\"\\u00e9\\b\\f\\n\\r\\t\\\\\\/\\\"\"",
            b"\"\\x\"",
            b"\"\\u12g4\"",
            b"\"\\ud83d\\ude00\"",
            b"\"\\ud83d\"",
            b"\"\\ud83dx\"",
            b"\"\\ude00\"",
            b"\"\\udc00\\udc00\"",
            b"\"\\udbff\\udfff\"",
            b"\"\\ud800\\udbff\"",
            b"\"\\ud800\\ue000\"",
            b"\"\\ud83d\\u0041\"",
            b"\"\xff\"",
            b"\"\xed\xa0\x80\"",
            b"\xef\xbb\xbf{}",
            b"{}\0",
            b"{}{}",
            b"",
            b"   ",
            b"\"open",
            b"[",
            b"{\"a\":",
            b"[1,\x0b2]",
        ];
        for text in texts {
            let known = serde_json::from_slice::<serde_json::Value>(text).is_ok();
            for buffer_bytes in [1, 2, 3, 7, 4096] {
                let ours = skip(text, buffer_bytes);
                assert_eq!(ours.is_ok(), known, "{:?}: {ours:?}", String::from_utf8_lossy(text));
            }
        }
    }

    #[test]
    fn strings_are_decoded_across_the_buffers_end() {
        let text = "\"caf\u{e9} \\u00e9\\t\\ud83d\\ude00 \\\"quoted\\\" end\"";
        let known: String = serde_json::from_str(text).unwrap();
        for buffer_bytes in 1..text.len() + 2 {
            assert_eq!(decode(text.as_bytes(), buffer_bytes).unwrap(), known, "{buffer_bytes}");
        }
    }

    #[test]
    fn depth_is_limited_where_the_reference_stops() {
        for (depth, fits) in [(127, true), (128, false), (100_000, false)] {
            let text = [b"[".repeat(depth), b"]".repeat(depth)].concat();
            assert_eq!(serde_json::from_slice::<serde_json::Value>(&text).is_ok(), fits);
            assert_eq!(skip(&text, 64).is_ok(), fits, "{depth}");
        }
    }

    #[test]
    fn duplicates_are_found_at_every_level_after_unescaping() {
        for text in [r#"{"a":1,"a":1}"#, r#"[{"x":{"b":0,"c":{},"\u0062":1}}]"#, r#"{"":1,"":2}"#] {
            assert!(matches!(skip(text.as_bytes(), 64), Err(JsonFault::Duplicate(_))), "{text}");
        }
        skip(br#"{"a":{"a":[{"a":1},{"a":2}]},"b":"a"}"#, 64).unwrap();
    }

    #[test]
    fn only_plain_integers_are_unsigned() {
        for (text, expected) in [
            ("0", Some(0)),
            ("18446744073709551615", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("99999999999999999999999999999999999999999999999999999999", None),
            ("-0", None),
            ("-1", None),
            ("1.0", None),
            ("1e2", None),
            ("\"1\"", None),
            ("null", None),
            ("[1]", None),
        ] {
            let mut json = JsonReader::new(text.as_bytes(), 0, 64);
            assert_eq!(json.unsigned("an integer").ok(), expected, "{text}");
        }
    }

    #[test]
    fn reads_that_are_interrupted_go_on_and_others_fail() {
        struct Faulty(Vec<io::ErrorKind>);
        impl Read for Faulty {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                self.0.pop().map_or(Ok(0), |kind| Err(kind.into()))
            }
        }
        let read = |kinds: &[io::ErrorKind]| JsonReader::new(Faulty(kinds.to_vec()), 0, 4).finish();
        read(&[io::ErrorKind::Interrupted, io::ErrorKind::Interrupted]).unwrap();
        assert!(matches!(read(&[io::ErrorKind::TimedOut]), Err(JsonFault::Io(_))));
    }

    #[test]
    fn faults_say_where() {
        let mut json = JsonReader::new(&b"{\"a\" ; 1}"[..], 8, 4);
        let mut key = String::new();
        json.open_object("an object").unwrap();
        match json.next_key(&mut true, &mut key) {
            Err(JsonFault::Syntax { offset: 13, expected: "`:`", found }) => assert_eq!(found, "`;`"),
            other => panic!("{other:?}"),
        }
    }
}
