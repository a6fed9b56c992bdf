//! The structures of DLPack 1.2 with C layout. Nothing here allocates or frees.
//!
//! Source: `include/dlpack/dlpack.h` of <https://github.com/dmlc/dlpack>. Structures and fields
//! have the names of that header.

use std::ffi::c_void;

/// The version of exported tensors: data types of 1.1, and never null strides as in 1.2.
pub const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 2 };

/// `kDLCPU`: host memory.
pub const DEVICE_CPU: i32 = 1;
/// `kDLCUDA`: memory of a CUDA device.
pub const DEVICE_CUDA: i32 = 2;

/// The consumer must not write.
pub const FLAG_READ_ONLY: u64 = 1;
/// A copy made for the consumer, its only owner.
pub const FLAG_IS_COPIED: u64 = 1 << 1;
/// Each element smaller than a byte has its own byte; without this flag they are packed.
pub const FLAG_IS_SUBBYTE_TYPE_PADDED: u64 = 1 << 2;

/// The version of a tensor's structure. The layout depends on the major version.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLPackVersion {
    /// Changes with the layout.
    pub major: u32,
    /// Changes with the possible values of fields.
    pub minor: u32,
}

/// The device of a tensor.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDevice {
    /// [`DEVICE_CPU`], [`DEVICE_CUDA`] or another of `DLDeviceType`.
    pub device_type: i32,
    /// Index among devices of this type; 0 for host memory.
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
    /// Device address of the first byte; null without elements.
    pub data: *mut c_void,
    /// Its device.
    pub device: DLDevice,
    /// Length of `shape` and of `strides`.
    pub ndim: i32,
    /// Type of its elements.
    pub dtype: DLDataType,
    /// Elements per dimension, outermost first.
    pub shape: *mut i64,
    /// Distance between indices of each dimension, in elements.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// A tensor with the owner of its memory.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// The layout of the following fields.
    pub version: DLPackVersion,
    /// Private data of the owner.
    pub manager_ctx: *mut c_void,
    /// Frees the tensor and this structure. Called once.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    /// A sum of flags: [`FLAG_READ_ONLY`], [`FLAG_IS_COPIED`], [`FLAG_IS_SUBBYTE_TYPE_PADDED`].
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

/// A tensor with the owner of its memory, as before version 1. It cannot be flagged read-only.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// Private data of the owner.
    pub manager_ctx: *mut c_void,
    /// Frees the tensor and this structure. Called once.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}
