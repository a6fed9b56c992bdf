//! Architectures outside the Llama family: GPT-2 and T5.
//!
//! Tests compare names, shapes and order with the output of `save_pretrained`.

use serde_json::json;

use super::config::ModelConfig;
use super::error::SynthError;
use super::tensor_list::{ModelLayout, TensorList};

/// GPT-2 with its head. Its projections are stored as `[inputs, outputs]`, unlike those of a linear
/// layer.
pub(super) fn gpt2(config: &ModelConfig) -> Result<ModelLayout, SynthError> {
    config.require("add_cross_attention", &json!(false), "synth lays out GPT-2 without cross-attention")?;
    let hidden = config.number("n_embd")?;
    let vocabulary = config.number("vocab_size")?;
    let inner = config.number_or("n_inner", config.product("n_embd", hidden, 4)?)?;
    let mut list = TensorList::new(config);
    list.push("transformer.wte.weight".to_owned(), &[vocabulary, hidden])?;
    list.push("transformer.wpe.weight".to_owned(), &[config.number_or("n_positions", 1024)?, hidden])?;
    for layer in 0..config.number("n_layer")? {
        let prefix = format!("transformer.h.{layer}");
        for (name, shape) in [
            ("ln_1", vec![hidden]),
            ("attn.c_attn", vec![hidden, 3 * hidden]),
            ("attn.c_proj", vec![hidden, hidden]),
            ("ln_2", vec![hidden]),
            ("mlp.c_fc", vec![hidden, inner]),
            ("mlp.c_proj", vec![inner, hidden]),
        ] {
            push_with_bias(&mut list, &format!("{prefix}.{name}"), &shape)?;
        }
    }
    push_with_bias(&mut list, "transformer.ln_f", &[hidden])?;
    if !config.flag_or("tie_word_embeddings", true)? {
        list.push("lm_head.weight".to_owned(), &[vocabulary, hidden])?;
    }
    Ok(ModelLayout { tensors: list.into_module_order(), class_name: "GPT2LMHeadModel" })
}

/// A weight and a bias as long as the weight's last dimension.
fn push_with_bias(list: &mut TensorList, name: &str, shape: &[u64]) -> Result<(), SynthError> {
    list.push(format!("{name}.weight"), shape)?;
    list.push(format!("{name}.bias"), &shape[shape.len() - 1..])
}

/// T5 with encoder, decoder and head, gated or not.
pub(super) fn t5(config: &ModelConfig) -> Result<ModelLayout, SynthError> {
    let layer_count = config.number("num_layers")?;
    let model = config.number("d_model")?;
    let vocabulary = config.number("vocab_size")?;
    let heads = config.number("num_heads")?;
    let stack = T5Stack {
        model,
        attention_width: config.product("num_heads", heads, config.number_or("d_kv", 64)?)?,
        feed_forward_width: config.number("d_ff")?,
        heads,
        bucket_count: config.number_or("relative_attention_num_buckets", 32)?,
        gated: config.text_or("feed_forward_proj", "relu")?.starts_with("gated-"),
    };
    let mut list = TensorList::new(config);
    list.push("shared.weight".to_owned(), &[vocabulary, model])?;
    stack.push(&mut list, "encoder", layer_count, false)?;
    stack.push(&mut list, "decoder", config.number_or("num_decoder_layers", layer_count)?, true)?;
    if !config.flag_or("tie_word_embeddings", true)? {
        list.push("lm_head.weight".to_owned(), &[vocabulary, model])?;
    }
    Ok(ModelLayout { tensors: list.into_module_order(), class_name: "T5ForConditionalGeneration" })
}

/// The sizes of a stack of T5 blocks.
struct T5Stack {
    model: u64,
    attention_width: u64,
    feed_forward_width: u64,
    heads: u64,
    bucket_count: u64,
    gated: bool,
}

impl T5Stack {
    fn push(
        &self,
        list: &mut TensorList,
        stack: &str,
        layer_count: u64,
        is_decoder: bool,
    ) -> Result<(), SynthError> {
        for layer in 0..layer_count {
            let block = format!("{stack}.block.{layer}.layer");
            self.push_attention(list, &format!("{block}.0"), "SelfAttention", layer == 0)?;
            if is_decoder {
                self.push_attention(list, &format!("{block}.1"), "EncDecAttention", false)?;
            }
            self.push_feed_forward(list, &format!("{block}.{}", if is_decoder { 2 } else { 1 }))?;
        }
        list.push(format!("{stack}.final_layer_norm.weight"), &[self.model])
    }

    /// The first block of a stack also holds the position bias that all its blocks share.
    fn push_attention(
        &self,
        list: &mut TensorList,
        prefix: &str,
        name: &str,
        has_position_bias: bool,
    ) -> Result<(), SynthError> {
        for input in ["q", "k", "v"] {
            list.push(format!("{prefix}.{name}.{input}.weight"), &[self.attention_width, self.model])?;
        }
        list.push(format!("{prefix}.{name}.o.weight"), &[self.model, self.attention_width])?;
        if has_position_bias {
            let name = format!("{prefix}.{name}.relative_attention_bias.weight");
            list.push(name, &[self.bucket_count, self.heads])?;
        }
        list.push(format!("{prefix}.layer_norm.weight"), &[self.model])
    }

    fn push_feed_forward(&self, list: &mut TensorList, prefix: &str) -> Result<(), SynthError> {
        let inputs: &[&str] = if self.gated { &["wi_0", "wi_1"] } else { &["wi"] };
        for input in inputs {
            let name = format!("{prefix}.DenseReluDense.{input}.weight");
            list.push(name, &[self.feed_forward_width, self.model])?;
        }
        list.push(format!("{prefix}.DenseReluDense.wo.weight"), &[self.model, self.feed_forward_width])?;
        list.push(format!("{prefix}.layer_norm.weight"), &[self.model])
    }
}
