//! The directory of a zip archive, and the place of each entry's bytes.
//!
//! An archive of a million storages has a million entries: one takes 24 bytes, and the names of
//! storages (`data/0`, `data/1`, ...) are kept as numbers.

use super::super::super::CheckpointError;
use super::super::super::error::kept;
use super::super::super::format::Input;
use super::super::pickle::{Arena, Slice};
use super::super::stream::{Fault, Stream};
use super::end::{Directory, u16_at, u32_at, u64_at};
use crate::footprint::Held;
use crate::units::{ByteRange, to_u64, to_usize};

const ENTRY_MAGIC: [u8; 4] = *b"PK\x01\x02";
const ENTRY_BYTES: usize = 46;
/// Names of torch's entries are short.
const NAME_BYTES_MAX: usize = 1024;
/// Sizes follow the data; names are UTF-8. Others mean encryption and patches.
pub(super) const FLAGS_ALLOWED: u16 = 1 << 3 | 1 << 11;

/// The name of an entry below the root folder: the number of a storage, or a position in
/// [`Entries::others`] with the highest bit set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name(u32);

impl Name {
    const OTHER: u32 = 1 << 31;

    /// The name of a storage with this key, if the key is a number as torch writes it.
    pub(super) fn storage(key: &[u8]) -> Option<Self> {
        let canonical = match key {
            [b'0'] => true,
            [b'1'..=b'9', rest @ ..] => rest.iter().all(u8::is_ascii_digit),
            _ => false,
        };
        let number = std::str::from_utf8(key).ok().filter(|_| canonical)?.parse().ok()?;
        (number < Self::OTHER).then_some(Self(number))
    }

    pub(super) fn other(self) -> Option<usize> {
        (self.0 & Self::OTHER != 0).then(|| to_usize(u64::from(self.0 & !Self::OTHER)))
    }
}

/// An entry. All are stored without compression.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// Its local header, and once that was read, its first byte.
    pub(super) start: u64,
    pub(super) len_bytes: u64,
    pub(super) name: Name,
    pub(super) checksum: u32,
}

/// All entries, sorted by name: storages first, by number.
pub(in super::super) struct Entries {
    /// With its slash.
    pub(super) root: Vec<u8>,
    pub(super) entries: Vec<Entry>,
    /// Names that are not those of storages, in the order of the directory.
    pub(super) others: Vec<Slice>,
    /// Positions in `others`, sorted by name.
    sorted: Vec<u32>,
    /// Entries that are storages with numbers.
    storage_count: usize,
}

impl Entries {
    /// Reads the directory. The entries are sorted by the offset of their local headers.
    pub(super) fn read(
        input: &Input<'_>,
        directory: Directory,
        arena: &mut Arena,
    ) -> Result<Self, CheckpointError> {
        let mut entries = Self {
            root: Vec::new(),
            entries: Vec::new(),
            others: Vec::new(),
            sorted: Vec::new(),
            storage_count: 0,
        };
        let (text, limit_bytes) = (directory.text, input.options.header_bytes_max);
        if text.len_bytes() > limit_bytes {
            let (path, what, found_bytes) = (input.path.to_owned(), "directory", text.len_bytes());
            return Err(CheckpointError::OverLimit { path, what, found_bytes, limit_bytes });
        }
        let mut stream = Stream::new(input, text);
        while stream.remaining() > 0 {
            entries.add(&mut stream, arena).map_err(|fault| *fault)?;
        }
        let found = to_u64(entries.entries.len());
        if found != directory.count || found == 0 {
            let reason = format!("expected {} entries in the directory, found {found}", directory.count);
            return Err(input.invalid(text.start(), reason));
        }
        entries.entries.sort_unstable_by_key(|entry| entry.start);
        Ok(entries)
    }

    /// Reads an entry of the directory.
    fn add(&mut self, stream: &mut Stream<'_>, arena: &mut Arena) -> Result<(), Fault> {
        let at = stream.offset();
        let invalid = |stream: &Stream<'_>, reason: String| Box::new(stream.input().invalid(at, reason));
        let fixed: [u8; ENTRY_BYTES] = stream.array()?;
        if !fixed.starts_with(&ENTRY_MAGIC) {
            return Err(invalid(
                stream,
                "expected an entry of the directory, found something else".to_owned(),
            ));
        }
        let (flags, method, checksum) = (u16_at(&fixed, 8), u16_at(&fixed, 10), u32_at(&fixed, 16));
        let (packed, len) = (u32_at(&fixed, 20), u32_at(&fixed, 24));
        let [name_bytes, extra_bytes, comment_bytes] = [28, 30, 32].map(|at| usize::from(u16_at(&fixed, at)));
        let (disk, start) = (u16_at(&fixed, 34), u32_at(&fixed, 42));
        let folder_flag = fixed[38] & 0x10 != 0;
        if name_bytes > NAME_BYTES_MAX {
            let reason = format!("expected a name of at most {NAME_BYTES_MAX} bytes, found {name_bytes}");
            return Err(invalid(stream, reason));
        }
        let mut name = [0; NAME_BYTES_MAX];
        let name = &mut name[..name_bytes];
        name.copy_from_slice(stream.take(name_bytes)?);
        let mut sizes = Sizes { len: u64::from(len), packed: u64::from(packed), start: u64::from(start) };
        let extra = stream.take(extra_bytes)?;
        let widened = sizes.widen(extra, [len == u32::MAX, packed == u32::MAX, start == u32::MAX]);
        stream.skip(to_u64(comment_bytes))?;
        widened.map_err(|reason| invalid(stream, format!("entry {}: {reason}", shown(name))))?;
        if is_code(name) {
            let found = "a TorchScript archive, which holds code beside its tensors";
            let advice = "save torch.jit.load(file).state_dict() with torch.save";
            return Err(Box::new(stream.input().refused("", found, advice)));
        }
        if flags & !FLAGS_ALLOWED != 0 || method != 0 || sizes.packed != sizes.len {
            let what = match flags & 1 {
                1 => "encrypted",
                _ => "compressed",
            };
            let found = format!("entry {} is {what}", shown(name));
            let advice = "save the file again with torch.save, which stores entries as they are";
            return Err(Box::new(stream.input().refused("", found, advice)));
        }
        // Readers that believe it give the data as empty.
        let is_folder = folder_flag || name.ends_with(b"/");
        if is_folder && sizes.len > 0 {
            return Err(invalid(stream, format!("entry {} is a folder with bytes", shown(name))));
        }
        if disk != 0 {
            return Err(invalid(stream, format!("entry {} is in another file", shown(name))));
        }
        let name = self.name(name, arena).map_err(|reason| {
            let name = shown(name);
            invalid(stream, format!("entry {name}: {reason}"))
        })?;
        let entry = Entry { start: sizes.start, len_bytes: sizes.len, name, checksum };
        let grown = arena.meter.grow(&mut self.entries, 1);
        grown.map_err(|_| too_many(stream.input()))?;
        self.entries.push(entry);
        Ok(())
    }

    /// The name below the root folder, which the first entry tells.
    fn name(&mut self, full: &[u8], arena: &mut Arena) -> Result<Name, &'static str> {
        if self.root.is_empty() {
            let slash = full.iter().position(|&byte| byte == b'/').filter(|slash| *slash > 0);
            let slash = slash.ok_or("expected it in a root folder, as torch.save writes it")?;
            if matches!(&full[..slash], b"." | b"..") || full[..slash].contains(&b'\\') {
                return Err("the name leaves its folder");
            }
            self.root = full[..=slash].to_vec();
        }
        let Some(name) = full.strip_prefix(&self.root[..]) else {
            return Err("expected it in the root folder of the first entry");
        };
        if let Some(storage) = name.strip_prefix(b"data/").and_then(Name::storage) {
            return Ok(storage);
        }
        let leaves = |part: &[u8]| matches!(part, b"." | b"..");
        let has_gaps = |part: &[u8]| part.is_empty();
        let folder = name.strip_suffix(b"/").unwrap_or(name);
        if name.split(|&byte| byte == b'/').any(leaves) || name.iter().any(|byte| matches!(byte, b'\\' | 0)) {
            return Err("the name leaves its folder");
        }
        if !name.is_empty() && folder.split(|&byte| byte == b'/').any(has_gaps) {
            return Err("a part of the name is empty");
        }
        let name = std::str::from_utf8(name).map_err(|_| "the name is not Unicode")?;
        let text = arena.push_text(name).map_err(|_| "too many names")?;
        arena.meter.grow(&mut self.others, 1).map_err(|_| "too many names")?;
        let position = u32::try_from(self.others.len()).map_err(|_| "too many names")?;
        self.others.push(text);
        Ok(Name(Name::OTHER | position))
    }

    /// Sorts the entries by name and refuses names that occur twice.
    pub(super) fn finish(&mut self, input: &Input<'_>, arena: &mut Arena) -> Result<(), CheckpointError> {
        self.entries.sort_unstable_by_key(|entry| entry.name);
        self.storage_count = self.entries.partition_point(|entry| entry.name.other().is_none());
        let twice = |name: &str, start: u64| {
            input.invalid(start, format!("expected each name once, found {} twice", shown(name.as_bytes())))
        };
        let storages = &self.entries[..self.storage_count];
        if let Some(pair) = storages.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(twice(&format!("data/{}", pair[0].name.0), pair[1].start));
        }
        arena.meter.grow(&mut self.sorted, self.others.len()).map_err(|_| *too_many(input))?;
        self.sorted.extend((0..).take(self.others.len()));
        let (others, sorted) = (&self.others, &mut self.sorted);
        // Readers that ignore case must not find another entry than we do.
        let name = |position: u32| arena.text(others[to_usize(u64::from(position))]);
        let folded = |position: u32| name(position).bytes().map(|byte| byte.to_ascii_lowercase());
        sorted.sort_unstable_by(|&left, &right| {
            folded(left).cmp(folded(right)).then_with(|| name(left).cmp(name(right)))
        });
        let pair = sorted.windows(2).find(|pair| folded(pair[0]).eq(folded(pair[1])));
        let is_odd = |&&position: &&u32| {
            let lower: Vec<u8> = folded(position).collect();
            lower.starts_with(b"data/") && !name(position).starts_with("data/")
        };
        let odd = sorted.iter().find(is_odd).copied();
        if let Some(position) = pair.map(|pair| pair[1]).or(odd) {
            let name = arena.text(others[to_usize(u64::from(position))]);
            let entry = self.entries[self.storage_count + to_usize(u64::from(position))];
            return Err(twice(name, entry.start));
        }
        sorted.sort_unstable_by(|&left, &right| name(left).cmp(name(right)));
        Ok(())
    }

    /// The bytes of the entry of that name, which is not that of a numbered storage.
    pub(super) fn named(&self, name: &str, arena: &Arena) -> Option<ByteRange> {
        self.position(name, arena).map(|position| self.bytes(position))
    }

    fn position(&self, name: &str, arena: &Arena) -> Option<usize> {
        let text = |position: &u32| arena.text(self.others[to_usize(u64::from(*position))]);
        let found = self.sorted.binary_search_by(|position| text(position).cmp(name)).ok()?;
        // Sorting by name has left the others in their order.
        Some(self.storage_count + to_usize(u64::from(self.sorted[found])))
    }

    /// The position of the storage with this key. Storages are mostly asked for in their order, so
    /// the one at `near` and the next are tried first.
    pub(super) fn storage(&self, key: &str, near: usize, arena: &Arena) -> Option<usize> {
        let Some(name) = Name::storage(key.as_bytes()) else {
            return self.position(&format!("data/{key}"), arena);
        };
        let storages = &self.entries[..self.storage_count];
        let is_there = |place: &usize| storages.get(*place).is_some_and(|entry| entry.name == name);
        let found = [near, near + 1].into_iter().find(is_there);
        found.or_else(|| storages.binary_search_by_key(&name, |entry| entry.name).ok())
    }

    /// The bytes of an entry.
    pub(super) fn bytes(&self, position: usize) -> ByteRange {
        let entry = self.entries[position];
        ByteRange::with_len(entry.start, entry.len_bytes).expect("entries were found inside the file")
    }

    /// Memory held.
    pub(super) fn add_to(&self, held: Held) -> Held {
        held.grown_list(&self.entries).grown_list(&self.others).list(&self.sorted)
    }
}

/// True for the names of a TorchScript archive's code.
fn is_code(full_name: &[u8]) -> bool {
    let slash = full_name.iter().position(|&byte| byte == b'/');
    let below = slash.map_or(full_name, |slash| &full_name[slash + 1..]);
    below == b"constants.pkl" || below.starts_with(b"code/")
}

/// The sizes of an entry, which may be in its extra field.
struct Sizes {
    len: u64,
    packed: u64,
    start: u64,
}

impl Sizes {
    /// Replaces those that are `wide` by 64-bit ones.
    fn widen(&mut self, mut extra: &[u8], wide: [bool; 3]) -> Result<(), &'static str> {
        const WIDE_FIELD: u16 = 1;
        let mut seen = !wide.contains(&true);
        while let [id_low, id_high, len_low, len_high, rest @ ..] = extra {
            let id = u16::from_le_bytes([*id_low, *id_high]);
            let len = usize::from(u16::from_le_bytes([*len_low, *len_high]));
            let field = rest.get(..len).ok_or("its extra field is longer than announced")?;
            extra = &rest[len..];
            if id != WIDE_FIELD || !wide.contains(&true) {
                continue;
            }
            if std::mem::replace(&mut seen, true) {
                return Err("its 64-bit sizes are there twice");
            }
            let mut numbers = field.chunks_exact(8).map(|number| u64_at(number, 0));
            let slots = [&mut self.len, &mut self.packed, &mut self.start];
            for (slot, _) in slots.into_iter().zip(wide).filter(|(_, wide)| *wide) {
                *slot = numbers.next().ok_or("its 64-bit sizes are missing")?;
            }
        }
        if seen { Ok(()) } else { Err("its 64-bit sizes are missing") }
    }
}

/// A name from the file, for a message.
pub(super) fn shown(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(&name[..name.len().min(120)]);
    format!("`{}`", kept(&text).escape_debug())
}

pub(super) fn too_many(input: &Input<'_>) -> Fault {
    let (path, limit) = (input.path.to_owned(), u64::from(u32::MAX >> 1));
    Box::new(CheckpointError::TooMany { path, what: "entries", limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_as_torch_writes_them_are_numbers() {
        for key in ["0", "7", "10", "2147483647"] {
            assert_eq!(Name::storage(key.as_bytes()), Some(Name(key.parse().unwrap())), "{key}");
        }
        for key in
            ["", "00", "01", "+1", "-1", " 1", "1a", "2147483648", "4294967296", "99999999999999999999"]
        {
            assert_eq!(Name::storage(key.as_bytes()), None, "{key}");
        }
        assert_eq!((Name(5).other(), Name(Name::OTHER | 5).other()), (None, Some(5)));
    }

    #[test]
    fn sizes_are_widened_in_their_order() {
        let field = |numbers: &[u64]| {
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            [&[1, 0, u8::try_from(bytes.len()).unwrap(), 0][..], &bytes].concat()
        };
        let widened = |extra: &[u8], wide: [bool; 3]| {
            let mut sizes = Sizes { len: 1, packed: 2, start: 3 };
            sizes.widen(extra, wide).map(|()| [sizes.len, sizes.packed, sizes.start])
        };
        assert_eq!(widened(&[], [false; 3]), Ok([1, 2, 3]));
        assert_eq!(widened(&field(&[10, 20, 30]), [true; 3]), Ok([10, 20, 30]));
        assert_eq!(widened(&field(&[30]), [false, false, true]), Ok([1, 2, 30]));
        let padded = [b"FB\x02\0ZZ".as_slice(), &field(&[10, 20])].concat();
        assert_eq!(widened(&padded, [true, true, false]), Ok([10, 20, 3]));
        assert_eq!(widened(&field(&[10]), [true; 3]), Err("its 64-bit sizes are missing"));
        assert_eq!(widened(&[], [true, false, false]), Err("its 64-bit sizes are missing"));
        assert_eq!(
            widened(&[field(&[1]), field(&[2])].concat(), [true, false, false]),
            Err("its 64-bit sizes are there twice")
        );
        assert_eq!(widened(b"FB\x05\0Z", [false; 3]), Err("its extra field is longer than announced"));
    }
}
