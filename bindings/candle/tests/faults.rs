//! Errors name the tensor, the file and the reason: wrong names, shapes, types, changed files.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::HashMap;

use candle_core::{DType, Device, Error, Tensor};
use candle_nn::VarBuilder;
use common::{fixture, numbers};
use onelayer::Checkpoint;
use onelayer_candle::CheckpointBackend;

mod common;

/// The error itself, without the backtrace that candle may wrap it in.
fn bare(error: Error) -> Error {
    match error {
        Error::WithBacktrace { inner, .. } => bare(*inner),
        other => other,
    }
}

fn llama(dtype: DType) -> VarBuilder<'static> {
    onelayer_candle::var_builder(fixture("llama"), dtype, &Device::Cpu).unwrap()
}

#[test]
fn a_name_that_is_not_there() {
    let weights = llama(DType::BF16);
    assert!(weights.contains_tensor("model.norm.weight"));
    for name in ["model.norm", "model.norm.weigh", ""] {
        assert!(!weights.contains_tensor(name));
        let refused = bare(weights.get(64, name).unwrap_err());
        assert!(matches!(&refused, Error::CannotFindTensor { path } if path == name), "{refused}");
        let refused = bare(weights.get_unchecked(name).unwrap_err());
        assert!(matches!(&refused, Error::CannotFindTensor { path } if path == name), "{refused}");
    }
}

#[test]
fn a_shape_that_is_another() {
    let refused = bare(llama(DType::F32).get((64, 1), "model.norm.weight").unwrap_err());
    let Error::UnexpectedShape { msg, expected, got } = refused else { panic!("{refused}") };
    assert_eq!(msg, "shape mismatch for model.norm.weight");
    assert_eq!((expected.dims(), got.dims()), (&[64, 1][..], &[64][..]));
}

#[test]
fn a_path_that_is_not_there() {
    let refused = onelayer_candle::var_builder("/nowhere/at/all", DType::F32, &Device::Cpu).err().unwrap();
    assert!(refused.to_string().contains("/nowhere/at/all"), "{refused}");
}

#[test]
fn a_type_that_candle_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let header = r#"{"flag":{"dtype":"BOOL","shape":[8],"data_offsets":[0,8]}}"#;
    let mut file = u64::try_from(header.len()).unwrap().to_le_bytes().to_vec();
    file.extend(header.bytes().chain([1; 8]));
    std::fs::write(&path, file).unwrap();
    let weights = onelayer_candle::var_builder(&path, DType::U8, &Device::Cpu).unwrap();
    let refused = weights.get(8, "flag").unwrap_err().to_string();
    for part in ["\"flag\"", "BOOL", path.to_str().unwrap()] {
        assert!(refused.contains(part), "{refused}");
    }
}

/// One tensor of a million numbers, in a file that is truncated or rewritten once it is open.
#[test]
fn a_file_that_changes() {
    type Change = fn(&std::path::Path);
    let changes: [(&str, Change); 2] = [
        ("cut off", |path| {
            let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
            file.set_len(file.metadata().unwrap().len() / 2).unwrap();
        }),
        ("written anew", |path| {
            let bytes = std::fs::read(path).unwrap();
            // Long enough for a new modification time.
            std::thread::sleep(std::time::Duration::from_millis(20));
            std::fs::write(path, bytes).unwrap();
        }),
    ];
    for (what, change) in changes {
        for wanted in [DType::F32, DType::BF16] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("model.safetensors");
            let values = numbers(1 << 20, 7);
            let tensor =
                Tensor::from_vec(values, 1 << 20, &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
            candle_core::safetensors::save(&HashMap::from([("big".to_owned(), tensor)]), &path).unwrap();
            let checkpoint = Checkpoint::open(&path).unwrap();
            let weights = CheckpointBackend::new(&checkpoint).unwrap().into_var_builder(wanted, &Device::Cpu);
            assert!(weights.get(1 << 20, "big").is_ok());
            change(&path);
            let refused =
                weights.get(1 << 20, "big").err().unwrap_or_else(|| panic!("{what} was not noticed"));
            let told = refused.to_string();
            assert!(told.contains("\"big\"") && told.contains(path.to_str().unwrap()), "{what}: {told}");
        }
    }
}
