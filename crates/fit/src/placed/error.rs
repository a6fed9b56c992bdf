//! Errors of loads by a device map.

use crate::{FitError, Tier};
use onelayer::device::DeviceError;
use onelayer::load::LoadError;
use onelayer::units::HumanBytes;

/// Why a load by a device map was refused or failed. Nothing stays resident.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlacedError {
    /// The map does not fit the checkpoint. All its mistakes.
    #[error("the device map does not fit the checkpoint: {}", list(faults))]
    Map {
        /// The mistakes.
        faults: Vec<FitError>,
    },
    /// The caller gave a context, stream or memory, which belong to one device; a map is for
    /// several.
    #[error("a load by a device map cannot use the caller's context, stream or memory")]
    Borrowed,
    /// The map names a GPU that cannot be used. Nothing was loaded.
    #[error("the device map names GPU {device}, which cannot be used")]
    NoDevice {
        /// Its number.
        device: u32,
        /// Why.
        source: DeviceError,
    },
    /// The map puts more on a GPU than is free there. Nothing was loaded.
    #[error(
        "the device map puts {} on GPU {device}, where {} are free, {} of them reserved: {} short",
        HumanBytes(*needed_bytes), HumanBytes(*free_bytes), HumanBytes(*reserve_bytes), HumanBytes(self.shortfall_bytes())
    )]
    DeviceTooSmall {
        /// Its number.
        device: u32,
        /// Bytes of the layers.
        needed_bytes: u64,
        /// Free bytes of the device, by its driver.
        free_bytes: u64,
        /// Bytes that must stay free.
        reserve_bytes: u64,
    },
    /// The load of one tier was refused or failed.
    #[error("cannot load the layers of {tier}")]
    Load {
        /// The place.
        tier: Tier,
        /// The error.
        source: LoadError,
    },
    /// The checkpoint cannot be grouped, its files cannot be opened for reading on demand, or no
    /// tensor is selected.
    #[error(transparent)]
    Checkpoint(#[from] LoadError),
}

impl PlacedError {
    /// True if the map is wrong for this checkpoint on any machine.
    #[must_use]
    pub fn is_bad_map(&self) -> bool {
        matches!(self, Self::Map { .. })
    }

    /// True if a device of the map is not available.
    #[must_use]
    pub fn is_device_unavailable(&self) -> bool {
        matches!(self, Self::NoDevice { .. })
    }

    /// Bytes that are missing on the device for [`Self::DeviceTooSmall`], else zero.
    #[must_use]
    pub fn shortfall_bytes(&self) -> u64 {
        match self {
            Self::DeviceTooSmall { needed_bytes, free_bytes, reserve_bytes, .. } => {
                needed_bytes.saturating_add(*reserve_bytes).saturating_sub(*free_bytes)
            }
            _ => 0,
        }
    }
}

fn list(faults: &[FitError]) -> String {
    faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
