//! Errors of devices.

use super::CudaCode;
use crate::units::HumanBytes;

/// Errors of devices.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The system refused memory for an arena.
    #[error("cannot allocate an arena of {} in host memory", HumanBytes(*bytes))]
    HostAllocation {
        /// Bytes of the arena.
        bytes: u64,
        /// The system's error.
        source: std::io::Error,
    },
    /// The output could not be written; the writer has the cause.
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
        /// File names, in the order of the attempts.
        looked_for: String,
        /// The system's errors.
        reason: String,
    },
    /// The driver lacks a function: it is too old, or not a CUDA driver.
    #[error(
        "{library} has no {symbol}: it is no CUDA driver, or one older than 11.4; install a newer driver"
    )]
    OldDriver {
        /// The library that was found.
        library: &'static str,
        /// The missing function.
        symbol: &'static str,
    },
    /// The driver exists but does not start.
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
        /// The requested number.
        ordinal: u32,
        /// Number of devices.
        devices: u32,
    },
    /// The resident layers do not fit the free memory of the device. Nothing was loaded.
    #[error(
        "the layers need {} on the device and {} are free, {} of them reserved: {} short; a smaller window needs less",
        HumanBytes(*needed_bytes), HumanBytes(*free_bytes), HumanBytes(*reserve_bytes), HumanBytes(self.shortfall_bytes())
    )]
    OutOfDeviceMemory {
        /// Bytes of the layers that are resident at once.
        needed_bytes: u64,
        /// Free bytes on the device, as its driver reports.
        free_bytes: u64,
        /// Bytes that have to stay free.
        reserve_bytes: u64,
    },
    /// The driver refused memory for an arena that should have fitted.
    #[error(
        "cannot allocate an arena of {} on the device: {} are free now; does another process use it?",
        HumanBytes(*bytes), HumanBytes(*free_bytes)
    )]
    DeviceAllocation {
        /// Bytes of the arena.
        bytes: u64,
        /// Free bytes on the device, as its driver reports.
        free_bytes: u64,
    },
    /// The caller's memory for a layer is too small, or not aligned to 256 bytes.
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
        /// Bytes of the layer's arena.
        needed_bytes: u64,
    },
    /// The caller's stream is a different one on each thread, so it cannot order the work of the
    /// loader's threads.
    #[error(
        "the per-thread default stream cannot order the copies of a load: hand in a stream of your own, or none"
    )]
    PerThreadStream,
    /// The driver refused to report when a dropped layer's part of the window is free, so no layer
    /// can follow it there.
    #[error(
        "it is unknown when a dropped layer's part of the window is free: the driver has refused to report it"
    )]
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
