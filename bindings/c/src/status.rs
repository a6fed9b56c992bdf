//! What functions return.

use onelayer::{CheckpointError, DeviceError, LoadError, PlanError};
use onelayer_dlpack::ExportError;

/// What came of a call. What is not OL_OK, OL_END or OL_NOT_YET is a failure: ol_last_error() has
/// its text.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the names of the header")]
pub enum Status {
    /// Done.
    OL_OK = 0,
    /// There is no further layer.
    OL_END = 1,
    /// No layer within the time allowed; ask again.
    OL_NOT_YET = 2,
    /// The system refused a file or a thread.
    OL_EIO = 3,
    /// The checkpoint is not what the format allows.
    OL_EFORMAT = 4,
    /// The budget does not hold what the load needs at least; the text says how much does.
    OL_EBUDGET = 5,
    /// The program itself holds all the layers that may be resident, and waited for another one.
    OL_ESTALLED = 6,
    /// The device failed.
    OL_EDEVICE = 7,
    /// An argument is null, too small, or names nothing there is.
    OL_EINVAL = 8,
    /// A fault of the library.
    OL_EPANIC = 9,
    /// Not on this machine, not with this build, or not for this type.
    OL_EUNSUPPORTED = 10,
    /// No such file, checkpoint or tensor.
    OL_ENOTFOUND = 11,
    /// The load was cancelled.
    OL_ECANCELLED = 12,
    /// A file is no longer what it was when the checkpoint was opened.
    OL_ECHANGED = 13,
    /// Memory that is needed beside the budget cannot be had, on the host or on the device.
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
            // Files and threads; what later versions of the library add is the system's too, until it is
            // named here.
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
