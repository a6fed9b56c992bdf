//! Reads the override file: a small TOML that replaces decisions of the rule.
//!
//! `overrides.rs` checks its names against a checkpoint.

use std::collections::BTreeMap;

use onelayer_system::TextPosition;
use serde::Deserialize;
use toml::Spanned;

use super::LayersError;

/// An override of the grouping rule, read from TOML. All keys are optional:
///
/// ```toml
/// # Numbered lists that are stacks, against the rule. A stack around or inside of one is none.
/// stacks = ["vision_tower.stages.0.blocks"]
/// # Numbered lists that are not stacks. Lists inside of them may be.
/// not_stacks = ["model.neck"]
/// # The first layers, in this order: layers (`lm_head`, `model.layers.3`), stacks (`model.layers`)
/// # or containers (`model.vision_tower`). The other layers follow in the default order.
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

/// A name in the override.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) position: TextPosition,
}

/// A layer defined by the override.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) id: Entry,
    pub(super) prefixes: Vec<Entry>,
}

/// The file, for serde.
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
            position: TextPosition::of_byte(text, error.span().unwrap_or_default().start),
            message: error.message().replace('\n', ", "),
        })?;
        let entry = |name: Spanned<String>| {
            let position = TextPosition::of_byte(text, name.span().start);
            Entry { name: name.into_inner(), position }
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
            return Err(LayersError::MapSyntax { position: group.id.position, message });
        }
        Ok(Self {
            stacks: entries(file.stacks),
            not_stacks: entries(file.not_stacks),
            order: entries(file.order),
            groups,
        })
    }

    /// True if it is empty and changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
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
        let place = |entry: &Entry| (entry.name.clone(), entry.position.line, entry.position.column);
        assert_eq!(place(&map.stacks[0]), ("a".to_owned(), 1, 11));
        assert_eq!(map.not_stacks[0].name, "b");
        assert_eq!(place(&map.order[1]), ("d".to_owned(), 3, 15));
        assert_eq!(place(&map.groups[0].id), ("x.y".to_owned(), 5, 1));
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
