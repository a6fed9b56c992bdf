//! The structures of DLPack 1.2, as C lays them out. Nothing here allocates or frees.
//!
//! Source: `include/dlpack/dlpack.h` of <https://github.com/dmlc/dlpack>. Names of structures and fields are that header's.

use std::ffi::c_void;

/// The version that exported tensors follow: data types of 1.1, and from 1.2 the promise that
/// strides are never null.
pub const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 2 };

/// `kDLCPU`: host memory.
pub const DEVICE_CPU: i32 = 1;
/// `kDLCUDA`: memory of a CUDA device.
pub const DEVICE_CUDA: i32 = 2;

/// The consumer must not write.
pub const FLAG_READ_ONLY: u64 = 1;
/// A copy that was made for the consumer, who alone owns it.
pub const FLAG_IS_COPIED: u64 = 1 << 1;
/// Elements of less than a byte have a byte each; otherwise they are packed.
pub const FLAG_IS_SUBBYTE_TYPE_PADDED: u64 = 1 << 2;

/// The version of a tensor's structure. Another major one is another layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLPackVersion {
    /// Changes with the layout.
    pub major: u32,
    /// Changes with the values that fields may have.
    pub minor: u32,
}

/// Where a tensor lies.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDevice {
    /// [`DEVICE_CPU`], [`DEVICE_CUDA`] or another of `DLDeviceType`.
    pub device_type: i32,
    /// Its number among those of its kind; 0 for host memory.
    pub device_id: i32,
}

/// Type of an element.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDataType {
    /// One of `DLDataTypeCode`.
    pub code: u8,
    /// Bits of one lane.
    pub bits: u8,
    /// Values in one element; 1 unless elements are vectors.
    pub lanes: u16,
}

/// A tensor that does not own its memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLTensor {
    /// Its first byte, an address of the device; null if there is none.
    pub data: *mut c_void,
    /// Where it lies.
    pub device: DLDevice,
    /// Length of `shape` and of `strides`.
    pub ndim: i32,
    /// Type of its elements.
    pub dtype: DLDataType,
    /// Elements per dimension, outermost first.
    pub shape: *mut i64,
    /// Elements from one index of a dimension to the next.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// A tensor with the owner of its memory.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// The layout of what follows.
    pub version: DLPackVersion,
    /// The owner's.
    pub manager_ctx: *mut c_void,
    /// Frees the tensor and this structure. Called once.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    /// A sum of flags: [`FLAG_READ_ONLY`], [`FLAG_IS_COPIED`], [`FLAG_IS_SUBBYTE_TYPE_PADDED`].
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

/// A tensor with the owner of its memory, as before version 1: it cannot say that it must not be
/// written to.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The owner's.
    pub manager_ctx: *mut c_void,
    /// Frees the tensor and this structure. Called once.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}
