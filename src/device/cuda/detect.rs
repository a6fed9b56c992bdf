//! Finds a usable driver, before the first call through cudarc, which panics if the library or a
//! symbol is missing.
//!
//! Uses cudarc's library names in cudarc's order, so that both find the same file.
#![allow(unsafe_code, reason = "loads a foreign library and calls it; each block says why it may")]

use std::error::Error as _;
use std::ffi::c_int;
use std::sync::OnceLock;

use libloading::Library;

use crate::device::{CudaCode, DeviceError};

/// Names of the driver's library.
const LIBRARY_NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// Every driver function that this folder calls, except the three that are called here. A test
/// checks it.
const SYMBOLS: [&str; 34] = [
    "cuCtxGetDevice",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemAllocFromPoolAsync",
    "cuMemAlloc_v2",
    "cuMemFreeAsync",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolGetAttribute",
    "cuMemPoolTrimTo",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// An initialised driver with every function that is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Driver {
    /// 1000 x major + 10 x minor of the newest supported CUDA version.
    pub(crate) version: u32,
    pub(crate) devices: u32,
}

/// The driver of this process. Searched once: a driver installed later is not seen.
pub(crate) fn driver() -> Result<Driver, DeviceError> {
    static FOUND: OnceLock<Result<Driver, Unusable>> = OnceLock::new();
    FOUND.get_or_init(find).clone().map_err(Unusable::into_error)
}

/// Why there is no usable driver.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Unusable {
    Missing { reason: String },
    Incomplete { library: &'static str, symbol: &'static str },
    Refused { library: &'static str, code: CudaCode },
}

impl Unusable {
    fn into_error(self) -> DeviceError {
        match self {
            Self::Missing { reason } => {
                DeviceError::NoDriver { looked_for: LIBRARY_NAMES.join(", "), reason }
            }
            Self::Incomplete { library, symbol } => DeviceError::OldDriver { library, symbol },
            Self::Refused { library, code } => DeviceError::DriverRefused { library, code },
        }
    }
}

fn find() -> Result<Driver, Unusable> {
    let mut reasons = Vec::new();
    for name in LIBRARY_NAMES {
        // SAFETY: loading runs the library's initialisers. A caller that opens a CUDA device wants
        // this library, and the system's linker finds it.
        match unsafe { Library::new(name) } {
            Ok(library) => return check(name, library),
            // The error's source has the cause.
            Err(error) => reasons.push(error.source().map_or_else(|| error.to_string(), ToString::to_string)),
        }
    }
    reasons.dedup();
    Err(Unusable::Missing { reason: reasons.join("; ") })
}

fn check(name: &'static str, library: Library) -> Result<Driver, Unusable> {
    type Init = unsafe extern "C" fn(u32) -> u32;
    type Get = unsafe extern "C" fn(*mut c_int) -> u32;
    let init = symbol::<Init>(name, &library, "cuInit")?;
    // SAFETY: `cuInit` of the driver API takes flags, which must be zero.
    let code = unsafe { init(0) };
    // A stub lacks functions too, but its own error is the better message.
    refused(name, code)?;
    for wanted in SYMBOLS {
        symbol::<Get>(name, &library, wanted)?;
    }
    let get = |wanted| {
        let get = symbol::<Get>(name, &library, wanted)?;
        let mut value: c_int = 0;
        // SAFETY: both functions that are asked for here write one int to the address they are given.
        let code = unsafe { get(&raw mut value) };
        refused(name, code)?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    let version = get("cuDriverGetVersion")?;
    let devices = get("cuDeviceGetCount")?;
    // The driver has started threads, so the library stays loaded.
    std::mem::forget(library);
    Ok(Driver { version, devices })
}

fn refused(library: &'static str, code: u32) -> Result<(), Unusable> {
    CudaCode::check(code).map_err(|code| Unusable::Refused { library, code })
}

fn symbol<F: Copy>(name: &'static str, library: &Library, symbol: &'static str) -> Result<F, Unusable> {
    // SAFETY: every name in this file is a function of the driver API, and the callers give its C
    // signature (or only look whether it is there).
    let found = unsafe { library.get::<F>(symbol.as_bytes()) };
    found.map(|found| *found).map_err(|_| Unusable::Incomplete { library: name, symbol })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// cudarc panics if a function is missing, so every function that is called must be looked up
    /// first.
    #[test]
    fn every_function_that_is_called_is_looked_for() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/device/cuda");
        let mut called = std::collections::BTreeSet::new();
        for file in std::fs::read_dir(folder).unwrap() {
            let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
            for rest in text.split("sys::cu").skip(1) {
                let name: String = rest.chars().take_while(|&c| c.is_alphanumeric() || c == '_').collect();
                if rest[name.len()..].starts_with('(') {
                    called.insert(format!("cu{name}"));
                }
            }
        }
        assert_eq!(called.iter().map(String::as_str).collect::<Vec<_>>(), SYMBOLS);
    }
}
