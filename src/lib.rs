//! Streams safetensors checkpoints layer by layer inside a host-memory budget that the caller chooses.

pub mod units;

pub mod budget;
pub mod checkpoint;
pub mod device;
pub mod layers;
pub mod plan;
pub mod probe;
pub mod source;
mod staging;
