//! What is reported of a load by a device map: place by place.

use serde::{Deserialize, Serialize};

use super::Vram;

/// What is in one place, in the order in which places are loaded.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct PlaceShare {
    /// A GPU's number, `cpu` or `disk`.
    pub(crate) tier: String,
    /// Layers.
    pub(crate) layers: u64,
    /// Bytes of their tensors: as they are delivered, on the disk as the files have them.
    pub(crate) tensor_bytes: u64,
    /// Bytes that they take there; none on the disk, which is not read.
    pub(crate) resident_bytes: u64,
    /// Bytes that are read for them, alignment included.
    pub(crate) read_bytes: u64,
    /// How long that took; `null` in a plan, and for the disk.
    pub(crate) seconds: Option<f64>,
    /// Memory of the GPU, by every method that gave a number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) vram: Vec<Vram>,
}
