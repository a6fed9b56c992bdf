//! The story: every case and trap of grouping that real checkpoints have shown, one test each.
//!
//! Inputs are written in the compact form of fixtures/inventories: `{0-3}` stands for four indices,
//! then the shape.

#![allow(clippy::unwrap_used, reason = "a test helper that fails should fail the test")]

use onelayer::layers::{Confidence, LayerId, LayerKind, LayerMap, Layers};

#[allow(dead_code, reason = "shared with the measuring example; only the parser is used here")]
use crate::read;

/// A transformer block of width 64 at `prefix`.
fn block(prefix: &str) -> String {
    block_of(prefix, 64)
}

fn block_of(prefix: &str, width: u64) -> String {
    let wide = 4 * width;
    format!(
        "{prefix}.norm1.weight {width}\n{prefix}.attn.qkv.weight {}x{width}\n{prefix}.attn.proj.weight {width}x{width}\n\
         {prefix}.norm2.weight {width}\n{prefix}.mlp.fc1.weight {wide}x{width}\n{prefix}.mlp.fc2.weight {width}x{wide}\n",
        3 * width
    )
}

struct Grouped {
    names: Vec<String>,
    layers: Layers,
}

fn group(text: &str) -> Grouped {
    group_with(text, &LayerMap::default())
}

fn group_with(text: &str, map: &LayerMap) -> Grouped {
    let inventory = read::parse_compact(&format!("@test\n{}", text.replace(' ', "\t"))).unwrap().remove(0);
    let layers = Layers::from_names(&inventory.named_shapes(), map).unwrap();
    let names = inventory.tensors.into_iter().map(|(name, _)| name).collect();
    Grouped { names, layers }
}

impl Grouped {
    fn stacks(&self) -> Vec<&str> {
        self.layers.stacks().iter().map(|stack| &**stack).collect()
    }

    fn ids(&self) -> Vec<&str> {
        self.layers.as_slice().iter().map(|layer| layer.id.as_str()).collect()
    }

    /// Ids of the layers that are in no stack, in order.
    fn groups(&self) -> Vec<&str> {
        let layers = self.layers.as_slice().iter().filter(|layer| layer.kind == LayerKind::Group);
        layers.map(|layer| layer.id.as_str()).collect()
    }

    fn names_in(&self, id: &str) -> Vec<&str> {
        let layer = self.layers.find(&LayerId::new(id)).unwrap_or_else(|| panic!("no layer {id}"));
        layer.tensors.iter().map(|tensor| self.names[tensor.index()].as_str()).collect()
    }

    fn sub_units(&self, id: &str) -> Vec<(&str, usize)> {
        let layer = self.layers.find(&LayerId::new(id)).unwrap();
        layer.sub_units.iter().map(|unit| (&*unit.prefix, unit.tensors.len())).collect()
    }
}

// --- what layers are made of ---

#[test]
fn experts_in_a_list_are_sub_units_of_their_layer() {
    let text = block("model.layers.{0-3}")
        + "model.layers.{0-3}.moe.gate.weight 12x64\n\
           model.layers.{0-3}.moe.experts.{0-11}.w1.weight 256x64\n\
           model.layers.{0-3}.moe.experts.{0-11}.w2.weight 64x256";
    let grouped = group(&text);
    assert_eq!(grouped.stacks(), ["model.layers"]);
    let units = grouped.sub_units("model.layers.2");
    assert_eq!(units.len(), 12);
    assert_eq!(units[10], ("model.layers.2.moe.experts.10", 2), "natural order, each with its tensors");
    assert_eq!(
        grouped.names_in("model.layers.2").len(),
        7 + 24,
        "the layer holds its base part and all experts"
    );
}

#[test]
fn experts_do_not_outvote_their_layer() {
    // Nearly all elements are in the experts, and little else is in the layer.
    let text = "net.{0-11}.norm.weight 512\nnet.{0-11}.router.weight 16x512\n\
                net.{0-11}.experts.{0-15}.w1.weight 512x512\nnet.{0-11}.experts.{0-15}.w2.weight 512x512\n\
                net.{0-11}.experts.{0-15}.w3.weight 512x512";
    assert_eq!(group(text).stacks(), ["net"]);
}

#[test]
fn fused_experts_and_their_companions_stay_together() {
    let text = block("model.layers.{0-3}")
        + "model.layers.{0-3}.mlp.experts.gate_up_proj_blocks 8x128x2x16\n\
           model.layers.{0-3}.mlp.experts.gate_up_proj_scales 8x128x2\n\
           model.layers.{0-3}.mlp.experts.gate_up_proj_bias 8x128";
    let grouped = group(&text);
    assert_eq!(grouped.names_in("model.layers.0").len(), 9);
    assert_eq!(grouped.sub_units("model.layers.0"), []);
    assert_eq!(grouped.layers.companions().len(), 4, "the scales, and neither blocks nor bias");
}

#[test]
fn hybrid_members_are_one_stack() {
    let text = "model.layers.{0-7}.input_layernorm.weight 64\nmodel.layers.{0-7}.ff_layernorm.weight 64\n\
                model.layers.{0,4}.self_attn.q_proj.weight 64x64\nmodel.layers.{0,4}.self_attn.o_proj.weight 64x64\n\
                model.layers.{1-3,5-7}.mamba.in_proj.weight 256x64\nmodel.layers.{1-3,5-7}.mamba.A_log 128x16\n\
                model.layers.{1-3,5-7}.mamba.out_proj.weight 64x128\n\
                model.layers.{0,2,4,6}.mlp.up.weight 256x64\nmodel.layers.{0,2,4,6}.mlp.down.weight 64x256\n\
                model.layers.{1,3,5,7}.moe.experts.{0-15}.up.weight 256x64\n\
                model.layers.{1,3,5,7}.moe.experts.{0-15}.down.weight 64x256";
    let grouped = group(text);
    assert_eq!(grouped.stacks(), ["model.layers"]);
    assert_eq!(grouped.layers.as_slice().len(), 8);
}

#[test]
fn uneven_widths_are_one_stack() {
    let text: String =
        (0..12).map(|layer| block_of(&format!("model.layers.{layer}"), 64 + 16 * layer)).collect();
    let grouped = group(&text);
    assert_eq!(grouped.stacks(), ["model.layers"]);
    assert_eq!(grouped.layers.confidence(0), Confidence::Medium);
}

#[test]
fn layers_of_several_lists_of_parts_stay_whole() {
    // T5: a block is a list of two or three unlike parts.
    let t5 = "decoder.block.{0-5}.layer.0.SelfAttention.{q}.weight 64x64\n".replace("{q}", "q")
        + "decoder.block.{0-5}.layer.0.SelfAttention.o.weight 64x64\ndecoder.block.{0-5}.layer.{0-2}.layer_norm.weight 64\n\
           decoder.block.{0-5}.layer.1.EncDecAttention.q.weight 64x64\ndecoder.block.{0-5}.layer.1.EncDecAttention.o.weight 64x64\n\
           decoder.block.{0-5}.layer.2.DenseReluDense.wi.weight 256x64\ndecoder.block.{0-5}.layer.2.DenseReluDense.wo.weight 64x256";
    let grouped = group(&t5);
    assert_eq!(grouped.stacks(), ["decoder.block"]);
    assert_eq!(grouped.sub_units("decoder.block.0").len(), 3);
    // The same with nothing but numbers for names: attention, attention, feed-forward.
    let numbered = "layers.{0-7}.{0-2}.norm.weight 64\nlayers.{0-7}.{0-1}.fn.to_q.weight 64x64\n\
                    layers.{0-7}.{0-1}.fn.to_out.weight 64x64\nlayers.{0-7}.2.fn.net.0.weight 256x64\n\
                    layers.{0-7}.2.fn.net.3.weight 64x256";
    assert_eq!(group(numbered).stacks(), ["layers"]);
}

#[test]
fn adapters_follow_the_layers_of_their_model() {
    let text = "base_model.model.model.layers.{0-11}.self_attn.q_proj.lora_A.weight 8x64\n\
                base_model.model.model.layers.{0-11}.self_attn.q_proj.lora_B.weight 64x8";
    assert_eq!(group(text).stacks(), ["base_model.model.model.layers"]);
}

// --- hierarchies ---

#[test]
fn stages_give_way_to_their_blocks() {
    let widths = [(0, 32, "{0-1}"), (1, 64, "{0-1}"), (2, 128, "{0-5}"), (3, 256, "{0-1}")];
    let blocks = |list: &str| -> String {
        widths
            .iter()
            .map(|(stage, width, blocks)| block_of(&format!("{list}.{stage}.blocks.{blocks}"), *width))
            .collect()
    };
    let downsample =
        "encoder.stages.0.downsample.proj.weight 64x128\nencoder.stages.1.downsample.proj.weight 128x256";
    let grouped = group(&(blocks("encoder.stages") + downsample));
    assert_eq!(grouped.stacks().len(), 4);
    assert_eq!(grouped.stacks()[2], "encoder.stages.2.blocks");
    assert_eq!(grouped.groups(), ["encoder.stages.0.downsample", "encoder.stages.1.downsample"]);
}

#[test]
fn numbered_stages_of_equal_width_give_way_too() {
    assert_eq!(group(&block("encoder.blocks.{0-2}.{0-3}")).stacks().len(), 3);
}

#[test]
fn stages_that_are_more_than_a_container_stay_whole() {
    let text: String = [(0, 32), (1, 64), (2, 128)]
        .map(|(stage, width)| {
            let prefix = format!("encoder.layer.{stage}");
            let convolution = |name: &str| {
                format!(
                    "{prefix}.{name}.conv.weight {width}x{width}x3x3\n{prefix}.{name}.norm.weight {width}\n\
                         {prefix}.{name}.norm.running_mean {width}\n"
                )
            };
            let own: String = ["down1", "down2", "local", "project", "fuse"].map(convolution).concat();
            own + &block_of(&format!("{prefix}.transformer.{{0-1}}"), width)
        })
        .concat();
    assert_eq!(group(&text).stacks(), ["encoder.layer"]);
}

#[test]
fn a_list_of_networks_gives_way_to_their_layers() {
    let own: String = ["embed", "position", "project", "condition.a", "condition.b", "condition.c", "head"]
        .map(|name| format!("priors.{{0-2}}.{name}.weight 64x32\n"))
        .concat();
    let grouped = group(&(own + &block("priors.{0-2}.layers.{0-35}")));
    assert_eq!(grouped.stacks(), ["priors.0.layers", "priors.1.layers", "priors.2.layers"]);
}

#[test]
fn u_nets_are_cut_at_their_resnets_and_transformer_blocks() {
    let mut text = String::new();
    for (level, width, attention) in [(0, 32, false), (1, 64, true), (2, 128, true)] {
        let prefix = format!("down_blocks.{level}");
        text += &format!(
            "{prefix}.resnets.{{0-1}}.norm1.weight {width}\n{prefix}.resnets.{{0-1}}.conv1.weight {width}x{width}x3x3\n\
             {prefix}.resnets.{{0-1}}.conv2.weight {width}x{width}x3x3\n{prefix}.downsamplers.0.conv.weight {width}x{width}x3x3\n"
        );
        if attention {
            let prefix = format!("{prefix}.attentions.{{0-1}}");
            text += &format!("{prefix}.norm.weight {width}\n{prefix}.proj_in.weight {width}x{width}\n");
            text += &block_of(&format!("{prefix}.transformer_blocks.{{0-9}}"), width);
        }
    }
    let grouped = group(&text);
    assert_eq!(
        grouped.stacks(),
        [
            "down_blocks.0.resnets",
            "down_blocks.1.attentions.0.transformer_blocks",
            "down_blocks.1.attentions.1.transformer_blocks",
            "down_blocks.1.resnets",
            "down_blocks.2.attentions.0.transformer_blocks",
            "down_blocks.2.attentions.1.transformer_blocks",
            "down_blocks.2.resnets",
        ]
    );
}

#[test]
fn blocks_of_growing_width_without_norms_are_a_stack() {
    let text: String = [(0, 32, 64), (1, 64, 128), (2, 128, 256), (3, 256, 512)]
        .map(|(at, from, to)| {
            format!("motion.res_blocks.{at}.conv1.weight {from}x{from}x3x3\nmotion.res_blocks.{at}.conv2.weight {to}x{from}x3x3\n\
                     motion.res_blocks.{at}.skip.weight {to}x{from}x1x1\n")
        })
        .concat();
    assert_eq!(group(&(text + "motion.conv_in.weight 32x3x1x1")).stacks(), ["motion.res_blocks"]);
}

#[test]
fn a_list_of_one_block_is_a_stack() {
    let grouped =
        group(&(block("model.layers.{0-3}") + &block("model.mtp_layers.0") + "model.stem.0.conv.weight 8x8"));
    assert_eq!(grouped.stacks(), ["model.layers", "model.mtp_layers"]);
    assert_eq!(grouped.layers.confidence(1), Confidence::Low);
    assert_eq!(grouped.groups(), ["model.stem"]);
}

// --- several stacks, and their order ---

#[test]
fn several_stacks_have_full_prefixes() {
    let text = block("model.layers.{0-1}")
        + &block("model.sam_model.blocks.{0-1}")
        + &block("model.qwen2_model.model.model.layers.{0-1}");
    let grouped = group(&text);
    let mut stacks = grouped.stacks();
    stacks.sort_unstable();
    assert_eq!(stacks, ["model.layers", "model.qwen2_model.model.model.layers", "model.sam_model.blocks"]);
}

#[test]
fn an_encoder_runs_before_its_decoder() {
    let text = block("decoder.layers.{0-1}")
        + &block("encoder.layers.{0-1}")
        + "shared.weight 1000x64\n\
               decoder.final_norm.weight 64\nencoder.final_norm.weight 64\nlm_head.weight 1000x64";
    assert_eq!(
        group(&text).ids(),
        [
            "shared",
            "encoder.layers.0",
            "encoder.layers.1",
            "encoder.final_norm",
            "decoder.layers.0",
            "decoder.layers.1",
            "decoder.final_norm",
            "lm_head"
        ]
    );
}

#[test]
fn what_reads_tokens_runs_after_what_feeds_it() {
    let text = block("model.language_model.layers.{0-1}")
        + "model.language_model.embed_tokens.weight 5000x64\n\
               model.language_model.norm.weight 64\nmodel.projector.linear.weight 64x32\nlm_head.weight 5000x64\n"
        + &block_of("model.vision_tower.blocks.{0-1}", 32)
        + "model.vision_tower.patch_embed.weight 32x3x14x14";
    assert_eq!(
        group(&text).ids(),
        [
            "model.vision_tower.patch_embed",
            "model.vision_tower.blocks.0",
            "model.vision_tower.blocks.1",
            "model.projector",
            "model.language_model.embed_tokens",
            "model.language_model.layers.0",
            "model.language_model.layers.1",
            "model.language_model.norm",
            "lm_head"
        ]
    );
}

#[test]
fn shapes_tell_front_from_back() {
    // No word in these names says where they belong.
    let text =
        block("h.{0-1}") + "w1.weight 64x3\nw1.bias 64\nw2.weight 3x64\nw2.bias 3\nw3.weight 64\nw3.bias 64";
    assert_eq!(group(&text).ids(), ["w1", "h.0", "h.1", "w3", "w2"]);
}

#[test]
fn a_head_beside_the_model_is_behind_it_whatever_its_name() {
    let text = block("gpt.layers.{0-1}")
        + "gpt.embed_in.weight 1000x64\nembed_out.weight 1000x64\nscore.weight 1000x64";
    assert_eq!(group(&text).ids(), ["gpt.embed_in", "gpt.layers.0", "gpt.layers.1", "embed_out", "score"]);
}

#[test]
fn a_modulated_final_layer_is_behind() {
    // Its modulation maps a condition into the width, as an embedder would.
    let text = block("layers.{0-1}")
        + "final_layer.linear.weight 16x64\nfinal_layer.linear.bias 16\n\
               final_layer.modulation.weight 64x32\nt_embedder.linear.weight 64x32\nmask_token 1x64";
    assert_eq!(group(&text).ids(), ["mask_token", "t_embedder", "layers.0", "layers.1", "final_layer"]);
}

#[test]
fn a_qualified_stack_follows_the_plain_one() {
    let grouped = group(&(block("single_transformer_blocks.{0-1}") + &block("transformer_blocks.{0-1}")));
    assert_eq!(grouped.stacks(), ["transformer_blocks", "single_transformer_blocks"]);
}

#[test]
fn interleaved_stacks_need_the_override() {
    let text = block("model.layers.{0-1}") + &block("model.gated_cross_attn_layers.{0-1}");
    assert_eq!(group(&text).ids()[..2], ["model.layers.0", "model.layers.1"]);
    let map = LayerMap::parse(
        "order = ['model.gated_cross_attn_layers.0', 'model.layers.0', 'model.gated_cross_attn_layers.1', 'model.layers']",
    );
    assert_eq!(
        group_with(&text, &map.unwrap()).ids(),
        [
            "model.gated_cross_attn_layers.0",
            "model.layers.0",
            "model.gated_cross_attn_layers.1",
            "model.layers.1"
        ]
    );
}

#[test]
fn components_of_a_pipeline_are_grouped_apart() {
    let text = block("transformer/blocks.{0-1}")
        + &block_of("text_encoder/encoder.layers.{0-1}", 32)
        + "transformer/x_embedder.weight 64x16\ntransformer/proj_out.weight 16x64\ntext_encoder/scale -\n"
        + &block_of("vae/{0-2}", 8);
    let grouped = group(&text);
    assert_eq!(grouped.stacks(), ["text_encoder/encoder.layers", "transformer/blocks", "vae"]);
    assert_eq!(grouped.names_in("vae/1").len(), 6);
    assert_eq!(grouped.groups(), ["text_encoder/scale", "transformer/x_embedder", "transformer/proj_out"]);
    assert_eq!(grouped.ids()[3], "transformer/x_embedder", "no component is mixed with another");
}

#[test]
fn single_file_pipelines_keep_their_prefixes() {
    let text = block("model.diffusion_model.double_blocks.{0-1}")
        + &block("cond_stage_model.transformer.layers.{0-1}")
        + "first_stage_model.decoder.conv_in.weight 8x8x3x3";
    let grouped = group(&text);
    assert_eq!(
        grouped.stacks(),
        ["cond_stage_model.transformer.layers", "model.diffusion_model.double_blocks"]
    );
    assert_eq!(grouped.groups(), ["first_stage_model"]);
}

// --- traps ---

#[test]
fn trap_1_a_stack_at_the_root_and_equal_indices_in_several_stacks() {
    let root = group(&block("{0-3}"));
    assert_eq!((root.stacks(), root.ids()), (vec![""], vec!["0", "1", "2", "3"]));
    let named = group(&(block("h.{0-3}") + &block("g.{0-3}")));
    assert_eq!(named.names_in("g.3").len(), 6);
    assert_eq!(named.names_in("h.3").len(), 6);
}

#[test]
fn trap_2_nested_digits_belong_to_their_layer() {
    let text = block("blocks.{0-3}")
        + "blocks.{0-3}.to_out.0.weight 64x64\nblocks.{0-3}.ff.net.0.proj.weight 64x64\n\
               blocks.{0-3}.ff.net.2.weight 64x64";
    let grouped = group(&text);
    assert_eq!(grouped.stacks(), ["blocks"]);
    assert_eq!(grouped.sub_units("blocks.0"), [], "a numbered linear is no sub-unit");
}

#[test]
fn trap_3_numbered_lists_that_are_no_layers() {
    let text = block("model.layers.{0-3}")
        + "classifiers.{0-3}.weight 8x64\nneck.{0-3}.weight 64x64\nneck.{0-3}.bias 64\n\
               mlp1.{0,1,3}.weight 64x64\nmm_projector.{0,2}.weight 64x64\npoint_embeddings.{0-3}.weight 1x64\n\
               text_hidden_fcs.0.{0,2}.weight 64x64\npatch_embeddings.0.proj.weight 64x3x7x7\n\
               patch_embeddings.0.norm.weight 64\npatch_embeddings.1.proj.weight 128x64x3x3\npatch_embeddings.1.norm.weight 128";
    assert_eq!(group(&text).stacks(), ["model.layers"]);
}

#[test]
fn trap_4_gaps_and_late_starts() {
    let grouped = group(&block("model.layers.{7,9,100,1000}"));
    assert_eq!(grouped.ids(), ["model.layers.7", "model.layers.9", "model.layers.100", "model.layers.1000"]);
}

#[test]
fn trap_5_odd_first_and_last_members() {
    let text = block("layers.{1-32}")
        + "layers.0.wte.weight 1000x64\nlayers.33.ln.weight 64\nlayers.33.linear.weight 1000x64";
    let grouped = group(&text);
    assert_eq!(grouped.stacks(), ["layers"]);
    assert_eq!(grouped.names_in("layers.0"), ["layers.0.wte.weight"]);
    assert_eq!(grouped.ids()[33], "layers.33");
}

#[test]
fn trap_6_companions_do_not_make_stacks_and_follow_their_weight() {
    let quantized = "mm_projector.{0,2}.weight 64x64\nmm_projector.{0,2}.weight.absmax 64\n\
                     mm_projector.{0,2}.weight.quant_state.bitsandbytes__nf4 82\n";
    let text = block("model.layers.{0-3}")
        + quantized
        + "model.layers.{0-3}.e.{0-3}.up.weight_packed 64x8\n\
               model.layers.{0-3}.e.{0-3}.up.weight_scale 64x1\nmodel.layers.{0-3}.e.{0-3}.down.weight_packed 64x8\n\
               model.layers.{0-3}.e.{0-3}.down.weight_scale 64x1\nlogit_scale -\nmodel.layers.{0-3}.layer_scalar 1";
    let grouped = group(&text);
    assert_eq!(grouped.stacks(), ["model.layers"]);
    assert_eq!(grouped.names_in("mm_projector").len(), 6);
    assert_eq!(
        grouped.sub_units("model.layers.1")[0],
        ("model.layers.1.e.0", 4),
        "scales are in their expert"
    );
    let hosts: Vec<_> = (grouped.layers.companions().iter())
        .map(|(companion, host)| {
            (grouped.names[companion.index()].as_str(), grouped.names[host.index()].as_str())
        })
        .collect();
    assert!(hosts.contains(&("mm_projector.2.weight.absmax", "mm_projector.2.weight")));
    assert!(hosts.iter().all(|(companion, _)| *companion != "logit_scale"));
    assert_eq!(hosts.len(), 4 + 32);
}

#[test]
fn trap_7_digits_in_words_and_prefixes_that_collide() {
    let text = block("layers.{1,10}")
        + "norm1.weight 64\nlinear_1.weight 64x64\nquery_768.weight 768x64\nlayers_extra.0 64";
    let grouped = group(&text);
    assert_eq!(grouped.stacks(), ["layers"]);
    assert_eq!(grouped.names_in("layers.1").len(), 6);
    assert_eq!(grouped.groups().len(), 4);
}

#[test]
fn trap_8_layer_like_words_outside_of_stacks() {
    let text = block("model.blocks.{0-3}")
        + "model.projector.layers.weight 64x32\nmodel.ff_out.weight 1000x64\n\
               iou_head.layers.{0-2}.weight 64x64\niou_head.layers.{0-2}.bias 64\nvison.pre_layrnorm.weight 64";
    let grouped = group(&text);
    assert_eq!(grouped.stacks(), ["model.blocks"]);
    assert_eq!(grouped.names_in("model.ff_out"), ["model.ff_out.weight"]);
}

#[test]
fn trap_9_bare_parameters_belong_to_their_container() {
    let text = block("model.layers.{0-3}")
        + "model.image_newline 64\nlogit_scale -\nmodel.layers.{0-3}.layer_scalar 1\n\
               model.layers.rotary.inv_freq 32\nmodel.norm.weight 64";
    let grouped = group(&text);
    assert_eq!(grouped.names_in("model"), ["model.image_newline"]);
    assert_eq!(grouped.ids()[0], "model", "parameters of a container are in front");
    assert_eq!(grouped.names_in("logit_scale"), ["logit_scale"]);
    assert_eq!(grouped.names_in("model.layers"), ["model.layers.rotary.inv_freq"]);
    assert_eq!(grouped.names_in("model.layers.3").len(), 7);
}

#[test]
fn trap_10_wrapper_prefixes_change_nothing() {
    for wrapper in ["module.", "_orig_mod.", "base_model.model."] {
        let text =
            block(&format!("{wrapper}model.layers.{{0-3}}")) + &format!("{wrapper}lm_head.weight 1000x64");
        let grouped = group(&text);
        assert_eq!(grouped.stacks(), [format!("{wrapper}model.layers")]);
        assert_eq!(grouped.groups(), [format!("{wrapper}lm_head")]);
    }
}

#[test]
fn trap_11_scalars_and_empty_tensors_are_tensors() {
    let text = block("layers.{0-1}")
        + "layers.{0-1}.attn.step -\nlayers.{0-1}.attn.empty 0x64\ncounter -\nnothing 0";
    let grouped = group(&text);
    assert_eq!(grouped.names_in("layers.0").len(), 8);
    assert_eq!(grouped.groups(), ["counter", "nothing"]);
}

#[test]
fn trap_12_ids_are_any_text_and_unique() {
    let text = "CON 1\ncon 1\na/b.weight 1\na/b.bias 1\n01.x 1\n1.x 1";
    let grouped = group(text);
    let mut ids = grouped.ids();
    ids.sort_unstable();
    assert_eq!(ids, ["01", "1", "CON", "a/b", "con"]);
    assert!(LayerId::parse("").is_err());
    assert_eq!(LayerId::parse("a/b").unwrap(), LayerId::new("a/b"));
}

#[test]
fn index_spellings_stay_apart() {
    let grouped = group(&(block("layers.{1-3}") + &block("layers.01")));
    assert_eq!(grouped.ids(), ["layers.1", "layers.01", "layers.2", "layers.3"]);
    assert_eq!(grouped.names_in("layers.01").len(), 6);
}

#[test]
fn every_way_to_a_layer_agrees() {
    let grouped = group(&(block("layers.{0-3}") + "norm.weight 64\nlm_head.weight 100x64"));
    for (position, layer) in grouped.layers.as_slice().iter().enumerate() {
        assert_eq!(grouped.layers.find(&layer.id), Some(layer));
        assert!(layer.tensors.is_sorted(), "file order");
        for &tensor in &layer.tensors {
            assert_eq!(grouped.layers.layer_of(tensor), layer);
            assert_eq!(grouped.layers.position_of(tensor), position);
        }
    }
    assert_eq!(grouped.layers.find(&LayerId::new("layers.4")), None);
    let empty = group("");
    assert!(empty.layers.as_slice().is_empty());
    assert!(grouped.layers.metadata_bytes() > 26 * 4 + empty.layers.metadata_bytes());
}

#[test]
fn without_shapes_stages_still_give_way() {
    let text = block("encoder.stages.{0-3}.blocks.{0-2}")
        + &block("layers.{0-3}")
        + "layers.{0-3}.experts.{0-7}.up.weight 1\n\
               layers.{0-3}.experts.{0-7}.down.weight 1";
    let text: String = text.lines().map(|line| format!("{} ?\n", line.split(' ').next().unwrap())).collect();
    let grouped = group(&text);
    let experts = ["w1", "w2", "w3"].map(|name| format!("net.{{0-11}}.e.{{0-7}}.{name}.weight ?\n")).concat();
    assert_eq!(
        group(&(experts + "net.{0-11}.norm.weight ?")).stacks(),
        ["net"],
        "three modules are an expert"
    );
    assert_eq!(grouped.stacks().len(), 5);
    assert!((0..5).all(|stack| grouped.layers.confidence(stack) == Confidence::Low));
}
