//! The format before torch 0.1.10: a tar archive.
//!
//! Three of its members matter. `storages` has a pickle about each storage, followed by its number
//! of elements and its bytes, then a list of views. `tensors` has a pickle about each tensor,
//! followed by its shape, strides and offset as numbers. `pickle` has the value, which names
//! storages and tensors by numbers.

use std::collections::HashMap;

use super::super::CheckpointError;
use super::super::format::Input;
use super::element::Element;
use super::pickle::{self, Arena, Item, Known, Persistent, Place, Ref, Refusal, placed};
use super::storage_id::persistent_class;
use super::stream::{Fault, Stream};
use crate::footprint::Held;
use crate::units::{ByteRange, to_u64, to_usize};

const BLOCK_BYTES: u64 = 512;
/// The pickles between the numbers are short.
const SHORT_BYTES_MAX: u64 = 4 << 10;
const DIMENSIONS_MAX: usize = 64;
/// What the table of objects takes for each.
const OBJECT_BYTES: u64 = 64;

/// The members that are read.
struct Members {
    storages: ByteRange,
    tensors: ByteRange,
    pickle: ByteRange,
}

/// A number that the value refers to.
#[derive(Clone, Copy, Debug)]
enum Object {
    Storage { element: Element, id: u32, count: u64 },
    Tensor(Ref),
}

/// A tar archive whose pickles were read.
#[derive(Default)]
pub(super) struct Tar {
    /// The first byte of each storage.
    starts: Vec<u64>,
    objects: HashMap<i64, Object>,
}

impl Tar {
    /// Reads everything but the bytes of the storages. Returns the pickle's value, too.
    pub(super) fn read(input: &Input<'_>, arena: &mut Arena) -> Result<(Self, Ref), CheckpointError> {
        let mut tar = Self::default();
        let root = tar.read_all(input, arena).map_err(|fault| *fault)?;
        Ok((tar, root))
    }

    fn read_all(&mut self, input: &Input<'_>, arena: &mut Arena) -> Result<Ref, Fault> {
        let members = members(input)?;
        let at = self.read_storages(input, arena, members.storages)?;
        self.read_views(input, arena, ByteRange::new(at, members.storages.end()).unwrap_or_default())?;
        self.read_tensors(input, arena, members.tensors)?;
        pickle::read(input, members.pickle, arena, self).map(|(root, _)| root)
    }

    /// Reads the storages. Returns the offset behind the last.
    fn read_storages(
        &mut self,
        input: &Input<'_>,
        arena: &mut Arena,
        member: ByteRange,
    ) -> Result<u64, Fault> {
        let (count, mut at) = self.count(input, arena, member, member.start())?;
        for _ in 0..count {
            let (parts, next) = self.short(input, arena, member, at)?;
            let [key, _location, class] = triple(input, arena, parts, at)?;
            let (Item::Int(key), Item::Class { known: Known::Storage(element), .. }) =
                (arena.item(key), arena.item(class))
            else {
                return Err(Box::new(input.invalid(at, "expected the number and the class of a storage")));
            };
            let mut stream = Stream::new(input, within(member, next, 8));
            let count = u64::from_le_bytes(stream.array()?);
            let start = stream.offset();
            let data = count.checked_mul(element.bytes()).and_then(|bytes| ByteRange::with_len(start, bytes));
            let Some(data) = data.filter(|data| data.end() <= member.end()) else {
                let reason = format!("storage of {count} elements of {} bytes is not whole", element.bytes());
                return Err(Box::new(input.invalid(next, reason)));
            };
            let id = self.push_start(input, arena, data.start())?;
            self.define(input, arena, at, key, Object::Storage { element, id, count })?;
            at = data.end();
        }
        Ok(at)
    }

    /// Reads the list of views: number, number of the storage, offset, count.
    fn read_views(&mut self, input: &Input<'_>, arena: &mut Arena, text: ByteRange) -> Result<(), Fault> {
        let at = text.start();
        let invalid = |reason: &str| Box::new(input.invalid(at, reason));
        let (views, _) = pickle::read(input, text, arena, self)?;
        let Item::List(views) = arena.item(views) else {
            return Err(invalid("expected a list of views, found something else"));
        };
        let views: Vec<Ref> = arena.chunks(views).flatten().copied().collect();
        for view in views {
            let numbers = match arena.item(view) {
                Item::Tuple(parts) => match *arena.values(parts) {
                    [key, root, offset, count] => {
                        Some([key, root, offset, count].map(|part| arena.item(part)))
                    }
                    _ => None,
                },
                _ => None,
            };
            let Some([Item::Int(key), Item::Int(root), Item::Int(offset), Item::Int(count)]) = numbers else {
                return Err(invalid("expected a view as four numbers, found something else"));
            };
            let root = self.objects.get(&root).copied();
            let Some(Object::Storage { element, id, count: whole }) = root else {
                return Err(invalid("expected a view of a storage, found one of nothing"));
            };
            let numbers = u64::try_from(offset).ok().zip(u64::try_from(count).ok());
            let inside =
                numbers.filter(|(offset, count)| offset.checked_add(*count).is_some_and(|end| end <= whole));
            let Some((offset, count)) = inside else {
                return Err(invalid("expected a view inside its storage, found one that leaves it"));
            };
            // Inside the storage, so inside the file.
            let start = self.starts[to_usize(u64::from(id))] + offset * element.bytes();
            let id = self.push_start(input, arena, start)?;
            self.define(input, arena, at, key, Object::Storage { element, id, count })?;
        }
        Ok(())
    }

    fn read_tensors(&mut self, input: &Input<'_>, arena: &mut Arena, member: ByteRange) -> Result<(), Fault> {
        let (count, mut at) = self.count(input, arena, member, member.start())?;
        for _ in 0..count {
            let (parts, next) = self.short(input, arena, member, at)?;
            let [key, storage, _class] = triple(input, arena, parts, at)?;
            let (Item::Int(key), Item::Int(storage)) = (arena.item(key), arena.item(storage)) else {
                return Err(Box::new(input.invalid(at, "expected the numbers of a tensor and its storage")));
            };
            let storage = self.objects.get(&storage).copied();
            let Some(Object::Storage { element, id, count }) = storage else {
                return Err(Box::new(
                    input.invalid(at, "expected a tensor of a storage, found one of nothing"),
                ));
            };
            let numbers = to_u64(16 + 16 * DIMENSIONS_MAX);
            let mut stream = Stream::new(input, within(member, next, numbers));
            // The number of dimensions has four bytes, and four that mean nothing.
            let [dimensions, _] = [i32::from_le_bytes(stream.array()?), i32::from_le_bytes(stream.array()?)];
            let Some(dimensions) = usize::try_from(dimensions).ok().filter(|count| *count <= DIMENSIONS_MAX)
            else {
                let reason = format!("expected 0 to {DIMENSIONS_MAX} dimensions, found {dimensions}");
                return Err(Box::new(input.invalid(next, reason)));
            };
            let mut numbers = [0; 2 * DIMENSIONS_MAX + 1];
            let numbers = &mut numbers[..2 * dimensions + 1];
            for number in &mut *numbers {
                let found = i64::from_le_bytes(stream.array()?);
                *number = u64::try_from(found).map_err(|_| {
                    stream.invalid(format!("expected a number from 0 before this, found {found}"))
                })?;
            }
            let (shape, rest) = numbers.split_at(dimensions);
            let (strides, offset) = rest.split_at(dimensions);
            let place = Place { id, storage_bytes: count.saturating_mul(element.bytes()) };
            let made = placed(arena, place, element, offset[0], shape, strides);
            let made = made.and_then(|item| Ok(arena.push(item)?));
            let tensor = made.map_err(|refusal| pickle::fault(input, arena, at, refusal))?;
            self.define(input, arena, at, key, Object::Tensor(tensor))?;
            at = stream.offset();
        }
        Ok(())
    }

    /// A number at `at`, and the offset behind it.
    fn count(
        &mut self,
        input: &Input<'_>,
        arena: &mut Arena,
        member: ByteRange,
        at: u64,
    ) -> Result<(u64, u64), Fault> {
        let (count, end) = self.short(input, arena, member, at)?;
        match arena.item(count) {
            Item::Int(count) if count >= 0 => Ok((count.unsigned_abs(), end)),
            _ => Err(Box::new(input.invalid(at, "expected how many there are, found something else"))),
        }
    }

    /// A short pickle at `at`, and the offset behind it.
    fn short(
        &mut self,
        input: &Input<'_>,
        arena: &mut Arena,
        member: ByteRange,
        at: u64,
    ) -> Result<(Ref, u64), Fault> {
        pickle::read(input, within(member, at, SHORT_BYTES_MAX), arena, self)
    }

    fn push_start(&mut self, input: &Input<'_>, arena: &mut Arena, start: u64) -> Result<u32, Fault> {
        let grown = arena.meter.grow(&mut self.starts, 1);
        grown.map_err(|full| pickle::fault(input, arena, start, full.into()))?;
        let id = u32::try_from(self.starts.len());
        self.starts.push(start);
        id.map_err(|_| pickle::fault(input, arena, start, Refusal::Full))
    }

    fn define(
        &mut self,
        input: &Input<'_>,
        arena: &mut Arena,
        at: u64,
        key: i64,
        object: Object,
    ) -> Result<(), Fault> {
        let added = arena.meter.add(OBJECT_BYTES);
        added.map_err(|full| pickle::fault(input, arena, at, full.into()))?;
        match self.objects.insert(key, object) {
            None => Ok(()),
            Some(_) => {
                Err(Box::new(input.invalid(at, format!("expected each number once, found {key} twice"))))
            }
        }
    }

    /// The first byte of a storage in the file.
    pub(super) fn start_of(&self, storage: u32) -> u64 {
        self.starts[to_usize(u64::from(storage))]
    }

    pub(super) fn add_to(&self, held: Held) -> Held {
        let objects = to_u64(self.objects.capacity()) * OBJECT_BYTES;
        held.grown_list(&self.starts).grown(objects)
    }
}

impl Persistent for Tar {
    fn load(&mut self, arena: &mut Arena, id: Ref) -> Result<Ref, Refusal> {
        if let Some(class) = persistent_class(arena, id) {
            return Ok(class);
        }
        let key = match arena.item(id) {
            Item::Int(key) => Some(key),
            Item::Text(key) => arena.text(key).parse().ok(),
            _ => None,
        };
        match key.and_then(|key| self.objects.get(&key)) {
            Some(&Object::Tensor(tensor)) => Ok(tensor),
            Some(&Object::Storage { element, id, count }) => {
                Ok(arena.push(Item::Storage { element, id, count })?)
            }
            None => {
                Err(Refusal::Invalid("expected the number of a tensor or storage, found none".to_owned()))
            }
        }
    }
}

/// The three parts of a tuple.
fn triple(input: &Input<'_>, arena: &Arena, parts: Ref, at: u64) -> Result<[Ref; 3], Fault> {
    match arena.item(parts) {
        Item::Tuple(parts) => <[Ref; 3]>::try_from(arena.values(parts)).ok(),
        _ => None,
    }
    .ok_or_else(|| Box::new(input.invalid(at, "expected a tuple of three, found something else")))
}

/// At most so many bytes of a member, from `at` on.
fn within(member: ByteRange, at: u64, len_bytes: u64) -> ByteRange {
    ByteRange::new(at, at.saturating_add(len_bytes).min(member.end())).unwrap_or_default()
}

/// Finds the members.
fn members(input: &Input<'_>) -> Result<Members, Fault> {
    let mut found: [Option<ByteRange>; 3] = [None; 3];
    let mut at = 0;
    while at < input.len_bytes {
        let block = within(ByteRange::new(0, input.len_bytes).unwrap_or_default(), at, BLOCK_BYTES);
        let block: [u8; to_block()] = Stream::new(input, block).array()?;
        if block.iter().all(|&byte| byte == 0) {
            break;
        }
        let (name, member) = member(input, &block, at)?;
        let slot = ["storages", "tensors", "pickle"].iter().position(|known| known.as_bytes() == name);
        if let Some(slot) = slot
            && found[slot].replace(member).is_some()
        {
            return Err(Box::new(input.invalid(at, "expected each member once, found one twice")));
        }
        at = member.end().next_multiple_of(BLOCK_BYTES);
    }
    match found {
        [Some(storages), Some(tensors), Some(pickle)] => Ok(Members { storages, tensors, pickle }),
        _ => {
            let found = "a tar archive without `storages`, `tensors` or `pickle`";
            Err(Box::new(input.refused("", found, "only archives that torch.save wrote can be read")))
        }
    }
}

const fn to_block() -> usize {
    512
}

/// The name and the bytes of the member whose header is `block`.
fn member<'b>(input: &Input<'_>, block: &'b [u8; 512], at: u64) -> Result<(&'b [u8], ByteRange), Fault> {
    let invalid = |reason: &str| Box::new(input.invalid(at, reason));
    let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
    let field: u64 = block[148..156].iter().map(|&byte| u64::from(byte)).sum();
    // The checksum is made with blanks in its own place.
    if octal(&block[148..156]) != Some(sum - field + 8 * u64::from(b' ')) || &block[257..262] != b"ustar" {
        return Err(invalid("expected the header of a tar member, found something else"));
    }
    if !matches!(block[156], b'0' | 0) {
        return Err(invalid("expected plain files in a tar archive, found a link or another kind"));
    }
    let size = match block[124] & 0x80 {
        0 => octal(&block[124..136]),
        _ if block[124..128] == [0x80, 0, 0, 0] => block[128..136].try_into().ok().map(u64::from_be_bytes),
        _ => None,
    };
    let member = size.and_then(|size| ByteRange::with_len(at + BLOCK_BYTES, size));
    let member = member.filter(|member| member.end() <= input.len_bytes);
    let member =
        member.ok_or_else(|| invalid("expected a tar member inside the file: interrupted download?"))?;
    let name = block[..100].split(|&byte| byte == 0).next().unwrap_or_default();
    Ok((name, member))
}

/// A number in octal digits, with blanks around it.
fn octal(field: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(field).ok()?;
    let digits = text.trim_matches(|character| matches!(character, ' ' | '\0'));
    u64::from_str_radix(digits, 8).ok()
}
