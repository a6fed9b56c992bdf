//! Promises about memory. The allocator of this program counts.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

mod allocator;
mod load;
mod metadata;
mod passes;
#[path = "../support/torch_corpus/mod.rs"]
mod torch_corpus;
mod torch_hostile;
