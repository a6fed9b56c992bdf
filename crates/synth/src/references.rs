//! Compares names, shapes, dtypes, order and sharding with transformers.
//!
//! `fixtures/synth/NAME.json`: small configurations and the files that `save_pretrained` of
//! transformers 5.23 wrote for them, by the script there. `checkpoint-NAME.json`: the same for the
//! small checkpoints in `fixtures/checkpoints`. `class-defaults.json`: the parameters of models
//! that transformers 4.57 builds from a configuration class without arguments, one line for all
//! layers and experts.

use std::collections::BTreeSet;
use std::path::PathBuf;

use safetensors::SafeTensors;
use serde_json::Value;

use super::config::ModelConfig;
use super::{architecture, shards};

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/synth")
}

fn read(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join(name)).unwrap()).unwrap()
}

fn config(value: &Value) -> ModelConfig {
    ModelConfig::from_entries("test".to_owned(), value.as_object().unwrap().clone())
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|item| item.as_str().unwrap().to_owned()).collect()
}

fn join(shape: &[usize]) -> String {
    shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

/// The tensors of a header in file order, as `NAME DTYPE SHAPE`.
fn lines(head: &[u8]) -> Vec<String> {
    // The crate wants the tensors too; with a length of zero for all, only the header's text is left to
    // compare.
    let header: Value = serde_json::from_slice(&head[8..]).unwrap();
    let entries = header.as_object().unwrap();
    assert_eq!(entries["__metadata__"], serde_json::json!({"format": "pt"}));
    assert_eq!(entries.keys().next().unwrap(), "__metadata__");
    let tensors = entries.iter().filter(|(name, _)| *name != "__metadata__");
    tensors
        .map(|(name, info)| {
            let shape: Vec<_> = info["shape"].as_array().unwrap().iter().map(Value::to_string).collect();
            format!("{name} {} {}", info["dtype"].as_str().unwrap(), shape.join("x"))
        })
        .collect()
}

#[test]
fn files_are_laid_out_as_save_pretrained_does() {
    let mut compared = 0;
    for entry in std::fs::read_dir(fixtures()).unwrap() {
        let file = entry.unwrap().file_name().into_string().unwrap();
        if !file.ends_with(".json") || file == "class-defaults.json" {
            continue;
        }
        let reference = read(&file);
        let config = config(&reference["config"]);
        let layout = architecture::layout(&config).unwrap_or_else(|error| panic!("{file}: {error}"));
        let dtype = config.dtype().unwrap();
        let single = shards::plan(&config, &layout.tensors, dtype, u64::MAX).unwrap();
        assert_eq!(single.shards.len(), 1, "{file}");
        assert_eq!(single.index_text, None, "{file}");
        assert_eq!(lines(&single.shards[0].head), texts(&reference["tensors"]), "{file}");
        if let Some(limit) = reference["shard_bytes"].as_u64() {
            check_shards(&file, &reference, &shards::plan(&config, &layout.tensors, dtype, limit).unwrap());
        }
        compared += 1;
    }
    assert_eq!(compared, 24, "every reference is there");
}

fn check_shards(file: &str, reference: &Value, plan: &shards::ShardPlan) {
    let expected: Vec<Vec<String>> = reference["shards"].as_array().unwrap().iter().map(texts).collect();
    let found: Vec<Vec<String>> = plan.shards.iter().map(names_in_shard).collect();
    assert_eq!(found, expected, "{file}");
    let index: Value = serde_json::from_str(plan.index_text.as_deref().unwrap()).unwrap();
    assert_eq!(index["metadata"], reference["index_metadata"], "{file}");
    for shard in expected {
        for tensor in &shard[1..] {
            assert_eq!(index["weight_map"][tensor], Value::from(shard[0].clone()), "{file}");
        }
    }
}

/// The file's name, then those of its tensors.
fn names_in_shard(shard: &shards::Shard) -> Vec<String> {
    let tensors = lines(&shard.head).into_iter().map(|line| line.split(' ').next().unwrap().to_owned());
    std::iter::once(shard.name.clone()).chain(tensors).collect()
}

#[test]
fn parameters_are_those_of_the_configuration_classes() {
    let references = read("class-defaults.json");
    for (name, reference) in references.as_object().unwrap() {
        let layout = architecture::layout(&config(&reference["config"])).unwrap();
        assert_eq!(layout.class_name, reference["class"].as_str().unwrap());
        let found: BTreeSet<String> = layout
            .tensors
            .iter()
            .map(|tensor| {
                let shape: Vec<_> = tensor.shape.iter().map(|side| usize::try_from(*side).unwrap()).collect();
                format!("{} {}", tensor.name, join(&shape))
            })
            .collect();
        assert_eq!(found, expand(reference), "{name}");
        assert_eq!(Some(u64::try_from(found.len()).unwrap()), reference["tensor_count"].as_u64(), "{name}");
    }
}

/// One line for every layer and expert.
fn expand(reference: &Value) -> BTreeSet<String> {
    let count = |key: &str| reference[key].as_u64().unwrap();
    let mut all = BTreeSet::new();
    for template in texts(&reference["tensors"]) {
        let layers = if template.contains("{layer}") { count("layers") } else { 1 };
        let experts = if template.contains("{expert}") { count("experts") } else { 1 };
        for layer in 0..layers {
            for expert in 0..experts {
                let line = template.replace("{layer}", &layer.to_string());
                all.insert(line.replace("{expert}", &expert.to_string()));
            }
        }
    }
    all
}

/// The head is one that the format's own crate accepts, bytes included.
#[test]
fn heads_are_accepted_by_the_reference_reader() {
    let config = config(&read("llama.json")["config"]);
    let layout = architecture::layout(&config).unwrap();
    let plan = shards::plan(&config, &layout.tensors, config.dtype().unwrap(), u64::MAX).unwrap();
    let shard = &plan.shards[0];
    let mut file = shard.head.clone();
    file.resize(usize::try_from(shard.file_bytes).unwrap(), 0);
    assert_eq!(SafeTensors::deserialize(&file).unwrap().len(), layout.tensors.len());
    assert_eq!(shard.head.len() % 8, 0);
}
