//! The devices where layers live: allocate an arena, copy from a slot, wait for the copy, free.
//!
//! Callers name a [`Target`] and ask an open [`Device`] about itself. The loader drives a private
//! trait with one implementation per kind of device, so that no driver type is in a public
//! signature.
//!
//! The files, in the order of what they need of each other: `code`, `error`; `backend` (the
//! traits); `idle` and `spare` (arenas to be reused) and `prefault` (pages touched ahead); `none`,
//! `host` and `cuda` (the devices); `open`.

use std::fmt;
use std::str::FromStr;

pub use self::backend::After;
use self::backend::refill_pieces;
pub(crate) use self::backend::{
    ArenaPlace, ArenaPool, Backend, Fill, Freed, PendingCopy, REFILLED_BYTES_MAX, Resident, Unfilled,
};
pub use self::code::CudaCode;
pub use self::error::DeviceError;
pub(crate) use self::host::HostBackend;
pub(crate) use self::none::NoneBackend;
pub use self::open::Device;
pub(crate) use self::open::DeviceKind;
pub use self::spare::SpareMemory;
use crate::plan::PlannedLayer;

mod backend;
mod code;
#[cfg(not(loom))]
#[cfg(test)]
mod conformance;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod error;
mod host;
mod idle;
mod none;
mod open;
mod prefault;
mod spare;

/// Where a load goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Target {
    /// Host memory: each layer in its own mapping, returned to the system when dropped.
    Host,
    /// The CUDA device of this number, as the driver counts (`CUDA_VISIBLE_DEVICES` changes it).
    /// Needs the feature `cuda`.
    Cuda(u32),
    /// Nowhere: bytes are read, hashed if asked, and dropped. For measuring sources.
    None,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.pad("host"),
            Self::Cuda(ordinal) => f.pad(&format!("cuda:{ordinal}")),
            Self::None => f.pad("none"),
        }
    }
}

/// The text names no target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a device; write host, none, cuda:0 or another number")]
pub struct UnknownTarget;

impl FromStr for Target {
    type Err = UnknownTarget;

    /// Reads what is shown: `host`, `none`, `cuda:N`.
    fn from_str(text: &str) -> Result<Self, UnknownTarget> {
        match text {
            "host" => Ok(Self::Host),
            "none" => Ok(Self::None),
            _ => {
                let ordinal = text.strip_prefix("cuda:").ok_or(UnknownTarget)?;
                // A number's own parser also takes a sign.
                let is_number = !ordinal.is_empty() && ordinal.bytes().all(|byte| byte.is_ascii_digit());
                let ordinal = ordinal.parse().ok().filter(|_| is_number);
                ordinal.map(Self::Cuda).ok_or(UnknownTarget)
            }
        }
    }
}

/// What a device says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its name as the driver reports it; `host` or `none` otherwise.
    pub name: String,
    /// The device's UUID as other tools print it, if it has one: `GPU-` and 32 hexadecimal digits
    /// in five groups.
    pub uuid: Option<String>,
    /// Its address on the PCI bus, if it has one: `domain:bus:device.function`.
    pub pci_bus_id: Option<String>,
    /// The newest CUDA version that the driver supports, major and minor, if there is a driver.
    pub cuda_version: Option<(u32, u32)>,
}

/// Memory of a device, used by any process, as its driver reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceMemoryInfo {
    /// Free bytes.
    pub free_bytes: u64,
    /// All bytes.
    pub total_bytes: u64,
}

impl DeviceMemoryInfo {
    /// Bytes in use by any process.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.free_bytes)
    }
}

/// The caller's memory on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceRegion {
    /// Where it starts, in the device's address space (`CUdeviceptr`). A multiple of 256.
    pub address: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
}

/// Returns the caller's memory for a layer, if the layer should not get an arena of the loader.
pub(crate) type Destinations = dyn Fn(&PlannedLayer) -> Option<DeviceRegion> + Send + Sync;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_reads_as_it_is_shown() {
        for target in [Target::Host, Target::None, Target::Cuda(0), Target::Cuda(17)] {
            assert_eq!(target.to_string().parse(), Ok(target));
        }
        for text in ["", "cuda", "cuda:", "cuda:+1", "cuda:-1", "cuda:1 ", "CUDA:0", "cuda:4294967296", "gpu"]
        {
            assert_eq!(text.parse::<Target>(), Err(UnknownTarget), "{text:?}");
        }
    }
}
