//! Quantization companions: scales, zero points and states that belong to a weight, whatever their name.
//!
//! `mlp.up.weight.absmax` looks like a parameter of a module `mlp.up.weight`, and a few such "modules" make a flat
//! list of linears look like a stack. So companions take no part in the search for stacks and follow
//! their weight. A suffix alone proves nothing (`logit_scale` is a plain parameter): the weight, or the packed form
//! that replaced it, has to exist.

use std::collections::HashMap;

use super::NamedShape;
use super::lists::{index32, slot};

/// Behind the name of a tensor: bitsandbytes, compressed-tensors, FP8, torchao, MXFP4.
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

/// Inside the name of a companion, with anything behind it.
const STATE_INFIX: &str = ".quant_state.";

/// What replaces the tensor in packed formats, behind its name.
const TENSOR_PAYLOADS: [&str; 3] = ["_packed", "_blocks", ".qdata"];

/// Behind the name of a module, beside its `.weight` or `.qweight`: GPTQ, AWQ, MLX, LLM.int8.
const MODULE_SUFFIXES: [&str; 5] = [".scales", ".biases", ".qzeros", ".g_idx", ".SCB"];
const MODULE_PAYLOADS: [&str; 2] = [".weight", ".qweight"];

/// "Not a companion".
const NO_HOST: u32 = u32::MAX;

/// The weight of every tensor that is a companion.
#[derive(Debug, Default)]
pub(super) struct Companions {
    /// Per tensor, or empty if there are none.
    hosts: Vec<u32>,
}

/// What a companion belongs to, by name.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Stem<'a> {
    Tensor(&'a str),
    Module(&'a str),
}

impl Companions {
    /// Finds the companions among `names`.
    pub(super) fn find(names: &[NamedShape<'_>]) -> Self {
        let candidates: Vec<_> = (names.iter().enumerate())
            .filter_map(|(tensor, entry)| Some((index32(tensor), stem(entry.name)?)))
            .collect();
        if candidates.is_empty() {
            return Self::default();
        }
        let mut host_of: HashMap<Stem<'_>, u32> =
            candidates.iter().map(|&(_, stem)| (stem, NO_HOST)).collect();
        for (tensor, entry) in names.iter().enumerate() {
            let exact = (Stem::Tensor(entry.name), true);
            let packed = stripped(entry.name, &TENSOR_PAYLOADS).map(|base| (Stem::Tensor(base), false));
            let module = stripped(entry.name, &MODULE_PAYLOADS).map(|base| (Stem::Module(base), false));
            for (stem, is_exact) in [Some(exact), packed, module].into_iter().flatten() {
                if let Some(host) = host_of.get_mut(&stem)
                    && (is_exact || *host == NO_HOST)
                {
                    *host = index32(tensor);
                }
            }
        }
        Self { hosts: resolve(names, &candidates, &host_of) }
    }

    /// The weight that `tensor` follows, if it is a companion.
    pub(super) fn host(&self, tensor: u32) -> Option<u32> {
        self.hosts.get(slot(tensor)).copied().filter(|&host| host != NO_HOST)
    }

    /// All companions with the weight each belongs to, ascending.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        (self.hosts.iter().enumerate())
            .filter(|&(_, &host)| host != NO_HOST)
            .map(|(tensor, &host)| (index32(tensor), host))
    }
}

/// The weight of each candidate; a companion of a companion belongs to the weight of the latter.
fn resolve(
    names: &[NamedShape<'_>],
    candidates: &[(u32, Stem<'_>)],
    host_of: &HashMap<Stem<'_>, u32>,
) -> Vec<u32> {
    let mut hosts = vec![NO_HOST; names.len()];
    let mut found: Vec<_> = (candidates.iter())
        .map(|&(tensor, stem)| (tensor, host_of[&stem]))
        .filter(|&(tensor, host)| host != NO_HOST && host != tensor)
        .collect();
    // A stem is shorter than its companion, so that in order of length every host is settled before it is used.
    // Packed forms are as long as their companions, but a packed form with a stem is not asked for.
    found.sort_by_key(|&(tensor, _)| names[slot(tensor)].name.len());
    for (tensor, host) in found {
        let settled = hosts[slot(host)];
        let root = if settled == NO_HOST { host } else { settled };
        if root != tensor {
            hosts[slot(tensor)] = root;
        }
    }
    hosts
}

fn stem(name: &str) -> Option<Stem<'_>> {
    if let Some(base) = stripped(name, &MODULE_SUFFIXES) {
        return Some(Stem::Module(base));
    }
    if let Some(at) = name.rfind(STATE_INFIX) {
        return Some(Stem::Tensor(&name[..at]));
    }
    stripped(name, &TENSOR_SUFFIXES).map(Stem::Tensor)
}

fn stripped<'n>(name: &'n str, suffixes: &[&str]) -> Option<&'n str> {
    suffixes.iter().find_map(|suffix| name.strip_suffix(suffix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(names: &[&str]) -> Vec<(String, String)> {
        let entries: Vec<_> = names.iter().map(|&name| NamedShape { name, shape: None }).collect();
        let pairs = Companions::find(&entries);
        pairs.pairs().map(|(left, right)| (names[slot(left)].into(), names[slot(right)].into())).collect()
    }

    #[test]
    fn the_weight_or_its_packed_form_has_to_exist() {
        let pair = |left: &str, right: &str| (left.to_owned(), right.to_owned());
        assert_eq!(hosts(&["logit_scale", "layer_scale", "x.scales", "image_shape"]), []);
        assert_eq!(hosts(&["a.weight_scale_inv", "a.weight"]), [pair("a.weight_scale_inv", "a.weight")]);
        assert_eq!(
            hosts(&["a.weight_shape", "a.weight_packed"]),
            [pair("a.weight_shape", "a.weight_packed")]
        );
        assert_eq!(hosts(&["e.up_scales", "e.up_blocks"]), [pair("e.up_scales", "e.up_blocks")]);
        assert_eq!(
            hosts(&["a.qweight", "a.qzeros", "a.scales", "a.g_idx"]).len(),
            3,
            "GPTQ keeps scales beside a packed weight"
        );
        assert_eq!(
            hosts(&["a.weight", "a.weight.quant_state.bitsandbytes__nf4", "a.weight.nested_absmax"]).len(),
            2
        );
    }

    #[test]
    fn chains_end_at_the_weight() {
        let chain: Vec<String> = (0..50).map(|count| format!("a{}", "_scale".repeat(count))).collect();
        let names: Vec<&str> = chain.iter().rev().map(String::as_str).collect();
        let found = hosts(&names);
        assert_eq!(found.len(), 49);
        assert!(found.iter().all(|(_, host)| host == "a"));
    }
}
