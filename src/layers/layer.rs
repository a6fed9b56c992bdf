//! Layers, and the list of all layers of a checkpoint.

use std::fmt;

use super::positions::{index32, slot};
use super::{Confidence, LayersError, Prefix, TensorIds};
use crate::checkpoint::TensorId;

/// The id of a layer: the full prefix of its tensors, such as `model.layers.0` or `lm_head`; in a
/// pipeline with its component in front, such as `transformer/transformer_blocks.0`. Cheap to
/// clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerId(Prefix);

impl LayerId {
    /// An id with this text. [`Layers::find`](super::Layers::find) tells whether a layer has it.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(Prefix::new(text))
    }

    /// An id with this text, which a person or a file gave.
    ///
    /// # Errors
    /// [`LayersError::EmptyId`] if `text` is empty. Any other text is accepted, as in tensor names.
    pub fn parse(text: &str) -> Result<Self, LayersError> {
        if text.is_empty() { Err(LayersError::EmptyId) } else { Ok(Self::new(text)) }
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl From<Prefix> for LayerId {
    fn from(prefix: Prefix) -> Self {
        Self(prefix)
    }
}

impl AsRef<str> for LayerId {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The kind of a layer.
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

/// A named part of a layer, such as one expert.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubUnit {
    /// Full prefix, such as `model.layers.0.mlp.experts.7`.
    pub prefix: Prefix,
    /// Its tensors, ascending.
    pub tensors: TensorIds,
}

/// One layer: tensors that are loaded, delivered and freed together.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Layer {
    /// Full prefix.
    pub id: LayerId,
    /// Its kind.
    pub kind: LayerKind,
    /// All its tensors, in file order (ascending ids), sub-units included.
    pub tensors: TensorIds,
    /// Numbered parts of the layer (experts), in natural order. The other tensors are its base
    /// part.
    pub sub_units: Box<[SubUnit]>,
}

/// "No position yet".
const NOWHERE: u32 = u32::MAX;

/// All layers of a checkpoint, in execution order. Every tensor is in exactly one.
///
/// Only names and shapes decide; no tensor is read. docs/layers.md explains the rule, its scores
/// and its limits.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    pub(super) layers: Vec<Layer>,
    pub(super) stacks: Vec<Prefix>,
    /// Per stack.
    pub(super) confidence: Vec<Confidence>,
    /// Per tensor: the position of its layer.
    pub(super) layer_of: Vec<u32>,
    /// Positions of the layers, sorted by id.
    pub(super) by_id: Vec<u32>,
    /// Companions and their weights, ascending.
    pub(super) companions: Vec<(TensorId, TensorId)>,
    pub(super) metadata_bytes: u64,
    pub(super) peak_bytes: u64,
}

impl Layers {
    /// The layers, in execution order.
    #[must_use]
    pub fn as_slice(&self) -> &[Layer] {
        &self.layers
    }

    /// Full prefixes of the stacks, such as `model.layers`, in execution order. A stack at the root
    /// of the names has the prefix "".
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

    /// The position of a tensor's layer in [`as_slice`](Self::as_slice).
    ///
    /// # Panics
    /// If `tensor` comes from another checkpoint and is out of range.
    #[must_use]
    pub fn position_of(&self, tensor: TensorId) -> usize {
        slot(self.layer_of[tensor.index()])
    }

    /// Quantization companions (scales, zero points, states), each with its weight.
    #[must_use]
    pub fn companions(&self) -> &[(TensorId, TensorId)] {
        &self.companions
    }

    /// Host memory of the grouping, in bytes, allocator overhead included.
    #[must_use]
    pub fn metadata_bytes(&self) -> u64 {
        self.metadata_bytes
    }

    /// Peak of host memory while grouping, in bytes: the result and temporary tables, allocator
    /// overhead included. It counts against every host budget.
    ///
    /// The override and tables that scale with its entries are not counted.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.peak_bytes
    }

    /// Puts the layers into the caller's order. It must name every layer with a selected tensor,
    /// each once; the others come last.
    ///
    /// # Errors
    /// [`LayersError::CallOrder`] for an unknown id, an id that occurs twice, and a missing layer.
    pub(crate) fn reorder(
        &mut self,
        order: &[LayerId],
        is_selected: impl Fn(TensorId) -> bool,
    ) -> Result<(), LayersError> {
        let wrong = |id: &LayerId, what| LayersError::CallOrder { layer: id.to_string(), what };
        let mut places = vec![NOWHERE; self.layers.len()];
        let mut next = 0..;
        for id in order {
            let at =
                self.position_of_id(id).ok_or_else(|| wrong(id, "which the checkpoint does not have"))?;
            if places[at] != NOWHERE {
                return Err(wrong(id, "twice"));
            }
            places[at] = next.next().expect("no more than there are layers");
        }
        for (layer, place) in self.layers.iter().zip(&mut places).filter(|(_, place)| **place == NOWHERE) {
            if layer.tensors.as_ref().iter().any(|&tensor| is_selected(tensor)) {
                return Err(wrong(&layer.id, "not at all; select tensors to leave a layer out"));
            }
            *place = next.next().expect("no more than there are layers");
        }
        for at in self.by_id.iter_mut().chain(&mut self.layer_of) {
            *at = places[slot(*at)];
        }
        // Each swap puts one layer into its final position.
        for at in 0..places.len() {
            while places[at] != index32(at) {
                let place = slot(places[at]);
                self.layers.swap(at, place);
                places.swap(at, place);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::{LayerMap, NamedShape};

    fn layers() -> Layers {
        let names = ["embed.weight", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "head.weight"];
        let names = names.map(|name| NamedShape { name, shape: None });
        Layers::from_names(&names, &LayerMap::default()).unwrap()
    }

    fn ids(layers: &Layers) -> Vec<String> {
        layers.as_slice().iter().map(|layer| layer.id.to_string()).collect()
    }

    #[test]
    fn everything_is_found_in_the_new_order() {
        let mut layers = layers();
        let mut order: Vec<LayerId> = layers.as_slice().iter().map(|layer| layer.id.clone()).collect();
        assert!(order.len() > 2, "{order:?}");
        order.rotate_left(1);
        order.swap(0, 1);
        let before = layers.clone();
        layers.reorder(&order, |_| true).unwrap();
        assert_eq!(ids(&layers), order.iter().map(ToString::to_string).collect::<Vec<_>>());
        for tensor in (0..6).map(TensorId) {
            assert_eq!(layers.layer_of(tensor).id, before.layer_of(tensor).id);
        }
        for id in &order {
            assert_eq!(layers.find(id).unwrap().id, *id);
        }
    }

    #[test]
    fn what_is_left_out_named_twice_or_unknown_is_refused() {
        let ids: Vec<LayerId> = layers().as_slice().iter().map(|layer| layer.id.clone()).collect();
        let refused = |order: &[LayerId]| layers().reorder(order, |_| true).unwrap_err().to_string();
        assert!(refused(&ids[1..]).contains("not at all"));
        assert!(refused(&[ids[0].clone(), ids[0].clone()]).contains("twice"));
        assert!(refused(&[LayerId::new("nowhere")]).contains("does not have"));
        let mut layers = layers();
        layers.reorder(&ids[1..], is_not_first).unwrap();
    }

    /// The first layer has the first tensor and no other.
    fn is_not_first(tensor: TensorId) -> bool {
        tensor != TensorId(0)
    }
}
