//! Layers and the set of them.

use super::{LayerId, LayerMap, LayersError};
use crate::checkpoint::{Checkpoint, TensorId};

/// What the rule sees of a tensor: its name, and its shape where it is known (an index file has none).
#[derive(Clone, Copy, Debug)]
pub struct NamedShape<'a> {
    /// Full name.
    pub name: &'a str,
    /// Elements per dimension.
    pub shape: Option<&'a [u64]>,
}

/// Where a layer comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
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
pub struct SubUnit {
    /// Full prefix, such as `model.layers.0.mlp.experts.7`.
    pub prefix: Box<str>,
    /// Its tensors.
    pub tensors: Box<[TensorId]>,
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
    pub tensors: Box<[TensorId]>,
    /// Lists inside the layer (experts), in natural order.
    pub sub_units: Box<[SubUnit]>,
}

/// All layers of a checkpoint, in execution order. Every tensor is in exactly one.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    layers: Vec<Layer>,
}

impl Layers {
    /// Groups the tensors of a checkpoint by the rule.
    pub fn group(checkpoint: &Checkpoint) -> Result<Self, LayersError> {
        Self::group_with(checkpoint, &LayerMap::default())
    }

    /// Groups the tensors of a checkpoint by the rule and an override.
    pub fn group_with(_checkpoint: &Checkpoint, _map: &LayerMap) -> Result<Self, LayersError> {
        Ok(Self::default())
    }

    /// Groups bare names: tensor ids count in the order given.
    pub fn from_names(_names: &[NamedShape<'_>], _map: &LayerMap) -> Result<Self, LayersError> {
        Ok(Self::default())
    }

    /// The layers, in execution order.
    #[must_use]
    pub fn as_slice(&self) -> &[Layer] {
        &self.layers
    }

    /// Full prefixes of the stacks, such as `model.layers`.
    #[must_use]
    pub fn stacks(&self) -> &[Box<str>] {
        &[]
    }

    /// Host memory that the grouping holds, in bytes. Part of every host budget.
    #[must_use]
    pub fn metadata_bytes(&self) -> u64 {
        0
    }
}
