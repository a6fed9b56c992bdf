//! The cache of each layer, from a configuration: a table of architectures, by `model_type`.
//!
//! Other architectures are unknown, even with the same keys, since their caches may differ. The
//! defaults are those of the configuration classes in transformers 5.23, for nested configurations
//! that omit them.

use serde_json::{Map, Value};

use super::cache::{CacheKind, CacheModel, LayerCache};
use super::config::{ModelConfig, Why};
use super::dimensions::{at, head_width, layer_types, product, query_heads};
use super::recurrent;

/// The layers of an architecture.
#[derive(Clone, Copy, Debug)]
enum Layers {
    /// Attention in each.
    Attention(Heads, Windows),
    /// Latent attention in each.
    Latent,
    /// Layers with states, alone or among attention: see `recurrent`.
    Mixed,
}

/// The source of the number of key and value heads.
#[derive(Clone, Copy, Debug)]
enum Heads {
    /// `num_key_value_heads`, by default the number of query heads.
    Own,
    /// The same, with defaults for the number of such heads and for the width of a head.
    Default { kv_heads: Option<u64>, width: Option<u64> },
    /// As many as query heads, always.
    AsQueries,
    /// One if `multi_query` is true, which is the default; `num_kv_heads` or `n_head_kv` in
    /// Falcon's new architecture.
    MultiQueryFlag,
}

/// The layers with a window on the context, if there are no `layer_types`.
#[derive(Clone, Copy, Debug)]
enum Windows {
    /// None.
    Never,
    /// All of them, if `sliding_window` is set.
    IfSet,
    /// Those from `max_window_layers` on, if `use_sliding_window`.
    IfUsed,
    /// All but every n-th, n being the default of `sliding_window_pattern`; windows are
    /// `sliding_window`, by default of the size given here.
    Pattern { every: u64, window_tokens: u64 },
    /// All but every n-th, in chunks of `attention_chunk_size`.
    Chunks { every: u64 },
}

const OWN: Heads = Heads::Own;

/// The architectures.
const TABLE: &[(&[&str], Layers)] = &[
    (
        &[
            "apertus",
            "arcee",
            "cohere",
            "ernie4_5",
            "ernie4_5_moe",
            "glm4_moe",
            "granite",
            "granitemoe",
            "llama",
            "nemotron",
            "olmo",
            "olmo2",
            "olmoe",
            "persimmon",
            "phi",
            "smollm3",
            "stablelm",
        ],
        Layers::Attention(OWN, Windows::Never),
    ),
    (
        &["glm", "glm4"],
        Layers::Attention(Heads::Default { kv_heads: Some(2), width: Some(128) }, Windows::Never),
    ),
    (
        &["helium", "seed_oss"],
        Layers::Attention(Heads::Default { kv_heads: None, width: Some(128) }, Windows::Never),
    ),
    (&["gemma"], Layers::Attention(Heads::Default { kv_heads: Some(16), width: Some(256) }, Windows::Never)),
    (
        &["gemma2", "vaultgemma"],
        Layers::Attention(
            Heads::Default { kv_heads: Some(4), width: Some(256) },
            Windows::Pattern { every: 2, window_tokens: 4096 },
        ),
    ),
    (
        &["gemma3_text"],
        Layers::Attention(
            Heads::Default { kv_heads: Some(4), width: Some(256) },
            Windows::Pattern { every: 6, window_tokens: 4096 },
        ),
    ),
    (
        &["gpt_oss"],
        Layers::Attention(
            Heads::Default { kv_heads: Some(8), width: Some(64) },
            Windows::Pattern { every: 2, window_tokens: 128 },
        ),
    ),
    (
        &["cohere2", "exaone4", "olmo3"],
        Layers::Attention(OWN, Windows::Pattern { every: 4, window_tokens: 4096 }),
    ),
    (
        &["llama4_text"],
        Layers::Attention(
            Heads::Default { kv_heads: Some(8), width: Some(128) },
            Windows::Chunks { every: 4 },
        ),
    ),
    (
        &["ministral3", "mistral", "mixtral"],
        Layers::Attention(Heads::Default { kv_heads: Some(8), width: None }, Windows::IfSet),
    ),
    (&["phi3", "phimoe", "starcoder2"], Layers::Attention(OWN, Windows::IfSet)),
    (
        &["qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text"],
        Layers::Attention(OWN, Windows::IfUsed),
    ),
    (&["qwen3"], Layers::Attention(Heads::Default { kv_heads: None, width: Some(128) }, Windows::IfUsed)),
    (&["qwen3_moe"], Layers::Attention(OWN, Windows::IfUsed)),
    (
        &["bloom", "codegen", "gpt2", "gpt_neox", "gptj", "mpt", "opt"],
        Layers::Attention(Heads::AsQueries, Windows::Never),
    ),
    (
        &["RefinedWeb", "RefinedWebModel", "falcon", "gpt_bigcode"],
        Layers::Attention(Heads::MultiQueryFlag, Windows::Never),
    ),
    (&["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"], Layers::Latent),
    (
        &[
            "bamba",
            "falcon_h1",
            "falcon_mamba",
            "granitemoehybrid",
            "jamba",
            "lfm2",
            "lfm2_moe",
            "mamba",
            "mamba2",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
            "recurrent_gemma",
        ],
        Layers::Mixed,
    ),
];

/// Architectures with tied embeddings by default.
const TIED: [&str; 20] = [
    "bloom",
    "cohere",
    "cohere2",
    "ernie4_5",
    "ernie4_5_moe",
    "falcon",
    "falcon_mamba",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_bigcode",
    "lfm2",
    "mamba",
    "mpt",
    "opt",
    "recurrent_gemma",
    "smollm3",
    "starcoder2",
    "vaultgemma",
];

/// True if the architecture ties head and embedding by default.
fn ties_by_default(model_type: &str) -> bool {
    TIED.contains(&model_type)
}

impl ModelConfig {
    /// The cache of each layer.
    #[must_use]
    pub fn cache(&self) -> CacheModel {
        match layers(self) {
            Ok(layers) => CacheModel::Known(layers.into()),
            Err(why) => CacheModel::Unknown { why },
        }
    }

    /// True if the model says that its head uses the embedding's weight; `None` if it does not say.
    #[must_use]
    pub fn ties_embeddings(&self) -> Option<bool> {
        let of = |map: &Map<String, Value>| map.get("tie_word_embeddings").and_then(Value::as_bool);
        of(&self.outer)
            .or_else(|| self.inner.as_ref().and_then(of))
            .or_else(|| self.model_type().filter(|name| ties_by_default(name)).map(|_| true))
    }
}

/// The number of layers.
fn layer_count(config: &ModelConfig) -> Result<u64, Why> {
    config.required(&["num_hidden_layers", "n_layer", "n_layers", "num_layers"])
}

/// The cache of each layer.
fn layers(config: &ModelConfig) -> Result<Vec<LayerCache>, Why> {
    let model_type = config.model_type().ok_or("config.json has no `model_type`")?;
    if config.flag("is_encoder_decoder") == Some(true) {
        return Err("an encoder-decoder also keeps keys and values of its input, whose length is not given"
            .to_owned());
    }
    let layers = TABLE.iter().find(|(names, _)| names.contains(&model_type)).map(|(_, layers)| *layers);
    let layers =
        layers.ok_or_else(|| format!("the cache of `{}` models is not known", model_type.escape_debug()))?;
    let count = layer_count(config)?;
    if count > LAYERS_MAX {
        return Err(format!("config.json has {count} layers, at most {LAYERS_MAX} are supported"));
    }
    match layers {
        Layers::Attention(heads, windows) => attention(config, count, heads, windows),
        Layers::Latent => latent(config, count),
        Layers::Mixed => recurrent::layers(config, model_type, count),
    }
}

/// The most layers, far above any model. It bounds memory for hostile configurations.
const LAYERS_MAX: u64 = 65_536;

/// Keys and values: `2 x heads of keys and values x width of a head` elements a token.
fn attention(
    config: &ModelConfig,
    count: u64,
    heads: Heads,
    windows: Windows,
) -> Result<Vec<LayerCache>, Why> {
    let queries = query_heads(config)?;
    let (kv_default, width_default) = match heads {
        Heads::Default { kv_heads, width } => (kv_heads, width),
        _ => (None, None),
    };
    let kv_heads = match heads {
        Heads::Own | Heads::Default { .. } => {
            config.optional(&["num_key_value_heads"])?.or(kv_default).unwrap_or(queries)
        }
        Heads::AsQueries => queries,
        Heads::MultiQueryFlag => multi_query_heads(config, queries)?,
    };
    let width = head_width(config, queries, width_default)?;
    let kind = CacheKind::of_heads(queries, kv_heads);
    let full = LayerCache::attention(kind, 2 * product(&[kv_heads, width])?, None);
    let window_of = window_of(config, windows)?;
    (0..count).map(|layer| Ok(LayerCache { window_tokens: window_of(layer)?, ..full })).collect()
}

fn multi_query_heads(config: &ModelConfig, queries: u64) -> Result<u64, Why> {
    // The first Falcon 40B predates this flag.
    let is_new = config.flag("new_decoder_architecture").unwrap_or(config.model_type() == Some("RefinedWeb"));
    if is_new {
        return Ok(config.optional(&["num_kv_heads", "n_head_kv"])?.unwrap_or(queries));
    }
    Ok(if config.flag("multi_query").unwrap_or(true) { 1 } else { queries })
}

/// One latent and one rotary key: `kv_lora_rank + qk_rope_head_dim` elements a token (DeepSeek-V2,
/// section 2.1).
fn latent(config: &ModelConfig, count: u64) -> Result<Vec<LayerCache>, Why> {
    let latent = product(&[config.required(&["kv_lora_rank"])?])?;
    let rotary = product(&[config.required(&["qk_rope_head_dim"])?])?;
    let layer = LayerCache::attention(CacheKind::Latent, latent + rotary, None);
    (0..count).map(|_| Ok(layer)).collect()
}

type WindowOf<'a> = Box<dyn Fn(u64) -> Result<Option<u64>, Why> + 'a>;

/// The window of each layer: by `layer_types` if present, else by the architecture.
fn window_of<'a>(config: &'a ModelConfig, windows: Windows) -> Result<WindowOf<'a>, Why> {
    if let Some(types) = layer_types(config)? {
        let window = move |layer: u64| match at(&types, layer)? {
            "full_attention" | "attention" => Ok(None),
            "sliding_attention" => sliding_window(config, windows).map(Some),
            "chunked_attention" => config.required(&["attention_chunk_size"]).map(Some),
            other => Err(format!("`layer_types` in config.json has `{}`", other.escape_debug())),
        };
        return Ok(Box::new(window));
    }
    let set = config.optional(&["sliding_window"])?.filter(|window| *window > 0);
    Ok(match windows {
        Windows::Never => Box::new(|_| Ok(None)),
        Windows::IfSet => Box::new(move |_| Ok(set)),
        Windows::IfUsed => {
            let first = match (config.flag("use_sliding_window"), config.model_type()) {
                (Some(true), Some("qwen2" | "qwen3")) => config.required(&["max_window_layers"])?,
                (Some(true), _) => {
                    return Err("which layers `use_sliding_window` is for is not known".to_owned());
                }
                _ => u64::MAX,
            };
            Box::new(move |layer| Ok(set.filter(|_| layer >= first)))
        }
        Windows::Pattern { every, window_tokens } => {
            let every =
                config.optional(&["sliding_window_pattern"])?.filter(|every| *every > 0).unwrap_or(every);
            let window_tokens = set.unwrap_or(window_tokens);
            Box::new(move |layer| Ok(Some(window_tokens).filter(|_| !(layer + 1).is_multiple_of(every))))
        }
        Windows::Chunks { every } => {
            let chunk_tokens = config.optional(&["attention_chunk_size"])?.unwrap_or(8192);
            Box::new(move |layer| Ok(Some(chunk_tokens).filter(|_| !(layer + 1).is_multiple_of(every))))
        }
    })
}

fn sliding_window(config: &ModelConfig, windows: Windows) -> Result<u64, Why> {
    match (config.optional(&["sliding_window"])?, windows) {
        (Some(window), _) if window > 0 => Ok(window),
        (_, Windows::Pattern { window_tokens, .. }) => Ok(window_tokens),
        _ => config.required(&["sliding_window"]),
    }
}

#[cfg(test)]
mod tests;
