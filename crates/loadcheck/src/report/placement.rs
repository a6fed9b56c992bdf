//! What fits where: the part of the report that `plan --vram` adds.

use serde::{Deserialize, Serialize};

/// Layers on GPUs, host and disk, derived from headers and `config.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Placement {
    /// Always `derived`: nothing here was measured.
    pub(crate) source: String,
    /// `found`, or `given` with `--device-map`.
    pub(crate) origin: String,
    /// Tokens of a sequence that room is kept for; 0 is no room.
    pub(crate) context_tokens: u64,
    /// Sequences at once.
    pub(crate) batch: u64,
    /// Bytes of an element of the cache.
    pub(crate) cache_element_bytes: u64,
    /// `config.json`, where there is one.
    pub(crate) config: Option<String>,
    /// The architecture, as it names it.
    pub(crate) model_type: Option<String>,
    /// The longest context that the model was made for.
    pub(crate) model_context_tokens: Option<u64>,
    /// Weights of all layers.
    pub(crate) weight_bytes: u64,
    /// What the layers keep of the context; `null` if that is not known.
    pub(crate) cache_bytes: Option<u64>,
    /// Why it is not.
    pub(crate) cache_unknown: Option<String>,
    /// Intermediate results on each device that computes: an estimate; `null` if the widths are not
    /// known.
    pub(crate) activation_estimate_bytes: Option<u64>,
    /// Where layers compute that are on no GPU: a GPU's number, or `cpu`.
    pub(crate) computes_on: String,
    /// GPUs, host and disk.
    pub(crate) tiers: Vec<TierShare>,
    /// Every layer, in execution order.
    pub(crate) layers: Vec<PlacedLayer>,
    /// Tensors that the files have twice and the model once: the second of each pair is not
    /// counted.
    pub(crate) ties: Vec<TiedPair>,
    /// What fits at most.
    pub(crate) largest: LargestFit,
    /// What the weights would need in other precisions.
    pub(crate) precisions: Vec<PrecisionNeed>,
}

/// What is in one place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct TierShare {
    /// A GPU's number, `cpu` or `disk`.
    pub(crate) tier: String,
    /// What it may hold; `null` is no limit.
    pub(crate) limit_bytes: Option<u64>,
    /// Layers.
    pub(crate) layers: u64,
    /// Their weights.
    pub(crate) weight_bytes: u64,
    /// What is kept of the context here.
    pub(crate) cache_bytes: u64,
    /// Intermediate results, an estimate.
    pub(crate) activation_estimate_bytes: u64,
    /// Room for the largest layer on its way; on the host also the staging of a load.
    pub(crate) landing_bytes: u64,
    /// All of it.
    pub(crate) needed_bytes: u64,
    /// What is left; `null` without a limit.
    pub(crate) free_bytes: Option<u64>,
}

/// A layer and its place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct PlacedLayer {
    /// The layer.
    pub(crate) id: String,
    /// A GPU's number, `cpu` or `disk`.
    pub(crate) tier: String,
    /// Its weights.
    pub(crate) weight_bytes: u64,
    /// Of these, numbered parts such as experts; they stay with their layer.
    pub(crate) sub_unit_bytes: u64,
    /// What it keeps of the context; `null` outside the decoder, and where that is not known.
    pub(crate) cache_bytes: Option<u64>,
    /// How: MHA, GQA, MQA, MLA, state or hybrid.
    pub(crate) attention: Option<String>,
    /// The most tokens that it keeps.
    pub(crate) window_tokens: Option<u64>,
}

/// Two tensors that are one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct TiedPair {
    /// The one that is counted.
    pub(crate) owner: String,
    /// The one that is not.
    pub(crate) alias: String,
}

/// The most that fits, at the other's value; `null` if not even one does, or it is not known what
/// the model keeps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct LargestFit {
    /// Tokens of context, every layer on a GPU.
    pub(crate) context_tokens_on_gpus: Option<u64>,
    /// Tokens of context, layers on host and disk too.
    pub(crate) context_tokens: Option<u64>,
    /// Sequences, every layer on a GPU.
    pub(crate) batch_on_gpus: Option<u64>,
    /// Sequences, layers on host and disk too.
    pub(crate) batch: Option<u64>,
}

/// A precision, and what it would need. Derived from shapes: nothing was quantized.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct PrecisionNeed {
    /// bf16, fp8, int8 or int4.
    pub(crate) precision: String,
    /// Weights, scales included.
    pub(crate) weight_bytes: u64,
    /// Every layer finds room on a GPU.
    pub(crate) on_gpus: bool,
    /// The longest context with every layer on a GPU.
    pub(crate) context_tokens_on_gpus: Option<u64>,
}
