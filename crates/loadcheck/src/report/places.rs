//! A load with a device map: the share of each place.

use serde::{Deserialize, Serialize};

use super::Vram;

/// The share of one place, in the order of loading.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct PlaceShare {
    /// A GPU's number, `cpu` or `disk`.
    pub(crate) tier: String,
    /// Number of layers.
    pub(crate) layers: u64,
    /// Bytes of their tensors: as delivered, or for the disk as in the files.
    pub(crate) tensor_bytes: u64,
    /// Bytes that they take there; 0 for the disk, which is not read.
    pub(crate) resident_bytes: u64,
    /// Bytes that are read for them, alignment included.
    pub(crate) read_bytes: u64,
    /// Time to load them; `null` in a plan and for the disk.
    pub(crate) seconds: Option<f64>,
    /// Memory of the GPU, by every method that gave a number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) vram: Vec<Vram>,
}
