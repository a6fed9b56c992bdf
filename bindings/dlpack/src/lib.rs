//! Hands tensors that `onelayer` has loaded to other libraries by DLPack, without a copy.
//!
//! [DLPack](https://dmlc.github.io/dlpack/latest/) is the structure in memory by which PyTorch, NumPy, JAX, CuPy, TVM and others
//! give each other tensors. An exported tensor owns what it shows: it outlives the stream, the
//! checkpoint and the thread it came from, and its memory is free once its deleter has run, on
//! whichever thread that is. The deleter is plain Rust: it needs no interpreter and may run after
//! one is gone.
//!
//! ```text
//! LoadedTensor --export--> ManagedTensor --into_raw--> consumer --deleter--> the layer's memory is free
//!                              | dropped: the same deleter
//! ```
//!
//! # Example
//!
//! ```
//! use onelayer::{Checkpoint, Loader, Target};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/checkpoints/llama");
//! let checkpoint = Checkpoint::open(path)?;
//! let mut model = Loader::builder(Target::Host).build()?.load(&checkpoint)?;
//! let tensor = onelayer_dlpack::export(model.tensor("model.norm.weight")?)?;
//! drop((model, checkpoint)); // the tensor keeps its layer
//! assert_eq!(tensor.tensor().dtype.bits, 16); // bfloat16
//! # Ok(())
//! # }
//! ```
//!
//! # What is not guaranteed
//!
//! - Exported tensors are writable unless they are [flagged](FLAG_READ_ONLY) otherwise. A consumer
//!   that writes sees to it that nobody reads the same tensor meanwhile.
//! - A tensor keeps its whole layer: the layer's memory is free when the last of its tensors is
//!   deleted.

mod abi;
mod element;
mod error;
mod export;
mod managed;

pub use self::abi::{
    DEVICE_CPU, DEVICE_CUDA, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion,
    DLTensor, FLAG_IS_COPIED, FLAG_IS_SUBBYTE_TYPE_PADDED, FLAG_READ_ONLY, VERSION,
};
pub use self::element::{data_type, device, shape};
pub use self::error::ExportError;
pub use self::export::{Memory, export, export_for_stream, export_with};
pub use self::managed::ManagedTensor;
