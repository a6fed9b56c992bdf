//! What can go wrong on a device.

use super::CudaCode;
use crate::units::HumanBytes;

/// What can go wrong on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The system refused memory for an arena.
    #[error("cannot allocate an arena of {} in host memory", HumanBytes(*bytes))]
    HostAllocation {
        /// Bytes of the arena.
        bytes: u64,
        /// The system's answer.
        source: std::io::Error,
    },
    /// What was to be written could not be; whoever writes it knows why.
    #[error("the output failed")]
    Output,
    /// This library was built without the feature `cuda`.
    #[error("this build has no CUDA device: build it with the feature `cuda`")]
    NotBuilt,
    /// There is no CUDA driver.
    #[error(
        "no CUDA driver: looked for {looked_for} ({reason}); install the NVIDIA driver, or start the container \
         with its GPUs"
    )]
    NoDriver {
        /// File names, in the order they were tried.
        looked_for: String,
        /// The system's answers.
        reason: String,
    },
    /// The driver lacks a function: it is too old, or it is something else of that name.
    #[error(
        "{library} has no {symbol}: it is no CUDA driver, or one older than 11.4; install a newer driver"
    )]
    OldDriver {
        /// The library that was found.
        library: &'static str,
        /// The function it lacks.
        symbol: &'static str,
    },
    /// The driver is there and does not start.
    #[error("the CUDA driver ({library}) does not start: {code}")]
    DriverRefused {
        /// The library that was found.
        library: &'static str,
        /// The driver's answer.
        code: CudaCode,
    },
    /// The driver has no such device.
    #[error("no CUDA device {ordinal}: the driver shows {devices}{}", if *devices == 0 { "; see CUDA_VISIBLE_DEVICES" } else { ", counted from 0" })]
    NoSuchDevice {
        /// The number that was asked for.
        ordinal: u32,
        /// How many there are.
        devices: u32,
    },
    /// What shall be resident does not fit the memory that is free on the device. Nothing was
    /// loaded.
    #[error(
        "the layers need {} on the device and {} are free, {} of them reserved: {} short; a smaller window needs less",
        HumanBytes(*needed_bytes), HumanBytes(*free_bytes), HumanBytes(*reserve_bytes), HumanBytes(self.shortfall_bytes())
    )]
    OutOfDeviceMemory {
        /// Bytes of the layers that are resident at once.
        needed_bytes: u64,
        /// Free on the device, as its driver says.
        free_bytes: u64,
        /// Bytes that shall stay free.
        reserve_bytes: u64,
    },
    /// The driver refused memory for an arena that was thought to fit.
    #[error(
        "cannot allocate an arena of {} on the device: {} are free now; does somebody else use it?",
        HumanBytes(*bytes), HumanBytes(*free_bytes)
    )]
    DeviceAllocation {
        /// Bytes of the arena.
        bytes: u64,
        /// Free on the device, as its driver says.
        free_bytes: u64,
    },
    /// Memory of the caller's own is too small for its layer, or starts at an odd place.
    #[error(
        "the caller's memory for layer {layer} at {address:#x} has {} and the layer needs {}, from a multiple of 256",
        HumanBytes(*given_bytes), HumanBytes(*needed_bytes)
    )]
    UnfitDestination {
        /// The layer.
        layer: String,
        /// Where the memory starts.
        address: u64,
        /// Its length.
        given_bytes: u64,
        /// What the layer's arena takes.
        needed_bytes: u64,
    },
    /// The stream that the caller handed in is another one on each thread, so that it orders
    /// nothing between the loader's.
    #[error(
        "the per-thread default stream cannot order the copies of a load: hand in a stream of your own, or none"
    )]
    PerThreadStream,
    /// The driver has refused to say when a dropped layer's place in the window is free, so that no
    /// layer can follow it there.
    #[error("nobody knows when a dropped layer's part of the window is free: the driver has refused to say")]
    WindowInDoubt,
    /// A call of the driver failed.
    #[error("{call} failed: {code}")]
    Cuda {
        /// The function of the driver API.
        call: &'static str,
        /// The driver's answer.
        code: CudaCode,
    },
}

impl DeviceError {
    /// True if the device cannot be used at all on this machine or with this build.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        matches!(
            self,
            Self::NotBuilt
                | Self::NoDriver { .. }
                | Self::OldDriver { .. }
                | Self::DriverRefused { .. }
                | Self::NoSuchDevice { .. }
        )
    }

    /// True if less resident memory would help.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfDeviceMemory { .. } | Self::DeviceAllocation { .. })
    }

    /// Bytes that are missing on the device, if that is the error.
    #[must_use]
    pub fn shortfall_bytes(&self) -> u64 {
        match self {
            Self::OutOfDeviceMemory { needed_bytes, free_bytes, reserve_bytes } => {
                needed_bytes.saturating_add(*reserve_bytes).saturating_sub(*free_bytes)
            }
            _ => 0,
        }
    }

    /// The driver's answer, if that is the error.
    #[must_use]
    pub fn cuda_code(&self) -> Option<CudaCode> {
        match self {
            Self::DriverRefused { code, .. } | Self::Cuda { code, .. } => Some(*code),
            Self::DeviceAllocation { .. } => Some(CudaCode::OUT_OF_MEMORY),
            _ => None,
        }
    }
}
