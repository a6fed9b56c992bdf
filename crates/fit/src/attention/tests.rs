//! Sizes against numbers that others have published, and the keys that change them.

use super::super::cache::{CacheModel, CacheType, Workload};
use super::*;

fn config(text: &str) -> ModelConfig {
    ModelConfig::parse("config.json", text.as_bytes()).unwrap()
}

fn bytes(text: &str, context_tokens: u64) -> u64 {
    let workload = Workload { context_tokens, batch: 1, cache_type: CacheType::Half };
    match config(text).cache() {
        CacheModel::Known(_) => config(text).cache().bytes(&workload).unwrap(),
        CacheModel::Unknown { why } => panic!("{why}"),
    }
}

fn kinds(text: &str) -> Vec<(CacheKind, Option<u64>)> {
    config(text).cache().layers().iter().map(|layer| (layer.kind, layer.window_tokens)).collect()
}

const LLAMA2_7B: &str = r#"{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32}"#;
const LLAMA3_8B: &str = r#"{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8}"#;
const LLAMA3_70B: &str = r#"{"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8}"#;
const MISTRAL_7B: &str = r#"{"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "sliding_window": WINDOW}"#;
const DEEPSEEK_V3: &str = r#"{"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}"#;
const JAMBA: &str = r#"{"model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_conv": 4, "mamba_d_state": 16,
    "mamba_expand": 2}"#;

/// "The KV cache of a single token demands 800 KB of space" for the 13B parameter OPT model: Kwon
/// et al., Efficient Memory Management for Large Language Model Serving with PagedAttention (SOSP
/// 2023), section 3.
#[test]
fn opt_13b_keeps_800_kib_a_token() {
    let text =
        r#"{"model_type": "opt", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40}"#;
    assert_eq!(bytes(text, 1), 800 << 10);
    assert_eq!(kinds(text)[0], (CacheKind::MultiHead, None));
}

/// About 2 GB for Llama 2 7B, 4096 tokens, 16 bits: NVIDIA, Mastering LLM Techniques: Inference
/// Optimization (2023).
#[test]
fn llama_2_7b_keeps_2_gib() {
    assert_eq!(bytes(LLAMA2_7B, 4096), 2 << 30);
}

/// 15.62 and 39.06 GB for 128,000 tokens of Llama 3.1 8B and 70B: Hugging Face, the Llama 3.1
/// announcement (2024).
#[test]
fn llama_3_1_as_announced() {
    assert_eq!(bytes(LLAMA3_8B, 128_000) * 100 / (1 << 30), 1562);
    assert_eq!(bytes(LLAMA3_70B, 128_000) * 100 / (1 << 30), 3906);
    assert_eq!(kinds(LLAMA3_8B)[31], (CacheKind::GroupedQuery, None));
}

/// 70.272, 327.680 and 516.096 KB a token for DeepSeek-V3, Qwen2.5 72B and Llama 3.1 405B: Insights
/// into DeepSeek-V3 (arXiv 2505.09343), table 1.
#[test]
fn deepseek_v3_and_its_comparison() {
    assert_eq!(bytes(DEEPSEEK_V3, 1), 70_272);
    assert_eq!(kinds(DEEPSEEK_V3)[0].0, CacheKind::Latent);
    let qwen = r#"{"model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "sliding_window": 131072, "use_sliding_window": false, "max_window_layers": 80}"#;
    assert_eq!(bytes(qwen, 1), 327_680);
    let llama = r#"{"model_type": "llama", "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128,
        "num_key_value_heads": 8}"#;
    assert_eq!(bytes(llama, 1), 516_096);
}

/// 32 GB for Mistral 7B and 4 GB for Jamba at 256K tokens, 16 bits: Jamba (arXiv 2403.19887), table
/// 1. The state of its other layers is beside that, and does not grow.
#[test]
fn jamba_keeps_an_eighth_of_mistral() {
    let whole = MISTRAL_7B.replace("WINDOW", "null");
    assert_eq!(bytes(&whole, 256 << 10), 32 << 30);
    let layers = config(JAMBA).cache().layers().to_vec();
    let state_bytes = bytes(JAMBA, 1) - 4 * 2 * 8 * 128 * 2;
    assert_eq!(bytes(JAMBA, 256 << 10) - state_bytes, 4 << 30);
    assert_eq!(layers.iter().filter(|layer| layer.kind == CacheKind::State).count(), 28);
    assert_eq!(layers[4].kind, CacheKind::GroupedQuery);
    assert_eq!(state_bytes, 28 * (8192 * 4 * 2 + 8192 * 16 * 4));
}

#[test]
fn windows_bound_what_is_kept() {
    let windowed = MISTRAL_7B.replace("WINDOW", "4096");
    assert_eq!(bytes(&windowed, 256 << 10), bytes(&windowed, 4096));
    let gemma2 = r#"{"model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256}"#;
    let expected = [Some(4096), None, Some(4096), None];
    assert_eq!(kinds(gemma2).iter().map(|layer| layer.1).collect::<Vec<_>>(), expected);
    let listed = gemma2.replace(
        "}",
        r#", "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention",
        "full_attention", "full_attention"]}"#,
    );
    assert_eq!(kinds(&listed).iter().map(|layer| layer.1).collect::<Vec<_>>(), [None, Some(7), None, None]);
    let gemma3 = r#"{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
        "num_hidden_layers": 34, "sliding_window": 1024}}"#;
    let full = kinds(gemma3).iter().filter(|layer| layer.1.is_none()).count();
    assert_eq!((full, kinds(gemma3)[0].1, bytes(gemma3, 1)), (5, Some(1024), 34 * 2 * 4 * 256 * 2));
    let qwen = r#"{"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "sliding_window": 16, "use_sliding_window": true, "max_window_layers": 2}"#;
    assert_eq!(kinds(qwen).iter().map(|layer| layer.1).collect::<Vec<_>>(), [None, None, Some(16)]);
}

#[test]
fn one_head_for_all() {
    let falcon = r#"{"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "multi_query": true, "new_decoder_architecture": false}"#;
    assert_eq!((bytes(falcon, 1), kinds(falcon)[0].0), (32 * 2 * 64 * 2, CacheKind::MultiQuery));
    let new = falcon.replace(": false", r#": true, "num_kv_heads": 8"#);
    assert_eq!(bytes(&new, 1), 8 * bytes(falcon, 1));
    let without = falcon.replace(r#""multi_query": true"#, r#""multi_query": false"#);
    assert_eq!(kinds(&without)[0].0, CacheKind::MultiHead);
    // The first tiiuae/falcon-40b, and falcon-7b: 8 heads of 64 in 60 layers, one of 64 in 32.
    let first = r#"{"model_type": "RefinedWeb", "hidden_size": 8192, "n_layer": 60, "n_head": 128, "n_head_kv": 8,
        "alibi": false, "parallel_attn": true}"#;
    assert_eq!((bytes(first, 1), kinds(first)[0].0), (60 * 2 * 8 * 64 * 2, CacheKind::GroupedQuery));
    let small = r#"{"model_type": "RefinedWebModel", "hidden_size": 4544, "n_layer": 32, "n_head": 71, "multi_query": true}"#;
    assert_eq!((bytes(small, 1), kinds(small)[0].0), (32 * 2 * 64 * 2, CacheKind::MultiQuery));
}

/// Its configuration need not say so: the class has the defaults of Gemma 2.
#[test]
fn vaultgemma_has_one_embedding() {
    assert_eq!(config(r#"{"model_type": "vaultgemma"}"#).ties_embeddings(), Some(true));
    assert_eq!(config(r#"{"model_type": "llama"}"#).ties_embeddings(), None);
}

#[test]
fn what_is_not_known_is_said_not_guessed() {
    let why = |text: &str| match config(text).cache() {
        CacheModel::Unknown { why } => why,
        CacheModel::Known(layers) => panic!("{layers:?}"),
    };
    for (text, expected) in [
        ("{}", "no `model_type`"),
        (r#"{"model_type": "brand_new", "num_hidden_layers": 2, "num_key_value_heads": 2}"#, "`brand_new`"),
        (r#"{"model_type": "llama"}"#, "no `num_hidden_layers`"),
        (r#"{"model_type": "llama", "num_hidden_layers": 2}"#, "no `num_attention_heads`"),
        (r#"{"model_type": "llama", "num_hidden_layers": 99999999999}"#, "at most 65536"),
        (r#"{"model_type": "t5", "is_encoder_decoder": true}"#, "encoder-decoder"),
        (&LLAMA2_7B.replace('}', r#", "layer_types": ["full_attention"]}"#), "only 1 entries"),
        (&JAMBA.replace('}', r#", "layer_types": ["new_thing"]}"#), "`new_thing`"),
        (&LLAMA2_7B.replace("4096", "18446744073709551615"), "are too large"),
    ] {
        assert!(why(text).contains(expected), "{text}: {}", why(text));
    }
}
