//! Result codes of the CUDA driver, with their names.

use std::fmt;

/// A result code of the CUDA driver API (`CUresult`), never zero. Printed as its name, its number
/// and what to do.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CudaCode(u32);

impl CudaCode {
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: Self = Self(2);
    /// `CUDA_ERROR_STUB_LIBRARY`.
    pub const STUB_LIBRARY: Self = Self(34);
    /// `CUDA_ERROR_NOT_READY`.
    pub const NOT_READY: Self = Self(600);

    /// The number.
    #[must_use]
    pub const fn as_u32(self) -> u32 {
        self.0
    }

    /// True if the context is lost: every later call fails, and nothing that was queued runs any
    /// more.
    ///
    /// From the descriptions of the codes in the driver API's reference ("leaves the process in an
    /// inconsistent state").
    #[must_use]
    pub const fn is_fatal(self) -> bool {
        matches!(self.0, 4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810)
    }

    /// Zero is success.
    #[cfg(feature = "cuda")]
    pub(crate) const fn check(code: u32) -> Result<(), Self> {
        match code {
            0 => Ok(()),
            code => Err(Self(code)),
        }
    }

    /// Its name in the driver API, if it is one that loading meets.
    const fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            1 => "CUDA_ERROR_INVALID_VALUE",
            2 => "CUDA_ERROR_OUT_OF_MEMORY",
            3 => "CUDA_ERROR_NOT_INITIALIZED",
            4 => "CUDA_ERROR_DEINITIALIZED",
            34 => "CUDA_ERROR_STUB_LIBRARY",
            46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
            100 => "CUDA_ERROR_NO_DEVICE",
            101 => "CUDA_ERROR_INVALID_DEVICE",
            201 => "CUDA_ERROR_INVALID_CONTEXT",
            214 => "CUDA_ERROR_ECC_UNCORRECTABLE",
            220 => "CUDA_ERROR_NVLINK_UNCORRECTABLE",
            304 => "CUDA_ERROR_OPERATING_SYSTEM",
            400 => "CUDA_ERROR_INVALID_HANDLE",
            600 => "CUDA_ERROR_NOT_READY",
            700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
            709 => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
            712 => "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
            713 => "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
            719 => "CUDA_ERROR_LAUNCH_FAILED",
            800 => "CUDA_ERROR_NOT_PERMITTED",
            801 => "CUDA_ERROR_NOT_SUPPORTED",
            802 => "CUDA_ERROR_SYSTEM_NOT_READY",
            803 => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            804 => "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
            999 => "CUDA_ERROR_UNKNOWN",
            _ => return None,
        })
    }

    /// What it means here and what to do, where that is known.
    const fn remedy(self) -> Option<&'static str> {
        if self.is_fatal() {
            return Some(
                "something that ran in the context has failed, and the context is lost: restart the process",
            );
        }
        Some(match self.0 {
            34 => "this is the toolkit's stub, not a driver: take its folder off the library path",
            46 => "another process uses the device exclusively",
            100 => "no device is visible: in a container, start it with the GPUs; see CUDA_VISIBLE_DEVICES",
            802 => "the GPU fabric is not ready: is its manager service running?",
            803 => {
                "the library and the kernel module are of different versions: restart the machine after an update"
            }
            804 => {
                "the compatibility package does not serve this device: use the library of the installed driver"
            }
            _ => return None,
        })
    }
}

impl fmt::Display for CudaCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0)?,
            None => write!(f, "CUDA error {}", self.0)?,
        }
        self.remedy().map_or(Ok(()), |remedy| write!(f, "; {remedy}"))
    }
}

impl fmt::Debug for CudaCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaCode({})", self.0)
    }
}

#[cfg(feature = "cuda")]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_says_its_name_number_and_remedy() {
        assert_eq!(CudaCode::check(0), Ok(()));
        assert_eq!(CudaCode::check(2).unwrap_err().to_string(), "CUDA_ERROR_OUT_OF_MEMORY (2)");
        assert_eq!(CudaCode::check(12_345).unwrap_err().to_string(), "CUDA error 12345");
        let lost = CudaCode::check(700).unwrap_err().to_string();
        assert!(lost.starts_with("CUDA_ERROR_ILLEGAL_ADDRESS (700); ") && lost.contains("is lost"), "{lost}");
        assert!(CudaCode::STUB_LIBRARY.to_string().ends_with("take its folder off the library path"));
    }

    #[test]
    fn a_lost_context_is_told_from_a_refusal() {
        for (code, fatal) in [(1, false), (2, false), (600, false), (700, true), (712, false), (719, true)] {
            assert_eq!(CudaCode::check(code).unwrap_err().is_fatal(), fatal, "{code}");
        }
    }
}
