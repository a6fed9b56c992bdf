//! The story: whole groupings of well-known models, pinned: every layer in order, with its tensors
//! and sub-units.
//!
//! Shapes are those of the models; where all members of a stack are alike, one of them is shown.

#![allow(clippy::unwrap_used, reason = "a test helper that fails should fail the test")]

use std::fmt::Write;

use onelayer::layers::{LayerKind, LayerMap, Layers};

#[allow(dead_code, reason = "shared with the measuring example; only the parser is used here")]
use crate::read;

/// One line per layer; runs of members with the same tensors are one line.
fn show(text: &str) -> String {
    let inventory = read::parse_compact(&format!("@test\n{}", text.replace(' ', "\t"))).unwrap().remove(0);
    let layers = Layers::from_names(&inventory.named_shapes(), &LayerMap::default()).unwrap();
    let mut lines: Vec<(String, String)> = Vec::new();
    for layer in layers.as_slice() {
        let id = layer.id.as_str();
        let within = |name: &str| name.strip_prefix(id).unwrap_or(name).to_owned();
        let mut tensors: Vec<_> =
            layer.tensors.iter().map(|tensor| within(&inventory.tensors[tensor.index()].0)).collect();
        tensors.sort();
        let mut detail = format!("{} tensors: {}", tensors.len(), tensors[..tensors.len().min(4)].join(" "));
        if let (Some(first), Some(last)) = (layer.sub_units.first(), layer.sub_units.last()) {
            let (first_path, last_path) = (within(&first.prefix), within(&last.prefix));
            let _ = write!(detail, "; {} sub-units {first_path} to {last_path}", layer.sub_units.len());
        }
        if let LayerKind::Member { stack } = layer.kind {
            let _ = write!(detail, "; stack {}, {:?}", layers.stacks()[stack], layers.confidence(stack));
        }
        match lines.last_mut() {
            Some((ids, same)) if *same == detail && layer.kind != LayerKind::Group => {
                let first = ids.split(" to ").next().unwrap().to_owned();
                *ids = format!("{first} to {id}");
            }
            _ => lines.push((id.to_owned(), detail)),
        }
    }
    lines.into_iter().map(|(ids, detail)| format!("{ids}\n    {detail}\n")).collect()
}

/// Compares with the snapshot called `name`.
fn golden(name: &str, shown: &str) {
    insta::with_settings!({ omit_expression => true }, { insta::assert_snapshot!(name, shown) });
}

#[test]
fn llama() {
    golden(
        "llama",
        &show(
            "model.embed_tokens.weight 128256x4096\n\
         model.layers.{0-31}.input_layernorm.weight 4096\n\
         model.layers.{0-31}.mlp.down_proj.weight 4096x14336\n\
         model.layers.{0-31}.mlp.gate_proj.weight 14336x4096\n\
         model.layers.{0-31}.mlp.up_proj.weight 14336x4096\n\
         model.layers.{0-31}.post_attention_layernorm.weight 4096\n\
         model.layers.{0-31}.self_attn.k_proj.weight 1024x4096\n\
         model.layers.{0-31}.self_attn.o_proj.weight 4096x4096\n\
         model.layers.{0-31}.self_attn.q_proj.weight 4096x4096\n\
         model.layers.{0-31}.self_attn.v_proj.weight 1024x4096\n\
         model.norm.weight 4096\n\
         lm_head.weight 128256x4096",
        ),
    );
}

#[test]
fn gemma() {
    golden(
        "gemma",
        &show(
            "model.embed_tokens.weight 256000x3072\n\
         model.layers.{0-27}.input_layernorm.weight 3072\n\
         model.layers.{0-27}.mlp.down_proj.weight 3072x24576\n\
         model.layers.{0-27}.mlp.gate_proj.weight 24576x3072\n\
         model.layers.{0-27}.mlp.up_proj.weight 24576x3072\n\
         model.layers.{0-27}.post_attention_layernorm.weight 3072\n\
         model.layers.{0-27}.self_attn.k_proj.weight 4096x3072\n\
         model.layers.{0-27}.self_attn.o_proj.weight 3072x4096\n\
         model.layers.{0-27}.self_attn.q_proj.weight 4096x3072\n\
         model.layers.{0-27}.self_attn.v_proj.weight 4096x3072\n\
         model.norm.weight 3072",
        ),
    );
}

#[test]
fn gpt2() {
    golden(
        "gpt2",
        &show(
            "h.{0-11}.attn.bias 1x1x1024x1024\nh.{0-11}.attn.c_attn.bias 2304\nh.{0-11}.attn.c_attn.weight 768x2304\n\
         h.{0-11}.attn.c_proj.bias 768\nh.{0-11}.attn.c_proj.weight 768x768\nh.{0-11}.ln_1.bias 768\n\
         h.{0-11}.ln_1.weight 768\nh.{0-11}.ln_2.bias 768\nh.{0-11}.ln_2.weight 768\nh.{0-11}.mlp.c_fc.bias 3072\n\
         h.{0-11}.mlp.c_fc.weight 768x3072\nh.{0-11}.mlp.c_proj.bias 768\nh.{0-11}.mlp.c_proj.weight 3072x768\n\
         ln_f.bias 768\nln_f.weight 768\nwpe.weight 1024x768\nwte.weight 50257x768",
        ),
    );
}

#[test]
fn mixtral() {
    golden(
        "mixtral",
        &show(
            "lm_head.weight 32000x4096\nmodel.embed_tokens.weight 32000x4096\n\
         model.layers.{0-31}.block_sparse_moe.experts.{0-7}.w1.weight 14336x4096\n\
         model.layers.{0-31}.block_sparse_moe.experts.{0-7}.w2.weight 4096x14336\n\
         model.layers.{0-31}.block_sparse_moe.experts.{0-7}.w3.weight 14336x4096\n\
         model.layers.{0-31}.block_sparse_moe.gate.weight 8x4096\n\
         model.layers.{0-31}.input_layernorm.weight 4096\n\
         model.layers.{0-31}.post_attention_layernorm.weight 4096\n\
         model.layers.{0-31}.self_attn.k_proj.weight 1024x4096\n\
         model.layers.{0-31}.self_attn.o_proj.weight 4096x4096\n\
         model.layers.{0-31}.self_attn.q_proj.weight 4096x4096\n\
         model.layers.{0-31}.self_attn.v_proj.weight 1024x4096\n\
         model.norm.weight 4096",
        ),
    );
}

/// A T5 block's parts: attention of `name` at place `place`.
fn t5_attention(stack: &str, place: u32, name: &str) -> String {
    let part = |leaf: &str| format!("{stack}.block.{{0-5}}.layer.{place}.{name}.{leaf}.weight 512x512\n");
    ["k", "o", "q", "v"].map(part).concat()
        + &format!("{stack}.block.{{0-5}}.layer.{place}.layer_norm.weight 512\n")
}

fn t5_feed_forward(stack: &str, place: u32) -> String {
    let prefix = format!("{stack}.block.{{0-5}}.layer.{place}");
    format!(
        "{prefix}.DenseReluDense.wi.weight 2048x512\n{prefix}.DenseReluDense.wo.weight 512x2048\n{prefix}.layer_norm.weight 512\n"
    )
}

#[test]
fn t5() {
    let decoder = t5_attention("decoder", 0, "SelfAttention")
        + &t5_attention("decoder", 1, "EncDecAttention")
        + &t5_feed_forward("decoder", 2)
        + "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight 32x8\n\
           decoder.final_layer_norm.weight 512\n";
    let encoder = t5_attention("encoder", 0, "SelfAttention")
        + &t5_feed_forward("encoder", 1)
        + "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight 32x8\n\
           encoder.final_layer_norm.weight 512\n";
    golden("t5", &show(&(decoder + &encoder + "shared.weight 32128x512")));
}

#[test]
fn diffusers_pipeline() {
    let attention = |prefix: &str, width: u32| {
        let linear =
            |name: &str| format!("{prefix}.{name}.weight {width}x{width}\n{prefix}.{name}.bias {width}\n");
        ["attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v"].map(linear).concat()
            + &format!(
                "{prefix}.ff.net.0.proj.weight {0}x{width}\n{prefix}.ff.net.2.weight {width}x{0}\n",
                4 * width
            )
    };
    let adaptive = |prefix: &str, width: u32| {
        format!("{prefix}.norm1.linear.weight {0}x{width}\n{prefix}.norm1.linear.bias {0}\n", 6 * width)
    };
    let resnet = |prefix: &str, width: u32| {
        format!(
            "{prefix}.norm1.weight {width}\n{prefix}.conv1.weight {width}x{width}x3x3\n\
             {prefix}.norm2.weight {width}\n{prefix}.conv2.weight {width}x{width}x3x3\n"
        )
    };
    let transformer = attention("transformer/transformer_blocks.{0-18}", 3072)
        + &adaptive("transformer/transformer_blocks.{0-18}", 3072)
        + &attention("transformer/single_transformer_blocks.{0-37}", 3072)
        + &adaptive("transformer/single_transformer_blocks.{0-37}", 3072)
        + "transformer/x_embedder.weight 3072x64\ntransformer/context_embedder.weight 3072x4096\n\
           transformer/norm_out.linear.weight 6144x3072\ntransformer/norm_out.linear.bias 6144\n\
           transformer/proj_out.weight 64x3072\ntransformer/proj_out.bias 64\n";
    let text_encoder = attention("text_encoder/text_model.encoder.layers.{0-11}", 768)
        + "text_encoder/text_model.encoder.layers.{0-11}.layer_norm1.weight 768\n\
           text_encoder/text_model.embeddings.token_embedding.weight 49408x768\n\
           text_encoder/text_model.final_layer_norm.weight 768\n";
    let vae = resnet("vae/encoder.down_blocks.0.resnets.{0-1}", 128)
        + &resnet("vae/encoder.down_blocks.1.resnets.{0-1}", 256)
        + &resnet("vae/decoder.up_blocks.0.resnets.{0-2}", 256)
        + &resnet("vae/decoder.up_blocks.1.resnets.{0-2}", 128)
        + "vae/encoder.down_blocks.0.downsamplers.0.conv.weight 128x128x3x3\nvae/encoder.conv_in.weight 128x3x3x3\n\
           vae/encoder.conv_out.weight 32x256x3x3\nvae/encoder.conv_out.bias 32\nvae/decoder.conv_in.weight 256x16x3x3\n\
           vae/decoder.conv_out.weight 3x128x3x3\nvae/decoder.conv_out.bias 3";
    golden("diffusers_pipeline", &show(&(transformer + &text_encoder + &vae)));
}
