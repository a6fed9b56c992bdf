//! Names and shapes to layers: each tensor is in exactly one layer, for all names and orders.
//!
//! Input: in each line a name, a tab and a shape. A repeated name counts once, as in a checkpoint.

#![allow(clippy::unwrap_used, reason = "a check that cannot go on panics")]

use std::collections::{BTreeMap, BTreeSet};

use onelayer::layers::{LayerKind, LayerMap, Layers, NamedShape};

/// A name, and its shape if known.
pub(crate) type Named = (String, Option<Vec<u64>>);

/// Checks one input.
pub fn check(data: &[u8]) {
    let named = parse(data);
    let layers = group(&named, &LayerMap::default());
    check_layers(&layers, named.len());
    for (companion, weight) in layers.companions() {
        assert_eq!(layers.position_of(*companion), layers.position_of(*weight), "it follows its weight");
    }
    let backwards: Vec<Named> = named.iter().rev().cloned().collect();
    let other = group(&backwards, &LayerMap::default());
    assert_eq!(
        by_id(&layers, &named),
        by_id(&other, &backwards),
        "the order of names decides about no layer"
    );
}

/// Names and shapes of the lines.
fn parse(data: &[u8]) -> Vec<Named> {
    let mut seen = BTreeSet::new();
    let mut named = Vec::new();
    for line in String::from_utf8_lossy(data).lines() {
        let (name, shape) = line.split_once('\t').map_or((line, None), |(name, shape)| (name, Some(shape)));
        let dims = |text: &str| text.split(' ').filter_map(|dim| dim.parse().ok()).collect();
        if seen.insert(name.to_owned()) {
            named.push((name.to_owned(), shape.map(dims)));
        }
    }
    named
}

fn group(named: &[Named], map: &LayerMap) -> Layers {
    Layers::from_names(&entries(named), map).unwrap()
}

/// The names as input of the library.
pub(crate) fn entries(named: &[Named]) -> Vec<NamedShape<'_>> {
    named.iter().map(|(name, shape)| NamedShape { name, shape: shape.as_deref() }).collect()
}

/// Layers by their ids, tensors by their names.
fn by_id<'a>(layers: &Layers, named: &'a [Named]) -> BTreeMap<String, BTreeSet<&'a str>> {
    let names = |tensors: &onelayer::layers::TensorIds| -> BTreeSet<&'a str> {
        tensors.iter().map(|tensor| named[tensor.index()].0.as_str()).collect()
    };
    layers.as_slice().iter().map(|layer| (layer.id.to_string(), names(&layer.tensors))).collect()
}

/// Checks that each of `count` tensors is in exactly one layer, and that all lookups agree.
pub(crate) fn check_layers(layers: &Layers, count: usize) {
    let mut owners: Vec<Option<usize>> = vec![None; count];
    let mut ids = BTreeSet::new();
    for (position, layer) in layers.as_slice().iter().enumerate() {
        assert!(ids.insert(layer.id.as_str()), "{} is there twice", layer.id);
        assert_eq!(layers.find(&layer.id), Some(layer));
        assert!(layer.tensors.is_sorted_by(|left, right| left < right), "{}: file order", layer.id);
        for tensor in &layer.tensors {
            assert_eq!(owners[tensor.index()].replace(position), None, "a tensor in two layers");
            assert_eq!(layers.position_of(*tensor), position);
        }
        if let LayerKind::Member { stack } = layer.kind {
            assert!(stack < layers.stacks().len());
            _ = layers.confidence(stack);
        }
        let mut parted = BTreeSet::new();
        for part in &layer.sub_units {
            for tensor in &part.tensors {
                assert!(layer.tensors.contains(tensor) && parted.insert(*tensor), "{}", part.prefix);
            }
        }
    }
    assert!(owners.iter().all(Option::is_some), "a tensor in no layer");
    assert!(layers.metadata_bytes() <= layers.peak_bytes());
}
