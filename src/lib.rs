//! Streams safetensors checkpoints layer by layer inside a host-memory budget that the caller chooses.

pub mod units;

mod footprint;

pub mod budget;
pub mod checkpoint;
pub mod device;
pub mod layers;
pub mod load;
pub mod model;
pub mod plan;
pub mod probe;
pub mod source;
mod staging;

pub use self::checkpoint::{Checkpoint, CheckpointError, DType, OpenOptions, TensorEntry};
pub use self::device::Target;
pub use self::layers::{LayerId, LayerMap, Layers};
pub use self::load::{LayerStream, LoadError, LoadedLayer, LoadedTensor, Loader};
pub use self::model::{Model, Receipt};
pub use self::plan::{IoMode, LoadPlan, Window};
pub use self::staging::{RingMode, StagingError};
