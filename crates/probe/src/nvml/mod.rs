//! Memory of a GPU as NVIDIA's management library (NVML) counts it: of the whole device, and of one
//! process.
//!
//! The library is looked for at run time under the names that its driver installs; nothing is
//! needed to build. It counts on its own, beside the CUDA driver: what a program frees shows here,
//! or it was not freed.
//!
//! What it does not do: it holds no CUDA context, and enforces nothing. NVML counts processes by
//! the machine's own process numbers, so inside a container the share of one process is mostly not
//! to be had, and [`GpuMemory::of_process`] says so.
//!
//! Functions and structures: NVML API Reference Guide, "Initialization and Cleanup", "Device
//! Queries", "Error reporting".

#[cfg(feature = "nvml")]
mod library;

/// Why NVML does not tell.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NvmlError {
    /// This library was built without the feature `cuda`.
    #[error("this build does not look for NVML: build it with the feature `cuda`")]
    NotBuilt,
    /// There is no such library.
    #[error("no NVML: looked for {looked_for}")]
    Missing {
        /// File names, in the order they were tried.
        looked_for: String,
    },
    /// The library lacks a function.
    #[error("{library} has no {symbol}: it is no NVML, or an old one")]
    Incomplete {
        /// The library that was found.
        library: &'static str,
        /// The function it lacks.
        symbol: &'static str,
    },
    /// A call failed.
    #[error("{call} failed: {reason} ({code})")]
    Failed {
        /// The function.
        call: &'static str,
        /// The library's number for the reason (`nvmlReturn_t`).
        code: u32,
        /// The library's words for it.
        reason: String,
    },
    /// No device of NVML's is the one that was asked for.
    #[error("NVML knows no device {device}")]
    NoSuchDevice {
        /// How the device was named.
        device: String,
    },
    /// The library does not list the process, or not how much it holds.
    #[error("NVML does not tell what process {pid} holds: {reason}")]
    NoSuchProcess {
        /// The process.
        pid: u32,
        /// What is known about the cause.
        reason: &'static str,
    },
}

/// A GPU that NVML knows. Closes the library when dropped.
#[derive(Debug)]
pub struct GpuMemory {
    #[cfg(feature = "nvml")]
    device: library::Device,
    #[cfg(not(feature = "nvml"))]
    never: std::convert::Infallible,
}

impl GpuMemory {
    /// The GPU with this identity (`GPU-` and 32 hexadecimal digits in five groups), or else at
    /// this place of the PCI bus (`domain:bus:device.function`), with this much memory in the
    /// eyes of the CUDA driver. A part of a GPU (MIG) is found by its identity alone: what is
    /// at its place is the whole.
    ///
    /// # Errors
    /// [`NvmlError`] if there is no usable library, or if it does not know the device.
    #[cfg_attr(not(feature = "nvml"), expect(unused_variables, reason = "there is nothing to ask"))]
    pub fn open(uuid: Option<&str>, pci_bus_id: Option<&str>, total_bytes: u64) -> Result<Self, NvmlError> {
        #[cfg(feature = "nvml")]
        return library::Device::open(uuid, pci_bus_id, total_bytes).map(|device| Self { device });
        #[cfg(not(feature = "nvml"))]
        Err(NvmlError::NotBuilt)
    }

    /// Bytes of the device that are in use, by whomever.
    ///
    /// # Errors
    /// [`NvmlError::Failed`].
    pub fn used_bytes(&self) -> Result<u64, NvmlError> {
        #[cfg(feature = "nvml")]
        return self.device.used_bytes();
        #[cfg(not(feature = "nvml"))]
        match self.never {}
    }

    /// Bytes of the device that a process holds, its CUDA context included.
    ///
    /// # Errors
    /// [`NvmlError::NoSuchProcess`] if the library does not tell, which is the rule in containers;
    /// [`NvmlError::Failed`].
    #[cfg_attr(not(feature = "nvml"), expect(unused_variables, reason = "there is nothing to ask"))]
    pub fn of_process(&mut self, pid: u32) -> Result<u64, NvmlError> {
        #[cfg(feature = "nvml")]
        return self.device.of_process(pid);
        #[cfg(not(feature = "nvml"))]
        match self.never {}
    }
}
