//! Why a load by a device map cannot begin, or what ended it.

use crate::{FitError, Tier};
use onelayer::device::DeviceError;
use onelayer::load::LoadError;
use onelayer::units::HumanBytes;

/// Why a load by a device map cannot begin, or what ended it. Nothing stays resident.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlacedError {
    /// The map does not fit the checkpoint: everything that is wrong with it.
    #[error("the device map does not fit the checkpoint: {}", list(faults))]
    Map {
        /// What is wrong.
        faults: Vec<FitError>,
    },
    /// The caller's own context, stream or memory is of one device, and a map is for several.
    #[error("a load by a device map takes no context, stream or memory of the caller's")]
    Borrowed,
    /// The map names a GPU that cannot be used here. Nothing was loaded.
    #[error("the device map names GPU {device}, which cannot be used")]
    NoDevice {
        /// Its number.
        device: u32,
        /// Why.
        source: DeviceError,
    },
    /// What the map puts on a GPU is more than is free there. Nothing was loaded.
    #[error(
        "the device map puts {} on GPU {device}, where {} are free, {} of them reserved: {} short",
        HumanBytes(*needed_bytes), HumanBytes(*free_bytes), HumanBytes(*reserve_bytes), HumanBytes(self.shortfall_bytes())
    )]
    DeviceTooSmall {
        /// Its number.
        device: u32,
        /// Bytes of the layers.
        needed_bytes: u64,
        /// Free on the device, as its driver says.
        free_bytes: u64,
        /// Bytes that shall stay free.
        reserve_bytes: u64,
    },
    /// The load of one place was refused, or failed.
    #[error("loading what belongs on {tier} failed")]
    Load {
        /// The place.
        tier: Tier,
        /// What it was.
        source: LoadError,
    },
    /// The checkpoint cannot be grouped, its files cannot be read on demand, or nothing of it is
    /// selected.
    #[error(transparent)]
    Checkpoint(#[from] LoadError),
}

impl PlacedError {
    /// True if the map is wrong for this checkpoint, whatever the machine is.
    #[must_use]
    pub fn is_bad_map(&self) -> bool {
        matches!(self, Self::Map { .. })
    }

    /// True if a device of the map is not there.
    #[must_use]
    pub fn is_device_unavailable(&self) -> bool {
        matches!(self, Self::NoDevice { .. })
    }

    /// Bytes that are missing on the device, if that is the error.
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
