//! Peak memory of a load: tensors, staging and reader, but nothing in proportion to a tensor.
//! Candle's own loader is measured on the same file for comparison.
//!
//! The only test of its program, since the peak is that of the whole process.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::print_stdout, reason = "figures")]

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use common::candles_own;
use onelayer::Checkpoint;
use onelayer_candle::CheckpointBackend;

mod common;

const MIB: u64 = 1 << 20;
/// Elements of each of the two tensors, which have 64 MiB in single precision.
const ROWS: usize = 4096;
const COLUMNS: usize = 4096;
const STAGING_BYTES: u64 = 8 * MIB;
/// Maximum memory of the reader: eight pieces of 2 MiB.
const READER_BYTES: u64 = 16 * MIB;
/// Slack for thread stacks and the allocator, as in the library's memory promise.
const SLACK_BYTES: u64 = 16 * MIB;

/// A line of `/proc/self/status`, in bytes.
fn status(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

/// Peak growth of resident memory while every tensor is loaded and kept.
fn rise(weights: impl FnOnce() -> VarBuilder<'static>) -> u64 {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmRSS");
    let weights = weights();
    let kept: Vec<Tensor> = ["a", "b"].map(|name| weights.get((ROWS, COLUMNS), name).unwrap()).into();
    let rise = status("VmHWM") - before;
    drop(kept);
    rise
}

fn ours(path: &Path, dtype: DType) -> VarBuilder<'static> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let backend = CheckpointBackend::new(&checkpoint).unwrap().staging(STAGING_BYTES);
    backend.into_var_builder(dtype, &Device::Cpu)
}

#[test]
fn a_load_takes_the_tensors_and_the_staging() {
    let folder = tempfile::tempdir().unwrap();
    let tensor =
        Tensor::arange(0_f32, 16_777_216_f32, &Device::Cpu).unwrap().reshape((ROWS, COLUMNS)).unwrap();
    let tensors = HashMap::from(["a", "b"].map(|name| (name.to_owned(), tensor.clone())));
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    drop((tensor, tensors));
    for (dtype, element_bytes) in [(DType::F32, 4), (DType::BF16, 2), (DType::F64, 8)] {
        let tensor_bytes = 2 * u64::try_from(ROWS * COLUMNS).unwrap() * element_bytes;
        let found = rise(|| ours(folder.path(), dtype));
        let theirs = rise(|| candles_own(folder.path(), dtype));
        println!(
            "{dtype:?}: tensors {} MiB, ours {} MiB, candle's own {} MiB",
            tensor_bytes / MIB,
            found / MIB,
            theirs / MIB
        );
        assert!(
            found <= tensor_bytes + STAGING_BYTES + READER_BYTES + SLACK_BYTES,
            "{dtype:?}: {} MiB",
            found / MIB
        );
        // The measurement works: it sees the mapped pages, and with a cast the copy before the
        // cast.
        assert!(theirs > found + 32 * MIB, "{dtype:?}: candle's own took {} MiB", theirs / MIB);
    }
}
