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
pub use self::id::LayerId;
pub use self::layer::{Layer, LayerKind, Layers, NamedShape, SubUnit};
pub use self::map::LayerMap;
pub use self::rule::{Confidence, Rule};
pub use self::shared::{Prefix, TensorIds};
pub use onelayer_system::TextPosition;

mod companions;
mod error;
mod finish;
mod grouping;
mod id;
mod index;
mod layer;
mod lists;
mod map;
mod named;
mod names;
mod order;
mod overrides;
mod reorder;
mod rule;
mod shared;
