//! The cache of a layer: keys and values, one latent vector per token, or a state of fixed size.
//!
//! Only arithmetic. `attention` and `recurrent` read the sizes from a configuration.

use std::fmt;

/// The kind of a layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheKind {
    /// Keys and values of every head (MHA).
    MultiHead,
    /// Keys and values of fewer heads, shared by groups of query heads (GQA).
    GroupedQuery,
    /// Keys and values of one head (MQA).
    MultiQuery,
    /// One compressed vector and one rotary key for all heads (MLA).
    Latent,
    /// A state that does not grow with the context: state space, linear attention, recurrence,
    /// convolution.
    State,
    /// Attention and a state side by side.
    Hybrid,
}

impl CacheKind {
    /// The kind of attention with `kv_heads` heads of keys and values for `heads` of queries.
    pub(super) const fn of_heads(heads: u64, kv_heads: u64) -> Self {
        match kv_heads {
            _ if kv_heads == heads => Self::MultiHead,
            1 => Self::MultiQuery,
            _ => Self::GroupedQuery,
        }
    }

    /// The usual short name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::MultiHead => "MHA",
            Self::GroupedQuery => "GQA",
            Self::MultiQuery => "MQA",
            Self::Latent => "MLA",
            Self::State => "state",
            Self::Hybrid => "hybrid",
        }
    }
}

impl fmt::Display for CacheKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The cache of one layer, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerCache {
    /// Its kind.
    pub kind: CacheKind,
    /// Elements for each token of each sequence, keys and values together.
    pub values_per_token: u64,
    /// The most tokens of a sequence in the cache, for sliding windows and chunks.
    pub window_tokens: Option<u64>,
    /// Elements for each sequence of any length, of the cache's type.
    pub state_values: u64,
    /// The same, of type f32: recurrent states accumulate in full precision.
    pub state_f32_values: u64,
}

impl LayerCache {
    /// Attention alone.
    pub(super) const fn attention(
        kind: CacheKind,
        values_per_token: u64,
        window_tokens: Option<u64>,
    ) -> Self {
        Self { kind, values_per_token, window_tokens, state_values: 0, state_f32_values: 0 }
    }

    /// A state alone.
    pub(super) const fn state(state_values: u64, state_f32_values: u64) -> Self {
        let (kind, window_tokens) = (CacheKind::State, None);
        Self { kind, values_per_token: 0, window_tokens, state_values, state_f32_values }
    }

    /// Both side by side.
    pub(super) const fn with_state(self, state: Self) -> Self {
        Self {
            kind: CacheKind::Hybrid,
            state_values: state.state_values,
            state_f32_values: state.state_f32_values,
            ..self
        }
    }

    /// Bytes of the cache under a workload: `batch x (tokens x values per token + state)`, where
    /// `tokens` is the context, or the window if that is smaller.
    #[must_use]
    pub fn bytes(&self, workload: &Workload) -> u64 {
        let tokens =
            self.window_tokens.map_or(workload.context_tokens, |window| workload.context_tokens.min(window));
        // Without a token there is no sequence, and no state either.
        let sequences = if tokens == 0 { 0 } else { workload.batch };
        let values = tokens.saturating_mul(self.values_per_token).saturating_add(self.state_values);
        let of_sequence = values
            .saturating_mul(workload.cache_type.bytes())
            .saturating_add(self.state_f32_values.saturating_mul(4));
        of_sequence.saturating_mul(sequences)
    }
}

/// The caches of all layers of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheModel {
    /// One entry for each layer of the decoder, in order.
    Known(Box<[LayerCache]>),
    /// The configuration does not determine the caches, or its architecture is not supported.
    Unknown {
        /// The reason, in lower case, without a full stop.
        why: String,
    },
}

impl CacheModel {
    /// The caches of the layers; empty if they are unknown.
    #[must_use]
    pub fn layers(&self) -> &[LayerCache] {
        match self {
            Self::Known(layers) => layers,
            Self::Unknown { .. } => &[],
        }
    }

    /// Bytes of all caches; `None` if they are unknown.
    #[must_use]
    pub fn bytes(&self, workload: &Workload) -> Option<u64> {
        match self {
            Self::Known(layers) => {
                Some(layers.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.bytes(workload))))
            }
            Self::Unknown { .. } => None,
        }
    }
}

/// The element type of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheType {
    /// bf16 or f16, two bytes.
    #[default]
    Half,
    /// f32, four bytes.
    F32,
    /// fp8, one byte; scales are not counted.
    Fp8,
}

impl CacheType {
    /// Bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Half => 2,
            Self::F32 => 4,
            Self::Fp8 => 1,
        }
    }
}

/// The intended use of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Tokens of a sequence, prompt and answer together. With zero, nothing is reserved for caches
    /// and activations.
    pub context_tokens: u64,
    /// Sequences at once.
    pub batch: u64,
    /// The element type of the cache.
    pub cache_type: CacheType,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_bound_the_tokens_and_states_do_not_grow() {
        let workload =
            |context_tokens, batch| Workload { context_tokens, batch, cache_type: CacheType::Half };
        let windowed = LayerCache::attention(CacheKind::GroupedQuery, 10, Some(4));
        assert_eq!(windowed.bytes(&workload(3, 1)), 60);
        assert_eq!(windowed.bytes(&workload(100, 2)), 160);
        let state = LayerCache::state(5, 7);
        assert_eq!(state.bytes(&workload(1, 3)), 3 * (10 + 28));
        assert_eq!(state.bytes(&workload(1000, 3)), 3 * (10 + 28));
        assert_eq!(state.bytes(&workload(0, 3)), 0);
        let both = windowed.with_state(state);
        assert_eq!((both.kind, both.bytes(&workload(100, 1))), (CacheKind::Hybrid, 80 + 10 + 28));
        let fp8 = Workload { cache_type: CacheType::Fp8, ..workload(100, 1) };
        assert_eq!(windowed.bytes(&fp8), 40);
        assert_eq!(windowed.bytes(&workload(u64::MAX, u64::MAX)), u64::MAX);
    }
}
