//! Tensors that lie anywhere in their file: with strides of their own, over each other's bytes,
//! between paddings. Each is delivered row-major, by every way of reading, in small slots.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

use std::path::Path;

use super::{LoadError, Loader, TensorReader};
use crate::checkpoint::for_tests::{Tensor, checkpoint_of};
use crate::checkpoint::{Checkpoint, DType, TensorEntry};
use crate::device::Target;
use crate::plan::{FloatType, IoMode, PlanError, Window};
use crate::units::{to_u64, to_usize};

const FILE_BYTES: usize = 40 << 20;

/// A file of bytes that tell where they are.
fn file(path: &Path) -> Vec<u8> {
    let words = (0_u32..).map(|at| at.wrapping_mul(0x9E37_79B1)).take(FILE_BYTES / 4);
    let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    std::fs::write(path, &bytes).unwrap();
    bytes
}

/// The bytes of a tensor in row-major order, by the definition of strides.
fn row_major(file: &[u8], tensor: &TensorEntry<'_>) -> Vec<u8> {
    let element = to_usize(tensor.dtype.bits().unwrap() / 8);
    let start = to_usize(tensor.extent.start());
    if tensor.strides.is_empty() {
        return file[start..to_usize(tensor.extent.end())].to_vec();
    }
    let count: u64 = tensor.shape.iter().product();
    let mut bytes = Vec::with_capacity(to_usize(count) * element);
    for number in 0..count {
        let mut rest = number;
        let inward = tensor.shape.iter().zip(tensor.strides).rev();
        let at: u64 = inward
            .map(|(len, stride)| {
                let index = rest % len;
                rest /= len;
                index * stride
            })
            .sum();
        bytes.extend_from_slice(&file[start + to_usize(at) * element..][..element]);
    }
    bytes
}

const MIB: u64 = 1 << 20;

/// Every kind of place that a PyTorch file may give a tensor.
fn tensors() -> Vec<Tensor<'static>> {
    use DType::{Bf16, F32, F64, U8};
    vec![
        ("layers.0.plain", F32, &[100, 77], &[], 64),
        ("layers.0.again", F32, &[50, 77], &[], 64), // the first half of the one before
        ("layers.0.odd", F32, &[10, 10], &[], 131),  // inside it, at an odd byte
        ("layers.0.transposed", Bf16, &[300, 500], &[1, 300], MIB),
        ("layers.0.channels_last", F32, &[640, 64, 3, 3], &[576, 1, 192, 64], 2 * MIB + 4),
        ("layers.0.columns", F32, &[1000, 60], &[1000, 1], 6 * MIB), // of 1000
        ("layers.0.rows", U8, &[7, 13], &[13, 1], 9 * MIB),          // row-major after all
        ("layers.1.swapped", Bf16, &[4, 1, 1000, 50], &[50_000, 7, 1, 1000], 12 * MIB),
        ("layers.1.long_columns", F64, &[40, 5000], &[60_000, 1], 14 * MIB),
        ("layers.1.one", F32, &[1, 1], &[9, 4], 34 * MIB + 1),
        ("layers.1.none", F32, &[0, 5], &[1, 9], 34 * MIB + 3),
        ("head", Bf16, &[2000, 1000], &[], 35 * MIB - 2),
    ]
}

fn scattered(folder: &Path) -> (Vec<u8>, Checkpoint) {
    let path = folder.join("file.bin");
    let bytes = file(&path);
    (bytes, checkpoint_of(&path, &tensors()))
}

#[test]
fn every_tensor_is_delivered_row_major() {
    let folder = tempfile::tempdir().unwrap();
    let (bytes, checkpoint) = scattered(folder.path());
    assert_eq!(checkpoint.tensor_count(), tensors().len());
    assert!(checkpoint.find("layers.0.rows").unwrap().strides.is_empty());
    assert!(checkpoint.find("layers.1.one").unwrap().strides.is_empty());
    for io in [IoMode::Auto, IoMode::Buffered, IoMode::Mmap, IoMode::Direct] {
        for (window, budget_bytes) in [(Window::Layers(1), 16 << 20), (Window::All, 64 << 20)] {
            let loader = Loader::builder(Target::Host).io(io).window(window).host_budget(budget_bytes);
            let loader = loader.build().unwrap();
            let mut seen = 0;
            for layer in loader.stream(&checkpoint).unwrap() {
                for tensor in layer.unwrap().tensors() {
                    let expected = row_major(&bytes, &tensor.entry());
                    assert!(tensor.as_bytes().unwrap() == expected, "{} by {io:?}", tensor.name());
                    seen += 1;
                }
            }
            assert_eq!(seen, checkpoint.tensor_count());
        }
    }
}

/// Casts come after the permutation, whether elements become shorter or longer.
#[test]
fn what_is_put_in_order_can_be_cast() {
    let folder = tempfile::tempdir().unwrap();
    let (bytes, checkpoint) = scattered(folder.path());
    let loader = Loader::builder(Target::Host).dtype(FloatType::Bf16).host_budget(16 << 20).build().unwrap();
    let model = loader.load(&checkpoint).unwrap();
    for name in ["layers.0.channels_last", "layers.0.columns", "layers.1.long_columns"] {
        let tensor = model.tensor(name).unwrap();
        let source = row_major(&bytes, &tensor.entry());
        let narrowed: Vec<u8> = match tensor.entry().dtype {
            DType::F64 => {
                let (values, _) = source.as_chunks::<8>();
                values
                    .iter()
                    .flat_map(|&value| half::bf16::from_f64(f64::from_le_bytes(value)).to_le_bytes())
                    .collect()
            }
            _ => {
                let (values, _) = source.as_chunks::<4>();
                values
                    .iter()
                    .flat_map(|&value| half::bf16::from_f32(f32::from_le_bytes(value)).to_le_bytes())
                    .collect()
            }
        };
        let found = tensor.as_bytes().unwrap();
        let differs = |(found, wanted): (&[u8], &[u8])| found != wanted && !is_nan(wanted);
        let different = found.chunks(2).zip(narrowed.chunks(2)).filter(|&pair| differs(pair)).count();
        assert_eq!((found.len(), different), (narrowed.len(), 0), "{name}");
    }
}

/// NaNs of a cast may differ in their payload.
fn is_nan(bytes: &[u8]) -> bool {
    half::bf16::from_le_bytes([bytes[0], bytes[1]]).is_nan()
}

#[test]
fn single_tensors_and_slices_are_row_major_too() {
    let folder = tempfile::tempdir().unwrap();
    let (bytes, checkpoint) = scattered(folder.path());
    let reader = TensorReader::open(&checkpoint).unwrap();
    for tensor in checkpoint.tensors() {
        let expected = row_major(&bytes, &tensor);
        let mut found = vec![0; expected.len()];
        reader.read(tensor.id, 0, &mut found).unwrap();
        assert!(found == expected, "{}", tensor.name);
        // Any part of it, wherever it begins and ends.
        let (start, end) = (expected.len() / 3 + 1, expected.len() * 2 / 3);
        if start < end {
            let mut found = vec![0; end - start];
            reader.read(tensor.id, to_u64(start), &mut found).unwrap();
            assert!(found == expected[start..end], "a part of {}", tensor.name);
        }
    }
}

#[test]
fn names_of_the_same_bytes_are_one_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file.bin");
    std::fs::write(&path, [7; 4000]).unwrap();
    let square: &[u64] = &[10, 10];
    let checkpoint = checkpoint_of(
        &path,
        &[
            ("wte", DType::F32, square, &[], 100),
            ("lm_head", DType::F32, square, &[], 100),
            ("a_view", DType::F32, &[100], &[], 100),
            ("transposed", DType::F32, square, &[1, 10], 100),
        ],
    );
    assert_eq!(checkpoint.tensor_count(), 3);
    assert_eq!(checkpoint.tensor_bytes(), 1200);
    let wte = checkpoint.find("wte").unwrap();
    assert_eq!(checkpoint.find("lm_head"), Some(wte), "the first name in the file is the tensor's");
    assert_eq!(checkpoint.aliases().collect::<Vec<_>>(), [("lm_head", wte.id)]);
    let model = Loader::builder(Target::Host).build().unwrap().load(&checkpoint).unwrap();
    assert_eq!(model.tensor("lm_head").unwrap().name(), "wte");
    let aliases: Vec<&str> = model.layers().flat_map(|layer| layer.aliases()).collect();
    assert_eq!(aliases, ["lm_head"]);
}

#[test]
fn elements_that_are_scattered_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file.bin");
    std::fs::write(&path, [7; 40_000]).unwrap();
    // Transposed, and every second column left out.
    let checkpoint = checkpoint_of(&path, &[("w", DType::F32, &[10, 10], &[2, 40], 0)]);
    let error = Loader::builder(Target::Host).build().unwrap().plan(&checkpoint).unwrap_err();
    assert!(
        matches!(&error, LoadError::Plan(PlanError::Scattered { tensor, .. }) if tensor == "w"),
        "{error}"
    );
    assert!(error.to_string().contains("save it with tensor.contiguous()"), "{error}");
}

/// A unit needs a slot of its own and another one: the refusal says how much.
#[test]
fn large_permutations_need_large_slots() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file.bin");
    std::fs::write(&path, vec![7; 8 << 20]).unwrap();
    let checkpoint = checkpoint_of(&path, &[("w", DType::F32, &[2048, 1024], &[1, 2048], 0)]);
    let loader = |budget_bytes| Loader::builder(Target::Host).host_budget(budget_bytes).build().unwrap();
    let error = loader(64 << 20).plan(&checkpoint).unwrap_err();
    let LoadError::Plan(PlanError::BudgetTooSmall { smallest_bytes, .. }) = error else { panic!("{error}") };
    assert!(loader(smallest_bytes).load(&checkpoint).is_ok());
}
