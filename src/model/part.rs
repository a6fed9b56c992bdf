//! Parts of a model: a layer, a prefix, a component, or all of it.

use std::fmt;

use crate::layers::LayerId;

/// A part of a model: a set of whole layers.
///
/// # Example
/// ```
/// use onelayer::{LayerId, Part};
///
/// let stack = Part::Prefix("model.layers.1");
/// assert!(stack.contains(&LayerId::new("model.layers.1")));
/// assert!(!stack.contains(&LayerId::new("model.layers.10")));
/// assert!(Part::Component("vae").contains(&LayerId::new("vae/decoder.up_blocks.0")));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Part<'a> {
    /// One layer.
    Layer(&'a LayerId),
    /// The layers whose names begin with this, in whole words: `model.layers` has `model.layers.0`
    /// but not `model.layers_extra.0`.
    Prefix(&'a str),
    /// The layers of one component of a pipeline, by the name of its folder: `text_encoder_2`.
    Component(&'a str),
    /// Every layer.
    All,
}

impl Part<'_> {
    /// True if the layer is in it.
    #[must_use]
    pub fn contains(&self, layer: &LayerId) -> bool {
        match *self {
            Self::Layer(id) => id == layer,
            Self::Prefix(prefix) => {
                let rest = layer.as_str().strip_prefix(prefix);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '/']))
            }
            Self::Component(component) => {
                layer.as_str().split_once('/').is_some_and(|(folder, _)| folder == component)
            }
            Self::All => true,
        }
    }

    /// The kind of part, and its name.
    #[must_use]
    pub fn words(&self) -> (&'static str, &str) {
        match *self {
            Self::Layer(id) => ("layer", id.as_str()),
            Self::Prefix(prefix) => ("layer below", prefix),
            Self::Component(component) => ("component", component),
            Self::All => ("layer", "all"),
        }
    }
}

impl<'a> From<&'a LayerId> for Part<'a> {
    fn from(layer: &'a LayerId) -> Self {
        Self::Layer(layer)
    }
}

impl fmt::Display for Part<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all layers"),
            part => {
                let (kind, name) = part.words();
                write!(f, "{kind} {name:?}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_of_whole_words() {
        let ids = ["model", "model.layers.1", "model.layers.10", "model.layers_extra.0", "te/model.layers.1"];
        let found = |part: Part<'_>| {
            ids.into_iter().filter(|id| part.contains(&LayerId::new(id))).collect::<Vec<_>>()
        };
        assert_eq!(found(Part::Prefix("model.layers")), ["model.layers.1", "model.layers.10"]);
        assert_eq!(found(Part::Prefix("model.layers.1")), ["model.layers.1"]);
        assert_eq!(found(Part::Prefix("model")), ids[..4]);
        assert_eq!(found(Part::Prefix("te")), ["te/model.layers.1"]);
        assert_eq!(found(Part::Prefix("")), [""; 0]);
        assert_eq!(found(Part::Component("te")), ["te/model.layers.1"]);
        assert_eq!(found(Part::Component("model")), [""; 0]);
        assert_eq!(found(Part::Layer(&LayerId::new("model"))), ["model"]);
        assert_eq!(found(Part::All), ids);
    }
}
