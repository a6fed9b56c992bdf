//! The keys and values in front of the tensors.
//!
//! Arrays (vocabularies with 10^5 to 10^6 texts) and long texts (chat templates) are skipped. Short
//! texts and numbers are kept, up to a limit. All keys are kept while they are read: a key that
//! occurs twice is refused.

use super::super::CheckpointError;
use super::super::error::kept;
use super::super::format::Input;
use super::super::metadata::FileMetadata;
use super::super::text_sort::sort_by_text;
use super::cursor::Cursor;
use crate::footprint::{Held, block_bytes};
use crate::units::{to_u64, to_usize};

/// The longest key that the format allows.
const KEY_BYTES_MAX: u64 = (1 << 16) - 1;
/// The longest text that is kept.
const VALUE_BYTES_MAX: u64 = 1 << 10;
/// The most bytes of keys and values that are kept, beside the keys that matter.
const TEXT_BYTES_MAX: usize = 64 << 10;
/// Arrays of arrays, at most.
const DEPTH_MAX: u32 = 8;
/// What is kept of an array that has a number for each layer.
const ARRAY: &str = "an array";
/// A key of one byte, the type and a value of one byte.
const ENTRY_BYTES_MIN: u64 = 8 + 4 + 1;

/// Bytes between the starts of tensors, where a file does not say.
const ALIGNMENT: u32 = 32;

/// What the keys say.
pub(super) struct Keys {
    pub(super) metadata: FileMetadata,
    /// `general.alignment`.
    pub(super) alignment: u64,
}

/// A type of values.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl Kind {
    /// In the order of their numbers in the format.
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::Text,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// Bytes of a value; `None` if they vary.
    fn len_bytes(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text | Self::Array => None,
        }
    }
}

/// A key in the list that finds duplicates.
#[derive(Clone, Copy)]
struct Seen {
    start: u32,
    end: u32,
    /// In the file.
    offset: u64,
}

/// Reads `count` keys with their values. Returns the memory that was held too.
pub(super) fn read(
    input: &Input<'_>,
    cursor: &mut Cursor<'_>,
    count: u64,
) -> Result<(Keys, Held), CheckpointError> {
    if count > cursor.rest_bytes() / ENTRY_BYTES_MIN {
        let reason = format!("{count} keys announced, more than the rest of the file can hold");
        return Err(input.invalid(cursor.offset(), reason));
    }
    let mut keys = Keys { metadata: FileMetadata::default(), alignment: u64::from(ALIGNMENT) };
    let (mut names, mut seen) = (String::new(), Vec::new());
    let mut key = String::new();
    for _ in 0..count {
        let offset = cursor.offset();
        let len_bytes = cursor.u64("the length of a key")?;
        if len_bytes > KEY_BYTES_MAX {
            let reason = format!("expected a key of at most {KEY_BYTES_MAX} bytes, found one of {len_bytes}");
            return Err(input.invalid(offset, reason));
        }
        key.clear();
        let bytes = cursor.take(to_usize(len_bytes), "a key")?;
        let text = std::str::from_utf8(bytes);
        key.push_str(text.map_err(|_| input.invalid(offset, "expected a key in UTF-8"))?);
        let start = names.len();
        names.push_str(&key);
        let span = u32::try_from(start).ok().zip(u32::try_from(names.len()).ok());
        let (start, end) = span.ok_or_else(|| {
            let (path, what) = (input.path.to_owned(), "bytes of keys");
            CheckpointError::TooMany { path, what, limit: u64::from(u32::MAX) }
        })?;
        seen.push(Seen { start, end, offset });
        let kind = kind(input, cursor)?;
        if key == "general.alignment" {
            keys.alignment = alignment(input, cursor, kind)?;
        } else {
            value(input, cursor, &key, kind, &mut keys.metadata)?;
        }
    }
    let text_of =
        |seen: Seen| &names.as_bytes()[to_usize(u64::from(seen.start))..to_usize(u64::from(seen.end))];
    if let Some(twice) = sort_by_text(&mut seen, text_of) {
        let key = kept(&String::from_utf8_lossy(&text_of(twice)[..text_of(twice).len().min(100)]));
        let reason = format!("expected each key once, found `{}` twice", key.escape_debug());
        return Err(input.invalid(twice.offset, reason));
    }
    let held = Held::default().grown_list(&seen).grown(block_bytes(to_u64(names.capacity())));
    let kept = keys.metadata.finish().expect("keys occur once");
    Ok((keys, held.and(kept.peak_bytes())))
}

/// The type of the next value.
fn kind(input: &Input<'_>, cursor: &mut Cursor<'_>) -> Result<Kind, CheckpointError> {
    let offset = cursor.offset();
    let number = cursor.u32("the type of a value")?;
    let kind = usize::try_from(number).ok().and_then(|number| Kind::ALL.get(number));
    kind.copied().ok_or_else(|| {
        input.invalid(offset, format!("expected a type of values from 0 to 12, found {number}"))
    })
}

/// The value of `general.alignment`.
fn alignment(input: &Input<'_>, cursor: &mut Cursor<'_>, kind: Kind) -> Result<u64, CheckpointError> {
    let offset = cursor.offset();
    if kind != Kind::U32 {
        return Err(input.invalid(offset, "expected general.alignment as an unsigned number of 32 bits"));
    }
    let alignment = cursor.u32("general.alignment")?;
    if !alignment.is_power_of_two() {
        let reason = format!("expected a power of two as general.alignment, found {alignment}");
        return Err(input.invalid(offset, reason));
    }
    Ok(u64::from(alignment))
}

/// Reads a value, and keeps it if it is short.
fn value(
    input: &Input<'_>,
    cursor: &mut Cursor<'_>,
    key: &str,
    kind: Kind,
    metadata: &mut FileMetadata,
) -> Result<(), CheckpointError> {
    let text = match kind {
        Kind::Array => {
            array(input, cursor, 1)?;
            if !is_heads(key) {
                return Ok(());
            }
            ARRAY.to_owned()
        }
        Kind::Text => {
            let len_bytes = cursor.u64("the length of a text")?;
            if len_bytes > VALUE_BYTES_MAX {
                return cursor.skip(len_bytes, "a text");
            }
            let bytes = cursor.take(to_usize(len_bytes), "a text")?;
            match std::str::from_utf8(bytes) {
                Ok(text) => text.to_owned(),
                Err(_) => return Ok(()),
            }
        }
        Kind::U8 => u8::from_le_bytes(cursor.number("a value")?).to_string(),
        Kind::I8 => i8::from_le_bytes(cursor.number("a value")?).to_string(),
        Kind::U16 => u16::from_le_bytes(cursor.number("a value")?).to_string(),
        Kind::I16 => i16::from_le_bytes(cursor.number("a value")?).to_string(),
        Kind::U32 => u32::from_le_bytes(cursor.number("a value")?).to_string(),
        Kind::I32 => i32::from_le_bytes(cursor.number("a value")?).to_string(),
        Kind::F32 => f32::from_le_bytes(cursor.number("a value")?).to_string(),
        Kind::Bool => (cursor.number::<1>("a value")? != [0]).to_string(),
        Kind::U64 => u64::from_le_bytes(cursor.number("a value")?).to_string(),
        Kind::I64 => i64::from_le_bytes(cursor.number("a value")?).to_string(),
        Kind::F64 => f64::from_le_bytes(cursor.number("a value")?).to_string(),
    };
    let limit = if is_heads(key) { 2 * TEXT_BYTES_MAX } else { TEXT_BYTES_MAX };
    let has_room = metadata.text().len() + key.len() + text.len() <= limit;
    if has_room || matters(key) {
        metadata.text().push_str(key);
        let middle = metadata.text().len();
        metadata.text().push_str(&text);
        metadata.entry_is_complete(middle).expect("the limit is far below 4 GiB");
    }
    Ok(())
}

/// True for keys that are kept beyond the limit: there is one of each.
fn matters(key: &str) -> bool {
    matches!(key, "general.architecture" | "split.no" | "split.count" | "split.tensors.count")
}

/// True for the keys that decide the order of rows. A missing one has a meaning, so they have room
/// of their own, and are kept even if their value is not.
fn is_heads(key: &str) -> bool {
    key.ends_with(".attention.head_count") || key.ends_with(".attention.head_count_kv")
}

/// Skips an array.
fn array(input: &Input<'_>, cursor: &mut Cursor<'_>, depth: u32) -> Result<(), CheckpointError> {
    let offset = cursor.offset();
    let kind = kind(input, cursor)?;
    let count = cursor.u64("the length of an array")?;
    let items_bytes_min = kind.len_bytes().unwrap_or(8);
    if count > cursor.rest_bytes() / items_bytes_min {
        let reason = format!("an array of {count} values announced, more than the rest of the file can hold");
        return Err(input.invalid(offset, reason));
    }
    if let Some(len_bytes) = kind.len_bytes() {
        return cursor.skip(count * len_bytes, "an array");
    }
    if kind == Kind::Array && depth == DEPTH_MAX {
        return Err(input.invalid(offset, format!("expected arrays in at most {DEPTH_MAX} levels")));
    }
    for _ in 0..count {
        match kind {
            Kind::Array => array(input, cursor, depth + 1)?,
            _ => {
                let len_bytes = cursor.u64("the length of a text")?;
                cursor.skip(len_bytes, "a text")?;
            }
        }
    }
    Ok(())
}
