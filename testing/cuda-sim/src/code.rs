//! Result codes of the driver API.

/// A `CUresult` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) u32);

/// The result of a call.
pub(crate) type Answer<T = ()> = Result<T, Code>;

impl Code {
    pub(crate) const INVALID_VALUE: Self = Self(1);
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const NOT_INITIALIZED: Self = Self(3);
    pub(crate) const NO_DEVICE: Self = Self(100);
    pub(crate) const INVALID_DEVICE: Self = Self(101);
    pub(crate) const INVALID_CONTEXT: Self = Self(201);
    pub(crate) const INVALID_HANDLE: Self = Self(400);
    pub(crate) const NOT_READY: Self = Self(600);
    pub(crate) const ILLEGAL_ADDRESS: Self = Self(700);
    pub(crate) const ALREADY_REGISTERED: Self = Self(712);
    pub(crate) const NOT_REGISTERED: Self = Self(713);
    pub(crate) const NOT_SUPPORTED: Self = Self(801);

    /// True for codes that make a context unusable (driver API reference: "the process must be
    /// terminated and relaunched", "leaves the process in an inconsistent state").
    pub(crate) const fn is_fatal(self) -> bool {
        matches!(self.0, 4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810)
    }

    /// Its name, NUL included.
    pub(crate) const fn name(self) -> Option<&'static std::ffi::CStr> {
        Some(match self.0 {
            0 => c"CUDA_SUCCESS",
            1 => c"CUDA_ERROR_INVALID_VALUE",
            2 => c"CUDA_ERROR_OUT_OF_MEMORY",
            3 => c"CUDA_ERROR_NOT_INITIALIZED",
            4 => c"CUDA_ERROR_DEINITIALIZED",
            34 => c"CUDA_ERROR_STUB_LIBRARY",
            46 => c"CUDA_ERROR_DEVICE_UNAVAILABLE",
            100 => c"CUDA_ERROR_NO_DEVICE",
            101 => c"CUDA_ERROR_INVALID_DEVICE",
            201 => c"CUDA_ERROR_INVALID_CONTEXT",
            214 => c"CUDA_ERROR_ECC_UNCORRECTABLE",
            304 => c"CUDA_ERROR_OPERATING_SYSTEM",
            400 => c"CUDA_ERROR_INVALID_HANDLE",
            600 => c"CUDA_ERROR_NOT_READY",
            700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            709 => c"CUDA_ERROR_CONTEXT_IS_DESTROYED",
            712 => c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
            713 => c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
            719 => c"CUDA_ERROR_LAUNCH_FAILED",
            800 => c"CUDA_ERROR_NOT_PERMITTED",
            801 => c"CUDA_ERROR_NOT_SUPPORTED",
            803 => c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            999 => c"CUDA_ERROR_UNKNOWN",
            _ => return None,
        })
    }
}
