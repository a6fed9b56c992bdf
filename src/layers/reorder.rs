//! Layers in an order of the caller's.

use super::lists::{index32, slot};
use super::{LayerId, Layers, LayersError};
use crate::checkpoint::TensorId;

/// The place of a layer that has none yet.
const NOWHERE: u32 = u32::MAX;

impl Layers {
    /// Puts the layers into that order. It has to name each layer that has a selected tensor, and
    /// each once; the others come last.
    ///
    /// # Errors
    /// [`LayersError::CallOrder`] for a name that no layer has, one that comes twice, and a layer
    /// that is left out.
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
        // Each swap puts one layer into its place for good.
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
