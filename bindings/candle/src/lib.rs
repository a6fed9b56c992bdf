//! Loads checkpoints for candle in bounded memory: a `VarBuilder` over [`onelayer`].
//!
//! Candle's own loaders either map whole files, which is `unsafe` and makes every touched page
//! resident, or read whole files. They load a tensor in its stored type and cast it afterwards, so
//! two copies of it exist on the device. Here a tensor is read on request, directly into memory
//! owned by candle. Tensors that must be cast or copied to a device pass through staging of a fixed
//! size. The weights are bit-identical.
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
//! - *Memory.* Besides the tensors of the model: the headers, at most 16 MiB of
//!   [`onelayer::TensorReader`], and the staging ([`CheckpointBackend::staging`], 16 MiB by
//!   default) while a tensor is cast or goes to another device. Tensors of the types F4, F6 and
//!   F8_E8M0, which candle can only copy whole, exist twice for a moment.
//! - *Bits.* Each cast is candle's own, done piece by piece on the host. The adapter refuses what
//!   candle's loader refuses.
//! - *Files.* No mapping: a file that is truncated or rewritten during a read is an error that
//!   names it, not a signal.
//!
//! # What is not guaranteed
//!
//! - Zero-copy weights on the CPU: candle has no shared mapping without a copy; its own loader
//!   copies out of the mapping, too.
//! - CUDA: this crate has not yet run on a CUDA device. It only compiles against candle's CUDA
//!   half.

#[cfg(not(target_endian = "little"))]
compile_error!("checkpoints are little-endian, and so must be the machine");

#[cfg(any(test, feature = "cuda"))]
mod arenas;
mod backend;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod pieces;
mod pull;
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

/// A `VarBuilder` for a checkpoint (a file, a directory, an index, a pipeline), for tensors of
/// `dtype` on `device`. Reads headers only; each tensor is read on request.
///
/// # Errors
/// [`AdapterError`], wrapped in candle's error, if the checkpoint is missing or invalid. For errors
/// of single tensors see [`CheckpointBackend`].
pub fn var_builder(path: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
    let checkpoint = Checkpoint::open(path).map_err(AdapterError::from)?;
    Ok(CheckpointBackend::new(&checkpoint)?.into_var_builder(dtype, device))
}
