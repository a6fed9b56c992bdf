//! GGUF files through the loader: layers by their names, blocks as stored, and floats from blocks
//! that are cut at every place.

#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use onelayer::checkpoint::FileFormat;
use onelayer::plan::FloatType;
use onelayer::{BlockType, Checkpoint, DType, Layers, Loader, Target, Window};
use onelayer_testing::gguf_file::{GgufFile, Value, text_bytes};
use onelayer_testing::repository;

const KINDS: [(u32, BlockType); 9] = [
    (2, BlockType::Q4_0),
    (8, BlockType::Q8_0),
    (10, BlockType::Q2_K),
    (12, BlockType::Q4_K),
    (14, BlockType::Q6_K),
    (15, BlockType::Q8_K),
    (19, BlockType::IQ1_S),
    (39, BlockType::MXFP4),
    (40, BlockType::NVFP4),
];

fn written(folder: &Path, bytes: &[u8]) -> PathBuf {
    let path = folder.join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn layers_are_found_by_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = GgufFile::new().key("general.architecture", Value::text("llama"));
    let mut add = |name: &str, dims: &[u64]| {
        let bytes = usize::try_from(dims.iter().product::<u64>()).unwrap();
        file = file.clone().tensor(name, dims, 24, bytes);
    };
    add("output_norm.weight", &[64]);
    add("output.weight", &[64, 1000]);
    for layer in [10, 1, 0, 11, 2] {
        add(&format!("blk.{layer}.attn_q.weight"), &[64, 64]);
        add(&format!("blk.{layer}.ffn_down.weight"), &[128, 64]);
        add(&format!("blk.{layer}.attn_norm.weight"), &[64]);
    }
    add("token_embd.weight", &[64, 1000]);
    let checkpoint = Checkpoint::open(written(folder.path(), &file.bytes())).unwrap();
    let layers = Layers::group(&checkpoint).unwrap();
    let names: Vec<&str> = layers.as_slice().iter().map(|layer| layer.id.as_str()).collect();
    assert_eq!(names.first(), Some(&"token_embd"), "{names:?}");
    assert_eq!(names.last(), Some(&"output"), "{names:?}");
    let blocks: Vec<&&str> = names.iter().filter(|name| name.starts_with("blk.")).collect();
    assert_eq!(blocks, [&"blk.0", &"blk.1", &"blk.2", &"blk.10", &"blk.11"], "{names:?}");
    assert!(
        layers
            .as_slice()
            .iter()
            .filter(|layer| layer.id.as_str().starts_with("blk."))
            .all(|layer| layer.tensors.len() == 3)
    );
}

#[test]
fn what_a_header_says_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = [text_bytes(b"one"), text_bytes(b"two")].concat();
    for (version, is_big_endian) in [(2, false), (3, false), (3, true)] {
        let mut file = GgufFile { version, is_big_endian, ..GgufFile::new() };
        if !is_big_endian {
            file = file
                .key("general.architecture", Value::text("llama"))
                .key("llama.block_count", Value::u32(32))
                .key("general.alignment", Value::u32(64))
                .key("tokenizer.chat_template", Value::text(&"x".repeat(5000)))
                .key("tokenizer.ggml.tokens", Value::array(8, 2, &tokens));
            file.alignment = 64;
        }
        file = file.tensor("a", &[5, 3, 2], 24, 30).tensor("b", &[7], 24, 7);
        let checkpoint = Checkpoint::open(written(folder.path(), &file.bytes())).unwrap();
        let shard = &checkpoint.shards()[0];
        assert_eq!(shard.format, FileFormat::Gguf);
        let a = checkpoint.find("a").unwrap();
        // Outermost first, as in torch.
        assert_eq!((a.shape, a.dtype), (&[2, 3, 5][..], DType::I8));
        if !is_big_endian {
            let texts: Vec<(&str, &str)> = shard.metadata.iter().collect();
            assert_eq!(texts, [("general.architecture", "llama"), ("llama.block_count", "32")]);
            assert!(a.extent.start().is_multiple_of(64));
        }
    }
}

/// Tensors at odd places: offsets that are not aligned are valid, and so are gaps.
#[test]
fn unaligned_offsets_and_gaps_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = GgufFile::new().tensor_at("b", &[50], 24, 101).tensor_at("a", &[3], 24, 5);
    file.data_bytes = 200;
    let checkpoint = Checkpoint::open(written(folder.path(), &file.bytes())).unwrap();
    let starts: Vec<u64> = checkpoint.tensors().map(|tensor| tensor.extent.start()).collect();
    assert_eq!(starts[1] - starts[0], 96);
}

/// Blocks of a type, and the bits of their elements in single precision, by gguf-py.
fn fixture(block: BlockType) -> (Vec<u8>, Vec<u8>) {
    let file = std::fs::read(repository().join("fixtures/gguf_blocks.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    let of = |part: &str| file.tensor(&format!("{block}.{part}")).unwrap().data().to_vec();
    (of("blocks"), of("floats"))
}

fn loaded(path: &Path, budget_bytes: u64, dtype: Option<FloatType>) -> BTreeMap<String, (DType, Vec<u8>)> {
    let mut builder = Loader::builder(Target::Host).host_budget(budget_bytes).window(Window::Layers(1));
    if let Some(dtype) = dtype {
        builder = builder.dtype(dtype);
    }
    let checkpoint = Checkpoint::open(path).unwrap();
    let mut found = BTreeMap::new();
    for layer in builder.build().unwrap().stream(&checkpoint).unwrap() {
        for tensor in layer.unwrap().tensors() {
            let bytes = tensor.as_bytes().unwrap().to_vec();
            found.insert(tensor.name().to_owned(), (tensor.dtype(), bytes));
        }
    }
    found
}

/// Several reads for each tensor, with the smallest slots, at places of every phase.
#[test]
fn blocks_are_whole_in_every_read() {
    let folder = tempfile::tempdir().unwrap();
    let (mut file, mut data, mut expected) = (GgufFile::new(), Vec::new(), BTreeMap::new());
    for (at, (kind, block)) in KINDS.into_iter().enumerate() {
        let (blocks, floats) = fixture(block);
        // About 3 MiB of single precision.
        let times = (3 << 20) / floats.len() + 1;
        let name = format!("blk.0.t{at}");
        let elements = (times * floats.len() / 4) as u64;
        // Odd places.
        data.resize(data.len() + 1 + at * 37, 0xEE);
        file = file.tensor_at(&name, &[elements], kind, data.len() as u64);
        data.extend(blocks.repeat(times));
        expected.insert(name, (DType::Block(block), blocks.repeat(times), floats.repeat(times)));
    }
    let mut bytes = file.header();
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.extend(data);
    let path = written(folder.path(), &bytes);
    for budget_mib in [5, 64] {
        let stored = loaded(&path, budget_mib << 20, None);
        let singles = loaded(&path, budget_mib << 20, Some(FloatType::F32));
        let halves = loaded(&path, budget_mib << 20, Some(FloatType::Bf16));
        for (name, (dtype, blocks, floats)) in &expected {
            assert!(stored[name] == (*dtype, blocks.clone()), "{name}, {dtype}");
            assert!(singles[name] == (DType::F32, floats.clone()), "{name}, {dtype}");
            let rounded = |bytes: &[u8]| {
                half::bf16::from_f32(f32::from_le_bytes(bytes.try_into().unwrap())).to_le_bytes()
            };
            let rounded: Vec<u8> = floats.chunks(4).flat_map(rounded).collect();
            assert!(halves[name] == (DType::Bf16, rounded), "{name}, {dtype}");
        }
    }
}
