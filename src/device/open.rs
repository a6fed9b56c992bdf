//! An open device, and what it says about itself.

#[cfg(feature = "cuda")]
use std::sync::Arc;

use super::{DeviceError, DeviceInfo, DeviceMemoryInfo, Target};

/// A device that is ready for loads. A CUDA device holds its primary context, so open it before
/// measuring a baseline: then the driver's own memory does not count as a load's. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Device {
    kind: DeviceKind,
}

/// The kinds of open devices.
#[derive(Clone, Debug)]
pub(crate) enum DeviceKind {
    Host,
    None,
    #[cfg(feature = "cuda")]
    Cuda {
        ordinal: u32,
        context: Arc<super::cuda::Context>,
    },
}

impl Device {
    /// Opens a device.
    ///
    /// # Errors
    /// [`DeviceError::is_unavailable`] if there is no such device, no usable driver, or no support
    /// in this build; [`DeviceError::Cuda`] if the driver cannot make a context. Host and none
    /// always open.
    pub fn open(target: Target) -> Result<Self, DeviceError> {
        let kind = match target {
            Target::Host => DeviceKind::Host,
            Target::None => DeviceKind::None,
            #[cfg(feature = "cuda")]
            Target::Cuda(ordinal) => {
                DeviceKind::Cuda { ordinal, context: super::cuda::Context::primary(ordinal)? }
            }
            #[cfg(not(feature = "cuda"))]
            Target::Cuda(_) => return Err(DeviceError::NotBuilt),
        };
        Ok(Self { kind })
    }

    /// The device in the caller's context.
    #[cfg(feature = "cuda")]
    pub(crate) fn in_context(ordinal: u32, context: Arc<super::cuda::Context>) -> Self {
        Self { kind: DeviceKind::Cuda { ordinal, context } }
    }

    pub(crate) fn kind(&self) -> &DeviceKind {
        &self.kind
    }

    /// What was opened.
    #[must_use]
    pub fn target(&self) -> Target {
        match &self.kind {
            DeviceKind::Host => Target::Host,
            DeviceKind::None => Target::None,
            #[cfg(feature = "cuda")]
            DeviceKind::Cuda { ordinal, .. } => Target::Cuda(*ordinal),
        }
    }

    /// What the device says about itself.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`] if the driver does not answer.
    pub fn info(&self) -> Result<DeviceInfo, DeviceError> {
        match &self.kind {
            DeviceKind::Host | DeviceKind::None => Ok(DeviceInfo {
                name: self.target().to_string(),
                uuid: None,
                pci_bus_id: None,
                cuda_version: None,
            }),
            #[cfg(feature = "cuda")]
            DeviceKind::Cuda { context, .. } => Ok(DeviceInfo {
                name: context.name()?,
                uuid: Some(context.uuid()?),
                pci_bus_id: Some(context.pci_bus_id()?),
                // The driver gives 1000 x major + 10 x minor (`cuDriverGetVersion`).
                cuda_version: Some((context.driver().version / 1000, context.driver().version % 1000 / 10)),
            }),
        }
    }

    /// The memory of a device that has its own; `None` for the others.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`] if the driver does not answer.
    pub fn memory(&self) -> Result<Option<DeviceMemoryInfo>, DeviceError> {
        match &self.kind {
            DeviceKind::Host | DeviceKind::None => Ok(None),
            #[cfg(feature = "cuda")]
            DeviceKind::Cuda { context, .. } => context.memory().map(Some),
        }
    }
}
