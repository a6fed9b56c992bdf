//! Small checkpoints of many layouts: what a conversion has to bring through bit by bit.
//!
//! Every layout comes with what is in it, told without the library: names, types, shapes and bytes
//! of its tensors, and its side files. All bytes are those of a seeded generator, so that a layout
//! is the same on every run and no two of its tensors are alike unless it says so.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    reason = "a test that cannot go on panics"
)]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::{TestTensor, random_bytes, write_file, write_sharded};

/// A checkpoint on disk, and what is in it.
#[derive(Debug)]
pub struct Layout {
    /// What is special about it.
    pub name: &'static str,
    /// What to open.
    pub path: PathBuf,
    /// Its tensors by full name, a component's prefix included.
    pub tensors: BTreeMap<String, TestTensor>,
    /// What has to go along: paths below the directory, and bytes.
    pub side_files: BTreeMap<String, Vec<u8>>,
}

/// How a layout is written below its folder.
type Writer = fn(&mut Draft);

const WRITERS: [(&str, Writer); 19] = [
    ("tied head", tied_head),
    ("experts", experts),
    ("encoder and decoder", encoder_and_decoder),
    ("pipeline", pipeline),
    ("every type", every_type),
    ("packed types", packed_types),
    ("nothing in them", nothing_in_them),
    ("quantized", quantized),
    ("odd names", odd_names),
    ("many shards, unordered", many_shards),
    ("layers across shards", layers_across_shards),
    ("metadata and odd header", metadata_and_odd_header),
    ("file of another name", file_of_another_name),
    ("wide floats", wide_floats),
    ("several slots", several_slots),
    ("numbered, no index", numbered_without_index),
    ("links of a cache", links_of_a_cache),
    ("one tensor", one_tensor),
    ("side files", side_files),
];

/// All layouts, each in a folder of its own below `root`.
pub fn all(root: &Path) -> Vec<Layout> {
    WRITERS.iter().map(|&(name, _)| one(root, name)).collect()
}

/// One layout.
pub fn one(root: &Path, name: &str) -> Layout {
    let position = WRITERS.iter().position(|(known, _)| *known == name).expect("a layout of that name");
    let (name, writer) = WRITERS[position];
    let folder = root.join(format!("layout-{position}"));
    fs::create_dir(&folder).unwrap();
    let seed = 1000 * (position as u64 + 1);
    let mut draft = Draft { path: folder.clone(), folder, seed, ..Draft::default() };
    writer(&mut draft);
    let Draft { path, tensors, side_files, .. } = draft;
    Layout { name, path, tensors, side_files }
}

/// A layout on its way.
#[derive(Default)]
struct Draft {
    folder: PathBuf,
    path: PathBuf,
    tensors: BTreeMap<String, TestTensor>,
    side_files: BTreeMap<String, Vec<u8>>,
    /// Of the next tensor.
    seed: u64,
}

impl Draft {
    /// A tensor of random bytes.
    fn tensor(&mut self, name: impl Into<String>, dtype: &'static str, shape: &[u64]) -> TestTensor {
        self.seed += 1;
        let len = shape.iter().product::<u64>() * bits(dtype) / 8;
        TestTensor {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
            bytes: random_bytes(len as usize, self.seed),
        }
    }

    fn tensors(&mut self, list: &[(&str, &'static str, &[u64])]) -> Vec<TestTensor> {
        list.iter().map(|&(name, dtype, shape)| self.tensor(name, dtype, shape)).collect()
    }

    /// Takes note of tensors that are written below `prefix`.
    fn keep(&mut self, prefix: &str, tensors: &[TestTensor]) {
        for tensor in tensors {
            let known = self.tensors.insert(format!("{prefix}{}", tensor.name), tensor.clone());
            assert!(known.is_none(), "{:?} stands twice", tensor.name);
        }
    }

    fn file(&mut self, name: &str, tensors: &[TestTensor]) {
        self.keep("", tensors);
        write_file(&self.folder.join(name), tensors, 0);
    }

    fn sharded(&mut self, shards: &[Vec<TestTensor>]) {
        shards.iter().for_each(|shard| self.keep("", shard));
        write_sharded(&self.folder, shards);
    }

    fn side_file(&mut self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, &bytes).unwrap();
        self.side_files.insert(name.to_owned(), bytes.as_ref().to_vec());
    }

    /// A decoder of three small layers, in the order of a file.
    fn decoder(&mut self, dtype: &'static str) -> Vec<TestTensor> {
        let mut list = vec![self.tensor("model.embed_tokens.weight", dtype, &[48, 32])];
        for layer in 0..3 {
            let parts: [(&str, &[u64]); 4] = [
                ("input_layernorm.weight", &[32]),
                ("mlp.down_proj.weight", &[32, 40]),
                ("mlp.up_proj.weight", &[40, 32]),
                ("self_attn.q_proj.weight", &[32, 32]),
            ];
            for (part, shape) in parts {
                list.push(self.tensor(format!("model.layers.{layer}.{part}"), dtype, shape));
            }
        }
        list.push(self.tensor("model.norm.weight", dtype, &[32]));
        list
    }
}

/// Bits of one element, as the format has them.
pub fn bits(dtype: &str) -> u64 {
    match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" => 8,
        name if name.starts_with("F8_") => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "C64" | "F64" | "I64" | "U64" => 64,
        other => panic!("no type {other}"),
    }
}

/// The head is stored again, as a copy of the embedding, and the configuration says that they are
/// one.
fn tied_head(draft: &mut Draft) {
    let mut tensors = draft.decoder("BF16");
    tensors.push(TestTensor { name: "lm_head.weight".to_owned(), ..tensors[0].clone() });
    draft.file("model.safetensors", &tensors);
    draft.side_file("config.json", r#"{"model_type": "llama", "tie_word_embeddings": true}"#);
}

/// A dense layer, then layers of experts with a router and an expert that all share.
fn experts(draft: &mut Draft) {
    let mut shards = vec![draft.decoder("BF16"), Vec::new()];
    for layer in 3..5 {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        shards[1].push(draft.tensor(name("input_layernorm.weight"), "BF16", &[32]));
        shards[1].push(draft.tensor(name("mlp.gate.weight"), "F32", &[12, 32]));
        shards[1].push(draft.tensor(name("mlp.shared_expert.up_proj.weight"), "BF16", &[24, 32]));
        // As files are sorted: 10 and 11 before 2.
        for expert in [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9] {
            for (part, shape) in [("down_proj", [32, 16]), ("gate_proj", [16, 32]), ("up_proj", [16, 32])] {
                let name = name(&format!("mlp.experts.{expert}.{part}.weight"));
                shards[1].push(draft.tensor(name, "BF16", &shape));
            }
        }
        shards[1].push(draft.tensor(name("self_attn.q_proj.weight"), "BF16", &[32, 32]));
    }
    shards[1].push(draft.tensor("lm_head.weight", "BF16", &[48, 32]));
    draft.sharded(&shards);
    draft.side_file("config.json", r#"{"model_type": "qwen2_moe", "num_experts": 12}"#);
}

/// Two stacks, and what both share.
fn encoder_and_decoder(draft: &mut Draft) {
    let mut tensors = Vec::new();
    for (stack, layers) in [("decoder", 3), ("encoder", 2)] {
        for layer in 0..layers {
            let mut parts =
                vec!["layer.0.SelfAttention.q", "layer.0.layer_norm", "layer.1.DenseReluDense.wi"];
            if stack == "decoder" {
                parts.push("layer.1.EncDecAttention.q");
            }
            for part in parts {
                let shape: &[u64] = if part.ends_with("norm") { &[24] } else { &[24, 24] };
                tensors.push(draft.tensor(format!("{stack}.block.{layer}.{part}.weight"), "F32", shape));
            }
        }
        tensors.push(draft.tensor(format!("{stack}.final_layer_norm.weight"), "F32", &[24]));
    }
    tensors.push(draft.tensor("lm_head.weight", "F32", &[40, 24]));
    tensors.push(draft.tensor("shared.weight", "F32", &[40, 24]));
    draft.file("model.safetensors", &tensors);
    draft.side_file("config.json", r#"{"model_type": "t5", "tie_word_embeddings": false}"#);
    draft.side_file("spiece.model", random_bytes(5000, draft.seed));
}

/// A pipeline: two components with weights, one of them sharded, and two without.
fn pipeline(draft: &mut Draft) {
    let mut blocks = draft.tensors(&[("pos_embed.proj.weight", "F16", &[16, 4, 2, 2])]);
    for block in 0..4 {
        for part in ["attn.to_q.weight", "ff.net.2.weight"] {
            blocks.push(draft.tensor(format!("transformer_blocks.{block}.{part}"), "F16", &[16, 16]));
        }
    }
    let folder = draft.folder.join("transformer");
    fs::create_dir(&folder).unwrap();
    let mut map = serde_json::Map::new();
    let (first, second) = blocks.split_at(5);
    for (number, shard) in [(1, first), (2, second)] {
        let name = format!("diffusion_pytorch_model-{number:05}-of-00002.safetensors");
        write_file(&folder.join(&name), shard, number);
        map.extend(shard.iter().map(|tensor| (tensor.name.clone(), name.clone().into())));
    }
    let total: usize = blocks.iter().map(|tensor| tensor.bytes.len()).sum();
    let index = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": map });
    fs::write(folder.join("diffusion_pytorch_model.safetensors.index.json"), index.to_string()).unwrap();
    draft.keep("transformer/", &blocks);

    let vae = draft.tensors(&[
        ("decoder.up_blocks.0.resnets.0.conv1.weight", "F32", &[8, 4, 3, 3]),
        ("decoder.up_blocks.1.resnets.0.conv1.weight", "F32", &[8, 4, 3, 3]),
        ("post_quant_conv.bias", "F32", &[5]),
    ]);
    fs::create_dir(draft.folder.join("vae")).unwrap();
    write_file(&draft.folder.join("vae/diffusion_pytorch_model.safetensors"), &vae, 1);
    draft.keep("vae/", &vae);

    draft.side_file(
        "model_index.json",
        r#"{"_class_name": "XPipeline", "transformer": ["diffusers", "X"], "vae": ["diffusers", "Y"],
            "scheduler": ["diffusers", "Z"], "tokenizer": ["transformers", "T"], "safety_checker": [null, null]}"#,
    );
    for name in ["transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json"] {
        draft.side_file(name, format!(r#"{{"_class_name": "{name}"}}"#));
    }
    draft.side_file("tokenizer/vocab.txt", "a\nb\n");
}

/// Every type of the format whose elements are whole bytes, in every layer.
fn every_type(draft: &mut Draft) {
    const TYPES: [&str; 19] = [
        "BOOL",
        "U8",
        "I8",
        "F8_E5M2",
        "F8_E4M3",
        "F8_E8M0",
        "F8_E4M3FNUZ",
        "F8_E5M2FNUZ",
        "I16",
        "U16",
        "F16",
        "BF16",
        "I32",
        "U32",
        "F32",
        "C64",
        "F64",
        "I64",
        "U64",
    ];
    let mut tensors = Vec::new();
    for layer in 0..3 {
        for dtype in TYPES {
            let mut tensor = draft.tensor(format!("h.{layer}.{}", dtype.to_lowercase()), dtype, &[3, 5]);
            if dtype == "BOOL" {
                tensor.bytes.iter_mut().for_each(|byte| *byte &= 1);
            }
            tensors.push(tensor);
        }
    }
    draft.file("model.safetensors", &tensors);
}

/// Types with several elements in a byte, and the scales that belong to them.
fn packed_types(draft: &mut Draft) {
    let mut tensors = Vec::new();
    for layer in 0..2 {
        for (part, dtype, shape) in [
            ("a.weight", "F4", [3, 6]),
            ("a.weight_scale", "F8_E8M0", [3, 1]),
            ("b.weight", "F6_E2M3", [4, 3]),
            ("c.weight", "F6_E3M2", [12, 5]),
            ("d.weight", "F4", [32, 64]),
        ] {
            tensors.push(draft.tensor(format!("layers.{layer}.{part}"), dtype, &shape));
        }
    }
    draft.file("model.safetensors", &tensors);
}

/// Tensors without bytes, scalars, and a layer that has nothing else.
fn nothing_in_them(draft: &mut Draft) {
    let mut tensors = Vec::new();
    for layer in 0..3 {
        let name = |part: &str| format!("layers.{layer}.{part}");
        tensors.push(draft.tensor(name("empty"), "F32", &[0]));
        if layer != 1 {
            tensors.push(draft.tensor(name("weight"), "F32", &[7]));
            tensors.push(draft.tensor(name("scale"), "F32", &[]));
        }
        tensors.push(draft.tensor(name("none"), "BF16", &[3, 0, 2]));
        if layer != 1 {
            tensors.push(draft.tensor(name("count"), "I64", &[]));
            tensors.push(draft.tensor(name("flag"), "BOOL", &[1]));
        }
    }
    tensors.push(draft.tensor("last.none", "F64", &[0, 0]));
    draft.file("model.safetensors", &tensors);
}

/// Quantized weights of three families with their companions, of odd lengths.
fn quantized(draft: &mut Draft) {
    let mut tensors = Vec::new();
    for layer in 0..2 {
        for (part, dtype, shape) in [
            ("q_proj.weight", "U8", &[517, 1][..]),
            ("q_proj.weight.absmax", "U8", &[17]),
            ("q_proj.weight.nested_absmax", "F32", &[1]),
            ("q_proj.weight.nested_quant_map", "F32", &[256]),
            ("q_proj.weight.quant_map", "F32", &[16]),
            ("q_proj.weight.quant_state.bitsandbytes__nf4", "U8", &[83]),
            ("k_proj.weight", "F8_E4M3", &[33, 31]),
            ("k_proj.weight_scale_inv", "F32", &[2, 1]),
            ("v_proj.qweight", "I32", &[4, 16]),
            ("v_proj.qzeros", "I32", &[1, 2]),
            ("v_proj.scales", "F16", &[1, 16]),
            ("v_proj.g_idx", "I32", &[32]),
            ("norm.weight", "F32", &[9]),
        ] {
            tensors.push(draft.tensor(format!("model.layers.{layer}.{part}"), dtype, shape));
        }
    }
    draft.file("model.safetensors", &tensors);
    draft.side_file("config.json", r#"{"quantization_config": {"quant_method": "bitsandbytes"}}"#);
}

/// Names that JSON has to escape, or that would be paths elsewhere.
fn odd_names(draft: &mut Draft) {
    let long = "long.".repeat(60);
    let names = [
        "layers.0.a \"quoted\" name",
        "layers.0.back\\slash",
        "layers.0.line\nbreak\ttab\u{1}",
        "layers.0.../../etc/passwd",
        "layers.1.\u{fc}nic\u{f6}de",
        "layers.1.\u{1f980}",
        "layers.1.\u{202e}reversed",
        "layers.1.{}[],:",
        " ",
        "..",
        "layers.2.__metadata__",
        "layers.2.\u{e000}\u{feff}",
        "A",
        "a",
        "10",
        "9",
        "layers",
        long.as_str(),
    ];
    let tensors: Vec<TestTensor> = names.iter().map(|&name| draft.tensor(name, "F16", &[3, 7])).collect();
    let (first, second) = tensors.split_at(9);
    draft.sharded(&[first.to_vec(), second.to_vec()]);
}

/// Thirty shards of one tensor each, which follow no order.
fn many_shards(draft: &mut Draft) {
    let shards: Vec<Vec<TestTensor>> = (0..30_u64)
        .map(|number| {
            let (layer, part) = ((number * 7) % 30 / 3, (number * 7) % 3);
            let shape = [number * 131 % 97 + 1, 3];
            vec![draft.tensor(format!("transformer.h.{layer}.part_{part}.weight"), "BF16", &shape)]
        })
        .collect();
    draft.sharded(&shards);
}

/// Layers whose halves lie in different shards, in another order than they run.
fn layers_across_shards(draft: &mut Draft) {
    let mut tensors = draft.decoder("BF16");
    tensors.push(draft.tensor("lm_head.weight", "BF16", &[48, 32]));
    let mut shards = vec![Vec::new(), Vec::new(), Vec::new()];
    for (number, tensor) in tensors.into_iter().enumerate() {
        shards[number.div_ceil(3) % 3].push(tensor);
    }
    draft.sharded(&shards);
}

/// Texts about the file in its header, and data that begin at an odd byte.
fn metadata_and_odd_header(draft: &mut Draft) {
    let tensors = draft.decoder("F32");
    draft.keep("", &tensors);
    let (mut members, mut offset, mut data) = (Vec::new(), 0, Vec::new());
    for tensor in &tensors {
        let end = offset + tensor.bytes.len();
        let name = serde_json::to_string(&tensor.name).unwrap();
        members.push(format!(
            r#"{name}:{{"dtype":"F32","shape":{:?},"data_offsets":[{offset},{end}]}}"#,
            tensor.shape
        ));
        data.extend_from_slice(&tensor.bytes);
        offset = end;
    }
    // The header stands in another order than the data.
    members.reverse();
    let about =
        serde_json::json!({ "format": "pt", "lic\u{e9}nce": "a \"quoted\"\nline", "": "no key", "n": "" });
    let mut header = format!(r#"{{{},"__metadata__":{about}}}"#, members.join(","));
    while (header.len() + 8) % 16 != 13 {
        header.push(' ');
    }
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
    fs::write(draft.folder.join("model.safetensors"), file).unwrap();
}

/// One file of its own name, given by its path. What lies beside it belongs to somebody else.
fn file_of_another_name(draft: &mut Draft) {
    let tensors = draft.decoder("F16");
    draft.file("weights.v2.safetensors", &tensors);
    draft.side_file("config.json", "{}");
    draft.side_files.clear();
    draft.path = draft.folder.join("weights.v2.safetensors");
}

/// Floats of all plain widths, in each layer and outside of them.
fn wide_floats(draft: &mut Draft) {
    let mut tensors = draft.tensors(&[("wte.weight", "F64", &[31, 7]), ("wpe.weight", "F32", &[5, 7])]);
    for layer in 0..3 {
        for (part, dtype, shape) in [
            ("a", "F64", [9, 7]),
            ("b", "F32", [9, 7]),
            ("c", "BF16", [9, 7]),
            ("d", "F16", [9, 7]),
            ("e", "I64", [2, 2]),
        ] {
            tensors.push(draft.tensor(format!("h.{layer}.{part}"), dtype, &shape));
        }
    }
    draft.file("model.safetensors", &tensors);
}

/// Tensors larger than a slot of the ring, at odd offsets.
fn several_slots(draft: &mut Draft) {
    let mut shards = vec![draft.tensors(&[("model.embed_tokens.weight", "U8", &[9_000_011])])];
    for layer in 0..2 {
        let names = [("a", 3_000_017), ("b", 13), ("c", 1_048_576)];
        let part = |draft: &mut Draft, (name, len)| {
            draft.tensor(format!("model.layers.{layer}.{name}"), "I8", &[len])
        };
        shards.push(names.into_iter().map(|name| part(draft, name)).collect());
    }
    draft.sharded(&shards);
}

/// A numbered set without an index.
fn numbered_without_index(draft: &mut Draft) {
    let tensors = draft.decoder("BF16");
    let (first, second) = tensors.split_at(6);
    draft.file("model-00001-of-00002.safetensors", first);
    draft.file("model-00002-of-00002.safetensors", second);
}

/// A snapshot in a cache of the hub: links to blobs.
fn links_of_a_cache(draft: &mut Draft) {
    let top = draft.folder.clone();
    let (blobs, snapshot) = (top.join("blobs"), top.join("snapshots/0123456789abcdef"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    draft.folder = snapshot.clone();
    let tensors = draft.decoder("BF16");
    let (first, second) = tensors.split_at(7);
    draft.sharded(&[first.to_vec(), second.to_vec()]);
    draft.side_file("config.json", r#"{"tie_word_embeddings": true}"#);
    draft.side_file("tokenizer.json", random_bytes(200_000, draft.seed));
    for (number, entry) in fs::read_dir(&snapshot).unwrap().enumerate() {
        let (path, blob) = (entry.unwrap().path(), format!("{number:040x}"));
        fs::rename(&path, blobs.join(&blob)).unwrap();
        symlink(Path::new("../../blobs").join(&blob), &path).unwrap();
    }
    draft.path = snapshot;
}

/// A single tensor, in no stack.
fn one_tensor(draft: &mut Draft) {
    let tensors = draft.tensors(&[("weight", "BF16", &[1])]);
    draft.file("model.safetensors", &tensors);
}

/// What else lies in the directory of a model: code, templates, folders; and what must not go
/// along.
fn side_files(draft: &mut Draft) {
    let tensors = draft.decoder("BF16");
    draft.file("model.safetensors", &tensors);
    for name in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "modeling_own.py",
        "1_Pooling/config.json",
        "LICENSE",
        "empty.txt",
    ] {
        let bytes = if name == "empty.txt" { Vec::new() } else { random_bytes(3000, draft.seed) };
        draft.side_file(name, bytes);
        draft.seed += 1;
    }
    for name in [".gitattributes", "pytorch_model.bin", "original/consolidated.00.pth", "onnx/model.onnx"] {
        draft.side_file(name, random_bytes(100, draft.seed));
        draft.side_files.remove(name);
    }
}
