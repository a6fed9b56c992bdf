//! Two arrays that all layers of a checkpoint share: the texts of ids, and the lists of tensors.
//!
//! A checkpoint may have a million layers of one tensor. Separate allocations would take more
//! memory than their contents, and freed small blocks between others do not return to the system.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::{Deref, Range};
use std::sync::Arc;

use super::positions::{index32, slot};
use crate::checkpoint::TensorId;
use crate::footprint::{Held, block_bytes, items_bytes};
use crate::units::to_u64;

/// A full prefix of tensor names, such as `model.layers.0`. Cheap to clone; it keeps the prefixes
/// of the whole grouping alive.
#[derive(Clone)]
pub struct Prefix {
    all: Arc<str>,
    start: u32,
    end: u32,
}

impl Prefix {
    /// The prefix as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.all[slot(self.start)..slot(self.end)]
    }

    /// A prefix with an allocation for itself alone.
    ///
    /// # Panics
    /// If it is longer than 4 GiB.
    pub(super) fn new(text: &str) -> Self {
        Self { all: text.into(), start: 0, end: index32(text.len()) }
    }
}

impl Deref for Prefix {
    type Target = str;

    fn deref(&self) -> &str {
        self.as_str()
    }
}

impl AsRef<str> for Prefix {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl Borrow<str> for Prefix {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl PartialEq for Prefix {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for Prefix {}

impl PartialOrd for Prefix {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Prefix {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_str().cmp(other.as_str())
    }
}

impl Hash for Prefix {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl fmt::Debug for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Tensors of a layer or of a part of it, ascending. Cheap to clone.
#[derive(Clone)]
pub struct TensorIds {
    all: Arc<[TensorId]>,
    start: u32,
    end: u32,
}

impl Deref for TensorIds {
    type Target = [TensorId];

    fn deref(&self) -> &[TensorId] {
        &self.all[slot(self.start)..slot(self.end)]
    }
}

impl<'a> IntoIterator for &'a TensorIds {
    type Item = &'a TensorId;
    type IntoIter = std::slice::Iter<'a, TensorId>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl FromIterator<TensorId> for TensorIds {
    /// A list with an allocation for itself alone.
    ///
    /// # Panics
    /// If there are 2^32 or more.
    fn from_iter<I: IntoIterator<Item = TensorId>>(ids: I) -> Self {
        let all: Arc<[TensorId]> = ids.into_iter().collect();
        let end = index32(all.len());
        Self { all, start: 0, end }
    }
}

impl PartialEq for TensorIds {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for TensorIds {}

impl fmt::Debug for TensorIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self).finish()
    }
}

/// A range of one of the two shared arrays.
pub(super) type Span = Range<u32>;

/// The shared arrays while they grow.
#[derive(Default)]
pub(super) struct SharedBuilder {
    text: String,
    ids: Vec<TensorId>,
}

/// The complete shared arrays.
pub(super) struct Shared {
    text: Arc<str>,
    ids: Arc<[TensorId]>,
}

impl SharedBuilder {
    /// Empty arrays with room for `ids` ids.
    pub(super) fn with_capacity(ids: usize) -> Self {
        Self { text: String::new(), ids: Vec::with_capacity(ids) }
    }

    /// Adds a text; `None` beyond 4 GiB of them.
    pub(super) fn text(&mut self, text: &str) -> Option<Span> {
        let start = u32::try_from(self.text.len()).ok()?;
        self.text.push_str(text);
        Some(start..u32::try_from(self.text.len()).ok()?)
    }

    /// Adds ids.
    pub(super) fn ids(&mut self, ids: impl Iterator<Item = TensorId>) -> Span {
        let start = index32(self.ids.len());
        self.ids.extend(ids);
        start..index32(self.ids.len())
    }

    /// Memory of the growing arrays.
    pub(super) fn held(&self) -> Held {
        Held::default().grown(block_bytes(to_u64(self.text.capacity()))).grown_list(&self.ids)
    }

    /// The complete arrays, without spare capacity.
    pub(super) fn share(self) -> Shared {
        Shared { text: self.text.into(), ids: self.ids.into() }
    }
}

impl Shared {
    pub(super) fn prefix(&self, span: Span) -> Prefix {
        Prefix { all: Arc::clone(&self.text), start: span.start, end: span.end }
    }

    pub(super) fn ids(&self, span: Span) -> TensorIds {
        TensorIds { all: Arc::clone(&self.ids), start: span.start, end: span.end }
    }

    /// Memory of the arrays.
    pub(super) fn held(&self) -> Held {
        /// An `Arc` stores two counters before its contents.
        const COUNTERS_BYTES: usize = 16;
        let text = block_bytes(to_u64(COUNTERS_BYTES + self.text.len()));
        let ids = items_bytes::<TensorId>(self.ids.len() + COUNTERS_BYTES / size_of::<TensorId>());
        Held::default().and(text).and(ids)
    }
}
