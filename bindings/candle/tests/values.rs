//! Every stored type as every requested type, in pieces and whole: the same tensors as candle's own
//! loader, or a refusal where it refuses.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "any bytes will do"
)]

use std::path::Path;

use candle_core::{DType, Device, Shape};
use candle_nn::VarBuilder;
use common::{bits, candles_own, numbers};
use onelayer::Checkpoint;
use onelayer_candle::CheckpointBackend;
use safetensors::Dtype as Stored;
use safetensors::tensor::TensorView;

mod common;

const STORED: [Stored; 17] = [
    Stored::BOOL,
    Stored::U8,
    Stored::I8,
    Stored::U16,
    Stored::I16,
    Stored::U32,
    Stored::I32,
    Stored::I64,
    Stored::U64,
    Stored::F16,
    Stored::BF16,
    Stored::F32,
    Stored::F64,
    Stored::F8_E4M3,
    Stored::F8_E5M2,
    Stored::F8_E8M0,
    Stored::F4,
];

const WANTED: [DType; 11] = [
    DType::U8,
    DType::U32,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::BF16,
    DType::F16,
    DType::F32,
    DType::F64,
    DType::F8E4M3,
    DType::F4,
];

/// Bytes of `count` elements: numbers for float types, to avoid NaN, else any bytes.
fn elements(stored: Stored, count: usize, seed: u64) -> Vec<u8> {
    let values = numbers(count, seed).into_iter().map(|value| value * 300.0);
    match stored {
        Stored::F64 => values.flat_map(f64::to_le_bytes).collect(),
        Stored::F32 => values.flat_map(|value| half::f16::from_f64(value).to_f32().to_le_bytes()).collect(),
        Stored::F16 => values.flat_map(|value| half::f16::from_f64(value).to_le_bytes()).collect(),
        Stored::BF16 => values.flat_map(|value| half::bf16::from_f64(value).to_le_bytes()).collect(),
        // Neither of its two NaN: 0x7f and 0xff.
        Stored::F8_E4M3 => {
            let any =
                numbers(count, seed).into_iter().map(|value| i8::try_from((value * 126.0).round() as i32));
            any.map(|value| value.unwrap().unsigned_abs()).collect()
        }
        other => {
            let len = (count * other.bitsize()).div_ceil(8);
            numbers(len, seed).into_iter().map(|value| (value * 100.0 + 128.0) as u8).collect()
        }
    }
}

/// A file with a tensor of each stored type in a few shapes.
fn write(directory: &Path) -> Vec<(String, Vec<usize>)> {
    let shapes: [&[usize]; 5] = [&[], &[0, 3], &[2], &[130, 70], &[3, 4, 5, 6]];
    let mut named = Vec::new();
    let mut data = Vec::new();
    for stored in STORED {
        for shape in shapes {
            let count = shape.iter().product();
            if count * stored.bitsize() % 8 != 0 {
                continue;
            }
            let name = format!("{stored:?}.{shape:?}");
            data.push(elements(stored, count, u64::try_from(named.len()).unwrap()));
            named.push((name, stored, shape.to_vec()));
        }
    }
    let views = named.iter().zip(&data).map(|((name, stored, shape), bytes)| {
        (name, TensorView::new(*stored, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &directory.join("model.safetensors")).unwrap();
    named.into_iter().map(|(name, _, shape)| (name, shape)).collect()
}

#[test]
fn every_type_becomes_what_candle_makes_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let named = write(folder.path());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let (mut same, mut refused) = (0, 0);
    for wanted in WANTED {
        let theirs = candles_own(folder.path(), wanted);
        // With the smallest staging, each tensor of 9100 elements has several pieces.
        for staging_bytes in [0, 1 << 30] {
            let backend = CheckpointBackend::new(&checkpoint).unwrap().staging(staging_bytes);
            let ours = backend.into_var_builder(wanted, &Device::Cpu);
            for (name, shape) in &named {
                if wanted == DType::F64 && name.starts_with("F8_E4M3.") {
                    // Another test covers these: candle's cast of them recurses until the stack
                    // overflows.
                    continue;
                }
                match (read(&ours, name, shape), read(&theirs, name, shape)) {
                    (Ok(found), Ok(expected)) => {
                        assert!(found == expected, "{name} as {wanted:?} differs");
                        same += 1;
                    }
                    (Err(_), Err(_)) => refused += 1,
                    (found, expected) => {
                        panic!("{name} as {wanted:?}: we {:?}, candle {:?}", found.err(), expected.err());
                    }
                }
            }
        }
    }
    // The test compared something: neither loader refused everything.
    assert!(same > 900 && refused > 200, "{same} the same, {refused} refused");
}

/// Shape and bits; another test compares opaque types.
fn read(weights: &VarBuilder<'_>, name: &str, shape: &[usize]) -> candle_core::Result<(Shape, Vec<u8>)> {
    let tensor = weights.get(shape, name)?;
    assert_eq!(tensor.dtype(), weights.dtype());
    let bits = if tensor.dtype() == DType::F4 { Vec::new() } else { bits(&tensor) };
    Ok((tensor.shape().clone(), bits))
}

/// Every 8-bit float but the two NaN, against single precision, which is exact too.
#[test]
fn eight_bit_floats_widen_to_double_precision() {
    let folder = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..=u8::MAX).filter(|byte| byte & 0x7f != 0x7f).collect();
    let view = TensorView::new(Stored::F8_E4M3, vec![bytes.len()], &bytes).unwrap();
    safetensors::serialize_to_file([("t", view)], None, &folder.path().join("model.safetensors")).unwrap();
    let values = |dtype| {
        let weights = onelayer_candle::var_builder(folder.path(), dtype, &Device::Cpu).unwrap();
        let tensor = weights.get(bytes.len(), "t").unwrap();
        assert_eq!(tensor.dtype(), dtype);
        tensor.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap()
    };
    let wide = values(DType::F64);
    assert_eq!(wide, values(DType::F32));
    assert_eq!(wide.iter().copied().fold(0.0, f64::max), 448.0, "the largest there is");
}

#[test]
fn opaque_elements_keep_their_bytes() {
    use candle_core::{CpuStorage, Storage};
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let stored = std::fs::read(folder.path().join("model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&stored).unwrap();
    let ours = onelayer_candle::var_builder(folder.path(), DType::F4, &Device::Cpu).unwrap();
    for name in ["F4.[130, 70]", "F4.[2]"] {
        let expected = stored.tensor(name).unwrap();
        let tensor = ours.get(expected.shape(), name).unwrap();
        let (storage, _) = tensor.storage_and_layout();
        match &*storage {
            Storage::Cpu(CpuStorage::F4(bytes)) => assert!(bytes == expected.data(), "{name}"),
            _ => panic!("{name} is something else"),
        }
    }
}

#[test]
fn several_threads_ask_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let named = write(folder.path());
    let theirs = candles_own(folder.path(), DType::F32);
    let ours = onelayer_candle::var_builder(folder.path(), DType::F32, &Device::Cpu).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for (name, shape) in &named {
                    let (found, expected) = (read(&ours, name, shape), read(&theirs, name, shape));
                    assert!(found.ok() == expected.ok(), "{name}");
                }
            });
        }
    });
}
