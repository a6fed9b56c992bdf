//! The CUDA device on the simulated driver.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

mod abuse;
#[path = "../support/cuda_case.rs"]
mod cuda_case;
mod engine;
mod faults;
mod load;
mod passes;
mod residency;
