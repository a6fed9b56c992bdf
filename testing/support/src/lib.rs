//! What the tests of all packages share. It depends on none of them, so that a change in one does
//! not rebuild the tests of the others.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]
#![allow(clippy::print_stdout, reason = "what a child says is said again")]
#![allow(missing_docs, missing_debug_implementations, reason = "helpers of tests")]

pub mod cuda_sim;
pub mod driver;
pub mod gguf_file;
pub mod layouts;
pub mod safetensors_file;
pub mod torch_file;

mod again;
mod checkpoints;
mod sample;
mod skipped;

pub use again::{again, full_name, in_own_process, measured, repository};
pub use checkpoints::{Random, TestTensor, fixture, random_bytes, small_decoder, write_file, write_sharded};
pub use sample::{all_or, at_least, is_thorough, sample};
pub use skipped::{skipped, skipped_by_child};
