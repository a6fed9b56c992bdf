//! Who holds a layer: which of its tensors, and how often.
//!
//! Only what is held has an entry, so that a layer of ten thousand tensors costs nothing until
//! somebody takes them. The list keeps its memory for the next ones, up to some length.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Entries that an empty list has room for: 16 KiB of them.
const KEPT_ENTRIES_MAX: usize = 1024;

/// The tensors of one layer that somebody holds.
#[derive(Debug, Default)]
pub(super) struct Owners {
    /// The tensor's place in its layer, ascending, and how many owners it has; never none.
    held: Mutex<Vec<(usize, usize)>>,
}

impl Owners {
    /// One owner more.
    pub(super) fn add(&self, place: usize) {
        let mut held = self.lock();
        match held.binary_search_by_key(&place, |entry| entry.0) {
            Ok(at) => held[at].1 += 1,
            Err(at) => held.insert(at, (place, 1)),
        }
    }

    /// One owner less.
    pub(super) fn remove(&self, place: usize) {
        let mut held = self.lock();
        let Ok(at) = held.binary_search_by_key(&place, |entry| entry.0) else { return };
        held[at].1 -= 1;
        if held[at].1 == 0 {
            held.remove(at);
        }
        if held.is_empty() && held.capacity() > KEPT_ENTRIES_MAX {
            *held = Vec::new();
        }
    }

    /// Places and owners, by place.
    pub(super) fn list(&self) -> Vec<(usize, usize)> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(usize, usize)>> {
        // Every update leaves counts that are true, so poison is ignored.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_held_is_listed() {
        let owners = Owners::default();
        [3, 1, 3, 3].into_iter().for_each(|place| owners.add(place));
        assert_eq!(owners.list(), [(1, 1), (3, 3)]);
        [1, 3, 7].into_iter().for_each(|place| owners.remove(place));
        assert_eq!(owners.list(), [(3, 2)]);
        [3, 3].into_iter().for_each(|place| owners.remove(place));
        assert_eq!(owners.list(), []);
        (0..5000).for_each(|place| owners.add(place));
        (0..5000).rev().for_each(|place| owners.remove(place));
        assert_eq!((owners.list(), owners.lock().capacity()), (vec![], 0), "a long list is given back");
    }
}
