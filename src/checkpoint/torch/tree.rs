//! The containers of a pickle as a tree: which hold tensors, and under which names.
//!
//! Nothing here recurses, and a container that stands in several places is expanded a bounded
//! number of times.

use super::pickle::{Arena, Chain, Item, Ref, Slice};
use crate::units::to_u64;

/// What is known of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Contains(u8);

impl Contains {
    const OPEN: u8 = 1;
    const DONE: u8 = 2;
    const NAMED: u8 = 4;
    const HIDDEN: u8 = 8;

    /// A tensor that has a name.
    pub(super) fn tensors(self) -> bool {
        self.0 & Self::NAMED != 0
    }

    /// A tensor without a name: inside an opaque object or a set.
    pub(super) fn hidden(self) -> bool {
        self.0 & Self::HIDDEN != 0
    }
}

/// Which values contain tensors.
pub(super) struct Survey {
    contains: Vec<Contains>,
}

/// An opened value, and what is left of it.
struct Open {
    value: Ref,
    slice: Slice,
    at: usize,
    rest: Chain,
    /// True inside a dictionary: every other value is a key.
    pairs: bool,
}

impl Open {
    fn of(arena: &Arena, value: Ref) -> Option<Self> {
        let (slice, rest, pairs) = match arena.item(value) {
            Item::Tuple(slice) => (slice, Chain::EMPTY, false),
            Item::List(chain) | Item::Set(chain) => (Slice::default(), chain, false),
            Item::Object { parts, .. } => (Slice::default(), parts, false),
            Item::Dict(chain) => (Slice::default(), chain, true),
            _ => return None,
        };
        Some(Self { value, slice, at: 0, rest, pairs })
    }

    /// The next value, with its key in a dictionary.
    fn next(&mut self, arena: &Arena) -> Option<(Option<Ref>, Ref)> {
        while self.at == self.slice.len() {
            self.slice = arena.next_chunk(&mut self.rest)?;
            self.at = 0;
        }
        let values = &arena.values(self.slice)[self.at..];
        match (self.pairs, values) {
            (true, &[key, value, ..]) => {
                self.at += 2;
                Some((Some(key), value))
            }
            (_, &[value, ..]) => {
                self.at += 1;
                Some((None, value))
            }
            (_, []) => None,
        }
    }
}

impl Survey {
    /// Looks through everything below `root`.
    pub(super) fn of(arena: &Arena, root: Ref) -> Self {
        let mut survey = Self { contains: vec![Contains::default(); arena.len()] };
        let mut opened: Vec<Open> = Vec::new();
        opened.extend(survey.open(arena, root));
        while let Some(open) = opened.last_mut() {
            match open.next(arena) {
                Some((_, value)) => {
                    let child = survey.open(arena, value);
                    match child {
                        Some(child) => opened.push(child),
                        None => {
                            let (parent, found) = (open.value, survey.contains(arena, value));
                            survey.add(parent, found);
                        }
                    }
                }
                None => {
                    let value = open.value;
                    opened.pop();
                    survey.close(arena, value);
                    if let Some(parent) = opened.last() {
                        let found = survey.contains(arena, value);
                        survey.add(parent.value, found);
                    }
                }
            }
        }
        survey
    }

    /// Opens a value that was not seen before and may hold others.
    fn open(&mut self, arena: &Arena, value: Ref) -> Option<Open> {
        let seen = &mut self.contains[value.position()?];
        if seen.0 & (Contains::OPEN | Contains::DONE) != 0 {
            return None;
        }
        let open = Open::of(arena, value)?;
        seen.0 |= Contains::OPEN;
        Some(open)
    }

    fn close(&mut self, arena: &Arena, value: Ref) {
        let Some(position) = value.position() else { return };
        let contains = &mut self.contains[position];
        contains.0 = contains.0 & !Contains::OPEN | Contains::DONE;
        // Names end at opaque objects.
        if matches!(arena.item(value), Item::Object { .. } | Item::Set(_)) && contains.tensors() {
            contains.0 = contains.0 & !Contains::NAMED | Contains::HIDDEN;
        }
    }

    fn add(&mut self, parent: Ref, found: Contains) {
        if let Some(position) = parent.position() {
            self.contains[position].0 |= found.0 & (Contains::NAMED | Contains::HIDDEN);
        }
    }

    /// What a value contains.
    pub(super) fn contains(&self, arena: &Arena, value: Ref) -> Contains {
        match arena.item(value) {
            Item::Tensor(_) | Item::Unreadable(_) => Contains(Contains::DONE | Contains::NAMED),
            _ => value.position().map_or(Contains::default(), |position| self.contains[position]),
        }
    }

    /// Memory held, in bytes.
    pub(super) fn heap_bytes(&self) -> u64 {
        to_u64(self.contains.capacity())
    }
}

/// Why a tree has no list of names.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TreeFault {
    /// A container holds itself.
    Circle,
    /// Containers stand in so many places that they cannot be expanded.
    Shared,
    /// Containers are nested deeper than any checkpoint.
    Deep,
    /// The key of a tensor or of what holds it is no text and no number.
    Key,
    /// A dictionary has the key twice.
    Twice,
}

/// The deepest nesting of names.
const DEPTH_MAX: usize = 256;

/// Steps through the tree: as many as it has values, and this many times more for values that stand
/// in several places.
const SHARING_MAX: usize = 8;

/// Goes through the tensors below a value, in the order of the file.
pub(super) struct Walk<'a> {
    arena: &'a Arena,
    survey: &'a Survey,
    opened: Vec<(Open, usize, u64)>,
    /// The name of the current value.
    pub(super) name: String,
    steps_left: usize,
}

impl<'a> Walk<'a> {
    /// `root` is a container without a name.
    pub(super) fn new(arena: &'a Arena, survey: &'a Survey, root: Ref) -> Result<Self, TreeFault> {
        if let Item::Dict(chain) = arena.item(root) {
            check_keys(arena, chain)?;
        }
        let steps_left = SHARING_MAX * (arena.len() + arena.value_count()) + 64;
        let opened = Open::of(arena, root).map(|open| (open, 0, 0)).into_iter().collect();
        Ok(Self { arena, survey, opened, name: String::new(), steps_left })
    }

    /// The next tensor, or an opaque object that holds tensors.
    pub(super) fn next(&mut self) -> Result<Option<Ref>, TreeFault> {
        loop {
            let is_inside = self.opened.len() > 1;
            let Some((open, name_bytes, index)) = self.opened.last_mut() else { return Ok(None) };
            self.name.truncate(*name_bytes);
            self.steps_left = self.steps_left.checked_sub(1).ok_or(TreeFault::Shared)?;
            let Some((key, value)) = open.next(self.arena) else {
                self.opened.pop();
                continue;
            };
            let position = *index;
            *index += 1;
            let contains = self.survey.contains(self.arena, value);
            if !contains.tensors() && !contains.hidden() {
                continue;
            }
            if is_inside {
                self.name.push('.');
            }
            match key {
                Some(key) => Key::of(self.arena, key).ok_or(TreeFault::Key)?.push_to(&mut self.name),
                None => self.name.push_str(&position.to_string()),
            }
            match self.arena.item(value) {
                Item::Dict(chain) => {
                    check_keys(self.arena, chain)?;
                    self.enter(value)?;
                }
                Item::Tuple(_) | Item::List(_) => self.enter(value)?,
                _ => return Ok(Some(value)),
            }
        }
    }

    fn enter(&mut self, value: Ref) -> Result<(), TreeFault> {
        if self.opened.len() == DEPTH_MAX {
            return Err(TreeFault::Deep);
        }
        if self.opened.iter().any(|(open, _, _)| open.value == value) {
            return Err(TreeFault::Circle);
        }
        let name_bytes = self.name.len();
        self.opened.extend(Open::of(self.arena, value).map(|open| (open, name_bytes, 0)));
        Ok(())
    }
}

/// A key that can be a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key<'a> {
    Number(i64),
    Text(&'a str),
}

impl<'a> Key<'a> {
    pub(super) fn of(arena: &'a Arena, key: Ref) -> Option<Self> {
        match arena.item(key) {
            Item::Text(text) => Some(Self::Text(arena.text(text))),
            Item::Int(number) => Some(Self::Number(number)),
            Item::Bool(value) => Some(Self::Number(value.into())),
            _ => None,
        }
    }

    pub(super) fn push_to(self, name: &mut String) {
        match self {
            Self::Text(text) => name.push_str(text),
            Self::Number(number) => name.push_str(&number.to_string()),
        }
    }
}

/// The entries of a dictionary.
pub(super) fn entries(arena: &Arena, dict: Chain) -> impl Iterator<Item = (Ref, Ref)> {
    arena.chunks(dict).flat_map(|chunk| chunk.chunks_exact(2)).map(|pair| (pair[0], pair[1]))
}

/// Refuses a dictionary that gives a key twice, unless both values are tensors: then their names
/// are compared later, with all others.
pub(super) fn check_keys(arena: &Arena, dict: Chain) -> Result<(), TreeFault> {
    let is_tensor = |value| matches!(arena.item(value), Item::Tensor(_) | Item::Unreadable(_));
    let others = entries(arena, dict).filter(|&(_, value)| !is_tensor(value));
    let mut others: Vec<Key<'_>> = others.filter_map(|(key, _)| Key::of(arena, key)).collect();
    if others.is_empty() {
        return Ok(());
    }
    others.sort_unstable();
    let is_twice = others.windows(2).any(|pair| pair[0] == pair[1]);
    let mut tensors = entries(arena, dict).filter(|&(_, value)| is_tensor(value));
    let meets =
        tensors.any(|(key, _)| Key::of(arena, key).is_some_and(|key| others.binary_search(&key).is_ok()));
    if is_twice || meets { Err(TreeFault::Twice) } else { Ok(()) }
}
