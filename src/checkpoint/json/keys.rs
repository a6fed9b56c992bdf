//! The keys of the JSON objects that are open while a value is skipped, to find duplicates.
//!
//! One text and one list for all levels, so that a hostile value costs a small multiple of its
//! length.

use super::super::text_sort::sort_by_text;
use crate::footprint::{Held, block_bytes};
use crate::units::{to_u64, to_usize};

/// Keys of all open objects.
#[derive(Debug, Default)]
pub(in super::super) struct OpenKeys {
    levels: Vec<Level>,
    text: String,
    /// Start and end of each key in `text`.
    keys: Vec<(u32, u32)>,
}

#[derive(Debug)]
struct Level {
    is_object: bool,
    first: bool,
    text_len: usize,
    key_count: usize,
}

/// The innermost open object or array, for the reader.
pub(super) struct Innermost<'a> {
    pub(super) is_object: bool,
    /// True before the first item.
    pub(super) first: &'a mut bool,
    /// The text to append the next key to. Anything else that is appended must be removed again.
    pub(super) text: &'a mut String,
}

impl OpenKeys {
    /// Number of open objects and arrays.
    pub(in super::super) fn depth(&self) -> usize {
        self.levels.len()
    }

    /// Enters an object or an array. An array has no keys.
    pub(in super::super) fn open(&mut self, is_object: bool) {
        let (text_len, key_count) = (self.text.len(), self.keys.len());
        self.levels.push(Level { is_object, first: true, text_len, key_count });
    }

    /// The innermost level; `None` if nothing is open.
    pub(super) fn innermost(&mut self) -> Option<Innermost<'_>> {
        let level = self.levels.last_mut()?;
        Some(Innermost { is_object: level.is_object, first: &mut level.first, text: &mut self.text })
    }

    /// Room for a skipped string: the same text, behind the keys.
    pub(in super::super) fn text(&mut self) -> &mut String {
        &mut self.text
    }

    /// Makes the text appended since the last key a key of the innermost object. False beyond 4 GiB
    /// of keys.
    #[must_use]
    pub(in super::super) fn key_is_complete(&mut self) -> bool {
        let Some(level) = self.levels.last() else { return false };
        let start = match self.keys[level.key_count..].last() {
            Some(&(_, end)) => Some(end),
            None => u32::try_from(level.text_len).ok(),
        };
        match (start, u32::try_from(self.text.len()).ok()) {
            (Some(start), Some(end)) => {
                self.keys.push((start, end));
                true
            }
            _ => false,
        }
    }

    /// Adds a key to the innermost object. False as for [`Self::key_is_complete`].
    #[must_use]
    pub(in super::super) fn push(&mut self, key: &str) -> bool {
        self.text.push_str(key);
        self.key_is_complete()
    }

    /// Leaves the innermost object or array.
    ///
    /// # Errors
    /// A key that occurs twice.
    pub(in super::super) fn close(&mut self) -> Result<(), String> {
        let Some(level) = self.levels.pop() else { return Ok(()) };
        let text = &self.text;
        let spelled = |(start, end): (u32, u32)| &text[to_usize(u64::from(start))..to_usize(u64::from(end))];
        let keys = &mut self.keys[level.key_count..];
        if let Some(key) = sort_by_text(keys, |key| spelled(key).as_bytes()) {
            return Err(spelled(key).to_owned());
        }
        self.keys.truncate(level.key_count);
        self.text.truncate(level.text_len);
        Ok(())
    }

    /// Peak of memory so far.
    pub(in super::super) fn held(&self) -> Held {
        let lists = Held::default().grown_list(&self.levels).grown_list(&self.keys);
        lists.grown(block_bytes(to_u64(self.text.capacity())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_keys_collide_in_one_object_only() {
        let mut keys = OpenKeys::default();
        keys.open(true);
        assert!(keys.push("a") && keys.push("b"));
        keys.open(true);
        assert!(keys.push("a"));
        keys.close().unwrap();
        assert!(keys.push(""));
        keys.close().unwrap();
        assert_eq!((keys.depth(), keys.text.len(), keys.keys.len()), (0, 0, 0));

        keys.open(true);
        assert!(keys.push("x") && keys.push("y") && keys.push("x"));
        assert_eq!(keys.close(), Err("x".to_owned()));
    }
}
