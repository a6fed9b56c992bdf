//! GGUF files with the names of Hugging Face models: rows come back in the order of the model, as
//! floats and as blocks, and what cannot be exact is refused by name.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    reason = "a test that cannot go on panics"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use onelayer::convert::{Conversion, ConvertError, Verification};
use onelayer::{Checkpoint, FloatType, IoMode, OpenOptions, TensorNames};
use onelayer_testing::gguf_file::{GgufFile, Value};

/// A type of tensors: its number in the format, and elements and bytes of a block.
#[derive(Clone, Copy, Debug)]
struct Kind(u32, u64, u64);

const F32: Kind = Kind(0, 1, 4);
const F16: Kind = Kind(1, 1, 2);
const Q8_0: Kind = Kind(8, 32, 34);
const Q4_K: Kind = Kind(12, 256, 144);
const IQ1_S: Kind = Kind(19, 256, 50);

fn add(file: GgufFile, name: &str, shape: &[u64], Kind(number, elements, bytes): Kind) -> GgufFile {
    let dims: Vec<u64> = shape.iter().rev().copied().collect();
    let len = shape.iter().product::<u64>() / elements * bytes;
    file.tensor(name, &dims, number, len.try_into().unwrap())
}

/// The keys of a model with these heads.
fn keys(arch: &str, heads: u32, kv_heads: u32) -> GgufFile {
    GgufFile::new()
        .key("general.architecture", Value::text(arch))
        .key(&format!("{arch}.attention.head_count"), Value::u32(heads))
        .key(&format!("{arch}.attention.head_count_kv"), Value::u32(kv_heads))
}

fn written(folder: &Path, file: &GgufFile) -> PathBuf {
    let path = folder.join("model.gguf");
    fs::write(&path, file.bytes()).unwrap();
    path
}

fn named() -> OpenOptions {
    OpenOptions::new().names(TensorNames::HuggingFace)
}

/// Name -> shape and bytes.
type Tensors = BTreeMap<String, (Vec<u64>, Vec<u8>)>;

fn tensors(target: &Path) -> Tensors {
    let checkpoint = Checkpoint::open(target).unwrap();
    let read = |tensor: onelayer::TensorEntry<'_>| {
        let file = fs::read(&checkpoint.shard(tensor.shard).path).unwrap();
        let range = tensor.extent.start() as usize..tensor.extent.end() as usize;
        (tensor.name.to_owned(), (tensor.shape.to_vec(), file[range].to_vec()))
    };
    checkpoint.tensors().map(read).collect()
}

/// Both conversions of a file: with its own names, and with those of the model.
fn both(source: &Path, settings: &Conversion) -> (Tensors, Tensors) {
    let folder = tempfile::tempdir().unwrap();
    let convert = |name: &str, options: OpenOptions| {
        let target = folder.path().join(name);
        let report = settings.clone().open_options(options).prepare(source, &target).unwrap().run().unwrap();
        assert!(report.is_complete);
        tensors(&target)
    };
    (convert("stored", OpenOptions::new()), convert("named", named()))
}

/// The rows of a tensor; `row_of` says where each of them comes from.
fn rows((shape, bytes): &(Vec<u64>, Vec<u8>), row_of: impl Fn(usize) -> usize) -> (Vec<u64>, Vec<u8>) {
    let count = shape[0] as usize;
    let row_bytes = bytes.len() / count;
    let row = |place| &bytes[row_of(place) * row_bytes..][..row_bytes];
    (shape.clone(), (0..count).flat_map(row).copied().collect())
}

/// Where a model's row of queries or keys lies in a file of llama.cpp.
fn in_pairs(rows: usize, heads: usize) -> impl Fn(usize) -> usize {
    let (head, half) = (rows / heads, rows / heads / 2);
    move |row| row / head * head + row % head % half * 2 + row % head / half
}

fn llama(kind: Kind, heads: u32, kv_heads: u32, head: u64, columns: u64) -> GgufFile {
    let mut file = keys("llama", heads, kv_heads);
    file = add(file, "token_embd.weight", &[50, columns], kind);
    for block in [1, 0] {
        file = add(file, &format!("blk.{block}.attn_q.weight"), &[u64::from(heads) * head, columns], kind);
        file = add(file, &format!("blk.{block}.attn_norm.weight"), &[columns], F32);
        file = add(file, &format!("blk.{block}.attn_k.weight"), &[u64::from(kv_heads) * head, columns], kind);
        file = add(file, &format!("blk.{block}.attn_k.bias"), &[u64::from(kv_heads) * head], F32);
        file = add(file, &format!("blk.{block}.ffn_down.weight"), &[16, columns], kind);
    }
    add(file, "rope_freqs.weight", &[head / 2], F32)
}

#[test]
fn rows_of_queries_and_keys_are_in_the_order_of_the_model() {
    let cases = [
        (F32, 2, 1, 64, 2048),
        (F16, 6, 3, 10, 96),
        (Q8_0, 4, 2, 64, 512),
        (Q4_K, 3, 3, 128, 1024),
        (IQ1_S, 2, 1, 64, 1024),
    ];
    for (kind, heads, kv_heads, head, columns) in cases {
        let folder = tempfile::tempdir().unwrap();
        let source = written(folder.path(), &llama(kind, heads, kv_heads, head, columns));
        let ways = [
            (None, IoMode::Direct),
            (Some(FloatType::F32), IoMode::Buffered),
            (Some(FloatType::Bf16), IoMode::Direct),
        ];
        for (dtype, io) in ways {
            let mut settings = Conversion::new().io(io).host_budget(48 << 20).verify(true);
            if let Some(dtype) = dtype {
                settings = settings.dtype(dtype);
            }
            let (stored, named) = both(&source, &settings);
            for block in 0..2 {
                let of = |name: &str| &stored[&format!("blk.{block}.{name}")];
                let is = |name: &str| &named[&format!("model.layers.{block}.{name}")];
                let order = |rows, heads| in_pairs(rows as usize, heads as usize);
                let queries = order(u64::from(heads) * head, heads);
                let what = format!("{kind:?} as {dtype:?} by {io:?}");
                assert!(
                    *is("self_attn.q_proj.weight") == rows(of("attn_q.weight"), queries),
                    "queries, {what}"
                );
                for suffix in ["weight", "bias"] {
                    let keys = order(u64::from(kv_heads) * head, kv_heads);
                    let expected = rows(of(&format!("attn_k.{suffix}")), keys);
                    assert!(*is(&format!("self_attn.k_proj.{suffix}")) == expected, "keys' {suffix}, {what}");
                }
                assert!(is("mlp.down_proj.weight") == of("ffn_down.weight"), "{what}");
                assert!(is("input_layernorm.weight") == of("attn_norm.weight"), "{what}");
            }
            assert!(named["model.embed_tokens.weight"] == stored["token_embd.weight"]);
            assert_eq!(named.len(), stored.len() - 1, "rope_freqs is left out");
        }
    }
}

/// A head that does not fit a small slot makes the slots larger, and the refusal names the budget.
#[test]
fn the_smallest_budget_for_long_heads_works() {
    let folder = tempfile::tempdir().unwrap();
    let source = written(folder.path(), &llama(Q4_K, 2, 2, 256, 8192));
    let settings = |budget_bytes| {
        Conversion::new().open_options(named()).host_budget(budget_bytes).dtype(FloatType::F32)
    };
    let target = folder.path().join("target");
    let error = settings(32 << 20).prepare(&source, &target).unwrap_err();
    let ConvertError::Plan(onelayer::PlanError::BudgetTooSmall { smallest_bytes, .. }) = error else {
        panic!("{error}")
    };
    assert!(
        settings(smallest_bytes).verify(true).prepare(&source, &target).unwrap().run().unwrap().is_complete
    );
}

#[test]
fn files_are_those_of_the_models_layers() {
    let folder = tempfile::tempdir().unwrap();
    let source = written(folder.path(), &llama(F16, 2, 2, 8, 32));
    let target = folder.path().join("target");
    let prepared = Conversion::new().open_options(named()).prepare(&source, &target).unwrap();
    let layers: Vec<String> = prepared.files().iter().flat_map(|file| file.layers.clone()).collect();
    assert_eq!(layers, ["model.embed_tokens", "model.layers.0", "model.layers.1"]);
    prepared.run().unwrap();
    let verify = |options: OpenOptions| {
        let verification = Verification::new().open_options(options);
        verification.run(&target, Some(&source), &mut |_| {}).unwrap()
    };
    assert_eq!(verify(named()).differences, []);
    let found = verify(OpenOptions::new());
    assert!(!found.differences.is_empty());
    assert!(found.notes.iter().any(|note| note.contains("--names hf")), "{:?}", found.notes);
    // A converted directory has the names already.
    let again = Checkpoint::open(&target).unwrap();
    let opened = named().open(&target).unwrap();
    assert!(again.tensors().map(|tensor| tensor.name).eq(opened.tensors().map(|tensor| tensor.name)));
}

#[test]
fn transposed_weights_and_merged_rows_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let gpt2 = add(keys("gpt2", 2, 2), "blk.0.attn_qkv.weight", &[36, 12], F16);
    let gpt2 = add(gpt2, "blk.0.attn_qkv.bias", &[36], F32);
    let (stored, named) = both(&written(folder.path(), &gpt2), &Conversion::new());
    let (shape, bytes) = &stored["blk.0.attn_qkv.weight"];
    assert_eq!(shape, &[36, 12]);
    let turned = (0..12).flat_map(|row| (0..36).map(move |column| (column * 12 + row) * 2));
    let expected: Vec<u8> = turned.flat_map(|at| bytes[at..at + 2].to_vec()).collect();
    assert_eq!(named["transformer.h.0.attn.c_attn.weight"], (vec![12, 36], expected));
    assert_eq!(named["transformer.h.0.attn.c_attn.bias"], stored["blk.0.attn_qkv.bias"]);

    // Head by head in the model: queries, keys and values of each.
    let (heads, head) = (4, 6);
    let bloom = add(keys("bloom", 4, 4), "blk.0.attn_qkv.weight", &[72, 64], Q8_0);
    let bloom = add(bloom, "blk.0.attn_qkv.bias", &[72], F32);
    let (stored, named) = both(&written(folder.path(), &bloom), &Conversion::new().dtype(FloatType::F32));
    for suffix in ["weight", "bias"] {
        let expected = rows(&stored[&format!("blk.0.attn_qkv.{suffix}")], |row| {
            let (of_head, part, at) = (row / (3 * head), row / head % 3, row % head);
            part * heads * head + of_head * head + at
        });
        assert!(named[&format!("transformer.h.0.self_attention.query_key_value.{suffix}")] == expected);
    }
}

#[test]
fn the_first_file_of_a_set_says_which_model_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let split = |file: GgufFile, number: u16| {
        file.key("split.no", Value::u16(number))
            .key("split.count", Value::u16(2))
            .key("split.tensors.count", Value::u32(3))
    };
    let first = split(add(keys("llama", 2, 2), "rope_freqs.weight", &[2], F32), 0);
    let first = add(first, "token_embd.weight", &[5, 8], F32);
    let second = add(split(GgufFile::new(), 1), "blk.0.attn_q.weight", &[8, 8], F32);
    for (number, file) in [(1, first), (2, second)] {
        fs::write(folder.path().join(format!("model-0000{number}-of-00002.gguf")), file.bytes()).unwrap();
    }
    let checkpoint = named().open(folder.path()).unwrap();
    let names: Vec<&str> = checkpoint.tensors().map(|tensor| tensor.name).collect();
    assert_eq!(names, ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]);
    assert!(checkpoint.notes().iter().any(|note| note.contains("rope_freqs.weight is left out")));
}

#[test]
fn what_is_not_exact_is_refused_by_name() {
    let tensor = |file: GgufFile, name: &str, shape: &[u64]| add(file, name, shape, F32);
    let q = "blk.0.attn_q.weight";
    let cases = [
        (
            tensor(keys("gemma2", 2, 2), q, &[8, 8]),
            "architecture gemma2, whose norm weights are stored plus 1",
        ),
        (tensor(keys("falcon", 2, 2), q, &[8, 8]), "architecture falcon, whose rows"),
        (
            tensor(keys("brand-new", 2, 2), q, &[8, 8]),
            "architecture brand-new, for which no Hugging Face names",
        ),
        (tensor(GgufFile::new(), q, &[8, 8]), "no general.architecture"),
        (tensor(keys("llama", 2, 2), "blk.0.ffn_gate_exps.weight", &[8, 8]), "`blk.0.ffn_gate_exps.weight`"),
        (tensor(keys("llama", 2, 2), "blk.x.attn_q.weight", &[8, 8]), "`blk.x.attn_q.weight`"),
        (tensor(keys("llama", 2, 2), "blk..attn_q.weight", &[8, 8]), "`blk..attn_q.weight`"),
        (tensor(keys("llama", 2, 2), "blk.0.attn_q.scales", &[8, 8]), "do not have by this name"),
        (tensor(keys("llama", 2, 2), "blk.{n}.attn_q.weight", &[8, 8]), "do not have by this name"),
        (tensor(keys("llama", 3, 3), q, &[8, 8]), "rows that 3 heads cannot share"),
        (tensor(keys("llama", 8, 8), q, &[8, 8]), "rows that 8 heads cannot share"),
        (tensor(keys("llama", 0, 0), q, &[8, 8]), "no number of heads: llama.attention.head_count"),
        (tensor(keys("llama", 2, 2), q, &[8, 4, 2]), "rows that 2 heads cannot share"),
        (
            tensor(GgufFile::new().key("general.architecture", Value::text("llama")), q, &[8, 8]),
            "no number of heads",
        ),
        (add(keys("gpt2", 2, 2), "blk.0.ffn_up.weight", &[64, 32], Q8_0), "Q8_0, whose blocks lie across"),
    ];
    for (file, expected) in cases {
        let folder = tempfile::tempdir().unwrap();
        let path = written(folder.path(), &file);
        let error = named().open(&path).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(expected) && text.contains("leave out --names hf"), "{text}");
        assert!(text.contains("model.gguf"), "{text}");
        Checkpoint::open(&path).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let twice = (0..2).fold(keys("llama", 2, 2), |file, _| tensor(file, "rope_freqs.weight", &[4]));
    let error = named().open(written(folder.path(), &twice)).unwrap_err().to_string();
    assert!(error.contains("`rope_freqs.weight`: is there twice"), "{error}");
}

/// A key that is not kept is not a missing key: without one, keys have as many heads as queries.
#[test]
fn heads_in_an_array_are_refused_and_heads_behind_many_keys_are_found() {
    let arch = || {
        GgufFile::new()
            .key("general.architecture", Value::text("llama"))
            .key("llama.attention.head_count", Value::u32(4))
    };
    let key = |file: GgufFile| add(file, "blk.0.attn_k.weight", &[16, 1], F32);
    let folder = tempfile::tempdir().unwrap();
    let array = Value::array(4, 1, &2_u32.to_le_bytes());
    let path = written(folder.path(), &key(arch().key("llama.attention.head_count_kv", array)));
    let error = named().open(&path).unwrap_err().to_string();
    assert!(error.contains("no number of heads: llama.attention.head_count_kv"), "{error}");

    let full = (0..70).fold(arch(), |file, n| file.key(&format!("x{n}"), Value::text(&"y".repeat(1000))));
    let full = (0..200).fold(full, |file, n| file.key(&format!("n{n}"), Value::u32(0)));
    let full = key(full.key("llama.attention.head_count_kv", Value::u32(2)));
    let path = written(folder.path(), &full);
    let (stored, named) = both(&path, &Conversion::new());
    let model = &named["model.layers.0.self_attn.k_proj.weight"];
    assert_eq!(*model, rows(&stored["blk.0.attn_k.weight"], in_pairs(16, 2)));
}
