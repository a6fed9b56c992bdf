//! Errors of exports.

use onelayer::LoadError;

/// The reason why a tensor cannot be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// DLPack has no such element type.
    #[error(
        "tensor {tensor:?} has elements of type {dtype}, which DLPack does not know; read its bytes instead"
    )]
    UnknownElement {
        /// The tensor.
        tensor: String,
        /// The type as spelled in the checkpoint.
        dtype: String,
    },
    /// Two 4-bit floats share a byte, but their number is odd.
    #[error(
        "tensor {tensor:?} of shape {shape:?} has 4-bit floats that do not pair in the innermost dimension"
    )]
    HalfElement {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A dimension, a stride or the number of dimensions is too large for DLPack.
    #[error("tensor {tensor:?} of shape {shape:?} has more elements or dimensions than DLPack supports")]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// The tensor was not kept, or DLPack does not support its device.
    #[error("tensor {tensor:?} was loaded to {target}, where there is nothing to export")]
    Nowhere {
        /// The tensor.
        tensor: String,
        /// The target of the load.
        target: String,
    },
    /// Its bytes did not arrive.
    #[error("the copy of tensor {tensor:?} to the device failed")]
    NotReady {
        /// The tensor.
        tensor: String,
        /// The device's error.
        source: Box<LoadError>,
    },
    /// Only the versioned structure can mark a tensor read-only.
    #[error("a read-only tensor cannot be exported in the structure from before DLPack 1.0")]
    ReadOnly,
}
