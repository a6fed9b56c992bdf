//! PyTorch and GGUF files: what the adapter serves, and what candle reads after a conversion, is
//! what candle's own readers of these formats give.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use common::bits;
use onelayer::convert::Conversion;
use onelayer::{FloatType, OpenOptions, TensorNames};
use onelayer_testing::random_bytes;
use onelayer_testing::torch_file::{Pickle, View, archive};

mod common;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// What candle's reader of GGUF files makes of each tensor, in single precision.
fn by_candle(path: &Path) -> Vec<(String, Tensor)> {
    let mut file = File::open(path).unwrap();
    let content = Content::read(&mut file).unwrap();
    let mut read = |name: &String| {
        let tensor = content.tensor(&mut file, name, &Device::Cpu).unwrap();
        (name.clone(), tensor.dequantize(&Device::Cpu).unwrap())
    };
    content.tensor_infos.keys().map(&mut read).collect()
}

/// All tensors of a converted directory, by candle's loader.
fn converted(source: &Path, settings: Conversion) -> HashMap<String, Tensor> {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("target");
    assert!(settings.prepare(source, &target).unwrap().run().unwrap().is_complete);
    let mut tensors = HashMap::new();
    for entry in fs::read_dir(&target).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ending| ending == "safetensors") {
            tensors.extend(candle_core::safetensors::load(path, &Device::Cpu).unwrap());
        }
    }
    tensors
}

/// A `pytorch_model.bin`, as `torch.save` writes it.
fn pytorch_model(path: &Path) {
    let kinds = [("FloatStorage", 4), ("HalfStorage", 2), ("BFloat16Storage", 2), ("LongStorage", 8)];
    let (rows, columns) = (6, 10);
    let mut pickle = Pickle::new();
    pickle.raw(b"}");
    let mut data = Vec::new();
    for (number, (class, bytes)) in kinds.into_iter().enumerate() {
        for (part, shape, strides) in
            [("rows", [rows, columns], [columns, 1]), ("turned", [columns, rows], [1, columns])]
        {
            let view = View { offset: 0, shape: &shape, strides: &strides };
            pickle.text(&format!("layers.{number}.{part}"));
            pickle.tensor(class, &data.len().to_string(), rows * columns, &view).raw(b"s");
            data.push(random_bytes(60 * bytes, u64::try_from(data.len()).unwrap()));
        }
    }
    let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
    fs::write(path, archive(&pickle.end(), &data).0).unwrap();
}

#[test]
fn a_pytorch_file_is_served_and_converted_as_candle_reads_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pytorch_model.bin");
    pytorch_model(&path);
    let theirs = candle_core::pickle::read_all(&path).unwrap();
    assert_eq!(theirs.len(), 8);
    let served = onelayer_candle::var_builder(folder.path(), DType::F32, &Device::Cpu).unwrap();
    let written = converted(&path, Conversion::new());
    for (name, expected) in theirs {
        let found = served.get_unchecked_dtype(&name, expected.dtype()).unwrap();
        assert_eq!(bits(&found), bits(&expected), "{name}");
        assert_eq!(bits(&written[&name]), bits(&expected), "{name}, converted");
    }
}

#[test]
fn a_gguf_file_becomes_what_candle_makes_of_it() {
    let path = fixture("gguf/tiny.gguf");
    let served = onelayer_candle::var_builder(&path, DType::F32, &Device::Cpu).unwrap();
    let written = converted(&path, Conversion::new().dtype(FloatType::F32));
    let (mut floats, mut blocks) = (0, 0);
    for (name, expected) in by_candle(&path) {
        assert_eq!(bits(&written[&name]), bits(&expected), "{name}, converted");
        match served.get_unchecked(&name) {
            Ok(tensor) => {
                floats += 1;
                assert_eq!(bits(&tensor), bits(&expected), "{name}");
            }
            Err(error) => {
                blocks += 1;
                let text = error.to_string();
                assert!(text.contains(&name) && text.contains("Q8_0"), "{text}");
            }
        }
    }
    assert_eq!((floats, blocks), (4, 8));
}

/// A GGUF file of one tensor.
fn gguf(kind: u32, rows: usize, columns: usize, data: &[u8]) -> Vec<u8> {
    let text = |text: &str| [&u64::try_from(text.len()).unwrap().to_le_bytes()[..], text.as_bytes()].concat();
    let mut file = [&b"GGUF\x03\0\0\0"[..], &1_u64.to_le_bytes(), &1_u64.to_le_bytes()].concat();
    file.extend([text("general.architecture"), 8_u32.to_le_bytes().to_vec(), text("qwen2")].concat());
    file.extend([text("blk.0.attn_q.weight"), 2_u32.to_le_bytes().to_vec()].concat());
    for len in [columns, rows] {
        file.extend(u64::try_from(len).unwrap().to_le_bytes());
    }
    file.extend([&kind.to_le_bytes()[..], &0_u64.to_le_bytes()].concat());
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(data);
    file
}

/// Blocks of random bytes, under the name that the model of candle-transformers asks for.
#[test]
fn blocks_become_what_candle_makes_of_them() {
    let file = fs::read(fixture("gguf_blocks.safetensors")).unwrap();
    let known = safetensors::SafeTensors::deserialize(&file).unwrap();
    let kinds = [(2, "Q4_0"), (3, "Q4_1"), (6, "Q5_0"), (7, "Q5_1"), (8, "Q8_0")];
    let k_kinds = [(10, "Q2_K"), (11, "Q3_K"), (12, "Q4_K"), (13, "Q5_K"), (14, "Q6_K")];
    for (kind, name) in kinds.into_iter().chain(k_kinds) {
        let blocks = known.tensor(&format!("{name}.blocks")).unwrap();
        let rows = blocks.shape()[0];
        let columns = if kind < 10 { 32 } else { 256 };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, gguf(kind, rows, columns, blocks.data())).unwrap();
        let (_, expected) = by_candle(&path).remove(0);
        let settings = Conversion::new().dtype(FloatType::F32);
        let names = OpenOptions::new().names(TensorNames::HuggingFace);
        let written = converted(&path, settings.open_options(names));
        let found = &written["model.layers.0.self_attn.q_proj.weight"];
        assert_eq!(bits(found), bits(&expected), "{name}");
    }
}
