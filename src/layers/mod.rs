//! Tensor names and shapes -> ordered layers, and the groups outside every stack.
//!
//! ```text
//! names + shapes ─ companions ─ lists ─ classify ─ drafts ─ order ─ finish ─> Layers
//!                                 overrides ┴──────┴────────┘
//! ```
//! No list of architectures and no list of words: a stack is recognized by the structure and the
//! shapes of its children. docs/layers.md explains the rule, its scores and its limits. No tensor
//! is read.
//!
//! `grouping` runs these steps. Each step uses only steps to its left, and `classify` uses `facts`,
//! `order` uses `role`. All of them share `layer`, `rule`, `map` and `error` (public types),
//! `shared` (one allocation for all texts), and `names`, `name_parts`, `text_index`, `positions`.

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
