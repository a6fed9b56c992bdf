//! Caches of layers with a state of fixed size, alone or among layers of attention.
//!
//! Sizes are those of the tensors in transformers 5.23. The last inputs of a convolution have the
//! cache's type; sums over the sequence are f32.

use super::cache::{CacheKind, LayerCache};
use super::config::{ModelConfig, Why};
use super::dimensions::{at, head_width, hidden_width, layer_types, product, query_heads};

/// The way a layer uses earlier tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mixer {
    Attention,
    Window,
    State,
    Both,
}

/// The cache of each layer.
pub(super) fn layers(config: &ModelConfig, model_type: &str, count: u64) -> Result<Vec<LayerCache>, Why> {
    let state = state(config, model_type)?;
    let mixers = (0..count).map(|layer| mixer(config, model_type, layer)).collect::<Result<Vec<_>, Why>>()?;
    let attends = mixers.iter().any(|mixer| *mixer != Mixer::State);
    let attention = if attends { Some(attention(config, model_type)?) } else { None };
    let window_tokens = if mixers.contains(&Mixer::Window) {
        Some(config.required(&["attention_window_size", "sliding_window"])?)
    } else {
        None
    };
    let layer = |mixer: &Mixer| match (mixer, attention) {
        (Mixer::State, _) | (_, None) => state,
        (Mixer::Attention, Some(attention)) => attention,
        (Mixer::Window, Some(attention)) => LayerCache { window_tokens, ..attention },
        (Mixer::Both, Some(attention)) => attention.with_state(state),
    };
    Ok(mixers.iter().map(layer).collect())
}

fn mixer(config: &ModelConfig, model_type: &str, layer: u64) -> Result<Mixer, Why> {
    if let Some(types) = layer_types(config)? {
        return match at(&types, layer)? {
            "full_attention" | "attention" => Ok(Mixer::Attention),
            "sliding_attention" => Ok(Mixer::Window),
            "linear_attention" | "mamba" | "conv" | "recurrent" => Ok(Mixer::State),
            "hybrid" => Ok(Mixer::Both),
            other => Err(format!("`layer_types` in config.json has `{}`", other.escape_debug())),
        };
    }
    let attends = |is_attention: bool| if is_attention { Mixer::Attention } else { Mixer::State };
    match model_type {
        "mamba" | "mamba2" | "falcon_mamba" => Ok(Mixer::State),
        "falcon_h1" => Ok(Mixer::Both),
        "jamba" => {
            let period = config.required(&["attn_layer_period"])?;
            let offset = config.optional(&["attn_layer_offset"])?.unwrap_or(4);
            Ok(attends(layer % period == offset))
        }
        "bamba" => Ok(attends(is_listed(config, "attn_layer_indices", layer)?)),
        "lfm2" | "lfm2_moe" => Ok(attends(is_listed(config, "full_attn_idxs", layer)?)),
        "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text" => {
            let every =
                config.optional(&["full_attention_interval"])?.filter(|every| *every > 0).unwrap_or(4);
            Ok(attends((layer + 1).is_multiple_of(every)))
        }
        "recurrent_gemma" => {
            let period = config.value("block_types").and_then(serde_json::Value::as_array);
            let names: Vec<&str> = match period {
                Some(list) => list.iter().filter_map(serde_json::Value::as_str).collect(),
                None => vec!["recurrent", "recurrent", "attention"],
            };
            let place = usize::try_from(layer).unwrap_or(0) % names.len().max(1);
            match names.get(place) {
                Some(&"attention") => Ok(Mixer::Window),
                Some(&"recurrent") => Ok(Mixer::State),
                _ => Err("`block_types` in config.json is not understood".to_owned()),
            }
        }
        _ => Err("config.json has no `layer_types`".to_owned()),
    }
}

/// True if the list `key` has the number of the layer. Without a list, false.
fn is_listed(config: &ModelConfig, key: &str, layer: u64) -> Result<bool, Why> {
    let Some(value) = config.value(key) else { return Ok(false) };
    let list = value.as_array().ok_or_else(|| format!("`{key}` in config.json is not a list"))?;
    Ok(list.iter().any(|entry| entry.as_u64() == Some(layer)))
}

fn attention(config: &ModelConfig, model_type: &str) -> Result<LayerCache, Why> {
    let queries = query_heads(config)?;
    let kv_heads = config.optional(&["num_key_value_heads"])?.unwrap_or(queries);
    let width_default = match model_type {
        "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text" => Some(256),
        _ => None,
    };
    let width = head_width(config, queries, width_default)?;
    let values = 2 * product(&[kv_heads, width])?;
    Ok(LayerCache::attention(CacheKind::of_heads(queries, kv_heads), values, None))
}

/// The cache of a layer with a state.
fn state(config: &ModelConfig, model_type: &str) -> Result<LayerCache, Why> {
    match model_type {
        "mamba" | "falcon_mamba" => selective(config, "state_size", "conv_kernel", "expand"),
        "jamba" => selective(config, "mamba_d_state", "mamba_d_conv", "mamba_expand"),
        "mamba2" => {
            let heads = (config.required(&["num_heads"])?, config.required(&["head_dim"])?);
            structured(config, heads, "state_size", "n_groups", "conv_kernel")
        }
        "bamba" | "falcon_h1" | "granitemoehybrid" => {
            let heads = config.required(&["mamba_n_heads"])?;
            let width = match config.optional(&["mamba_d_head"]) {
                Ok(Some(width)) => width,
                // `auto`: the expanded width divided by the heads.
                _ => expanded(config, "mamba_expand")? / heads,
            };
            structured(config, (heads, width), "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
        }
        "lfm2" | "lfm2_moe" => {
            let inputs = config.required(&["conv_L_cache"])?;
            Ok(LayerCache::state(product(&[hidden_width(config)?, inputs])?, 0))
        }
        "recurrent_gemma" => {
            let width = match config.optional(&["lru_width"])? {
                Some(width) => width,
                None => hidden_width(config)?,
            };
            let kernel = config.optional(&["conv1d_width"])?.unwrap_or(4);
            Ok(LayerCache::state(product(&[width, kernel.saturating_sub(1)])?, width))
        }
        _ => gated_delta(config),
    }
}

fn expanded(config: &ModelConfig, expand: &str) -> Result<u64, Why> {
    product(&[hidden_width(config)?, config.optional(&[expand])?.unwrap_or(2)])
}

/// Mamba: `width x kernel` last inputs and `width x state size` of state.
fn selective(config: &ModelConfig, size: &str, kernel: &str, expand: &str) -> Result<LayerCache, Why> {
    let own =
        if config.model_type() == Some("jamba") { None } else { config.optional(&["intermediate_size"])? };
    let width = match own {
        Some(width) => width,
        None => expanded(config, expand)?,
    };
    let (size, kernel) = (config.required(&[size])?, config.required(&[kernel])?);
    Ok(LayerCache::state(product(&[width, kernel])?, product(&[width, size])?))
}

/// Mamba 2: `(width + 2 x groups x state size) x kernel` last inputs and `heads x head width x
/// state size` of state.
fn structured(
    config: &ModelConfig,
    (heads, head_width): (u64, u64),
    size: &str,
    groups: &str,
    kernel: &str,
) -> Result<LayerCache, Why> {
    let (size, kernel) = (config.required(&[size])?, config.required(&[kernel])?);
    let groups = config.required(&[groups])?;
    let width = product(&[heads, head_width])?;
    let inputs = product(&[width + 2 * product(&[groups, size])?, kernel])?;
    Ok(LayerCache::state(inputs, product(&[width, size])?))
}

/// Gated delta rule: `(2 x keys + values) x kernel` last inputs and a matrix `key width x value
/// width` for each value head.
fn gated_delta(config: &ModelConfig) -> Result<LayerCache, Why> {
    let number = |key: &str| config.required(&[key]);
    let key_width = number("linear_key_head_dim")?;
    let (value_heads, value_width) = (number("linear_num_value_heads")?, number("linear_value_head_dim")?);
    let keys = product(&[number("linear_num_key_heads")?, key_width])?;
    let inputs = 2 * keys + product(&[value_heads, value_width])?;
    let kernel = config.optional(&["linear_conv_kernel_dim"])?.unwrap_or(4);
    Ok(LayerCache::state(product(&[inputs, kernel])?, product(&[value_heads, key_width, value_width])?))
}
