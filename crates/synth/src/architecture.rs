//! From a configuration to the tensors of the model, in the order in which `save_pretrained` meets
//! them.
//!
//! This file holds what the architectures share: the list that is being built, the names of the
//! families, the cut to fewer layers, and the refusal of what would change the tensors in a way not
//! known here. The families themselves are in `decoder` (Llama and its relatives, mixtures of
//! experts among them) and in `other` (GPT-2, T5).

use serde_json::{Value, json};

use super::config::ModelConfig;
use super::error::SynthError;
use super::{decoder, other};

/// Twice what the largest published mixtures of experts have; it bounds the memory that a hostile
/// configuration can ask for.
const TENSOR_COUNT_MAX: usize = 200_000;

/// One tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    /// Its name in the files.
    pub(super) name: String,
    /// Its dimensions.
    pub(super) shape: Vec<u64>,
    /// Tensors of one unit are never separated by sharding (see [`TensorList::unit`]).
    pub(super) unit: u64,
}

/// What a model consists of.
#[derive(Debug)]
pub(super) struct ModelLayout {
    /// All tensors, in the order of the saved state dict.
    pub(super) tensors: Vec<Tensor>,
    /// The class that owns these tensors, as `architectures` names it.
    pub(super) class_name: &'static str,
}

/// Lays out the model that a configuration describes.
///
/// # Errors
///
/// An unknown `model_type`, a missing or wrong value, or one that stands for other tensors than
/// those known here.
pub(super) fn layout(config: &ModelConfig) -> Result<ModelLayout, SynthError> {
    config.require(
        "quantization_config",
        &Value::Null,
        "synth makes unquantized tensors only; remove the key to get those",
    )?;
    let layout = if let Some(family) = decoder::family(config.model_type()) {
        decoder::layout(config, family)?
    } else {
        match config.model_type() {
            "gpt2" => other::gpt2(config)?,
            "t5" => other::t5(config)?,
            unknown => return Err(unknown_model_type(config, unknown)),
        }
    };
    config.require(
        "architectures",
        &json!([layout.class_name]),
        "synth lays out the model with its language-model head; remove the key to get that",
    )?;
    Ok(layout)
}

/// Every `model_type` that can be laid out.
pub(super) fn model_types() -> Vec<&'static str> {
    let mut names: Vec<_> = decoder::FAMILIES.iter().map(|family| family.model_type).collect();
    names.extend(["gpt2", "t5"]);
    names.sort_unstable();
    names
}

/// Writes into the configuration that the model has only its first `layer_count` layers (of encoder
/// and decoder, where there are both), and shortens the lists that have an item per layer.
pub(super) fn cut_layers(config: &mut ModelConfig, layer_count: u64) -> Result<(), SynthError> {
    let (key, second_key) = match config.model_type() {
        "gpt2" => ("n_layer", None),
        "t5" => ("num_layers", Some("num_decoder_layers")),
        _ => ("num_hidden_layers", None),
    };
    let available = config.number(key)?;
    if layer_count == 0 || layer_count > available {
        return Err(SynthError::Layers { origin: config.origin().to_owned(), asked: layer_count, available });
    }
    config.set(key, layer_count);
    if let Some(second_key) = second_key
        && config.number_or(second_key, available)? > layer_count
    {
        config.set(second_key, layer_count);
    }
    for list in ["layer_types", "no_rope_layers"] {
        config.truncate_list(list, layer_count);
    }
    config.drop_layers_from("mlp_only_layers", layer_count);
    Ok(())
}

/// The error for an architecture that is not known.
fn unknown_model_type(config: &ModelConfig, model_type: &str) -> SynthError {
    SynthError::UnknownModelType {
        origin: config.origin().to_owned(),
        model_type: model_type.escape_debug().to_string(),
        known: model_types().join(", "),
    }
}

/// The tensors of a model while they are being listed.
pub(super) struct TensorList<'a> {
    config: &'a ModelConfig,
    /// Each with the name that it has in the model in memory, if that differs from the name in the
    /// file.
    entries: Vec<(Option<String>, Tensor)>,
    unit_count: u64,
}

impl<'a> TensorList<'a> {
    /// An empty list; the configuration is named in errors.
    pub(super) fn new(config: &'a ModelConfig) -> Self {
        Self { config, entries: Vec::new(), unit_count: 0 }
    }

    /// Adds a tensor that stands alone.
    pub(super) fn push(&mut self, name: String, shape: &[u64]) -> Result<(), SynthError> {
        let unit = self.unit();
        self.push_part(None, name, shape, unit)
    }

    /// Adds a tensor whose name in memory (which decides the order, see
    /// [`TensorList::into_saved_order`]) differs.
    pub(super) fn push_renamed(
        &mut self,
        memory_name: String,
        name: String,
        shape: &[u64],
    ) -> Result<(), SynthError> {
        let unit = self.unit();
        self.push_part(Some(memory_name), name, shape, unit)
    }

    /// Adds one of several tensors that were cut out of one tensor in memory.
    pub(super) fn push_part(
        &mut self,
        memory_name: Option<String>,
        name: String,
        shape: &[u64],
        unit: u64,
    ) -> Result<(), SynthError> {
        if self.entries.len() == TENSOR_COUNT_MAX {
            return Err(SynthError::TooLarge {
                origin: self.config.origin().to_owned(),
                what: "the number of tensors".to_owned(),
                limit: u64::try_from(TENSOR_COUNT_MAX).expect("a small constant"),
            });
        }
        self.entries.push((memory_name, Tensor { name, shape: shape.to_vec(), unit }));
        Ok(())
    }

    /// Adds the weight of a linear layer (`[outputs, inputs]`, as PyTorch stores it) and its bias
    /// if it has one.
    pub(super) fn push_linear(
        &mut self,
        name: &str,
        outputs: u64,
        inputs: u64,
        has_bias: bool,
    ) -> Result<(), SynthError> {
        self.push(format!("{name}.weight"), &[outputs, inputs])?;
        if has_bias {
            self.push(format!("{name}.bias"), &[outputs])?;
        }
        Ok(())
    }

    /// A new unit of sharding. `save_pretrained` keeps tensors that are views of one storage in one
    /// file; that concerns the experts, which transformers 5 holds as one tensor in memory and
    /// writes one by one.
    pub(super) fn unit(&mut self) -> u64 {
        self.unit_count += 1;
        self.unit_count
    }

    /// The list in the order in which the modules were added: what models without a conversion are
    /// saved in.
    pub(super) fn into_module_order(self) -> Vec<Tensor> {
        self.entries.into_iter().map(|(_, tensor)| tensor).collect()
    }

    /// The list sorted by the names in memory, numbers by value, which is how transformers 5 saves
    /// the models whose weights it converts on the way out; tensors cut out of one keep the
    /// order in which they were added.
    pub(super) fn into_saved_order(mut self) -> Vec<Tensor> {
        self.entries.sort_by_cached_key(|(memory_name, tensor)| {
            natural_key(memory_name.as_deref().unwrap_or(&tensor.name))
        });
        self.into_module_order()
    }
}

/// A part of a name between dots, ordered numbers first and by value.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum NamePart {
    Number(u64),
    Text(String),
}

/// The parts of a name as a key to sort by.
fn natural_key(name: &str) -> Vec<NamePart> {
    name.split('.')
        .map(|part| part.parse().map_or_else(|_| NamePart::Text(part.to_owned()), NamePart::Number))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> ModelConfig {
        ModelConfig::parse("test".to_owned(), text.as_bytes()).unwrap()
    }

    #[test]
    fn an_unknown_architecture_names_the_known_ones() {
        let error = layout(&config(r#"{"model_type": "mamba"}"#)).unwrap_err();
        assert!(error.is_invalid_config());
        let message = error.to_string();
        for part in ["`mamba`", "gemma2", "gpt2", "llama", "qwen3_moe", "t5"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn what_would_change_the_tensors_is_refused() {
        let shapes = r#""model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "vocab_size": 8"#;
        assert_eq!(layout(&config(&format!("{{{shapes}}}"))).unwrap().tensors.len(), 12);
        for (key, extra) in [
            ("quantization_config", r#""quantization_config": {"quant_method": "awq"}"#),
            ("architectures", r#""architectures": ["LlamaForSequenceClassification"]"#),
        ] {
            match layout(&config(&format!("{{{shapes}, {extra}}}"))) {
                Err(SynthError::Unsupported { key: found, .. }) => assert_eq!(found, key),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn hostile_counts_end_in_an_error() {
        let error = layout(&config(
            r#"{"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 999999999,
                "num_attention_heads": 2, "vocab_size": 8}"#,
        ))
        .unwrap_err();
        assert!(matches!(error, SynthError::TooLarge { .. }), "{error}");
    }

    #[test]
    fn cutting_layers_also_cuts_the_lists() {
        let mut cut = config(
            r#"{"model_type": "qwen3_moe", "num_hidden_layers": 4, "layer_types": ["a", "b", "c", "d"],
                "mlp_only_layers": [0, 3]}"#,
        );
        cut_layers(&mut cut, 2).unwrap();
        assert_eq!(cut.number("num_hidden_layers").unwrap(), 2);
        assert_eq!(cut.numbers("mlp_only_layers").unwrap(), [0]);
        assert!(cut.to_text().contains("\"b\"") && !cut.to_text().contains("\"c\""));
        for asked in [0, 3] {
            assert!(matches!(cut_layers(&mut cut, asked), Err(SynthError::Layers { available: 2, .. })));
        }
        let mut both = config(r#"{"model_type": "t5", "num_layers": 6, "num_decoder_layers": 8}"#);
        cut_layers(&mut both, 3).unwrap();
        assert_eq!(both.number("num_decoder_layers").unwrap(), 3);
    }

    #[test]
    fn names_sort_by_the_value_of_their_numbers() {
        let mut names = ["model.layers.10.a", "model.layers.9.b", "lm_head.weight", "model.layers.9.a"];
        names.sort_by_cached_key(|name| natural_key(name));
        assert_eq!(names, ["lm_head.weight", "model.layers.9.a", "model.layers.9.b", "model.layers.10.a"]);
    }
}
