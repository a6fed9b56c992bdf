//! Finds quantization companions: scales, zero points and states that belong to a weight.
//!
//! `mlp.up.weight.absmax` looks like a parameter of a module `mlp.up.weight`, and a few such
//! "modules" make a flat list of linear layers look like a stack. So the search for stacks ignores
//! companions, and each is put into the layer of its weight. A suffix is not enough (`logit_scale`
//! is a plain parameter): the weight, or its packed form, must exist.

use super::names::Names;
use super::positions::{index32, slot};
use super::text_index::TextIndex;
use crate::footprint::{Held, PeakMeter};

/// Suffixes of a tensor's name: bitsandbytes, compressed-tensors, FP8, torchao, MXFP4.
const TENSOR_SUFFIXES: [&str; 17] = [
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    ".qdata",
    ".scale",
    ".zero_point",
    "_scale",
    "_scale_2",
    "_scale_inv",
    "_packed",
    "_shape",
    "_zero_point",
    "_g_idx",
    "_global_scale",
    "_blocks",
    "_scales",
];

/// Infix of a companion's name; anything may follow.
const STATE_INFIX: &str = ".quant_state.";

/// Suffixes of the packed form that replaces a tensor.
const TENSOR_PAYLOADS: [&str; 3] = ["_packed", "_blocks", ".qdata"];

/// Suffixes of a module's name, beside its `.weight` or `.qweight`: GPTQ, AWQ, MLX, LLM.int8.
const MODULE_SUFFIXES: [&str; 5] = [".scales", ".biases", ".qzeros", ".g_idx", ".SCB"];
const MODULE_PAYLOADS: [&str; 2] = [".weight", ".qweight"];

const TENSOR_ENDINGS: [[u8; 2]; TENSOR_SUFFIXES.len()] = endings(TENSOR_SUFFIXES);
const TENSOR_PAYLOAD_ENDINGS: [[u8; 2]; TENSOR_PAYLOADS.len()] = endings(TENSOR_PAYLOADS);
const MODULE_ENDINGS: [[u8; 2]; MODULE_SUFFIXES.len()] = endings(MODULE_SUFFIXES);
const MODULE_PAYLOAD_ENDINGS: [[u8; 2]; MODULE_PAYLOADS.len()] = endings(MODULE_PAYLOADS);

/// "Not a companion".
const NO_WEIGHT: u32 = u32::MAX;

/// The weight of every tensor that is a companion.
#[derive(Debug, Default)]
pub(super) struct Companions {
    /// Per tensor, or empty if there are none.
    weights: Vec<u32>,
}

/// The name that a companion extends.
#[derive(Clone, Copy)]
enum Stem<'a> {
    Tensor(&'a str),
    Module(&'a str),
}

/// A tensor that is a companion if a tensor or module with its stem exists.
struct Candidate {
    tensor: u32,
    stem_len: u32,
    /// The first candidate of the same stem.
    first: u32,
    /// The tensor with the stem's name; set for the first candidate of a stem.
    weight: u32,
}

/// The candidates, indexed by stem.
#[derive(Default)]
struct Candidates {
    list: Vec<Candidate>,
    by_tensor: TextIndex,
    by_module: TextIndex,
}

impl Companions {
    /// Finds the companions among `names`.
    pub(super) fn find(names: Names<'_>, meter: &mut PeakMeter) -> Self {
        let mut candidates = Candidates::default();
        for tensor in names.tensors() {
            if let Some(stem) = stem(names.name(tensor)) {
                candidates.add(names, tensor, stem);
            }
        }
        if candidates.list.is_empty() {
            return Self::default();
        }
        for tensor in names.tensors() {
            let name = names.name(tensor);
            let packed = stripped(name, &TENSOR_PAYLOADS, &TENSOR_PAYLOAD_ENDINGS)
                .map(|base| (Stem::Tensor(base), false));
            let module = stripped(name, &MODULE_PAYLOADS, &MODULE_PAYLOAD_ENDINGS)
                .map(|base| (Stem::Module(base), false));
            for (stem, is_exact) in [Some((Stem::Tensor(name), true)), packed, module].into_iter().flatten() {
                if let Some(weight) = candidates.weight_mut(names, stem)
                    && (is_exact || *weight == NO_WEIGHT)
                {
                    *weight = tensor;
                }
            }
        }
        meter.note(candidates.held());
        let Candidates { list, .. } = candidates;
        let companions = resolve(names, list, meter);
        meter.keep(Held::default().list(&companions.weights));
        companions
    }

    /// The weight of `tensor`, if it is a companion.
    pub(super) fn weight(&self, tensor: u32) -> Option<u32> {
        self.weights.get(slot(tensor)).copied().filter(|&weight| weight != NO_WEIGHT)
    }

    /// All companions with their weights, ascending.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        (self.weights.iter().enumerate())
            .filter(|&(_, &weight)| weight != NO_WEIGHT)
            .map(|(tensor, &weight)| (index32(tensor), weight))
    }
}

impl Candidates {
    fn add(&mut self, names: Names<'_>, tensor: u32, stem: Stem<'_>) {
        let Self { list, by_tensor, by_module } = self;
        let (index, text) = match stem {
            Stem::Tensor(text) => (by_tensor, text),
            Stem::Module(text) => (by_module, text),
        };
        let known = index.find(text, |at| spelled(names, list, at));
        let position = index32(list.len());
        let first = known.unwrap_or(position);
        list.push(Candidate { tensor, stem_len: index32(text.len()), first, weight: NO_WEIGHT });
        if known.is_none() {
            index.insert(position, |at| spelled(names, list, at));
        }
    }

    fn weight_mut(&mut self, names: Names<'_>, stem: Stem<'_>) -> Option<&mut u32> {
        let Self { list, by_tensor, by_module } = self;
        let (index, text) = match stem {
            Stem::Tensor(text) => (by_tensor, text),
            Stem::Module(text) => (by_module, text),
        };
        let first = index.find(text, |at| spelled(names, list, at))?;
        Some(&mut list[slot(first)].weight)
    }

    fn held(&self) -> Held {
        Held::default().grown_list(&self.list).grown(self.by_tensor.bytes()).grown(self.by_module.bytes())
    }
}

fn spelled<'a>(names: Names<'a>, list: &[Candidate], candidate: u32) -> &'a str {
    let Candidate { tensor, stem_len, .. } = list[slot(candidate)];
    &names.name(tensor)[..slot(stem_len)]
}

/// The weight of each candidate. A companion of a companion belongs to the weight of the latter.
fn resolve(names: Names<'_>, mut candidates: Vec<Candidate>, meter: &mut PeakMeter) -> Companions {
    for at in 0..candidates.len() {
        candidates[at].weight = candidates[slot(candidates[at].first)].weight;
    }
    candidates.retain(|candidate| candidate.weight != NO_WEIGHT && candidate.weight != candidate.tensor);
    // A stem is shorter than its companion, so in order of length every weight is resolved before it
    // is used. Packed forms are as long as their companions, but are never looked up as companions.
    candidates.sort_unstable_by_key(|candidate| (names.name(candidate.tensor).len(), candidate.tensor));
    let mut weights = vec![NO_WEIGHT; names.count()];
    for Candidate { tensor, weight, .. } in &candidates {
        let settled = weights[slot(*weight)];
        let root = if settled == NO_WEIGHT { *weight } else { settled };
        if root != *tensor {
            weights[slot(*tensor)] = root;
        }
    }
    meter.note(Held::default().list(&candidates).list(&weights));
    Companions { weights }
}

fn stem(name: &str) -> Option<Stem<'_>> {
    if let Some(base) = stripped(name, &MODULE_SUFFIXES, &MODULE_ENDINGS) {
        return Some(Stem::Module(base));
    }
    if let Some(at) = last_state_infix(name) {
        return Some(Stem::Tensor(&name[..at]));
    }
    stripped(name, &TENSOR_SUFFIXES, &TENSOR_ENDINGS).map(Stem::Tensor)
}

/// As `str::rfind`, which takes longer to prepare its search than this takes for a short name.
fn last_state_infix(name: &str) -> Option<usize> {
    let bytes = name.as_bytes();
    let has_q = |part: &[u8]| part.iter().fold(false, |has, &byte| has | (byte == b'q'));
    let (words, rest) = bytes.as_chunks::<8>();
    if !has_q(rest) && !words.iter().any(|word| has_q(word)) {
        return None;
    }
    let begins =
        |at: &usize| bytes[*at..].starts_with(b".q") && bytes[*at..].starts_with(STATE_INFIX.as_bytes());
    (0..bytes.len()).rev().find(begins)
}

/// The last two bytes of each suffix. Most names end in others, which is faster to see than by
/// comparing all suffixes.
const fn endings<const COUNT: usize>(suffixes: [&str; COUNT]) -> [[u8; 2]; COUNT] {
    let mut endings = [[0; 2]; COUNT];
    let mut at = 0;
    while at < COUNT {
        endings[at] = *suffixes[at].as_bytes().last_chunk().expect("every suffix is longer");
        at += 1;
    }
    endings
}

fn stripped<'n>(name: &'n str, suffixes: &[&str], endings: &[[u8; 2]]) -> Option<&'n str> {
    let ending = name.as_bytes().last_chunk()?;
    if !endings.contains(ending) {
        return None;
    }
    suffixes.iter().find_map(|suffix| name.strip_suffix(suffix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::NamedShape;

    fn weights(names: &[&str]) -> Vec<(String, String)> {
        let entries: Vec<_> = names.iter().map(|&name| NamedShape { name, shape: None }).collect();
        let pairs = Companions::find(Names::Listed(&entries), &mut PeakMeter::default());
        pairs.pairs().map(|(left, right)| (names[slot(left)].into(), names[slot(right)].into())).collect()
    }

    #[test]
    fn the_weight_or_its_packed_form_has_to_exist() {
        let pair = |left: &str, right: &str| (left.to_owned(), right.to_owned());
        assert_eq!(weights(&["logit_scale", "layer_scale", "x.scales", "image_shape"]), []);
        assert_eq!(weights(&["a.weight_scale_inv", "a.weight"]), [pair("a.weight_scale_inv", "a.weight")]);
        assert_eq!(
            weights(&["a.weight_shape", "a.weight_packed"]),
            [pair("a.weight_shape", "a.weight_packed")]
        );
        assert_eq!(weights(&["e.up_scales", "e.up_blocks"]), [pair("e.up_scales", "e.up_blocks")]);
        assert_eq!(
            weights(&["a.qweight", "a.qzeros", "a.scales", "a.g_idx"]).len(),
            3,
            "GPTQ keeps scales beside a packed weight"
        );
        assert_eq!(
            weights(&["a.weight", "a.weight.quant_state.bitsandbytes__nf4", "a.weight.nested_absmax"]).len(),
            2
        );
    }

    #[test]
    fn chains_end_at_the_weight() {
        let chain: Vec<String> = (0..50).map(|count| format!("a{}", "_scale".repeat(count))).collect();
        let names: Vec<&str> = chain.iter().rev().map(String::as_str).collect();
        let found = weights(&names);
        assert_eq!(found.len(), 49);
        assert!(found.iter().all(|(_, weight)| weight == "a"));
    }
}
