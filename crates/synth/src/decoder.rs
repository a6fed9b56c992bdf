//! Decoder-only models related to Llama: a table of their differences, and one function that lists
//! the tensors of all of them.
//!
//! The defaults are those of the configuration classes in transformers 5. Tests compare names,
//! shapes and order with the output of `save_pretrained` (`fixtures/synth`, made by the script
//! there).

use super::config::ModelConfig;
use super::error::SynthError;
use super::tensor_list::{ModelLayout, TensorList};

/// Which projections of the attention have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttentionBias {
    /// None of them.
    Never,
    /// All four, if `attention_bias` is set.
    AllIfSet,
    /// Query, key and value, always.
    Inputs,
    /// Query, key and value, unless `qkv_bias` is false.
    InputsUnlessUnset,
}

/// The norm of query and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueryKeyNorm {
    None,
    /// One weight per element of a head.
    PerHead,
    /// One weight per element of the whole projection.
    Whole,
}

/// The feed-forward part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FeedForward {
    /// `gate_proj`, `up_proj`, `down_proj`.
    Gated,
    /// `gate_up_proj`, `down_proj`; the attention has one `qkv_proj`.
    Fused,
    /// A router and experts.
    Experts(ExpertNames),
}

/// Names of the parts of a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ExpertNames {
    /// The block in the files. In memory it is always `mlp`.
    block: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
    /// The key that gives the width of an expert.
    width_key: &'static str,
    /// The default number of experts.
    count_default: u64,
    /// Whether some layers may be dense (`decoder_sparse_step`, `mlp_only_layers`).
    has_dense_layers: bool,
    /// The default width of the shared expert, which every token uses. Zero: there is none.
    shared_width_default: u64,
}

/// One member of the family.
#[derive(Debug)]
pub(super) struct Family {
    /// The value of `model_type`.
    pub(super) model_type: &'static str,
    class_name: &'static str,
    /// The default number of key and value heads. `None`: as many as query heads.
    kv_heads_default: Option<u64>,
    /// The default width of a head. `None`: the hidden size divided by the number of heads.
    head_width_default: Option<u64>,
    /// Whether the output head shares the embedding's weight by default.
    tied_default: bool,
    attention_bias: AttentionBias,
    /// Whether `mlp_bias` is read.
    reads_mlp_bias: bool,
    query_key_norm: QueryKeyNorm,
    feed_forward: FeedForward,
    /// The norms of a layer, in module order.
    norms: &'static [&'static str],
}

const TWO_NORMS: &[&str] = &["input_layernorm", "post_attention_layernorm"];
const FOUR_NORMS: &[&str] = &[
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
];

/// Llama, the base of the other entries.
const LLAMA: Family = Family {
    model_type: "llama",
    class_name: "LlamaForCausalLM",
    kv_heads_default: None,
    head_width_default: None,
    tied_default: false,
    attention_bias: AttentionBias::AllIfSet,
    reads_mlp_bias: true,
    query_key_norm: QueryKeyNorm::None,
    feed_forward: FeedForward::Gated,
    norms: TWO_NORMS,
};

/// Experts with Qwen's names.
const QWEN_EXPERTS: ExpertNames = ExpertNames {
    block: "mlp",
    gate: "gate_proj",
    up: "up_proj",
    down: "down_proj",
    width_key: "moe_intermediate_size",
    count_default: 128,
    has_dense_layers: true,
    shared_width_default: 0,
};

/// Every member.
pub(super) const FAMILIES: &[Family] = &[
    LLAMA,
    Family {
        model_type: "mistral",
        class_name: "MistralForCausalLM",
        kv_heads_default: Some(8),
        attention_bias: AttentionBias::Never,
        reads_mlp_bias: false,
        ..LLAMA
    },
    Family {
        model_type: "mixtral",
        class_name: "MixtralForCausalLM",
        kv_heads_default: Some(8),
        attention_bias: AttentionBias::Never,
        reads_mlp_bias: false,
        feed_forward: FeedForward::Experts(ExpertNames {
            block: "block_sparse_moe",
            gate: "w1",
            up: "w3",
            down: "w2",
            width_key: "intermediate_size",
            count_default: 8,
            has_dense_layers: false,
            shared_width_default: 0,
        }),
        ..LLAMA
    },
    Family {
        model_type: "gemma",
        class_name: "GemmaForCausalLM",
        kv_heads_default: Some(16),
        head_width_default: Some(256),
        tied_default: true,
        reads_mlp_bias: false,
        ..LLAMA
    },
    Family {
        model_type: "gemma2",
        class_name: "Gemma2ForCausalLM",
        kv_heads_default: Some(4),
        head_width_default: Some(256),
        tied_default: true,
        reads_mlp_bias: false,
        norms: FOUR_NORMS,
        ..LLAMA
    },
    Family {
        model_type: "gemma3_text",
        class_name: "Gemma3ForCausalLM",
        kv_heads_default: Some(4),
        head_width_default: Some(256),
        tied_default: true,
        reads_mlp_bias: false,
        query_key_norm: QueryKeyNorm::PerHead,
        norms: FOUR_NORMS,
        ..LLAMA
    },
    Family {
        model_type: "qwen2",
        class_name: "Qwen2ForCausalLM",
        kv_heads_default: Some(32),
        attention_bias: AttentionBias::Inputs,
        reads_mlp_bias: false,
        ..LLAMA
    },
    Family {
        model_type: "qwen3",
        class_name: "Qwen3ForCausalLM",
        kv_heads_default: Some(32),
        head_width_default: Some(128),
        reads_mlp_bias: false,
        query_key_norm: QueryKeyNorm::PerHead,
        ..LLAMA
    },
    Family {
        model_type: "qwen2_moe",
        class_name: "Qwen2MoeForCausalLM",
        kv_heads_default: Some(16),
        attention_bias: AttentionBias::InputsUnlessUnset,
        reads_mlp_bias: false,
        feed_forward: FeedForward::Experts(ExpertNames {
            count_default: 60,
            shared_width_default: 5632,
            ..QWEN_EXPERTS
        }),
        ..LLAMA
    },
    Family {
        model_type: "qwen3_moe",
        class_name: "Qwen3MoeForCausalLM",
        kv_heads_default: Some(4),
        reads_mlp_bias: false,
        query_key_norm: QueryKeyNorm::PerHead,
        feed_forward: FeedForward::Experts(QWEN_EXPERTS),
        ..LLAMA
    },
    Family {
        model_type: "phi3",
        class_name: "Phi3ForCausalLM",
        attention_bias: AttentionBias::Never,
        reads_mlp_bias: false,
        feed_forward: FeedForward::Fused,
        ..LLAMA
    },
    Family {
        model_type: "smollm3",
        class_name: "SmolLM3ForCausalLM",
        kv_heads_default: Some(4),
        tied_default: true,
        ..LLAMA
    },
    Family {
        model_type: "olmo2",
        class_name: "Olmo2ForCausalLM",
        reads_mlp_bias: false,
        query_key_norm: QueryKeyNorm::Whole,
        norms: &["post_attention_layernorm", "post_feedforward_layernorm"],
        ..LLAMA
    },
    Family {
        model_type: "olmoe",
        class_name: "OlmoeForCausalLM",
        reads_mlp_bias: false,
        query_key_norm: QueryKeyNorm::Whole,
        feed_forward: FeedForward::Experts(ExpertNames {
            width_key: "intermediate_size",
            count_default: 64,
            has_dense_layers: false,
            ..QWEN_EXPERTS
        }),
        ..LLAMA
    },
];

/// The member with this `model_type`.
pub(super) fn family(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.model_type == model_type)
}

/// The tensors of a family with a configuration.
pub(super) fn layout(config: &ModelConfig, family: &Family) -> Result<ModelLayout, SynthError> {
    let hidden = config.number("hidden_size")?;
    let vocabulary = config.number("vocab_size")?;
    let layer_count = config.number("num_hidden_layers")?;
    let attention = Attention::read(config, family, hidden)?;
    let feed_forward = FeedForwardShape::read(config, family, hidden)?;
    let mut list = TensorList::new(config);
    list.push("model.embed_tokens.weight".to_owned(), &[vocabulary, hidden])?;
    for layer in 0..layer_count {
        let prefix = format!("model.layers.{layer}");
        attention.push(&mut list, &format!("{prefix}.self_attn"))?;
        feed_forward.push(&mut list, &prefix, layer)?;
        for norm in family.norms {
            list.push(format!("{prefix}.{norm}.weight"), &[hidden])?;
        }
    }
    list.push("model.norm.weight".to_owned(), &[hidden])?;
    if !config.flag_or("tie_word_embeddings", family.tied_default)? {
        list.push("lm_head.weight".to_owned(), &[vocabulary, hidden])?;
    }
    let tensors = match family.feed_forward {
        FeedForward::Experts(_) => list.into_saved_order(),
        FeedForward::Gated | FeedForward::Fused => list.into_module_order(),
    };
    Ok(ModelLayout { tensors, class_name: family.class_name })
}

/// The sizes of the attention.
struct Attention {
    hidden: u64,
    query_width: u64,
    kv_width: u64,
    head_width: u64,
    input_bias: bool,
    output_bias: bool,
    norm: QueryKeyNorm,
    fused: bool,
}

impl Attention {
    fn read(config: &ModelConfig, family: &Family, hidden: u64) -> Result<Self, SynthError> {
        let heads = config.number("num_attention_heads")?;
        let kv_heads_default = match family.kv_heads_default {
            // Unlike an absent key, a null means "as many as query heads" in all families.
            Some(count) if !config.is_null("num_key_value_heads") => count,
            _ => heads,
        };
        let kv_heads = config.number_or("num_key_value_heads", kv_heads_default)?;
        let head_width = match config.number_or_none("head_dim")?.or(family.head_width_default) {
            Some(width) => width,
            None if hidden >= heads => hidden / heads,
            None => {
                return Err(
                    config.bad_value("num_attention_heads", format!("at most the hidden size, {hidden}"))
                );
            }
        };
        let (input_bias, output_bias) = match family.attention_bias {
            AttentionBias::Never => (false, false),
            AttentionBias::AllIfSet => {
                let all = config.flag_or("attention_bias", false)?;
                (all, all)
            }
            AttentionBias::Inputs => (true, false),
            AttentionBias::InputsUnlessUnset => (config.flag_or("qkv_bias", true)?, false),
        };
        Ok(Self {
            hidden,
            query_width: config.product("num_attention_heads", heads, head_width)?,
            kv_width: config.product("num_key_value_heads", kv_heads, head_width)?,
            head_width,
            input_bias,
            output_bias,
            norm: family.query_key_norm,
            fused: family.feed_forward == FeedForward::Fused,
        })
    }

    fn push(&self, list: &mut TensorList, prefix: &str) -> Result<(), SynthError> {
        if self.fused {
            list.push_linear(&format!("{prefix}.o_proj"), self.hidden, self.query_width, self.output_bias)?;
            let width = self.query_width + 2 * self.kv_width;
            return list.push_linear(&format!("{prefix}.qkv_proj"), width, self.hidden, self.input_bias);
        }
        for (name, width) in
            [("q_proj", self.query_width), ("k_proj", self.kv_width), ("v_proj", self.kv_width)]
        {
            list.push_linear(&format!("{prefix}.{name}"), width, self.hidden, self.input_bias)?;
        }
        list.push_linear(&format!("{prefix}.o_proj"), self.hidden, self.query_width, self.output_bias)?;
        let (query_norm, key_norm) = match self.norm {
            QueryKeyNorm::None => return Ok(()),
            QueryKeyNorm::PerHead => (self.head_width, self.head_width),
            QueryKeyNorm::Whole => (self.query_width, self.kv_width),
        };
        list.push(format!("{prefix}.q_norm.weight"), &[query_norm])?;
        list.push(format!("{prefix}.k_norm.weight"), &[key_norm])
    }
}

/// The sizes of the feed-forward part.
struct FeedForwardShape {
    kind: FeedForward,
    hidden: u64,
    /// The width of a dense layer.
    width: u64,
    bias: bool,
    expert_count: u64,
    expert_width: u64,
    shared_width: u64,
    sparse_step: u64,
    dense_layers: Vec<u64>,
}

impl FeedForwardShape {
    fn read(config: &ModelConfig, family: &Family, hidden: u64) -> Result<Self, SynthError> {
        let mut shape = Self {
            kind: family.feed_forward,
            hidden,
            width: config.number("intermediate_size")?,
            bias: family.reads_mlp_bias && config.flag_or("mlp_bias", false)?,
            expert_count: 0,
            expert_width: 0,
            shared_width: 0,
            sparse_step: 1,
            dense_layers: Vec::new(),
        };
        if let FeedForward::Experts(names) = family.feed_forward {
            // Transformers 4 and 5 use different keys for some of these models.
            shape.expert_count = match config.number_or_none("num_experts")? {
                Some(count) => count,
                None => config.number_or("num_local_experts", names.count_default)?,
            };
            shape.expert_width = config.number(names.width_key)?;
            if names.shared_width_default > 0 {
                shape.shared_width =
                    config.number_or("shared_expert_intermediate_size", names.shared_width_default)?;
            }
            if names.has_dense_layers {
                shape.sparse_step = config.number_or("decoder_sparse_step", 1)?;
                shape.dense_layers = config.numbers("mlp_only_layers")?;
            }
        }
        Ok(shape)
    }

    fn push(&self, list: &mut TensorList, prefix: &str, layer: u64) -> Result<(), SynthError> {
        match self.kind {
            FeedForward::Fused => {
                let both = 2 * self.width;
                list.push_linear(&format!("{prefix}.mlp.gate_up_proj"), both, self.hidden, self.bias)?;
                list.push_linear(&format!("{prefix}.mlp.down_proj"), self.hidden, self.width, self.bias)
            }
            FeedForward::Experts(names) if self.is_sparse(layer) => self.push_experts(list, prefix, names),
            FeedForward::Gated | FeedForward::Experts(_) => {
                self.push_gated(list, &format!("{prefix}.mlp"), self.width)
            }
        }
    }

    /// Whether a layer has experts, by Qwen's rule. With their constants it holds for all other
    /// mixtures.
    fn is_sparse(&self, layer: u64) -> bool {
        !self.dense_layers.contains(&layer) && (layer + 1).is_multiple_of(self.sparse_step)
    }

    fn push_gated(&self, list: &mut TensorList, prefix: &str, width: u64) -> Result<(), SynthError> {
        list.push_linear(&format!("{prefix}.gate_proj"), width, self.hidden, self.bias)?;
        list.push_linear(&format!("{prefix}.up_proj"), width, self.hidden, self.bias)?;
        list.push_linear(&format!("{prefix}.down_proj"), self.hidden, width, self.bias)
    }

    /// Adds router and experts. In memory transformers 5 holds all experts of a layer in two
    /// tensors, `gate_up_proj` and `down_proj`. It splits them when saving.
    fn push_experts(
        &self,
        list: &mut TensorList,
        prefix: &str,
        names: ExpertNames,
    ) -> Result<(), SynthError> {
        let (memory, file) = (format!("{prefix}.mlp"), format!("{prefix}.{}", names.block));
        let router = [self.expert_count, self.hidden];
        list.push_renamed(format!("{memory}.gate.weight"), format!("{file}.gate.weight"), &router)?;
        for (together, single, shape) in [
            ("gate_up_proj", names.gate, [self.expert_width, self.hidden]),
            ("gate_up_proj", names.up, [self.expert_width, self.hidden]),
            ("down_proj", names.down, [self.hidden, self.expert_width]),
        ] {
            let unit = list.unit();
            for expert in 0..self.expert_count {
                let name = format!("{file}.experts.{expert}.{single}.weight");
                list.push_part(Some(format!("{memory}.experts.{together}")), name, &shape, unit)?;
            }
        }
        if self.shared_width > 0 {
            self.push_gated(list, &format!("{file}.shared_expert"), self.shared_width)?;
            list.push(format!("{file}.shared_expert_gate.weight"), &[1, self.hidden])?;
        }
        Ok(())
    }
}
