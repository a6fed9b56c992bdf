//! Converts errors of the library to Python exceptions. Their classes are in `onelayer/_errors.py`.

use std::error::Error;
use std::io;
use std::path::Path;

use onelayer::convert::ConvertError;
use onelayer::{CheckpointError, DeviceError, LoadError, PlanError, SourceError};
use onelayer_fit::{FitError, PlacedError};
use pyo3::exceptions::{
    PyFileExistsError, PyFileNotFoundError, PyKeyError, PyMemoryError, PyOSError, PyRuntimeError,
    PyValueError,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// `ENOENT` and `ENOSPC` of errno.h, the same on every Linux.
const NO_SUCH_FILE: i32 = 2;
const NO_SPACE: i32 = 28;

/// The exception for an invalid checkpoint.
pub(crate) fn of_checkpoint(py: Python<'_>, error: &CheckpointError) -> PyErr {
    match error {
        CheckpointError::Io { path, source, .. } => system(source, &chain(error), path),
        _ if error.is_missing() => {
            let path = error.path().map(Path::to_path_buf);
            PyFileNotFoundError::new_err((NO_SUCH_FILE, error.to_string(), path))
        }
        _ => of_package(py, "CheckpointError", &chain(error), |details| {
            details.set_item("path", error.path())?;
            details.set_item("tensor", error.tensor())
        }),
    }
}

/// The exception for a failed load.
pub(crate) fn of_load(py: Python<'_>, error: &LoadError) -> PyErr {
    match error {
        LoadError::Plan(plan) => of_plan(py, plan),
        LoadError::Source(source) => of_source(py, source),
        LoadError::Device(device) => of_device(py, device),
        LoadError::Stalled { held, .. } | LoadError::DeviceBudgetFull { held, .. } => {
            let held: Vec<&str> = held.iter().map(onelayer::LayerId::as_str).collect();
            let hint =
                "a loop variable holds its layer until the next assignment: use `with layer:` to release it";
            let message = format!("{error} ({hint})");
            of_package(py, "StalledError", &message, |details| details.set_item("held", held))
        }
        LoadError::Cancelled => of_package(py, "CancelledError", &chain(error), |_| Ok(())),
        LoadError::Layers(_) | LoadError::Slice(_) => PyValueError::new_err(chain(error)),
        LoadError::NotFound { .. } => PyKeyError::new_err(error.to_string()),
        LoadError::Staging(_) => PyMemoryError::new_err(chain(error)),
        _ => PyRuntimeError::new_err(chain(error)),
    }
}

/// The exception for a conversion or a verification.
pub(crate) fn of_convert(py: Python<'_>, error: &ConvertError) -> PyErr {
    // The library names the flags of the program.
    let message = chain(error).replace("--force", "overwrite=True").replace("--max-shard-size", "max_shard=");
    match error {
        ConvertError::Checkpoint(error) => of_checkpoint(py, error),
        ConvertError::Plan(error) => of_plan(py, error),
        ConvertError::Load(error) => of_load(py, error),
        ConvertError::Exists { .. } | ConvertError::OtherConversion { .. } => {
            PyFileExistsError::new_err(message)
        }
        ConvertError::NoSpace { path, .. } => PyOSError::new_err((NO_SPACE, message, path.clone())),
        ConvertError::Write { path, source, .. } | ConvertError::Read { path, source, .. } => {
            system(source, &message, path)
        }
        ConvertError::BadManifest { path, .. } => of_package(py, "CheckpointError", &message, |details| {
            details.set_item("path", path)?;
            details.set_item("tensor", None::<&str>)
        }),
        ConvertError::Locked { .. } => PyRuntimeError::new_err(message),
        _ => PyValueError::new_err(message),
    }
}

/// The exception for a placement by a device map, or for one that cannot be found.
pub(crate) fn of_fit(py: Python<'_>, error: &FitError) -> PyErr {
    match error {
        FitError::TooSmall { needed_bytes, limit_bytes, .. }
        | FitError::OverLimit { needed_bytes, limit_bytes, .. } => {
            let remedy = "a shorter context, a smaller batch, kv_dtype=\"fp8\", dtype or quantise takes less";
            budget_error(py, &format!("{}; {remedy}", chain(error)), *needed_bytes, *limit_bytes, None)
        }
        _ => PyValueError::new_err(chain(error)),
    }
}

/// The exception for all mistakes of a device map, or all limits that it exceeds.
pub(crate) fn of_faults(py: Python<'_>, faults: &[FitError]) -> PyErr {
    match faults {
        [one] => of_fit(py, one),
        _ => {
            let texts: Vec<String> = faults.iter().map(|fault| chain(fault)).collect();
            PyValueError::new_err(format!("device_map: {}", texts.join("; ")))
        }
    }
}

/// The exception for a load by a device map.
pub(crate) fn of_placed(py: Python<'_>, error: &PlacedError) -> PyErr {
    match error {
        PlacedError::Load { source, .. } | PlacedError::Checkpoint(source) => of_load(py, source),
        PlacedError::NoDevice { .. } | PlacedError::DeviceTooSmall { .. } => {
            of_package(py, "DeviceError", &chain(error), |_| Ok(()))
        }
        _ => PyValueError::new_err(chain(error)),
    }
}

fn of_plan(py: Python<'_>, error: &PlanError) -> PyErr {
    let (required, budget) = match error {
        PlanError::BudgetTooSmall { budget_bytes, smallest_bytes, .. } => (*smallest_bytes, *budget_bytes),
        PlanError::DeviceBudgetTooSmall { needed_bytes, budget_bytes, .. } => (*needed_bytes, *budget_bytes),
        _ => return PyValueError::new_err(chain(error)),
    };
    budget_error(py, &chain(error), required, budget, None)
}

/// The exception for a too small budget. `tensor` is the one that does not fit, if any.
pub(crate) fn budget_error(
    py: Python<'_>,
    message: &str,
    required: u64,
    budget: u64,
    tensor: Option<&str>,
) -> PyErr {
    of_package(py, "BudgetError", message, |details| {
        details.set_item("required", required)?;
        details.set_item("budget", budget)?;
        details.set_item("tensor", tensor)
    })
}

/// The exception for a file that cannot be read or has changed.
pub(crate) fn of_source(py: Python<'_>, error: &SourceError) -> PyErr {
    match error {
        SourceError::Open { path, source }
        | SourceError::Status { path, source }
        | SourceError::Read { path, source, .. } => system(source, &chain(error), path),
        // Changed, truncated, or no longer a regular file.
        _ => of_package(py, "CheckpointError", &chain(error), |details| {
            details.set_item("path", error.path())?;
            details.set_item("tensor", None::<&str>)
        }),
    }
}

fn of_device(py: Python<'_>, error: &DeviceError) -> PyErr {
    if matches!(error, DeviceError::HostAllocation { .. }) {
        return PyMemoryError::new_err(chain(error));
    }
    of_package(py, "DeviceError", &chain(error), |_| Ok(()))
}

/// The exception for memory that the system refused.
pub(crate) fn of_memory(tensor: &str, bytes: u64, source: &io::Error) -> PyErr {
    PyMemoryError::new_err(format!("tensor {tensor:?}: cannot allocate {bytes} bytes: {source}"))
}

/// `OSError` or its subclass for the error number: `FileNotFoundError`, `PermissionError`, ...
fn system(source: &io::Error, message: &str, path: &Path) -> PyErr {
    match source.raw_os_error() {
        Some(number) => PyOSError::new_err((number, message.to_owned(), path.to_path_buf())),
        None => PyOSError::new_err(message.to_owned()),
    }
}

/// An exception of a class in `onelayer._errors`, with details as keyword arguments.
fn of_package(
    py: Python<'_>,
    class: &str,
    message: &str,
    describe: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<()>,
) -> PyErr {
    let exception = || {
        let details = PyDict::new(py);
        describe(&details)?;
        py.import("onelayer._errors")?.getattr(class)?.call((message,), Some(&details))
    };
    // A failure to create the exception is itself an exception.
    exception().map_or_else(|error| error, PyErr::from_value)
}

/// A message with its causes, except those it already contains.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let text = inner.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        cause = inner.source();
    }
    message
}
