//! The name of a layer.

use std::fmt;
use std::sync::Arc;

/// The name of a layer: the full prefix of its tensors, such as `model.layers.0` or `lm_head`. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerId(Arc<str>);

impl LayerId {
    /// The id spelled `text`.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(text.into())
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}
