//! The local headers of a zip archive: the first byte of each entry is behind them.
//!
//! Each header is compared with the directory, and no entry may reach into the next. Headers that
//! are near each other are read together: an archive may have a million.

use super::super::super::CheckpointError;
use super::super::super::format::Input;
use super::super::pickle::Arena;
use super::end::{read, u16_at, u32_at, u64_at};
use super::entries::{Entries, Entry, FLAGS_ALLOWED, Name, shown};
use crate::units::{to_u64, to_usize};

const LOCAL_MAGIC: [u8; 4] = *b"PK\x03\x04";
const LOCAL_BYTES: usize = 30;
/// The fixed part, the longest name, and an extra field with 64-bit sizes.
const SINGLE_BYTES: usize = 512;
/// Headers closer than this are read together.
const NEAR_BYTES: u64 = 4 << 10;
const TOGETHER_BYTES: usize = 64 << 10;

/// Replaces the offset of each local header by that of the first byte behind it. The entries are
/// sorted by offset; all end before the directory.
pub(super) fn locate(
    input: &Input<'_>,
    entries: &mut Entries,
    arena: &Arena,
    directory_start: u64,
) -> Result<(), CheckpointError> {
    let mut window = Window { input, bytes: Vec::new(), start: 0 };
    for position in 0..entries.entries.len() {
        let entry = entries.entries[position];
        let next = entries.entries.get(position + 1).map_or(directory_start, |next| next.start);
        if position == 0 && entry.start != 0 {
            return Err(input.invalid(0, "expected the first entry at the start of the file"));
        }
        let header = window.header(entry.start, next, directory_start)?;
        let data_start = check(input, entries, arena, &entry, header)?;
        let end = data_start.checked_add(entry.len_bytes).filter(|end| *end <= next);
        if end.is_none() {
            let reason = format!(
                "expected entry {} of {} bytes to end before the next at {next}",
                full_name(entries, arena, &entry),
                entry.len_bytes
            );
            return Err(input.invalid(entry.start, reason));
        }
        entries.entries[position].start = data_start;
    }
    Ok(())
}

/// Parts of the file.
struct Window<'a> {
    input: &'a Input<'a>,
    bytes: Vec<u8>,
    start: u64,
}

impl Window<'_> {
    /// The bytes of the local header at `start`, with its name and as much of the extra field as is
    /// needed. The next one is at `next`.
    fn header(&mut self, start: u64, next: u64, limit: u64) -> Result<&[u8], CheckpointError> {
        let room = limit.saturating_sub(start);
        if room < to_u64(LOCAL_BYTES) {
            return Err(self.input.invalid(start, "expected a local header, found the directory"));
        }
        let wanted = room.min(to_u64(SINGLE_BYTES));
        let mut have = self.have(start);
        if to_u64(have.len()) < wanted {
            let len = match next.saturating_sub(start) < NEAR_BYTES {
                true => room.min(to_u64(TOGETHER_BYTES)),
                false => wanted,
            };
            self.fill(start, to_usize(len))?;
            have = 0..self.bytes.len();
        }
        let parts = [26, 28].map(|at| usize::from(u16_at(&self.bytes[have.start..], at)));
        let needed = LOCAL_BYTES + parts[0] + parts[1].min(SINGLE_BYTES);
        if have.len() < needed {
            if room < to_u64(needed) {
                return Err(self.input.invalid(start, "expected a local header, found the directory"));
            }
            self.fill(start, needed)?;
            have = 0..self.bytes.len();
        }
        Ok(&self.bytes[have])
    }

    /// The part of the window from `start` on.
    fn have(&self, start: u64) -> std::ops::Range<usize> {
        let skip = start.checked_sub(self.start).filter(|skip| *skip <= to_u64(self.bytes.len()));
        skip.map_or(0..0, |skip| to_usize(skip)..self.bytes.len())
    }

    fn fill(&mut self, start: u64, len: usize) -> Result<(), CheckpointError> {
        self.bytes.clear();
        self.bytes.resize(len, 0);
        self.start = start;
        read(self.input, start, &mut self.bytes)
    }
}

fn full_name(entries: &Entries, arena: &Arena, entry: &Entry) -> String {
    match entry.name.other() {
        Some(position) => shown(arena.text(entries.others[position]).as_bytes()),
        None => format!("number {:?}", entry.name),
    }
}

/// Compares a local header with the directory. Returns the offset of the first byte behind it.
fn check(
    input: &Input<'_>,
    entries: &Entries,
    arena: &Arena,
    entry: &Entry,
    header: &[u8],
) -> Result<u64, CheckpointError> {
    let differs = |what: &str| {
        let name = full_name(entries, arena, entry);
        let reason = format!("the local header of entry {name} has another {what} than the directory");
        input.invalid(entry.start, reason)
    };
    if !header.starts_with(&LOCAL_MAGIC) {
        let name = full_name(entries, arena, entry);
        return Err(
            input.invalid(entry.start, format!("expected the local header of entry {name}, found none"))
        );
    }
    let (flags, method, checksum) = (u16_at(header, 6), u16_at(header, 8), u32_at(header, 14));
    let (packed, len) = (u32_at(header, 18), u32_at(header, 22));
    let [name_bytes, extra_bytes] = [26, 28].map(|at| usize::from(u16_at(header, at)));
    if flags & !FLAGS_ALLOWED != 0 || method != 0 {
        return Err(differs("compression or encryption"));
    }
    let name = &header[LOCAL_BYTES..LOCAL_BYTES + name_bytes];
    let below = name.strip_prefix(&entries.root[..]);
    let same_name = below.is_some_and(|below| match entry.name.other() {
        Some(position) => below == arena.text(entries.others[position]).as_bytes(),
        None => below.strip_prefix(b"data/").and_then(Name::storage) == Some(entry.name),
    });
    if !same_name {
        return Err(differs("name"));
    }
    // With this flag the sizes follow the data, and the header may have zeros.
    let later = flags & (1 << 3) != 0;
    if checksum != entry.checksum && !(later && checksum == 0) {
        return Err(differs("checksum"));
    }
    let extra = &header[LOCAL_BYTES + name_bytes..];
    let sizes_fit = match (len, packed) {
        (0, 0) if later => true,
        (u32::MAX, u32::MAX)
            if wide_sizes(&extra[..extra_bytes.min(extra.len())]) == Some([entry.len_bytes; 2]) =>
        {
            true
        }
        _ => u64::from(len) == entry.len_bytes && packed == len,
    };
    if !sizes_fit {
        return Err(differs("size"));
    }
    Ok(entry.start + to_u64(LOCAL_BYTES + name_bytes + extra_bytes))
}

/// The sizes in the extra field: of the data, and packed.
fn wide_sizes(mut extra: &[u8]) -> Option<[u64; 2]> {
    while let [id_low, id_high, len_low, len_high, rest @ ..] = extra {
        let len = usize::from(u16::from_le_bytes([*len_low, *len_high]));
        let field = rest.get(..len)?;
        if (id_low, id_high) == (&1, &0) {
            return (field.len() >= 16).then(|| [u64_at(field, 0), u64_at(field, 8)]);
        }
        extra = &rest[len..];
    }
    None
}
