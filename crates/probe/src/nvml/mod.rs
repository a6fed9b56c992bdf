//! Used memory of a GPU from NVIDIA's management library (NVML): of the whole device, and of one
//! process.
//!
//! The library comes with the driver and is loaded at run time; building needs nothing. NVML counts
//! independently of the CUDA driver, so it shows whether a program really freed memory. It needs no
//! CUDA context.
//!
//! NVML uses the host's process ids. Inside a container the memory of one process is therefore
//! usually unknown, and [`GpuMemory::of_process`] returns an error.
//!
//! Functions and structures: NVML API Reference Guide, "Initialization and Cleanup", "Device
//! Queries", "Error reporting".

#[cfg(feature = "nvml")]
mod library;

/// An error of NVML.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NvmlError {
    /// Built without the feature `nvml`, which the features `cuda` of the program and the bindings
    /// enable.
    #[error("this build does not look for NVML: build it with the feature `cuda`")]
    NotBuilt,
    /// The library was not found.
    #[error("no NVML: looked for {looked_for}")]
    Missing {
        /// File names, in the order they were tried.
        looked_for: String,
    },
    /// The library lacks a function.
    #[error("{library} has no {symbol}: it is not NVML or too old")]
    Incomplete {
        /// The library.
        library: &'static str,
        /// The missing function.
        symbol: &'static str,
    },
    /// A call failed.
    #[error("{call} failed: {reason} ({code})")]
    Failed {
        /// The function.
        call: &'static str,
        /// NVML's error code (`nvmlReturn_t`).
        code: u32,
        /// NVML's text for the code.
        reason: String,
    },
    /// NVML does not know the requested device.
    #[error("NVML knows no device {device}")]
    NoSuchDevice {
        /// The requested device.
        device: String,
    },
    /// NVML does not report the memory of the process.
    #[error("NVML does not report the memory of process {pid}: {reason}")]
    NoSuchProcess {
        /// Process id.
        pid: u32,
        /// The known cause.
        reason: &'static str,
    },
}

/// A GPU in NVML. Shuts NVML down when dropped.
#[derive(Debug)]
pub struct GpuMemory {
    #[cfg(feature = "nvml")]
    device: library::Device,
    #[cfg(not(feature = "nvml"))]
    never: std::convert::Infallible,
}

impl GpuMemory {
    /// Opens the GPU with this UUID (`GPU-` and 32 hexadecimal digits in five groups), or else at
    /// this PCI address (`domain:bus:device.function`) if its total memory is about `total_bytes`,
    /// the number of the CUDA driver. A MIG instance is found only by UUID: at its PCI address is
    /// the whole GPU.
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

    /// Used memory of the device, by all processes.
    ///
    /// # Errors
    /// [`NvmlError::Failed`].
    pub fn used_bytes(&self) -> Result<u64, NvmlError> {
        #[cfg(feature = "nvml")]
        return self.device.used_bytes();
        #[cfg(not(feature = "nvml"))]
        match self.never {}
    }

    /// Device memory used by a process, its CUDA context included.
    ///
    /// # Errors
    /// [`NvmlError::NoSuchProcess`] if NVML does not report it, which is usual in containers;
    /// [`NvmlError::Failed`].
    #[cfg_attr(not(feature = "nvml"), expect(unused_variables, reason = "there is nothing to ask"))]
    pub fn of_process(&mut self, pid: u32) -> Result<u64, NvmlError> {
        #[cfg(feature = "nvml")]
        return self.device.of_process(pid);
        #[cfg(not(feature = "nvml"))]
        match self.never {}
    }
}
