//! The `__metadata__` of a header: free text about the file.

use std::fmt;

use super::text_sort::sort_by_text;
use crate::footprint::{Held, block_bytes};
use crate::units::{to_u64, to_usize};

/// The `__metadata__` of one file: a small map of texts, sorted by key. Empty if the file has none.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct FileMetadata {
    text: String,
    entries: Vec<Entry>,
}

/// A key, followed by its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    start: u32,
    middle: u32,
    end: u32,
}

impl FileMetadata {
    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The value of that key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        let position = self.entries.binary_search_by(|&entry| self.key(entry).cmp(key)).ok()?;
        Some(self.value(self.entries[position]))
    }

    /// Keys and values, sorted by key.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.entries.iter().map(|&entry| (self.key(entry), self.value(entry)))
    }

    fn key(&self, entry: Entry) -> &str {
        &self.text[to_usize(u64::from(entry.start))..to_usize(u64::from(entry.middle))]
    }

    fn value(&self, entry: Entry) -> &str {
        &self.text[to_usize(u64::from(entry.middle))..to_usize(u64::from(entry.end))]
    }

    /// The text, to which the reader appends a key and then its value.
    pub(super) fn text(&mut self) -> &mut String {
        &mut self.text
    }

    /// Makes an entry of the text appended since the last one: a key that ends at `middle`, then
    /// its value. `None` beyond 4 GiB of text.
    pub(super) fn entry_is_complete(&mut self, middle: usize) -> Option<()> {
        let start = self.entries.last().map_or(0, |entry| entry.end);
        let (middle, end) = (u32::try_from(middle).ok()?, u32::try_from(self.text.len()).ok()?);
        self.entries.push(Entry { start, middle, end });
        Some(())
    }

    /// Sorts the entries and gives back spare memory. Returns the memory held before.
    ///
    /// # Errors
    /// A key that occurs twice.
    pub(super) fn finish(&mut self) -> Result<Held, String> {
        let mut entries = std::mem::take(&mut self.entries);
        if let Some(entry) = sort_by_text(&mut entries, |entry| self.key(entry).as_bytes()) {
            return Err(self.key(entry).to_owned());
        }
        let text_bytes = block_bytes(to_u64(self.text.capacity()));
        let held = Held::default().grown_list(&entries).grown(text_bytes);
        entries.shrink_to_fit();
        self.entries = entries;
        self.text.shrink_to_fit();
        Ok(held)
    }

    /// Memory held, in bytes.
    pub(super) fn heap_bytes(&self) -> u64 {
        to_u64(self.text.capacity()) + to_u64(self.entries.capacity() * size_of::<Entry>())
    }
}

impl fmt::Debug for FileMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(entries: &[(&str, &str)]) -> Result<FileMetadata, String> {
        let mut metadata = FileMetadata::default();
        for (key, value) in entries {
            metadata.text().push_str(key);
            let middle = metadata.text().len();
            metadata.text().push_str(value);
            metadata.entry_is_complete(middle).unwrap();
        }
        metadata.finish().map(|_| metadata)
    }

    #[test]
    fn entries_are_found_by_key() {
        let metadata = filled(&[("format", "pt"), ("", "empty"), ("a", "")]).unwrap();
        assert_eq!(metadata.iter().collect::<Vec<_>>(), [("", "empty"), ("a", ""), ("format", "pt")]);
        assert_eq!(
            (metadata.get("format"), metadata.get("a"), metadata.get("b")),
            (Some("pt"), Some(""), None)
        );
        assert_eq!(metadata.len(), 3);
        assert_eq!(filled(&[("x", "1"), ("x", "2")]), Err("x".to_owned()));
    }
}
