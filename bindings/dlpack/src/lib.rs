//! Exports tensors loaded by `onelayer` to other libraries with DLPack, without a copy.
//!
//! [DLPack](https://dmlc.github.io/dlpack/latest/) is the in-memory structure with which PyTorch,
//! NumPy, JAX, CuPy, TVM and others exchange tensors. An exported tensor owns its memory: it may
//! outlive the stream, the checkpoint and its thread. Its deleter frees the memory, on any thread.
//! The deleter is plain Rust: it needs no interpreter and may run after one has exited.
//!
//! ```text
//! LoadedTensor --export--> ManagedTensor --into_raw--> consumer --deleter--> frees the layer's memory
//!                              | drop: the same deleter
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
//! - Exported tensors are writable unless [flagged](FLAG_READ_ONLY). A consumer that writes must
//!   prevent concurrent reads of the same tensor.
//! - A tensor keeps its whole layer alive: the layer's memory is freed with the last of its
//!   tensors.

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
