//! The table of common architectures: how a tensor is divided, from its name, its shape and the
//! tensors beside it.

use super::Split;
use crate::checkpoint::{Checkpoint, TensorEntry};

/// How a module is divided. Most weights have the shape `[outputs, inputs]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Each rank has some of the outputs and their biases.
    Outputs,
    /// Two modules divided by outputs, one behind the other in one tensor.
    FusedPair,
    /// Each rank has some of the inputs. Outputs are summed over the ranks, so the bias is not
    /// divided.
    Inputs,
    /// Each rank has some of the vocabulary.
    Vocabulary,
}

/// By the last names of a module.
const ROLES: [(&str, Role); 28] = [
    // Llama, Mistral, Qwen, Gemma, OPT, Phi, and what follows their names
    ("q_proj", Role::Outputs),
    ("k_proj", Role::Outputs),
    ("v_proj", Role::Outputs),
    ("o_proj", Role::Inputs),
    ("self_attn.out_proj", Role::Inputs),
    ("self_attn.dense", Role::Inputs),
    ("gate_proj", Role::Outputs),
    ("up_proj", Role::Outputs),
    ("down_proj", Role::Inputs),
    ("gate_up_proj", Role::FusedPair),
    ("fc1", Role::Outputs),
    ("fc2", Role::Inputs),
    // experts of Mixtral; see `is_gated`
    ("w1", Role::Outputs),
    ("w3", Role::Outputs),
    ("w2", Role::Inputs),
    // latent attention of DeepSeek: what comes before the heads is whole
    ("q_b_proj", Role::Outputs),
    ("kv_b_proj", Role::Outputs),
    // GPT-NeoX; its queries, keys and values lie head by head
    ("attention.query_key_value", Role::Outputs),
    ("attention.dense", Role::Inputs),
    ("mlp.dense_h_to_4h", Role::Outputs),
    ("mlp.dense_4h_to_h", Role::Inputs),
    // embeddings and heads
    ("embed_tokens", Role::Vocabulary),
    ("lm_head", Role::Vocabulary),
    ("wte", Role::Vocabulary),
    ("embed_in", Role::Vocabulary),
    ("embed_out", Role::Vocabulary),
    ("word_embeddings", Role::Vocabulary),
    ("tok_embeddings", Role::Vocabulary),
];

/// Vocabularies are padded to a multiple of this, as in vLLM.
const VOCABULARY_MULTIPLE: u64 = 64;

/// The table applied to one checkpoint.
pub(super) struct Table<'a> {
    checkpoint: &'a Checkpoint,
}

impl<'a> Table<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint }
    }

    pub(super) fn split_of(&self, entry: &TensorEntry<'_>) -> Split {
        let Some((module, parameter)) = entry.name.rsplit_once('.') else { return Split::Whole };
        if let Some(split) = self.split_of_gpt2(module, parameter, entry.shape) {
            return split;
        }
        let Some((name, role)) = ROLES.into_iter().find(|(name, _)| ends_on(module, name)) else {
            return Split::Whole;
        };
        let is_known = match name {
            "w1" | "w2" | "w3" => self.is_gated(module, parameter),
            "mlp.dense_h_to_4h" => self.is_plain_pair(module, parameter, entry.shape),
            _ => true,
        };
        if is_known { split(role, parameter, entry.shape) } else { Split::Whole }
    }

    /// True if all of `w1`, `w2` and `w3` exist: then `w2` is the way back. Early Qwen models have
    /// a gate of that name and no `w3`.
    fn is_gated(&self, module: &str, parameter: &str) -> bool {
        let around = module.strip_suffix(['1', '2', '3']).unwrap_or(module);
        ["1", "2", "3"]
            .iter()
            .all(|which| self.checkpoint.find(&format!("{around}{which}.{parameter}")).is_some())
    }

    /// True if `dense_h_to_4h` is one module, as in GPT-NeoX. In ChatGLM it is a fused gate and up
    /// projection, twice as wide as the input of `dense_4h_to_h`.
    fn is_plain_pair(&self, module: &str, parameter: &str, shape: &[u64]) -> bool {
        let around = module.strip_suffix("dense_h_to_4h").unwrap_or(module);
        let back = self.checkpoint.find(&format!("{around}dense_4h_to_h.weight"));
        matches!(parameter, "weight" | "bias")
            && back.is_some_and(|back| matches!(*back.shape, [_, inputs] if shape.first() == Some(&inputs)))
    }

    /// GPT-2 has inputs first, and queries, keys and values one behind the other. Other models
    /// share its names but not its shapes; three outputs per input in the attention tell GPT-2
    /// apart.
    fn split_of_gpt2(&self, module: &str, parameter: &str, shape: &[u64]) -> Option<Split> {
        let (block, name) = module.rsplit_once('.').and_then(|(around, name)| {
            let (block, part) = around.rsplit_once('.')?;
            matches!((part, name), ("attn", "c_attn" | "c_proj") | ("mlp", "c_fc" | "c_proj"))
                .then_some((block, name))
        })?;
        let attention = self.checkpoint.find(&format!("{block}.attn.c_attn.weight"));
        let is_gpt2 = attention.is_some_and(
            |tensor| matches!(*tensor.shape, [inputs, outputs] if inputs.checked_mul(3) == Some(outputs)),
        );
        let blocks = if name == "c_attn" { 3 } else { 1 };
        Some(match (is_gpt2, name, parameter, shape.len()) {
            (true, "c_attn" | "c_fc", "weight", 2) => Split::Even { axis: 1, blocks },
            (true, "c_attn" | "c_fc", "bias", 1) => Split::Even { axis: 0, blocks },
            (true, "c_proj", "weight", 2) => Split::Even { axis: 0, blocks },
            _ => Split::Whole,
        })
    }
}

/// True if the module's name ends on these components.
fn ends_on(module: &str, names: &str) -> bool {
    module.strip_suffix(names).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

fn split(role: Role, parameter: &str, shape: &[u64]) -> Split {
    // The dimensions of outputs and inputs.
    let (outputs, inputs) = match (parameter, shape) {
        ("weight" | "weight_packed", [_, _]) => (0, 1),
        // Its columns may be packed, and then they are not tokens.
        ("qweight", [_, _]) if role == Role::Vocabulary => return Split::Whole,
        ("qweight", [_, _]) => (1, 0),
        ("bias", [_]) if role != Role::Inputs => (0, 0),
        _ => return Split::Whole,
    };
    match role {
        Role::Outputs => Split::Even { axis: outputs, blocks: 1 },
        Role::FusedPair => Split::Even { axis: outputs, blocks: 2 },
        // Packed into one column: the inputs are inside the bytes.
        Role::Inputs if shape[inputs] == 1 => Split::Whole,
        Role::Inputs => Split::Even { axis: inputs, blocks: 1 },
        Role::Vocabulary => Split::Padded { axis: outputs, multiple: VOCABULARY_MULTIPLE },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_whole_names() {
        assert!(ends_on("model.layers.0.mlp.up_proj", "up_proj"));
        assert!(ends_on("up_proj", "up_proj"));
        assert!(!ends_on("model.layers.0.mlp.gate_up_proj", "up_proj"));
        assert!(ends_on("gpt_neox.layers.0.attention.dense", "attention.dense"));
        assert!(!ends_on("layers.0.self_attention.dense", "attention.dense"));
    }

    #[test]
    fn roles_and_shapes_say_what_is_divided() {
        let even = |axis| Split::Even { axis, blocks: 1 };
        for (role, parameter, shape, expected) in [
            (Role::Outputs, "weight", &[8, 4][..], even(0)),
            (Role::Outputs, "bias", &[8], even(0)),
            (Role::Outputs, "qweight", &[1, 8], even(1)),
            (Role::Inputs, "weight", &[8, 4], even(1)),
            (Role::Inputs, "bias", &[8], Split::Whole),
            (Role::Inputs, "qweight", &[2, 8], even(0)),
            (Role::Inputs, "weight", &[32, 1], Split::Whole),
            (Role::Outputs, "weight", &[2, 8, 4], Split::Whole),
            (Role::Outputs, "input_scale", &[1], Split::Whole),
            (Role::FusedPair, "weight", &[8, 4], Split::Even { axis: 0, blocks: 2 }),
            (Role::Vocabulary, "weight", &[100, 4], Split::Padded { axis: 0, multiple: 64 }),
            (Role::Vocabulary, "qweight", &[4, 100], Split::Whole),
        ] {
            assert_eq!(split(role, parameter, shape), expected, "{role:?} {parameter} {shape:?}");
        }
    }
}
