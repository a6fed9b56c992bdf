//! The legacy format, written by torch 0.1.10 to 1.5 and still on request.
//!
//! Pickles in a row: a magic number, a version, facts about the machine, the value, and the keys of
//! the storages in the order of their bytes. Then each storage: its number of elements (64 bits)
//! and its bytes, always little-endian.

use hashbrown::HashTable;
use std::hash::BuildHasher;

use super::super::CheckpointError;
use super::super::format::Input;
use super::element::Element;
use super::pickle::{self, Arena, Item, Persistent, Ref, Refusal};
use super::storage_id::{StorageId, persistent_class};
use super::stream::{Fault, Stream};
use crate::footprint::Held;
use crate::units::{ByteRange, to_u64, to_usize};

/// The version of the format, which never changed.
const VERSION: i64 = 1001;

/// A storage, or a view of one.
#[derive(Clone, Copy, Debug)]
struct Stored {
    /// Its key in `keys`; none for a view.
    key: (u32, u32),
    element: Element,
    count: u64,
    /// The storage that it is a view of, or its own position.
    root: u32,
    /// Its first byte: in the file, or for a view in its root.
    start: Option<u64>,
}

/// A legacy file whose pickles were read.
#[derive(Default)]
pub(super) struct Legacy {
    stored: Vec<Stored>,
    keys: Vec<u8>,
    by_key: HashTable<u32>,
    hasher: foldhash::quality::RandomState,
}

/// In the small pickles nothing is left to the file.
struct Nothing;

impl Persistent for Nothing {
    fn load(&mut self, _arena: &mut Arena, _id: Ref) -> Result<Ref, Refusal> {
        Err(Refusal::Invalid("expected no storage here, found one".to_owned()))
    }
}

impl Legacy {
    /// Reads the pickles, and where the storages are. Returns the pickle's value, too.
    pub(super) fn read(input: &Input<'_>, arena: &mut Arena) -> Result<(Self, Ref), CheckpointError> {
        let mut legacy = Self::default();
        let root = legacy.read_all(input, arena).map_err(|fault| *fault)?;
        Ok((legacy, root))
    }

    fn read_all(&mut self, input: &Input<'_>, arena: &mut Arena) -> Result<Ref, Fault> {
        let rest = |start| ByteRange::new(start, input.len_bytes).expect("a pickle ends inside the file");
        // The first bytes were seen when the format was found.
        let (_magic, end) = pickle::read(input, rest(0), arena, &mut Nothing)?;
        let (version, after) = pickle::read(input, rest(end), arena, &mut Nothing)?;
        if arena.item(version) != Item::Int(VERSION) {
            return Err(Box::new(
                input.invalid(end, format!("expected version {VERSION} of the legacy format")),
            ));
        }
        let (_machine, end) = pickle::read(input, rest(after), arena, &mut Nothing)?;
        let (root, end) = pickle::read(input, rest(end), arena, self)?;
        let (keys, after) = pickle::read(input, rest(end), arena, &mut Nothing)?;
        let Item::List(keys) = arena.item(keys) else {
            return Err(Box::new(input.invalid(end, "expected the list of storages, found something else")));
        };
        let mut stream = Stream::new(input, rest(after));
        for &key in arena.chunks(keys).flatten() {
            self.place(&mut stream, arena.text_of(key))?;
        }
        Ok(root)
    }

    /// Notes where the storage with this key lies: at the next byte of the stream.
    fn place(&mut self, stream: &mut Stream<'_>, key: Option<&str>) -> Result<(), Fault> {
        let Some(position) = key.and_then(|key| self.find(key)) else {
            return Err(stream.invalid("expected the storages that the pickle names, found another one"));
        };
        let stored = self.stored[position];
        if stored.start.is_some() {
            return Err(stream.invalid("expected each storage once, found one twice"));
        }
        let count = i64::from_le_bytes(stream.array()?);
        if u64::try_from(count) != Ok(stored.count) {
            let reason = format!("expected a storage of {} elements, found one of {count}", stored.count);
            return Err(stream.invalid(reason));
        }
        self.stored[position].start = Some(stream.offset());
        let bytes = count.unsigned_abs().saturating_mul(stored.element.bytes());
        stream.skip(bytes)
    }

    fn find(&self, key: &str) -> Option<usize> {
        let hash = self.hasher.hash_one(key.as_bytes());
        let found = self.by_key.find(hash, |&position| self.key(position) == key.as_bytes());
        found.map(|&position| to_usize(u64::from(position)))
    }

    fn key(&self, position: u32) -> &[u8] {
        let (start, len) = self.stored[to_usize(u64::from(position))].key;
        let start = to_usize(u64::from(start));
        &self.keys[start..start + to_usize(u64::from(len))]
    }

    fn push(&mut self, arena: &mut Arena, stored: Stored) -> Result<u32, Refusal> {
        arena.meter.grow(&mut self.stored, 1)?;
        let position = u32::try_from(self.stored.len()).map_err(|_| Refusal::Full)?;
        self.stored.push(stored);
        Ok(position)
    }

    /// The storage with this key, which is new if it is met for the first time.
    fn root(&mut self, arena: &mut Arena, element: Element, key: &str, count: u64) -> Result<u32, Refusal> {
        if let Some(position) = self.find(key) {
            let known = self.stored[position];
            let bytes = |element: Element, count: u64| count.checked_mul(element.bytes());
            if bytes(known.element, known.count) != bytes(element, count) {
                let reason = format!("expected one length of storage `{}`, found two", key.escape_debug());
                return Err(Refusal::Invalid(reason));
            }
            return u32::try_from(position).map_err(|_| Refusal::Full);
        }
        arena.meter.grow(&mut self.keys, key.len())?;
        // The table of positions.
        arena.meter.add(8)?;
        let place = u32::try_from(self.keys.len()).ok().zip(u32::try_from(key.len()).ok());
        let key_place = place.ok_or(Refusal::Full)?;
        self.keys.extend_from_slice(key.as_bytes());
        let root = u32::try_from(self.stored.len()).map_err(|_| Refusal::Full)?;
        let position = self.push(arena, Stored { key: key_place, element, count, root, start: None })?;
        let hash = self.hasher.hash_one(key.as_bytes());
        let (stored, keys, hasher) = (&self.stored, &self.keys, &self.hasher);
        let rehash = |&position: &u32| {
            let (start, len) = stored[to_usize(u64::from(position))].key;
            let start = to_usize(u64::from(start));
            hasher.hash_one(&keys[start..start + to_usize(u64::from(len))])
        };
        self.by_key.insert_unique(hash, position, rehash);
        Ok(position)
    }

    /// The first byte of a storage in the file; none if the file has no bytes of it.
    pub(super) fn start_of(&self, storage: u32) -> Option<u64> {
        let stored = self.stored[to_usize(u64::from(storage))];
        if stored.root == storage {
            return stored.start;
        }
        let root = self.stored[to_usize(u64::from(stored.root))];
        root.start?.checked_add(stored.start?)
    }

    pub(super) fn add_to(&self, held: Held) -> Held {
        let table_bytes = to_u64(self.by_key.capacity()) * 8;
        held.grown_list(&self.stored).grown_list(&self.keys).grown(table_bytes)
    }
}

/// `(key, offset, count)`: a part of a storage.
fn view(arena: &Arena, view: Ref, element: Element, whole: u64) -> Result<(u64, u64), Refusal> {
    let numbers = match arena.item(view) {
        Item::Tuple(parts) => match arena.values(parts) {
            &[_key, offset, count] => Some((arena.item(offset), arena.item(count))),
            _ => None,
        },
        _ => None,
    };
    let Some((Item::Int(offset), Item::Int(count))) = numbers else {
        return Err(Refusal::Invalid("expected the view of a storage as key, offset and count".to_owned()));
    };
    let numbers = u64::try_from(offset).ok().zip(u64::try_from(count).ok());
    let inside = numbers.filter(|(offset, count)| offset.checked_add(*count).is_some_and(|end| end <= whole));
    let Some((offset, count)) = inside else {
        let reason =
            format!("expected a view inside its storage of {whole} elements, found {count} from {offset}");
        return Err(Refusal::Invalid(reason));
    };
    let offset_bytes = offset.checked_mul(element.bytes()).ok_or(Refusal::Full)?;
    Ok((offset_bytes, count))
}

impl Persistent for Legacy {
    fn load(&mut self, arena: &mut Arena, id: Ref) -> Result<Ref, Refusal> {
        if let Some(class) = persistent_class(arena, id) {
            return Ok(class);
        }
        let StorageId { element, key, count, rest } = StorageId::of(arena, id)?;
        let (key, part) = (key.to_owned(), rest.first().copied().unwrap_or(Ref::NONE));
        let root = self.root(arena, element, &key, count)?;
        if part == Ref::NONE {
            return Ok(arena.push(Item::Storage { element, id: root, count })?);
        }
        let (start, count) = view(arena, part, element, count)?;
        let stored = Stored { key: (0, 0), element, count, root, start: Some(start) };
        let id = self.push(arena, stored)?;
        Ok(arena.push(Item::Storage { element, id, count })?)
    }
}
