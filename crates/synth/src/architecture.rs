//! The tensors of a model, from its configuration, in the order of `save_pretrained`.
//!
//! Picks the family by `model_type`, refuses configurations whose tensors would differ, and cuts a
//! model to fewer layers. The families are in `decoder` (Llama and its relatives, with mixtures of
//! experts) and in `other` (GPT-2, T5).

use serde_json::{Value, json};

use super::config::ModelConfig;
use super::error::SynthError;
use super::tensor_list::ModelLayout;
use super::{decoder, other};

/// Lays out the model that a configuration describes.
///
/// # Errors
///
/// An unknown `model_type`, a missing or wrong value, or a value that would change the tensors in
/// an unknown way.
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

/// Every supported `model_type`.
pub(super) fn model_types() -> Vec<&'static str> {
    let mut names: Vec<_> = decoder::FAMILIES.iter().map(|family| family.model_type).collect();
    names.extend(["gpt2", "t5"]);
    names.sort_unstable();
    names
}

/// Changes the configuration to the first `layer_count` layers, of encoder and decoder if there are
/// both, and shortens lists with an item per layer.
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

/// The error for an unknown architecture.
fn unknown_model_type(config: &ModelConfig, model_type: &str) -> SynthError {
    SynthError::UnknownModelType {
        origin: config.origin().to_owned(),
        model_type: model_type.escape_debug().to_string(),
        known: model_types().join(", "),
    }
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
}
