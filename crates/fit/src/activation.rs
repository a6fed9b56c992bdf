//! Estimates the memory of intermediate results, beside weights and caches.

use super::cache::Workload;
use super::config::{ModelConfig, Why};
use super::dimensions::{head_width, hidden_width, query_heads};

/// The most tokens of a sequence that are processed at once. Engines feed long prompts in pieces.
const PREFILL_TOKENS: u64 = 2048;

/// The widths of intermediate results. An **estimate**, not a bound: engines differ in what they
/// keep.
///
/// `tokens x (4 x hidden + 2 x intermediate x experts per token + queries + keys and values) x 2
/// bytes` and `batch x vocabulary x 4 bytes` together, where `tokens` is `batch x min(context,
/// 2048)`: the residual stream, its norm and the sum; both halves of a gated feed-forward part; the
/// projections of attention; logits of the last token in f32. Attention scores are not counted,
/// since fused kernels do not store them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activation {
    /// Elements for each token that is being processed.
    values_per_token: u64,
    /// Size of the vocabulary.
    vocabulary: u64,
}

impl Activation {
    /// The widths of a configuration; `None` if one is missing.
    #[must_use]
    pub fn of(config: &ModelConfig) -> Option<Self> {
        Self::read(config).ok()
    }

    fn read(config: &ModelConfig) -> Result<Self, Why> {
        let hidden = hidden_width(config)?;
        let experts = config.optional(&["num_experts_per_tok", "num_experts_per_token"])?.unwrap_or(0);
        let dense = config.optional(&["intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"])?;
        let expert = config.optional(&["moe_intermediate_size"])?.or(dense).unwrap_or(0);
        let wide = dense.unwrap_or(hidden.saturating_mul(4)).max(expert.saturating_mul(experts));
        let projections = match query_heads(config) {
            Ok(heads) => {
                let kv_heads = config.optional(&["num_key_value_heads"])?.unwrap_or(heads);
                let width = head_width(config, heads, None)?;
                heads.saturating_add(kv_heads.saturating_mul(2)).saturating_mul(width)
            }
            // Models without attention expand the residual stream once more instead.
            Err(_) => hidden.saturating_mul(2),
        };
        let values_per_token =
            hidden.saturating_mul(4).saturating_add(wide.saturating_mul(2)).saturating_add(projections);
        Ok(Self { values_per_token, vocabulary: config.required(&["vocab_size"])? })
    }

    /// Bytes on each device that computes; zero without a context.
    #[must_use]
    pub fn bytes(&self, workload: &Workload) -> u64 {
        if workload.context_tokens == 0 {
            return 0;
        }
        let tokens = workload.batch.saturating_mul(workload.context_tokens.min(PREFILL_TOKENS));
        let layers = tokens.saturating_mul(self.values_per_token).saturating_mul(2);
        layers.saturating_add(workload.batch.saturating_mul(self.vocabulary).saturating_mul(4))
    }
}

#[cfg(test)]
mod tests {
    use super::super::cache::CacheType;
    use super::*;

    #[test]
    fn it_is_the_stated_sum() {
        let text = r#"{"model_type": "llama", "hidden_size": 10, "intermediate_size": 30, "num_attention_heads": 5,
            "num_key_value_heads": 1, "vocab_size": 100}"#;
        let of = |text: &str| Activation::of(&ModelConfig::parse("c", text.as_bytes()).unwrap());
        let activation = of(text).unwrap();
        assert_eq!(activation.values_per_token, 40 + 60 + 10 + 4);
        let workload = |context_tokens| Workload { context_tokens, batch: 3, cache_type: CacheType::Half };
        assert_eq!(activation.bytes(&workload(0)), 0);
        assert_eq!(activation.bytes(&workload(7)), 3 * 7 * 114 * 2 + 3 * 100 * 4);
        assert_eq!(activation.bytes(&workload(1 << 20)), activation.bytes(&workload(2048)));
        let experts = text.replace('}', r#", "num_experts_per_tok": 8, "moe_intermediate_size": 5}"#);
        assert_eq!(of(&experts).unwrap().values_per_token, 40 + 80 + 10 + 4);
        assert_eq!(of(r#"{"hidden_size": 1}"#), None);
    }
}
