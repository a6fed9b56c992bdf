//! The memory needs of a model, layer by layer: weights, caches, shared tensors.

use std::collections::HashMap;

use super::activation::Activation;
use super::cache::{CacheModel, LayerCache, Workload};
use super::config::ModelConfig;
use super::dimensions::hidden_width;
use super::weights::{Weighing, Weights};
use onelayer::checkpoint::{Checkpoint, TensorId};
use onelayer::layers::{Layer, LayerId, LayerKind, Layers};

/// One layer. It is placed as a whole, experts included.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unit {
    /// The layer.
    pub id: LayerId,
    /// Bytes of its tensors, without those that are shared with an earlier layer.
    pub weight_bytes: u64,
    /// Bytes that must be on the computing device together if the layer is elsewhere: a member of a
    /// stack as a whole, the largest module of a group outside every stack.
    pub landing_bytes: u64,
    /// Bytes of the weights in sub-units (experts).
    pub sub_unit_bytes: u64,
    /// Its cache; `None` outside the decoder, and if it is unknown.
    pub cache: Option<LayerCache>,
    /// Position of the earlier layer that it shares a tensor with. Both must be on the same tier.
    pub tied_to: Option<usize>,
}

impl Unit {
    /// Bytes of its cache under a workload.
    #[must_use]
    pub fn cache_bytes(&self, workload: &Workload) -> u64 {
        self.cache.map_or(0, |cache| cache.bytes(workload))
    }
}

/// Two tensors in the files that are one tensor in the model, by its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tie {
    /// The tensor that is counted, in the layer that runs first.
    pub owner: TensorId,
    /// The tensor that is not counted.
    pub alias: TensorId,
}

/// The memory needs of a model.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Demand {
    /// Its layers, in execution order.
    pub units: Box<[Unit]>,
    /// The caches of its decoder.
    pub cache: CacheModel,
    /// Memory of intermediate results; `None` if unknown.
    pub activation: Option<Activation>,
    /// Pairs of tensors that are one.
    pub ties: Box<[Tie]>,
    /// A head without a tensor in the files, because it shares the embedding's: its name, and the
    /// position of the embedding's layer. Device maps of whole models must name it.
    pub(crate) tied_head: Option<(&'static str, usize)>,
    /// The longest context that the model was made for, in tokens.
    pub context_max: Option<u64>,
}

impl Demand {
    /// The needs of a checkpoint. Without a configuration, caches and activations are unknown.
    #[must_use]
    pub fn of(
        checkpoint: &Checkpoint,
        layers: &Layers,
        config: Option<&ModelConfig>,
        weights: Weights,
    ) -> Self {
        let ties = config.map_or_else(Vec::new, |config| ties(checkpoint, layers, config));
        let mut cache = match config {
            Some(config) => config.cache(),
            None => CacheModel::Unknown { why: "there is no config.json".to_owned() },
        };
        let caches = match assign(layers, checkpoint, cache.layers()) {
            Ok(caches) => caches,
            Err(why) => {
                cache = CacheModel::Unknown { why };
                vec![None; layers.as_slice().len()]
            }
        };
        let weighing = Weighing::new(weights, checkpoint, layers);
        let is_alias = |tensor: TensorId| ties.iter().any(|tie| tie.alias == tensor);
        let unit = |(layer, cache): (&Layer, Option<LayerCache>)| {
            let in_stack = matches!(layer.kind, LayerKind::Member { .. });
            let bytes = |tensors: &[TensorId]| {
                let counted = tensors.iter().filter(|tensor| !is_alias(**tensor));
                counted.map(|tensor| weighing.bytes(*tensor)).sum()
            };
            let tie = ties.iter().find(|tie| layers.layer_of(tie.alias).id == layer.id);
            let tied_to = tie.map(|tie| layers.position_of(tie.owner));
            let weight_bytes = bytes(&layer.tensors);
            let largest_module = || {
                let mut modules: HashMap<&str, u64> = HashMap::new();
                for tensor in &layer.tensors {
                    let name = checkpoint.tensor(*tensor).name;
                    *modules.entry(name.rsplit_once('.').map_or("", |(module, _)| module)).or_default() +=
                        bytes(std::slice::from_ref(tensor));
                }
                modules.into_values().max().unwrap_or(0)
            };
            Unit {
                id: layer.id.clone(),
                weight_bytes,
                landing_bytes: if in_stack { weight_bytes } else { largest_module() },
                sub_unit_bytes: layer.sub_units.iter().map(|part| bytes(&part.tensors)).sum(),
                cache,
                tied_to: tied_to.filter(|owner| layers.as_slice()[*owner].id != layer.id),
            }
        };
        Self {
            units: layers.as_slice().iter().zip(caches).map(unit).collect(),
            activation: config.and_then(Activation::of),
            tied_head: config.and_then(|config| tied_head(checkpoint, layers, config)),
            context_max: config.and_then(ModelConfig::context_max),
            ties: ties.into(),
            cache,
        }
    }

    /// Bytes of all weights.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.units.iter().map(|unit| unit.weight_bytes).sum()
    }

    /// Bytes of intermediate results on each device that computes; zero if unknown.
    #[must_use]
    pub fn activation_bytes(&self, workload: &Workload) -> u64 {
        self.activation.map_or(0, |activation| activation.bytes(workload))
    }
}

/// Assigns caches to layers. The decoder is the largest stack with as many members as the
/// configuration has layers. If there is none, it is the largest stack with more members; the extra
/// ones predict further tokens.
fn assign(
    layers: &Layers,
    checkpoint: &Checkpoint,
    caches: &[LayerCache],
) -> Result<Vec<Option<LayerCache>>, String> {
    let mut assigned = vec![None; layers.as_slice().len()];
    if caches.is_empty() {
        return Ok(assigned);
    }
    // Members and bytes of each stack.
    let mut sizes = vec![(0_usize, 0_u64); layers.stacks().len()];
    for layer in layers.as_slice() {
        if let LayerKind::Member { stack } = layer.kind {
            sizes[stack].0 += 1;
            sizes[stack].1 += layer.tensors.iter().map(|id| checkpoint.tensor(*id).len_bytes()).sum::<u64>();
        }
    }
    let largest = |is_wanted: &dyn Fn(usize) -> bool| {
        let wanted = sizes.iter().enumerate().filter(|(_, (members, _))| is_wanted(*members));
        wanted.max_by_key(|(_, (_, bytes))| *bytes).map(|(stack, _)| stack)
    };
    let count = caches.len();
    let Some(stack) = largest(&|members| members == count).or_else(|| largest(&|members| members > count))
    else {
        return Err(format!("config.json has {count} layers, and no stack in the files has as many"));
    };
    for (position, layer) in layers.as_slice().iter().enumerate() {
        let number = layer.id.as_str().rsplit('.').next().and_then(|number| number.parse::<usize>().ok());
        if layer.kind == (LayerKind::Member { stack }) {
            assigned[position] = number.and_then(|number| caches.get(number)).copied();
        }
    }
    Ok(assigned)
}

/// Tensors outside every stack with the shape and type of the embedding, if the configuration ties
/// embedding and head. The first one is counted.
fn ties(checkpoint: &Checkpoint, layers: &Layers, config: &ModelConfig) -> Vec<Tie> {
    if config.ties_embeddings() != Some(true) {
        return Vec::new();
    }
    let mut embeddings = embeddings(checkpoint, layers, config);
    embeddings.sort_by_key(|tensor| (layers.position_of(*tensor), tensor.index()));
    let Some((owner, aliases)) = embeddings.split_first() else { return Vec::new() };
    let dtype = checkpoint.tensor(*owner).dtype;
    let same = aliases.iter().filter(|alias| checkpoint.tensor(**alias).dtype == dtype);
    same.map(|alias| Tie { owner: *owner, alias: *alias }).collect()
}

/// Tensors of the shape vocabulary x hidden, outside every stack.
fn embeddings(checkpoint: &Checkpoint, layers: &Layers, config: &ModelConfig) -> Vec<TensorId> {
    let (Ok(vocabulary), Ok(hidden)) = (config.required(&["vocab_size"]), hidden_width(config)) else {
        return Vec::new();
    };
    let groups = layers.as_slice().iter().filter(|layer| layer.kind == LayerKind::Group);
    let tensors = groups.flat_map(|layer| layer.tensors.iter().copied());
    tensors.filter(|tensor| *checkpoint.tensor(*tensor).shape == [vocabulary, hidden]).collect()
}

/// The head without a tensor in the files. Nearly all text models call it `lm_head`.
fn tied_head(
    checkpoint: &Checkpoint,
    layers: &Layers,
    config: &ModelConfig,
) -> Option<(&'static str, usize)> {
    let has_head = config.class_name().is_some_and(|name| {
        name.ends_with("ForCausalLM")
            || name.ends_with("LMHeadModel")
            || name.ends_with("ForConditionalGeneration")
    });
    let embeddings = embeddings(checkpoint, layers, config);
    let [embedding] = embeddings[..] else { return None };
    let is_tied = has_head && config.ties_embeddings() == Some(true);
    let head = if config.model_type() == Some("gpt_neox") { "embed_out" } else { "lm_head" };
    is_tied.then(|| (head, layers.position_of(embedding)))
}
