//! Layers and the set of them.

use super::grouping::{self, SubUnits};
use super::lists::slot;
use super::named::Names;
use super::{Confidence, LayerId, LayerMap, LayersError, Prefix, Rule, TensorIds};
use crate::checkpoint::{Checkpoint, TensorId};

/// What the rule sees of a tensor: its name, and its shape where it is known (an index file has
/// none).
#[derive(Clone, Copy, Debug)]
pub struct NamedShape<'a> {
    /// Full name.
    pub name: &'a str,
    /// Elements per dimension.
    pub shape: Option<&'a [u64]>,
}

/// Where a layer comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerKind {
    /// One element of a stack.
    Member {
        /// Index in [`Layers::stacks`].
        stack: usize,
    },
    /// A named group outside every stack: embedding, head, final norm, ...
    Group,
}

/// A part of a layer that can be told apart, such as one expert.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubUnit {
    /// Full prefix, such as `model.layers.0.mlp.experts.7`.
    pub prefix: Prefix,
    /// Its tensors, ascending.
    pub tensors: TensorIds,
}

/// One layer: what is loaded, handed out and freed together.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Layer {
    /// Full prefix.
    pub id: LayerId,
    /// Where it comes from.
    pub kind: LayerKind,
    /// All its tensors, in file order (ascending ids), sub-units included.
    pub tensors: TensorIds,
    /// Lists inside the layer (experts), in natural order. What is in none of them is the layer's
    /// base part.
    pub sub_units: Box<[SubUnit]>,
}

/// All layers of a checkpoint, in execution order. Every tensor is in exactly one.
///
/// Nothing is read: names and shapes decide. docs/layers.md tells the rule, its figures and its
/// limits.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    pub(super) layers: Vec<Layer>,
    pub(super) stacks: Vec<Prefix>,
    /// Per stack.
    pub(super) confidence: Vec<Confidence>,
    /// Position of each tensor's layer.
    pub(super) layer_of: Vec<u32>,
    /// Positions of the layers, sorted by id.
    pub(super) by_id: Vec<u32>,
    /// Companions and their weights, ascending.
    pub(super) companions: Vec<(TensorId, TensorId)>,
    pub(super) metadata_bytes: u64,
    pub(super) peak_bytes: u64,
}

impl Layers {
    /// Groups the tensors of a checkpoint by the rule.
    ///
    /// # Errors
    /// [`LayersError::Unaccounted`] if tensors or bytes do not add up, which would be a bug.
    pub fn group(checkpoint: &Checkpoint) -> Result<Self, LayersError> {
        Self::group_with(checkpoint, &LayerMap::default())
    }

    /// Groups the tensors of a checkpoint by the rule and an override.
    ///
    /// # Errors
    /// As [`group`](Self::group), and if the override names what the checkpoint does not have, or
    /// contradicts itself.
    pub fn group_with(checkpoint: &Checkpoint, map: &LayerMap) -> Result<Self, LayersError> {
        Self::of_checkpoint(checkpoint, map, SubUnits::Named)
    }

    /// As [`group_with`](Self::group_with), for a caller who takes layers as a whole: none of them
    /// has a sub-unit.
    pub(crate) fn group_whole(checkpoint: &Checkpoint, map: &LayerMap) -> Result<Self, LayersError> {
        Self::of_checkpoint(checkpoint, map, SubUnits::LeftOut)
    }

    fn of_checkpoint(
        checkpoint: &Checkpoint,
        map: &LayerMap,
        sub_units: SubUnits,
    ) -> Result<Self, LayersError> {
        let layers = grouping::group(Names::Opened(checkpoint), map, &Rule::default(), sub_units)?;
        let bytes_of = |tensor: &TensorId| checkpoint.extent_of(*tensor).len_bytes();
        let found = layers.layers.iter().flat_map(|layer| layer.tensors.iter()).map(bytes_of).sum();
        let expected = checkpoint.tensor_bytes();
        if found != expected {
            return Err(LayersError::Unaccounted { what: "bytes", expected, found });
        }
        Ok(layers)
    }

    /// Groups bare names: tensor ids count in the order given.
    ///
    /// # Errors
    /// As [`group_with`](Self::group_with), and [`LayersError::TooManyTensors`].
    pub fn from_names(names: &[NamedShape<'_>], map: &LayerMap) -> Result<Self, LayersError> {
        Self::from_names_by(names, map, &Rule::default())
    }

    /// The same with other thresholds: to measure how much they matter.
    ///
    /// # Errors
    /// As [`from_names`](Self::from_names).
    pub fn from_names_by(names: &[NamedShape<'_>], map: &LayerMap, rule: &Rule) -> Result<Self, LayersError> {
        grouping::group(Names::Listed(names), map, rule, SubUnits::Named)
    }

    /// The layers, in execution order.
    #[must_use]
    pub fn as_slice(&self) -> &[Layer] {
        &self.layers
    }

    /// Full prefixes of the stacks, such as `model.layers`, in the order in which they first run. A
    /// list at the root of the names has the prefix "".
    #[must_use]
    pub fn stacks(&self) -> &[Prefix] {
        &self.stacks
    }

    /// How sure the rule is of a stack.
    ///
    /// # Panics
    /// If there is no stack of that index.
    #[must_use]
    pub fn confidence(&self, stack: usize) -> Confidence {
        self.confidence[stack]
    }

    /// The layer of that id.
    #[must_use]
    pub fn find(&self, id: &LayerId) -> Option<&Layer> {
        Some(&self.layers[self.position_of_id(id)?])
    }

    pub(super) fn position_of_id(&self, id: &LayerId) -> Option<usize> {
        let position = |&at: &u32| self.layers[slot(at)].id.as_str();
        let at = self.by_id.binary_search_by(|at| position(at).cmp(id.as_str())).ok()?;
        Some(slot(self.by_id[at]))
    }

    /// The layer that holds a tensor.
    ///
    /// # Panics
    /// If `tensor` comes from another checkpoint and is out of range.
    #[must_use]
    pub fn layer_of(&self, tensor: TensorId) -> &Layer {
        &self.layers[self.position_of(tensor)]
    }

    /// The position in [`as_slice`](Self::as_slice) of the layer that holds a tensor.
    ///
    /// # Panics
    /// If `tensor` comes from another checkpoint and is out of range.
    #[must_use]
    pub fn position_of(&self, tensor: TensorId) -> usize {
        slot(self.layer_of[tensor.index()])
    }

    /// Quantization companions (scales, zero points, states), each with the weight that it belongs
    /// to.
    #[must_use]
    pub fn companions(&self) -> &[(TensorId, TensorId)] {
        &self.companions
    }

    /// Host memory that the grouping holds, in bytes as the allocator takes them.
    #[must_use]
    pub fn metadata_bytes(&self) -> u64 {
        self.metadata_bytes
    }

    /// The most host memory that grouping held at once, in bytes as the allocator takes them: what
    /// is kept, and the tables that led to it. Part of every host budget.
    ///
    /// A sum of the capacities of all lists and tables that are held together, at its highest. Not
    /// in it: the override itself, and what scales with its entries.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.peak_bytes
    }
}
