//! Sizes that several kinds of layers read from a configuration: widths, heads, `layer_types`.

use super::config::{ModelConfig, Why};

/// The product of a few numbers of a configuration.
pub(super) fn product(factors: &[u64]) -> Result<u64, Why> {
    let bounded = factors.iter().try_fold(1_u64, |product, factor| product.checked_mul(*factor));
    // A sixteenth of the range: sums of a few products cannot overflow.
    bounded
        .filter(|product| *product < u64::MAX / 16)
        .ok_or_else(|| "the sizes in config.json are too large".to_owned())
}

/// Heads of queries.
pub(super) fn query_heads(config: &ModelConfig) -> Result<u64, Why> {
    let keys = ["num_attention_heads", "n_head", "n_heads", "num_heads"];
    match (config.optional(&keys)?, config.model_type()) {
        // The only architecture whose nested configurations omit it.
        (None, Some("gemma3_text")) => Ok(8),
        _ => config.required(&keys),
    }
}

/// Width of the residual stream.
pub(super) fn hidden_width(config: &ModelConfig) -> Result<u64, Why> {
    config.required(&["hidden_size", "n_embd", "n_embed", "d_model"])
}

/// Width of a head of keys or values.
pub(super) fn head_width(config: &ModelConfig, queries: u64, default: Option<u64>) -> Result<u64, Why> {
    match config.optional(&["head_dim"])?.or(default) {
        Some(width) => Ok(width),
        None => Ok(hidden_width(config)? / queries),
    }
}

/// The list `layer_types`, if present.
pub(super) fn layer_types(config: &ModelConfig) -> Result<Option<Vec<&str>>, Why> {
    let Some(value) = config.value("layer_types") else { return Ok(None) };
    let texts = value.as_array().and_then(|list| list.iter().map(serde_json::Value::as_str).collect());
    texts.map(Some).ok_or_else(|| "`layer_types` in config.json is not a list of strings".to_owned())
}

/// The entry of a layer.
pub(super) fn at<'a>(types: &[&'a str], layer: u64) -> Result<&'a str, Why> {
    let entry = usize::try_from(layer).ok().and_then(|layer| types.get(layer));
    entry.copied().ok_or_else(|| format!("`layer_types` in config.json has only {} entries", types.len()))
}
