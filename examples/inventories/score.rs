//! Scores a grouping against the boundaries given by a model's author.
//!
//! The author's `no_split_paths` are the modules that must stay on one device. An inventory counts
//! if some of them are *indexed* (their last component is a number: `model.layers.7`), since only
//! those are layers. It is **exact** if
//! - no such path is **split**: all tensors below it are in one layer; and
//! - no two are **merged**: no layer has tensors of two of them, unless one lies inside the other.
//!
//! A tensor is *lost* unless it is in exactly one layer. Lost tensors are counted for every
//! inventory.

use std::collections::{BTreeSet, HashMap, HashSet};

use onelayer::layers::Layers;

use super::read::Inventory;

/// The score of a grouping.
#[derive(Debug, Default)]
pub(crate) struct Score {
    /// Paths in more than one layer, with the number of layers.
    pub(crate) split: Vec<(String, usize)>,
    /// Layers with several paths, with the first two.
    pub(crate) merged: Vec<(String, [String; 2])>,
    /// Tensors in no layer or in several.
    pub(crate) lost: usize,
}

impl Score {
    /// True if nothing is split, merged or lost.
    pub(crate) fn is_exact(&self) -> bool {
        self.split.is_empty() && self.merged.is_empty() && self.lost == 0
    }

    /// The reason of a miss, in one line.
    pub(crate) fn reason(&self) -> String {
        let mut reasons = Vec::new();
        if let Some((path, layers)) = self.split.first() {
            reasons.push(format!("{} split: {path} into {layers} layers, ...", self.split.len()));
        }
        if let Some((layer, [first, second])) = self.merged.first() {
            reasons.push(format!("{} merged: {layer} holds {first} and {second}, ...", self.merged.len()));
        }
        if self.lost > 0 {
            reasons.push(format!("{} tensors lost", self.lost));
        }
        reasons.join("; ")
    }
}

/// Scores `layers` against `paths`.
pub(crate) fn score(inventory: &Inventory, layers: &Layers, paths: &[&str]) -> Score {
    let mut places = vec![Vec::new(); inventory.tensors.len()];
    for (position, layer) in layers.as_slice().iter().enumerate() {
        for tensor in &layer.tensors {
            places[tensor.index()].push(position);
        }
    }
    let known: HashSet<&str> = paths.iter().copied().collect();
    let mut layers_of: HashMap<&str, BTreeSet<usize>> = HashMap::new();
    let mut paths_of: HashMap<usize, BTreeSet<&str>> = HashMap::new();
    for ((name, _), places) in inventory.tensors.iter().zip(&places) {
        let ends = name.match_indices('.').map(|(at, _)| at).chain([name.len()]);
        let around: Vec<&str> = ends.filter_map(|end| known.get(&name[..end]).copied()).collect();
        for path in &around {
            layers_of.entry(path).or_default().extend(places);
        }
        if let Some(outermost) = around.first() {
            for &place in places {
                paths_of.entry(place).or_default().insert(outermost);
            }
        }
    }
    let mut score =
        Score { lost: places.iter().filter(|places| places.len() != 1).count(), ..Score::default() };
    for path in paths {
        let count = layers_of.get(path).map_or(0, BTreeSet::len);
        if count > 1 {
            score.split.push(((*path).to_owned(), count));
        }
    }
    let mut places: Vec<_> = paths_of.keys().copied().collect();
    places.sort_unstable();
    for place in places {
        let mut paths = paths_of[&place].iter();
        if let (Some(first), Some(second)) = (paths.next(), paths.next()) {
            let id = layers.as_slice()[place].id.to_string();
            score.merged.push((id, [(*first).to_owned(), (*second).to_owned()]));
        }
    }
    score
}
