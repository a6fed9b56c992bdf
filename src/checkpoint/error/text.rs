//! Names, shapes and lists in errors: bounded in the fields, short in the messages.

use std::fmt;

use crate::units::HumanBytes;

/// The most bytes of a name that an error keeps.
const NAME_BYTES_MAX: usize = 64 << 10;

/// A name for a field of an error, cut to 64 KiB: an error must not hold a whole header.
pub(in super::super) fn kept(name: &str) -> String {
    name[..floor_char_boundary(name, NAME_BYTES_MAX)].to_owned()
}

/// The largest position up to `limit` that does not cut a character.
fn floor_char_boundary(text: &str, limit: usize) -> usize {
    (0..=limit.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// A shape for a field of an error: `[2, 3]`, or the first dimensions and the rank.
pub(in super::super) fn shape_text(shape: &[u64]) -> String {
    const SHOWN: usize = 16;
    if shape.len() <= SHOWN {
        return format!("{shape:?}");
    }
    let mut text = format!("{:?}", &shape[..SHOWN]);
    text.pop();
    format!("{text}, ...] (rank {})", shape.len())
}

/// A name in back quotes, shortened to fit a line.
pub(super) struct Quoted<'a>(pub(super) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 120;
        let shown = &self.0[..floor_char_boundary(self.0, SHOWN)];
        if shown.len() == self.0.len() {
            write!(f, "`{shown}`")
        } else {
            write!(f, "`{shown}...` ({} bytes)", self.0.len())
        }
    }
}

/// ``tensor `x`: ``, or nothing without a name.
pub(super) struct OfTensor<'a>(pub(super) &'a str);

impl fmt::Display for OfTensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, "tensor {}: ", Quoted(self.0)) }
    }
}

/// ` (and 3 more)` for a count of 4.
pub(super) struct Others(pub(super) u64);

impl fmt::Display for Others {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.saturating_sub(1) {
            0 => Ok(()),
            more => write!(f, " (and {more} more)"),
        }
    }
}

/// The first few names of a list, and the number of the others.
pub(super) struct Listed<'a>(pub(super) &'a [String], pub(super) u64);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        let shown = &self.0[..self.0.len().min(SHOWN)];
        for (position, name) in shown.iter().enumerate() {
            write!(f, "{}{}", if position == 0 { "" } else { ", " }, Quoted(name))?;
        }
        let shown_count = u64::try_from(shown.len()).unwrap_or(u64::MAX);
        match self.1.saturating_sub(shown_count) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// ` (1.5 MiB of it arrived)`, or nothing.
pub(super) struct PartOf<'a>(pub(super) Option<&'a u64>);

impl fmt::Display for PartOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(bytes) => write!(f, " ({} of it arrived)", HumanBytes(*bytes)),
            None => Ok(()),
        }
    }
}

/// The section of a JSON text (a header or an index) that an error is about.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum JsonSection {
    /// The header of a file, outside any tensor.
    Header,
    /// The description of one tensor.
    Tensor(String),
    /// The `__metadata__` of a header.
    Metadata,
    /// The outermost object of an index.
    Index,
    /// The `weight_map` of an index.
    WeightMap,
    /// The `model_index.json` of a pipeline.
    Pipeline,
}

impl fmt::Display for JsonSection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header => f.write_str("the header"),
            Self::Tensor(name) => write!(f, "tensor {}", Quoted(name)),
            Self::Metadata => f.write_str("the header's `__metadata__`"),
            Self::Index => f.write_str("the index"),
            Self::WeightMap => f.write_str("the index's `weight_map`"),
            Self::Pipeline => f.write_str("the pipeline's index"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_long_is_cut_between_characters() {
        let shape: Vec<u64> = (0..1000).collect();
        assert!(shape_text(&shape).ends_with("15, ...] (rank 1000)"));
        assert_eq!((shape_text(&[]).as_str(), shape_text(&[2, 3]).as_str()), ("[]", "[2, 3]"));
        assert_eq!(kept("name"), "name");
        let long = "\u{20ac}".repeat(30_000);
        assert_eq!(kept(&long).len(), (64 << 10) / 3 * 3);
        assert!(Quoted(&long).to_string().ends_with("...` (90000 bytes)"));
        assert_eq!(
            Quoted("a").to_string() + &Others(1).to_string() + &Others(3).to_string(),
            "`a` (and 2 more)"
        );
    }
}
