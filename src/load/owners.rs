//! Who holds a layer: which of its tensors, and how often.
//!
//! Only what is held has an entry, so that a layer of ten thousand tensors costs nothing until somebody takes them.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The tensors of one layer that somebody holds.
#[derive(Debug, Default)]
pub(super) struct Owners {
    /// Owners by the tensor's place in its layer; never zero.
    held: Mutex<BTreeMap<usize, usize>>,
}

impl Owners {
    /// One owner more.
    pub(super) fn add(&self, place: usize) {
        *self.lock().entry(place).or_default() += 1;
    }

    /// One owner less.
    pub(super) fn remove(&self, place: usize) {
        let mut held = self.lock();
        let Some(count) = held.get_mut(&place) else { return };
        *count -= 1;
        if *count == 0 {
            held.remove(&place);
        }
    }

    /// Places and owners, by place.
    pub(super) fn list(&self) -> Vec<(usize, usize)> {
        self.lock().iter().map(|(&place, &count)| (place, count)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
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
    }
}
