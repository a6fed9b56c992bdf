//! The values that a pickle describes, in a few flat arrays.
//!
//! A pickle of a million tensors describes twenty million values, so a value is 16 bytes and
//! nothing is allocated for it alone. Values point to older values by a [`Ref`] of 4 bytes; small
//! numbers are in the [`Ref`] itself. What only served to describe a tensor is removed again once
//! the tensor is known ([`Arena::rewind`]).
//!
//! Every array grows through [`Meter::grow`], which stops at a limit.

use super::super::element::Element;
use super::class::{Known, Layout};
use crate::footprint::{Held, block_bytes};
use crate::units::{to_u64, to_usize};

/// A value: a position in the arena, or a small value itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Ref(u32);

impl Ref {
    const SMALL: u32 = 1 << 31;
    const OTHER: u32 = 1 << 30;
    const INT_MAX: u32 = Self::OTHER - 1;

    pub(in super::super) const NONE: Self = Self(Self::SMALL | Self::OTHER);
    pub(in super::super) const FALSE: Self = Self(Self::SMALL | Self::OTHER | 1);
    pub(in super::super) const TRUE: Self = Self(Self::SMALL | Self::OTHER | 2);
    /// A number with a fraction, one beyond 64 bits, bytes, a text that is long or not Unicode:
    /// nothing here depends on what it is.
    pub(in super::super) const PLAIN: Self = Self(Self::SMALL | Self::OTHER | 3);

    #[inline]
    fn small(value: i64) -> Option<Self> {
        let value = u32::try_from(value).ok().filter(|value| *value <= Self::INT_MAX)?;
        Some(Self(Self::SMALL | value))
    }

    /// Its position in the arena, unless it is a small value.
    #[inline]
    pub(in super::super) fn position(self) -> Option<usize> {
        (self.0 & Self::SMALL == 0).then(|| to_usize(u64::from(self.0)))
    }
}

/// A part of one of the arrays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct Slice {
    start: u32,
    len: u32,
}

impl Slice {
    #[inline]
    pub(in super::super) fn range(self) -> std::ops::Range<usize> {
        let start = to_usize(u64::from(self.start));
        start..start + to_usize(u64::from(self.len))
    }

    pub(in super::super) fn len(self) -> usize {
        to_usize(u64::from(self.len))
    }
}

/// Values that were added to a container in several steps: a list of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Chain {
    first: u32,
    last: u32,
}

const NO_CHUNK: u32 = u32::MAX;

impl Chain {
    pub(in super::super) const EMPTY: Self = Self { first: NO_CHUNK, last: NO_CHUNK };
}

#[derive(Clone, Copy, Debug)]
struct Chunk {
    values: Slice,
    next: u32,
}

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Item {
    None,
    Bool(bool),
    Plain,
    Int(i64),
    Text(Slice),
    Tuple(Slice),
    List(Chain),
    /// Keys and values in turn.
    Dict(Chain),
    Set(Chain),
    /// A class or a function, which is never called.
    Class {
        name: Slice,
        known: Known,
    },
    /// Bytes in the file: `count` elements.
    Storage {
        element: Element,
        id: u32,
        count: u64,
    },
    /// A position in [`Arena::tensors`].
    Tensor(u32),
    /// A tensor that cannot be read: a position in [`Arena::unreadable`].
    Unreadable(u32),
    /// An object of a class that is not known, and all that was given to it.
    Object {
        class: Ref,
        parts: Chain,
    },
}

const _: () = assert!(size_of::<Item>() == 16, "there are two values for each tensor");

/// A tensor: element type, shape and strides are its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Tensor {
    /// From the start of its storage to its first byte.
    pub(in super::super) offset_bytes: u64,
    pub(in super::super) storage: u32,
    pub(in super::super) kind: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    element: Element,
    shape: Slice,
    strides: Slice,
}

/// Why a tensor cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Unreadable {
    /// It has no plain bytes.
    Layout(Layout),
    /// It is made by this class or function.
    Code(Slice),
    /// It is not inside its storage.
    Outside { needed_bytes: u64, storage_bytes: u64 },
}

/// The lengths of the arrays at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Watermark {
    items: usize,
    values: usize,
    chunks: usize,
    text: usize,
    pins: u64,
}

/// Sums up the memory of arrays.
pub(in super::super) struct Meter {
    used_bytes: u64,
    limit_bytes: u64,
}

/// An array would be over the limit.
#[derive(Debug)]
pub(in super::super) struct Full;

impl Meter {
    pub(in super::super) fn new(limit_bytes: u64) -> Self {
        Self { used_bytes: 0, limit_bytes }
    }

    pub(in super::super) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    pub(in super::super) fn add(&mut self, bytes: u64) -> Result<(), Full> {
        self.used_bytes = self.used_bytes.saturating_add(bytes);
        if self.used_bytes > self.limit_bytes { Err(Full) } else { Ok(()) }
    }

    /// Makes room for `more` bytes of text.
    fn grow_text(&mut self, text: &mut String, more: usize) -> Result<(), Full> {
        let needed = text.len() + more;
        if needed > text.capacity() {
            let capacity = needed.max(text.capacity() * 2).max(64);
            self.add(to_u64(capacity - text.capacity()))?;
            text.reserve_exact(capacity - text.len());
        }
        Ok(())
    }

    /// Makes room for `more` items.
    #[inline]
    pub(in super::super) fn grow<T>(&mut self, list: &mut Vec<T>, more: usize) -> Result<(), Full> {
        let needed = list.len() + more;
        if needed > list.capacity() {
            let capacity = needed.max(list.capacity() * 2).max(16);
            self.add(to_u64((capacity - list.capacity()) * size_of::<T>()))?;
            list.reserve_exact(capacity - list.len());
        }
        Ok(())
    }
}

/// Kinds that were met recently are found again by a hash of so many bits.
const RECENT_BITS: u32 = 10;

pub(in super::super) struct Arena {
    pub(in super::super) meter: Meter,
    items: Vec<Item>,
    values: Vec<Ref>,
    chunks: Vec<Chunk>,
    text: String,
    tensors: Vec<Tensor>,
    kinds: Vec<Kind>,
    dims: Vec<u64>,
    /// Positions in `kinds`, by a hash.
    recent: Vec<u32>,
    unreadable: Vec<Unreadable>,
    /// Names of classes that are not known; the first few.
    pub(in super::super) strangers: Vec<Box<str>>,
    /// Counts the moments at which an older value may have got to know newer ones.
    pins: u64,
}

/// The most classes that are remembered for the notes.
const STRANGERS_MAX: usize = 16;

impl Arena {
    pub(in super::super) fn new(limit_bytes: u64) -> Self {
        Self {
            meter: Meter::new(limit_bytes),
            items: Vec::new(),
            values: Vec::new(),
            chunks: Vec::new(),
            text: String::new(),
            tensors: Vec::new(),
            kinds: Vec::new(),
            dims: Vec::new(),
            recent: Vec::new(),
            unreadable: Vec::new(),
            strangers: Vec::new(),
            pins: 0,
        }
    }

    /// Memory held, in bytes.
    pub(in super::super) fn held(&self) -> Held {
        let lists = Held::default().grown_list(&self.items).grown_list(&self.values);
        let lists = lists.grown_list(&self.chunks).grown(block_bytes(to_u64(self.text.capacity())));
        let lists = lists.grown_list(&self.tensors).grown_list(&self.kinds).grown_list(&self.dims);
        let names = self.strangers.iter().map(|name| block_bytes(to_u64(name.len()))).sum::<u64>();
        lists.grown_list(&self.recent).grown_list(&self.unreadable).and(names)
    }

    /// Number of values.
    pub(in super::super) fn len(&self) -> usize {
        self.items.len()
    }

    /// Values in containers.
    pub(in super::super) fn value_count(&self) -> usize {
        self.values.len()
    }

    #[inline]
    pub(in super::super) fn item(&self, value: Ref) -> Item {
        match value.position() {
            Some(position) => self.items[position],
            None => match value {
                Ref::NONE => Item::None,
                Ref::FALSE => Item::Bool(false),
                Ref::TRUE => Item::Bool(true),
                Ref::PLAIN => Item::Plain,
                Ref(small) => Item::Int(i64::from(small & Ref::INT_MAX)),
            },
        }
    }

    #[inline]
    pub(in super::super) fn push(&mut self, item: Item) -> Result<Ref, Full> {
        self.meter.grow(&mut self.items, 1)?;
        let position = u32::try_from(self.items.len()).ok().filter(|position| *position < Ref::SMALL);
        let position = position.ok_or(Full)?;
        self.items.push(item);
        Ok(Ref(position))
    }

    /// Gives a value another meaning, for everything that refers to it.
    pub(in super::super) fn replace(&mut self, value: Ref, item: Item) {
        self.pin();
        if let Some(position) = value.position() {
            self.items[position] = item;
        }
    }

    #[inline]
    pub(in super::super) fn push_int(&mut self, value: i64) -> Result<Ref, Full> {
        Ref::small(value).map_or_else(|| self.push(Item::Int(value)), Ok)
    }

    #[inline]
    pub(in super::super) fn push_text(&mut self, text: &str) -> Result<Slice, Full> {
        self.meter.grow_text(&mut self.text, text.len())?;
        let start = u32::try_from(self.text.len()).map_err(|_| Full)?;
        let len = u32::try_from(text.len()).map_err(|_| Full)?;
        self.text.push_str(text);
        Ok(Slice { start, len })
    }

    #[inline]
    pub(in super::super) fn text(&self, slice: Slice) -> &str {
        &self.text[slice.range()]
    }

    /// The text that a value is.
    #[inline]
    pub(in super::super) fn text_of(&self, value: Ref) -> Option<&str> {
        match self.item(value) {
            Item::Text(slice) => Some(self.text(slice)),
            _ => None,
        }
    }

    #[inline]
    pub(in super::super) fn push_values(&mut self, values: &[Ref]) -> Result<Slice, Full> {
        self.meter.grow(&mut self.values, values.len())?;
        let start = u32::try_from(self.values.len()).map_err(|_| Full)?;
        let len = u32::try_from(values.len()).map_err(|_| Full)?;
        self.values.extend_from_slice(values);
        Ok(Slice { start, len })
    }

    #[inline]
    pub(in super::super) fn values(&self, slice: Slice) -> &[Ref] {
        &self.values[slice.range()]
    }

    /// A chain with more values at its end.
    pub(in super::super) fn extended(&mut self, chain: Chain, values: &[Ref]) -> Result<Chain, Full> {
        self.pin();
        let values = self.push_values(values)?;
        self.meter.grow(&mut self.chunks, 1)?;
        let last = u32::try_from(self.chunks.len()).ok().filter(|last| *last < NO_CHUNK).ok_or(Full)?;
        self.chunks.push(Chunk { values, next: NO_CHUNK });
        if chain.first == NO_CHUNK {
            return Ok(Chain { first: last, last });
        }
        self.chunks[to_usize(u64::from(chain.last))].next = last;
        Ok(Chain { first: chain.first, last })
    }

    /// The values of a chain, chunk by chunk.
    pub(in super::super) fn chunks(&self, chain: Chain) -> impl Iterator<Item = &[Ref]> {
        let chunk = |position: u32| self.chunks.get(to_usize(u64::from(position)));
        let chunks = std::iter::successors(chunk(chain.first), move |last| chunk(last.next));
        chunks.map(|chunk| self.values(chunk.values))
    }

    /// The values of a chain behind a place in it, which is moved past them.
    #[inline]
    pub(in super::super) fn next_chunk(&self, rest: &mut Chain) -> Option<Slice> {
        let chunk = self.chunks.get(to_usize(u64::from(rest.first)))?;
        rest.first = chunk.next;
        Some(chunk.values)
    }

    /// What is now at the end of the arrays.
    #[inline]
    pub(in super::super) fn watermark(&self) -> Watermark {
        let (items, values, chunks) = (self.items.len(), self.values.len(), self.chunks.len());
        Watermark { items, values, chunks, text: self.text.len(), pins: self.pins }
    }

    /// Something older than the newest values may refer to them now: all that is there stays.
    pub(in super::super) fn pin(&mut self) {
        self.pins += 1;
    }

    /// Removes everything since `mark`, unless something older may refer to it.
    pub(in super::super) fn rewind(&mut self, mark: Watermark) {
        if self.pins == mark.pins {
            self.items.truncate(mark.items);
            self.values.truncate(mark.values);
            self.chunks.truncate(mark.chunks);
            self.text.truncate(mark.text);
        }
    }

    pub(in super::super) fn push_unreadable(&mut self, why: Unreadable) -> Result<Item, Full> {
        self.meter.grow(&mut self.unreadable, 1)?;
        let position = u32::try_from(self.unreadable.len()).map_err(|_| Full)?;
        self.unreadable.push(why);
        Ok(Item::Unreadable(position))
    }

    pub(in super::super) fn unreadable(&self, position: u32) -> Unreadable {
        self.unreadable[to_usize(u64::from(position))]
    }

    pub(in super::super) fn push_tensor(&mut self, tensor: Tensor) -> Result<Item, Full> {
        self.meter.grow(&mut self.tensors, 1)?;
        let position = u32::try_from(self.tensors.len()).map_err(|_| Full)?;
        self.tensors.push(tensor);
        Ok(Item::Tensor(position))
    }

    pub(in super::super) fn tensor(&self, position: u32) -> Tensor {
        self.tensors[to_usize(u64::from(position))]
    }

    /// The kind of tensors of this element type, shape and strides.
    pub(in super::super) fn kind(
        &mut self,
        element: Element,
        shape: &[u64],
        strides: &[u64],
    ) -> Result<u32, Full> {
        if self.recent.is_empty() {
            self.meter.grow(&mut self.recent, 1 << RECENT_BITS)?;
            self.recent.resize(1 << RECENT_BITS, u32::MAX);
        }
        let mix = |hash: u64, dim: &u64| (hash.rotate_left(5) ^ dim).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hash = shape.iter().chain(strides).fold(to_u64(element.name().len()), mix);
        let slot = to_usize(hash >> (64 - RECENT_BITS));
        let known = self.recent[slot];
        if let Some(kind) = self.kinds.get(to_usize(u64::from(known)))
            && kind.element == element
            && self.dims[kind.shape.range()] == *shape
            && self.dims[kind.strides.range()] == *strides
        {
            return Ok(known);
        }
        let kind = Kind { element, shape: self.push_dims(shape)?, strides: self.push_dims(strides)? };
        self.meter.grow(&mut self.kinds, 1)?;
        let position = u32::try_from(self.kinds.len()).map_err(|_| Full)?;
        self.kinds.push(kind);
        self.recent[slot] = position;
        Ok(position)
    }

    fn push_dims(&mut self, dims: &[u64]) -> Result<Slice, Full> {
        self.meter.grow(&mut self.dims, dims.len())?;
        let start = u32::try_from(self.dims.len()).map_err(|_| Full)?;
        let len = u32::try_from(dims.len()).map_err(|_| Full)?;
        self.dims.extend_from_slice(dims);
        Ok(Slice { start, len })
    }

    /// Element type, shape and strides; no strides if row-major.
    pub(in super::super) fn kind_of(&self, kind: u32) -> (Element, &[u64], &[u64]) {
        let kind = self.kinds[to_usize(u64::from(kind))];
        (kind.element, &self.dims[kind.shape.range()], &self.dims[kind.strides.range()])
    }

    /// Remembers a class that is not known.
    pub(in super::super) fn note_stranger(&mut self, name: &str) {
        if self.strangers.len() < STRANGERS_MAX && !self.strangers.iter().any(|known| **known == *name) {
            self.strangers.push(name.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_values_need_no_room() {
        let mut arena = Arena::new(1 << 20);
        for value in [0, 1, 255, (1 << 30) - 1] {
            let small = arena.push_int(value).unwrap();
            assert_eq!((arena.item(small), small.position()), (Item::Int(value), None));
        }
        assert_eq!(arena.len(), 0);
        for value in [-1, 1 << 30, i64::MIN, i64::MAX] {
            let large = arena.push_int(value).unwrap();
            assert_eq!(arena.item(large), Item::Int(value));
        }
        assert_eq!(arena.len(), 4);
        let others = [Ref::NONE, Ref::FALSE, Ref::TRUE, Ref::PLAIN].map(|value| arena.item(value));
        assert_eq!(others, [Item::None, Item::Bool(false), Item::Bool(true), Item::Plain]);
    }

    #[test]
    fn rewinding_keeps_what_something_older_may_refer_to() {
        let mut arena = Arena::new(1 << 20);
        let list = arena.push(Item::List(Chain::EMPTY)).unwrap();
        let mark = arena.watermark();
        let text = arena.push_text("gone").unwrap();
        arena.push(Item::Text(text)).unwrap();
        arena.rewind(mark);
        assert_eq!((arena.len(), arena.value_count()), (1, 0));
        // Once the list knows a newer value, that stays.
        let mark = arena.watermark();
        let text = arena.push_text("kept").unwrap();
        let value = arena.push(Item::Text(text)).unwrap();
        let chain = arena.extended(Chain::EMPTY, &[value]).unwrap();
        arena.replace(list, Item::List(chain));
        arena.rewind(mark);
        assert_eq!(arena.text_of(value), Some("kept"));
        let mark = arena.watermark();
        arena.push(Item::Int(-1)).unwrap();
        arena.rewind(mark);
        assert_eq!(arena.len(), 2);
    }

    #[test]
    fn chains_are_read_in_the_order_of_their_parts() {
        let mut arena = Arena::new(1 << 20);
        let one = arena.push_int(1).unwrap();
        let mut chain = arena.extended(Chain::EMPTY, &[one, Ref::TRUE]).unwrap();
        arena.extended(Chain::EMPTY, &[Ref::NONE]).unwrap();
        chain = arena.extended(chain, &[Ref::FALSE]).unwrap();
        let values: Vec<Ref> = arena.chunks(chain).flatten().copied().collect();
        assert_eq!(values, [one, Ref::TRUE, Ref::FALSE]);
        assert_eq!(arena.next_chunk(&mut chain).map(Slice::len), Some(2));
        assert_eq!(arena.next_chunk(&mut chain).map(Slice::len), Some(1));
        assert_eq!((arena.next_chunk(&mut chain), arena.chunks(Chain::EMPTY).count()), (None, 0));
    }

    #[test]
    fn kinds_are_shared() {
        let mut arena = Arena::new(1 << 20);
        let element = Element::BYTE;
        let kinds =
            [&[2_u64, 3][..], &[3, 2], &[2, 3], &[]].map(|shape| arena.kind(element, shape, &[]).unwrap());
        assert_eq!((kinds[0], kinds[0] == kinds[1]), (kinds[2], false));
        assert_eq!(arena.kind_of(kinds[1]), (element, &[3, 2][..], &[][..]));
        // More than are remembered.
        let many: Vec<u32> = (0..5000).map(|dim| arena.kind(element, &[dim], &[1]).unwrap()).collect();
        assert!(many.iter().zip(0..).all(|(&kind, dim)| arena.kind_of(kind).1 == [dim]));
    }

    #[test]
    fn growing_stops_at_the_limit() {
        let mut arena = Arena::new(10_000);
        let pushed = (0..).take_while(|_| arena.push(Item::Int(-1)).is_ok()).count();
        assert!((200..=625).contains(&pushed), "{pushed}");
        assert!(arena.held().bytes() <= 10_500);
        let mut arena = Arena::new(100);
        assert!(
            arena.push_text("a".repeat(50).as_str()).is_ok()
                && arena.push_text("a".repeat(60).as_str()).is_err()
        );
        assert!(
            arena.push_values(&[Ref::NONE; 100]).is_err() && arena.kind(Element::BYTE, &[], &[]).is_err()
        );
    }
}
