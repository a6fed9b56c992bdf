//! Finds texts that are stored elsewhere: a hash table of 4-byte positions.
//!
//! A map from `&str` takes 25 bytes a bucket, and half as much again while it grows: with a million
//! layers that was the largest table of the grouping. Here a bucket takes 5 bytes, and the caller
//! returns the text of a position.

use std::hash::BuildHasher;

use foldhash::quality::RandomState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::footprint::block_bytes;
use crate::units::to_u64;

/// Positions by text.
#[derive(Debug, Default)]
pub(super) struct TextIndex {
    table: HashTable<u32>,
    // Seeded at random, since names come from strangers.
    state: RandomState,
}

impl TextIndex {
    /// The position of `text`. `text_of` returns the text of an inserted position.
    pub(super) fn find<'t>(&self, text: &str, text_of: impl Fn(u32) -> &'t str) -> Option<u32> {
        self.table.find(self.state.hash_one(text), |&at| text_of(at) == text).copied()
    }

    /// Adds the position of a new text. `text_of` must know it already.
    pub(super) fn insert<'t>(&mut self, position: u32, text_of: impl Fn(u32) -> &'t str) {
        let Self { table, state } = self;
        let hash = |at: &u32| state.hash_one(text_of(*at));
        table.insert_unique(hash(&position), position, hash);
    }

    /// The position of `text`, or `None` after adding `position` for it. `text_of` must know the
    /// positions that were inserted before.
    pub(super) fn find_or_insert<'t>(
        &mut self,
        text: &str,
        position: u32,
        text_of: impl Fn(u32) -> &'t str,
    ) -> Option<u32> {
        let Self { table, state } = self;
        let is_it = |at: &u32| text_of(*at) == text;
        match table.entry(state.hash_one(text), is_it, |at| state.hash_one(text_of(*at))) {
            Entry::Occupied(known) => Some(*known.get()),
            Entry::Vacant(room) => {
                room.insert(position);
                None
            }
        }
    }

    /// Memory of the table.
    pub(super) fn bytes(&self) -> u64 {
        block_bytes(to_u64(self.table.allocation_size()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_is_found_at_its_position() {
        let texts: Vec<String> = (0..1000).map(|number| format!("t{number}")).collect();
        let text_of = |at: u32| texts[usize::try_from(at).unwrap()].as_str();
        let mut index = TextIndex::default();
        for position in 0..900 {
            assert_eq!(index.find(text_of(position), text_of), None);
            index.insert(position, text_of);
        }
        assert_eq!(index.find_or_insert(text_of(7), 900, text_of), Some(7));
        assert_eq!(index.find_or_insert(text_of(900), 900, text_of), None);
        for position in 0..1000 {
            assert_eq!(index.find(text_of(position), text_of), (position <= 900).then_some(position));
        }
        assert!(index.bytes() >= 4 * 900 && index.bytes() < 20 * 900, "{}", index.bytes());
    }
}
