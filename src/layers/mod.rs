//! Tensor names and shapes -> ordered layers, and what stands outside every stack.

pub use self::error::LayersError;
pub use self::id::LayerId;
pub use self::layer::{Layer, LayerKind, Layers, NamedShape, SubUnit};
pub use self::map::LayerMap;

mod error;
mod id;
mod layer;
mod map;
