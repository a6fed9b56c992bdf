//! The placement of layers, which `plan --vram` adds.

use serde::{Deserialize, Serialize};

/// Layers on GPUs, host and disk, derived from headers and `config.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Placement {
    /// Always `derived`: nothing here was measured.
    pub(crate) source: String,
    /// `found`, or `given` with `--device-map`.
    pub(crate) origin: String,
    /// Tokens of context that the cache has room for; 0 is no cache.
    pub(crate) context_tokens: u64,
    /// Sequences at a time.
    pub(crate) batch: u64,
    /// Bytes of one element of the cache.
    pub(crate) cache_element_bytes: u64,
    /// `config.json`, if there is one.
    pub(crate) config: Option<String>,
    /// The architecture, as `config.json` names it.
    pub(crate) model_type: Option<String>,
    /// The longest context that the model supports.
    pub(crate) model_context_tokens: Option<u64>,
    /// Weights of all layers.
    pub(crate) weight_bytes: u64,
    /// Cache of all layers; `null` if unknown.
    pub(crate) cache_bytes: Option<u64>,
    /// Why it is unknown.
    pub(crate) cache_unknown: Option<String>,
    /// Estimated intermediate results on each device that computes; `null` if the widths are
    /// unknown.
    pub(crate) activation_estimate_bytes: Option<u64>,
    /// Where layers that are not on a GPU are computed: a GPU's number, or `cpu`.
    pub(crate) computes_on: String,
    /// GPUs, host and disk.
    pub(crate) tiers: Vec<TierShare>,
    /// Every layer, in execution order.
    pub(crate) layers: Vec<PlacedLayer>,
    /// Tensors that are stored twice and used once by the model: the second of each pair is not
    /// counted.
    pub(crate) ties: Vec<TiedPair>,
    /// The most that fits.
    pub(crate) largest: LargestFit,
    /// The size of the weights in other precisions.
    pub(crate) precisions: Vec<PrecisionNeed>,
}

/// The share of one place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct TierShare {
    /// A GPU's number, `cpu` or `disk`.
    pub(crate) tier: String,
    /// Its limit; `null` is no limit.
    pub(crate) limit_bytes: Option<u64>,
    /// Number of layers.
    pub(crate) layers: u64,
    /// Their weights.
    pub(crate) weight_bytes: u64,
    /// Cache of these layers.
    pub(crate) cache_bytes: u64,
    /// Estimated intermediate results.
    pub(crate) activation_estimate_bytes: u64,
    /// Room for the largest layer in transit; on the host also the staging memory of a load.
    pub(crate) landing_bytes: u64,
    /// The sum.
    pub(crate) needed_bytes: u64,
    /// Free memory; `null` without a limit.
    pub(crate) free_bytes: Option<u64>,
}

/// A layer and its place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct PlacedLayer {
    /// Its id.
    pub(crate) id: String,
    /// A GPU's number, `cpu` or `disk`.
    pub(crate) tier: String,
    /// Its weights.
    pub(crate) weight_bytes: u64,
    /// Weights of its numbered parts, such as experts, which stay with their layer.
    pub(crate) sub_unit_bytes: u64,
    /// Its cache; `null` outside the decoder, and if unknown.
    pub(crate) cache_bytes: Option<u64>,
    /// Its attention: MHA, GQA, MQA, MLA, state or hybrid.
    pub(crate) attention: Option<String>,
    /// The most tokens in its cache.
    pub(crate) window_tokens: Option<u64>,
}

/// Two names of one tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct TiedPair {
    /// The name that is counted.
    pub(crate) owner: String,
    /// The name that is not counted.
    pub(crate) alias: String,
}

/// The most that fits, with the other value as given; `null` if not even one fits, or the size of
/// the cache is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct LargestFit {
    /// Tokens of context, with every layer on a GPU.
    pub(crate) context_tokens_on_gpus: Option<u64>,
    /// Tokens of context, with layers on host and disk too.
    pub(crate) context_tokens: Option<u64>,
    /// Sequences, with every layer on a GPU.
    pub(crate) batch_on_gpus: Option<u64>,
    /// Sequences, with layers on host and disk too.
    pub(crate) batch: Option<u64>,
}

/// The memory that another precision would need. Derived from shapes: nothing was quantised.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct PrecisionNeed {
    /// bf16, fp8, int8 or int4.
    pub(crate) precision: String,
    /// Weights, scales included.
    pub(crate) weight_bytes: u64,
    /// Whether every layer fits on a GPU.
    pub(crate) on_gpus: bool,
    /// The longest context with every layer on a GPU.
    pub(crate) context_tokens_on_gpus: Option<u64>,
}
