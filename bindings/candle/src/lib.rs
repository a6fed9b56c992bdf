//! Checkpoints for candle, loaded in bounded memory: a `VarBuilder` over [`onelayer`].
//!
//! Candle's own ways either map whole files, which is `unsafe` and counts every page that was touched, or read them whole. And
//! each loads a tensor as it is stored and casts it afterwards, so that for a moment it is there twice, on the device. Here a
//! tensor is read when the model asks for it, straight into the memory that candle will own; what has to be cast or carried to
//! a device passes through staging of a fixed size. The weights come out bit for bit the same.
//!
//! # Example
//!
//! ```
//! use candle_core::{DType, Device};
//!
//! # fn main() -> candle_core::Result<()> {
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/checkpoints/llama");
//! // Instead of: unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::BF16, &Device::Cpu)? }
//! let weights = onelayer_candle::var_builder(path, DType::BF16, &Device::Cpu)?;
//!
//! let norm = weights.pp("model.norm").get(64, "weight")?; // model code is unchanged
//! assert_eq!(norm.dims(), [64]);
//! # Ok(())
//! # }
//! ```
//!
//! # What is guaranteed
//!
//! - *Memory.* Beside the tensors that the model keeps: the headers, at most 16 MiB of [`onelayer::TensorReader`], and the staging
//!   ([`CheckpointBackend::staging`], 16 MiB unless said otherwise) while a tensor is read that must be cast or goes to another
//!   device. Tensors of the types F4, F6 and F8_E8M0, which candle can only copy whole, are there twice for a moment.
//! - *Bits.* Each cast is candle's own, done piece by piece on the host. What candle's loader refuses is refused here.
//! - *Files.* No mapping: a file that is cut off or rewritten meanwhile is an error that names it, not a signal.
//!
//! # What is not
//!
//! - Weights that stay on the CPU in the type they are stored in: a mapping that is shared by many processes, and never copied, does
//!   not exist in candle; its own loader copies out of the mapping too.
//! - On a CUDA device nothing of this crate has been run yet. It is compiled against candle's CUDA half, no more.

#[cfg(not(target_endian = "little"))]
compile_error!("checkpoints are little-endian, and so must be the machine");

#[cfg(any(test, feature = "cuda"))]
mod arenas;
mod backend;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod pieces;
mod types;
mod whole;

use std::path::Path;

use candle_core::{DType, Device, Result};
use candle_nn::VarBuilder;
use onelayer::Checkpoint;

pub use self::backend::{CheckpointBackend, DEFAULT_STAGING_BYTES};
#[cfg(feature = "cuda")]
pub use self::cuda::ArenaBackend;
pub use self::error::AdapterError;

/// The tensors of a checkpoint (a file, a directory, an index, a pipeline), as elements of `dtype` on `device`, each read when
/// the model asks for it. Reads headers only.
///
/// # Errors
/// [`AdapterError`], wrapped as candle wraps errors of others, if the checkpoint is missing or invalid. What a tensor may fail with
/// is told by [`CheckpointBackend`].
pub fn var_builder(path: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
    let checkpoint = Checkpoint::open(path).map_err(AdapterError::from)?;
    Ok(CheckpointBackend::new(&checkpoint)?.into_var_builder(dtype, device))
}
