//! The override file: a small TOML that replaces what the rule decided.
//!
//! This file only reads it. Whether the names exist is checked against a checkpoint in `overrides`.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::Range;
use toml::Spanned;

use super::LayersError;

/// An override of the grouping rule, read from TOML. All keys are optional:
///
/// ```toml
/// # Numbered lists that are stacks, whatever the rule says. A stack around or inside of one gives way.
/// stacks = ["vision_tower.stages.0.blocks"]
/// # Numbered lists that are not. Lists inside of them are still looked at.
/// not_stacks = ["model.neck"]
/// # What comes first, in this order: layers (`lm_head`, `model.layers.3`), stacks (`model.layers`) or containers
/// # (`model.vision_tower`). Layers that are not named follow in the default order.
/// order = ["model.embed_tokens", "model.layers", "model.norm"]
///
/// # Layers of your own: an id, and the prefixes (or whole tensor names) that it holds. Also the way to keep
/// # something in one piece: list its prefix alone.
/// [groups]
/// head = ["model.norm", "lm_head"]
/// ```
///
/// A prefix ends where a component ends: `model.layers.1` does not match `model.layers.10`.
///
/// # Example
/// ```
/// use onelayer::layers::{LayerMap, Layers, NamedShape};
/// let map = LayerMap::parse("[groups]\nhead = [\"norm\", \"lm_head\"]")?;
/// let names = ["norm.weight", "lm_head.weight"].map(|name| NamedShape { name, shape: None });
/// let layers = Layers::from_names(&names, &map)?;
/// assert_eq!(layers.as_slice()[0].id.as_str(), "head");
/// # Ok::<(), onelayer::layers::LayersError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerMap {
    pub(super) stacks: Vec<Entry>,
    pub(super) not_stacks: Vec<Entry>,
    pub(super) order: Vec<Entry>,
    pub(super) groups: Vec<Group>,
}

/// A place in an override file, for error messages. Both count from 1; columns count characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

/// A name as the override spells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) place: Place,
}

/// A layer that the override defines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) id: Entry,
    pub(super) prefixes: Vec<Entry>,
}

/// The file as serde sees it.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct File {
    stacks: Vec<Spanned<String>>,
    not_stacks: Vec<Spanned<String>>,
    order: Vec<Spanned<String>>,
    groups: BTreeMap<Spanned<String>, Vec<Spanned<String>>>,
}

impl LayerMap {
    /// Reads an override from the text of a TOML file.
    ///
    /// # Errors
    /// [`LayersError::MapSyntax`] with line and column if `text` is not TOML, or has an unknown
    /// key, a value of another type, or a group without an id or without prefixes.
    pub fn parse(text: &str) -> Result<Self, LayersError> {
        let file: File = toml::from_str(text).map_err(|error| LayersError::MapSyntax {
            place: place(text, error.span().unwrap_or_default()),
            message: error.message().replace('\n', ", "),
        })?;
        let entry = |name: Spanned<String>| {
            let place = place(text, name.span());
            Entry { name: name.into_inner(), place }
        };
        let entries = |names: Vec<Spanned<String>>| names.into_iter().map(entry).collect::<Vec<_>>();
        let groups: Vec<_> = (file.groups.into_iter())
            .map(|(id, prefixes)| Group { id: entry(id), prefixes: entries(prefixes) })
            .collect();
        for group in &groups {
            let message = match (group.id.name.is_empty(), group.prefixes.is_empty()) {
                (true, _) => "a group needs an id".to_owned(),
                (_, true) => format!("group `{}` lists no prefix", group.id.name),
                _ => continue,
            };
            return Err(LayersError::MapSyntax { place: group.id.place, message });
        }
        Ok(Self {
            stacks: entries(file.stacks),
            not_stacks: entries(file.not_stacks),
            order: entries(file.order),
            groups,
        })
    }

    /// True if it changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

fn place(text: &str, span: Range<usize>) -> Place {
    let before = text.get(..span.start).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    Place { line: 1 + before.matches('\n').count(), column: 1 + before[line_start..].chars().count() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_read() {
        let map = LayerMap::parse(
            "stacks = [\"a\"]\nnot_stacks = ['b']\norder = [\"c\", \"d\"]\n[groups]\n\"x.y\" = [\"e\"]\n",
        )
        .unwrap();
        assert_eq!(map.stacks[0], Entry { name: "a".into(), place: Place { line: 1, column: 11 } });
        assert_eq!(map.not_stacks[0].name, "b");
        assert_eq!(map.order[1].place, Place { line: 3, column: 15 });
        assert_eq!(map.groups[0].id, Entry { name: "x.y".into(), place: Place { line: 5, column: 1 } });
        assert!(!map.is_empty() && LayerMap::parse("").unwrap().is_empty());
    }

    #[test]
    fn mistakes_are_told_with_their_place() {
        let message = |text| LayerMap::parse(text).unwrap_err().to_string();
        let cases = [
            ("stack = []", "line 1, column 1: unknown field `stack`, expected one of"),
            ("\nstacks = [1]", "line 2, column 11: invalid type: integer `1`, expected a string"),
            ("order = 'a'", "line 1, column 9: invalid type: string \"a\", expected a sequence"),
            ("order = [", "line 1, column 10: unclosed array"),
            ("[groups]\nhead = []", "line 2, column 1: group `head` lists no prefix"),
            ("[groups]\n'' = ['a']", "line 2, column 1: a group needs an id"),
            ("order = ['é', 1]", "line 1, column 15: invalid type"),
        ];
        for (text, expected) in cases {
            assert!(message(text).contains(expected), "{text}: {}", message(text));
        }
    }
}
