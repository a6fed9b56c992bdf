//! PyTorch and GGUF files through the program: names of Hugging Face models.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use std::fs;

use crate::support::{assert_code, run, stderr, stdout};
use onelayer_testing::gguf_file::{GgufFile, Value};

/// A GGUF file of a model with one block.
fn gguf(arch: &str) -> Vec<u8> {
    GgufFile::new()
        .key("general.architecture", Value::text(arch))
        .key(&format!("{arch}.attention.head_count"), Value::u32(2))
        .tensor("token_embd.weight", &[32, 10], 8, 340)
        .tensor("blk.0.attn_q.weight", &[32, 8], 8, 272)
        .tensor("output_norm.weight", &[32], 0, 128)
        .bytes()
}

#[test]
fn names_of_gguf_files_become_those_of_the_model() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path();
    fs::write(path.join("model.gguf"), gguf("llama")).unwrap();
    assert_code(&run(path, "convert model.gguf out --names hf --dtype f32 --verify"), 0);
    let manifest = fs::read_to_string(path.join("out/onelayer.manifest.json")).unwrap();
    for part in ["model.layers.0.self_attn.q_proj.weight", "\"model.embed_tokens\"", "--names hf"] {
        assert!(manifest.contains(part), "{part} in {manifest}");
    }
    assert_code(&run(path, "verify out --against model.gguf --names hf"), 0);
    let output = run(path, "verify out --against model.gguf");
    assert_code(&output, 5);
    assert!(stdout(&output).contains("--names hf"), "{}", stdout(&output));
    assert_code(&run(path, "verify out --names hf"), 2);

    fs::write(path.join("gemma.gguf"), gguf("gemma")).unwrap();
    let output = run(path, "convert gemma.gguf gemma --names hf");
    assert_code(&output, 3);
    let text = stderr(&output);
    assert!(text.contains("gemma.gguf") && text.contains("norm weights are stored plus 1"), "{text}");
    assert!(text.contains("leave out --names hf") && !path.join("gemma").exists(), "{text}");
    assert_code(&run(path, "convert gemma.gguf gemma"), 0);
}
