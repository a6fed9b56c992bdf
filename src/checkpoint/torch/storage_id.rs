//! How a pickle names what it leaves to its file.

use super::element::Element;
use super::pickle::{Arena, Item, Known, Ref, Refusal};

/// The parts of `("storage", class, key, location, count, ...)`.
pub(super) struct StorageId<'a> {
    pub(super) element: Element,
    pub(super) key: &'a str,
    pub(super) count: u64,
    /// What follows.
    pub(super) rest: &'a [Ref],
}

impl<'a> StorageId<'a> {
    pub(super) fn of(arena: &'a Arena, id: Ref) -> Result<Self, Refusal> {
        let invalid = |reason: &str| Err(Refusal::Invalid(reason.to_owned()));
        let Item::Tuple(parts) = arena.item(id) else {
            return invalid("expected the identity of a storage as a tuple, found something else");
        };
        let &[kind, class, key, _location, count, ref rest @ ..] = arena.values(parts) else {
            return invalid("expected five parts in the identity of a storage, found fewer");
        };
        if arena.text_of(kind) != Some("storage") {
            return invalid("expected the identity of a storage, found something else");
        }
        let Item::Class { known: Known::Storage(element), .. } = arena.item(class) else {
            return invalid("expected a class of storages that torch has, found something else");
        };
        let count = match arena.item(count) {
            Item::Int(count) => u64::try_from(count).ok(),
            _ => None,
        };
        match (arena.text_of(key), count) {
            (Some(key), Some(count)) => Ok(Self { element, key, count, rest }),
            _ => invalid("expected the key of a storage as text and its length as a number from 0"),
        }
    }
}

/// The class in `("module", class, file, source)`, as old pickles of whole modules have it.
pub(super) fn persistent_class(arena: &Arena, id: Ref) -> Option<Ref> {
    let Item::Tuple(parts) = arena.item(id) else { return None };
    match *arena.values(parts) {
        [kind, class, ..] if arena.text_of(kind) == Some("module") => Some(class),
        _ => None,
    }
}
