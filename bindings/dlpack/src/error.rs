//! Why a tensor cannot be exported.

use onelayer::LoadError;

/// Why a tensor cannot be exported.
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
        /// The type as the checkpoint spells it.
        dtype: String,
    },
    /// Two 4-bit floats share a byte, and here one has none to share with.
    #[error(
        "tensor {tensor:?} of shape {shape:?} has 4-bit floats that do not pair in the innermost dimension"
    )]
    HalfElement {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A dimension or a stride that DLPack cannot count, or more dimensions than it can.
    #[error("tensor {tensor:?} of shape {shape:?} has more elements or dimensions than DLPack counts")]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// The tensor was not kept, or lies where DLPack does not reach.
    #[error("tensor {tensor:?} was loaded to {target}, where there is nothing to export")]
    Nowhere {
        /// The tensor.
        tensor: String,
        /// Where it was loaded to.
        target: String,
    },
    /// Its bytes did not arrive.
    #[error("tensor {tensor:?} did not arrive")]
    NotReady {
        /// The tensor.
        tensor: String,
        /// The device's answer.
        source: Box<LoadError>,
    },
    /// What must not be written to can only be told in the versioned structure.
    #[error("a read-only tensor cannot be exported in the structure from before DLPack 1.0")]
    ReadOnly,
}
