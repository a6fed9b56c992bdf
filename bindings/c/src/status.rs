//! Return values of functions.

use onelayer::{CheckpointError, DeviceError, LoadError, PlanError};
use onelayer_dlpack::ExportError;

/// The result of a call. All but OL_OK, OL_END and OL_NOT_YET are failures; ol_last_error() has the
/// text.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the names of the header")]
pub enum Status {
    /// Success.
    OL_OK = 0,
    /// There are no more layers.
    OL_END = 1,
    /// No layer within the time limit; call again.
    OL_NOT_YET = 2,
    /// A file or thread operation failed.
    OL_EIO = 3,
    /// The checkpoint violates the format.
    OL_EFORMAT = 4,
    /// The budget is too small; the text has the smallest possible one.
    OL_EBUDGET = 5,
    /// The program waits for a layer while it holds as many layers as may be resident.
    OL_ESTALLED = 6,
    /// The device failed.
    OL_EDEVICE = 7,
    /// An argument is null, too small, or names something that does not exist.
    OL_EINVAL = 8,
    /// A bug in the library.
    OL_EPANIC = 9,
    /// Unsupported on this machine, in this build, or for this type.
    OL_EUNSUPPORTED = 10,
    /// No such file, checkpoint or tensor.
    OL_ENOTFOUND = 11,
    /// The load was cancelled.
    OL_ECANCELLED = 12,
    /// A file has changed since the checkpoint was opened.
    OL_ECHANGED = 13,
    /// Out of memory outside the budget, on the host or on the device.
    OL_ENOMEM = 14,
}

impl From<&CheckpointError> for Status {
    fn from(error: &CheckpointError) -> Self {
        if error.is_missing() {
            Self::OL_ENOTFOUND
        } else if error.is_invalid() {
            Self::OL_EFORMAT
        } else {
            Self::OL_EIO
        }
    }
}

impl From<&LoadError> for Status {
    fn from(error: &LoadError) -> Self {
        match error {
            LoadError::Plan(plan) => plan.into(),
            LoadError::Layers(_) | LoadError::Slice(_) => Self::OL_EINVAL,
            LoadError::Budget(_) | LoadError::Panicked { .. } => Self::OL_EPANIC,
            LoadError::Staging(_) => Self::OL_ENOMEM,
            LoadError::Source(source) if source.is_file_changed() => Self::OL_ECHANGED,
            LoadError::Device(device) => device.into(),
            LoadError::Stalled { .. } | LoadError::DeviceBudgetFull { .. } => Self::OL_ESTALLED,
            LoadError::Cancelled => Self::OL_ECANCELLED,
            LoadError::NotFound { .. } => Self::OL_ENOTFOUND,
            // Files and threads, and error variants that later versions of the library add.
            _ => Self::OL_EIO,
        }
    }
}

impl From<&PlanError> for Status {
    fn from(error: &PlanError) -> Self {
        match error {
            error if error.is_over_budget() => Self::OL_EBUDGET,
            PlanError::Overflow { .. } => Self::OL_EFORMAT,
            _ => Self::OL_EINVAL,
        }
    }
}

impl From<&DeviceError> for Status {
    fn from(error: &DeviceError) -> Self {
        if error.is_unavailable() {
            Self::OL_EUNSUPPORTED
        } else if error.is_out_of_memory() {
            Self::OL_ENOMEM
        } else {
            Self::OL_EDEVICE
        }
    }
}

impl From<&ExportError> for Status {
    fn from(error: &ExportError) -> Self {
        match error {
            ExportError::NotReady { source, .. } => source.as_ref().into(),
            _ => Self::OL_EUNSUPPORTED,
        }
    }
}
