//! The name of a layer.

use std::fmt;

use super::{LayersError, Prefix};

/// The name of a layer: the full prefix of its tensors, such as `model.layers.0` or `lm_head`; in a
/// pipeline with its component in front, such as `transformer/transformer_blocks.0`. Cheap to
/// clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerId(Prefix);

impl LayerId {
    /// The id spelled `text`, unchecked: whether a layer has that id is for
    /// [`Layers::find`](super::Layers::find) to say.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(Prefix::new(text))
    }

    /// The id that a person or a file spelled `text`.
    ///
    /// # Errors
    /// [`LayersError::EmptyId`] if `text` is empty. Nothing else is refused, since tensor names may
    /// hold any text.
    pub fn parse(text: &str) -> Result<Self, LayersError> {
        if text.is_empty() { Err(LayersError::EmptyId) } else { Ok(Self::new(text)) }
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl From<Prefix> for LayerId {
    fn from(prefix: Prefix) -> Self {
        Self(prefix)
    }
}

impl AsRef<str> for LayerId {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
