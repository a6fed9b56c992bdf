//! Models of candle-transformers give bit-identical results with weights from this adapter and from
//! candle's own loader.
//!
//! The Llama checkpoint was written by transformers. Those of BERT and T5 have deterministic random
//! weights with the names of candle's code.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::{bert, llama, t5};
use common::{Inventor, bits, candles_own, fixture};

mod common;

/// Runs a model with both loaders and compares the results.
fn compare(directory: &Path, dtype: DType, answer: impl Fn(VarBuilder<'static>) -> Tensor) {
    let expected = answer(candles_own(directory, dtype));
    let values = expected.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
    assert!(values.iter().all(|value| value.is_finite()), "no answer to compare");
    assert!(values.iter().any(|value| (value - values[0]).abs() > 1e-4), "an answer that says nothing");
    let found = answer(onelayer_candle::var_builder(directory, dtype, &Device::Cpu).unwrap());
    assert_eq!(found.shape(), expected.shape());
    assert!(bits(&found) == bits(&expected), "{}: the answers differ", directory.display());
    // The comparison works: other weights give another result.
    let renamed =
        onelayer_candle::var_builder(directory, dtype, &Device::Cpu).unwrap().rename_f(swap_projections);
    assert!(bits(&answer(renamed)) != bits(&expected), "the answer does not depend on the weights");
}

/// Replaces the attention keys' weights by those of the values, in every architecture here.
fn swap_projections(name: &str) -> String {
    for (key, value) in [("k_proj", "v_proj"), ("key", "value"), ("SelfAttention.k", "SelfAttention.v")] {
        if name.contains(key) {
            return name.replace(key, value);
        }
    }
    name.to_owned()
}

fn tokens(ids: &[u32]) -> Tensor {
    Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap()
}

fn llama_answers(name: &str, dtype: DType) {
    let directory = fixture(name);
    let config = std::fs::read(directory.join("config.json")).unwrap();
    let config: llama::LlamaConfig = serde_json::from_slice(&config).unwrap();
    let config = config.into_config(false);
    compare(&directory, dtype, |weights| {
        let model = llama::Llama::load(weights, &config).unwrap();
        let mut cache = llama::Cache::new(true, dtype, &config, &Device::Cpu).unwrap();
        let first = model.forward(&tokens(&[1, 17, 300, 42, 511]), 0, &mut cache).unwrap();
        // The second step uses the cache of the first one.
        let second = model.forward(&tokens(&[7]), 5, &mut cache).unwrap();
        Tensor::cat(&[first, second], 0).unwrap()
    });
}

#[test]
fn llama_cast_to_single_precision() {
    llama_answers("llama", DType::F32);
}

#[test]
fn llama_of_several_files() {
    llama_answers("llama_sharded", DType::F32);
}

#[test]
fn llama_cast_to_half_precision() {
    llama_answers("llama", DType::F16);
}

#[test]
fn bert() {
    let config = bert::Config {
        vocab_size: 300,
        hidden_size: 48,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        intermediate_size: 96,
        max_position_embeddings: 64,
        ..bert::Config::default()
    };
    let answer = |weights: VarBuilder<'_>| {
        let model = bert::BertModel::load(weights, &config).unwrap();
        let ids = tokens(&[101, 7, 250, 3, 102]);
        model.forward(&ids, &ids.zeros_like().unwrap(), None).unwrap()
    };
    for stored in [DType::F32, DType::BF16] {
        let folder = tempfile::tempdir().unwrap();
        let inventor = Inventor::new(&[]);
        answer(inventor.var_builder());
        inventor.save(folder.path(), stored);
        compare(folder.path(), DType::F32, answer);
    }
}

#[test]
fn t5() {
    for (tied, gated) in [(true, false), (false, true)] {
        let config = t5::Config {
            vocab_size: 200,
            d_model: 32,
            d_kv: 8,
            d_ff: 64,
            num_layers: 2,
            num_heads: 4,
            tie_word_embeddings: tied,
            feed_forward_proj: t5::ActivationWithOptionalGating {
                gated,
                activation: if gated { Activation::NewGelu } else { Activation::Relu },
            },
            ..t5::Config::default()
        };
        let answer = |weights: VarBuilder<'_>| {
            let mut model = t5::T5ForConditionalGeneration::load(weights, &config).unwrap();
            model.forward(&tokens(&[5, 9, 177, 1]), &tokens(&[0, 31])).unwrap()
        };
        let folder = tempfile::tempdir().unwrap();
        let inventor = Inventor::new(&["shared.weight"]);
        answer(inventor.var_builder());
        inventor.save(folder.path(), DType::F16);
        compare(folder.path(), DType::F32, answer);
    }
}
