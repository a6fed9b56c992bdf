//! Tensor names and shapes -> ordered layers, and what stands outside every stack.
//!
//! ```text
//! names + shapes ─ companions ─ lists ─ rule ─ grouping ─ order ─> Layers
//!                                 overrides ┴──────┴────────┘
//! ```
//! No list of architectures and no list of words: a stack is recognized by the structure and the
//! shapes of its children. docs/layers.md tells the rule, its figures and its limits. Nothing is
//! read from tensors.

pub use self::error::LayersError;
pub use self::layer::{Layer, LayerId, LayerKind, Layers, SubUnit};
pub use self::map::LayerMap;
pub use self::names::NamedShape;
pub use self::rule::{Confidence, Rule};
pub use self::shared::{Prefix, TensorIds};
pub use onelayer_system::TextPosition;

mod classify;
mod companions;
mod drafts;
mod error;
mod facts;
mod finish;
mod grouping;
mod layer;
mod lists;
mod map;
mod name_parts;
mod names;
mod order;
mod overrides;
mod positions;
mod role;
mod rule;
mod shared;
mod text_index;
