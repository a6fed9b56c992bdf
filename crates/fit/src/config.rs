//! The `config.json` of a Hugging Face checkpoint: the keys that sizes depend on.
//!
//! If a configuration wraps several models (`text_config`, `llm_config`), that of the language
//! model is used. `attention`, `recurrent` and `activation` interpret the values.

use serde_json::{Map, Value};

use super::error::FitError;

/// Keys of a wrapped language model's configuration.
const INNER: [&str; 3] = ["text_config", "llm_config", "language_config"];

/// The configuration of a model.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    pub(super) outer: Map<String, Value>,
    /// The configuration of a wrapped language model.
    pub(super) inner: Option<Map<String, Value>>,
}

/// The reason why a number is unknown, in lower case, without a full stop.
pub(super) type Why = String;

impl ModelConfig {
    /// Reads the text of a `config.json`. `origin` names it in errors.
    ///
    /// # Errors
    /// [`FitError::BadConfig`] if `text` is not a JSON object.
    ///
    /// # Example
    /// ```
    /// use onelayer_fit::{CacheType, ModelConfig, Workload};
    /// let text = br#"{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}"#;
    /// let config = ModelConfig::parse("config.json", text)?;
    /// let workload = Workload { context_tokens: 4096, batch: 1, cache_type: CacheType::Half };
    /// assert_eq!(config.cache().bytes(&workload), Some(2 << 30)); // Llama 2 7B
    /// # Ok::<(), onelayer_fit::FitError>(())
    /// ```
    pub fn parse(origin: &str, text: &[u8]) -> Result<Self, FitError> {
        let wrong = |message: String| FitError::BadConfig { origin: origin.to_owned(), message };
        let value: Value = serde_json::from_slice(text).map_err(|error| wrong(error.to_string()))?;
        let Value::Object(mut outer) = value else { return Err(wrong("it is not a JSON object".to_owned())) };
        let inner = INNER.iter().find_map(|key| match outer.get_mut(*key) {
            Some(Value::Object(inner)) => Some(std::mem::take(inner)),
            _ => None,
        });
        Ok(Self { outer, inner })
    }

    /// The `model_type`: that of the language model, if it is wrapped.
    #[must_use]
    pub fn model_type(&self) -> Option<&str> {
        self.value("model_type").and_then(Value::as_str)
    }

    /// The longest sequence that the model was made for, in tokens.
    #[must_use]
    pub fn context_max(&self) -> Option<u64> {
        let keys = ["max_position_embeddings", "n_positions", "max_seq_len", "seq_length"];
        self.optional(&keys).ok().flatten().filter(|tokens| *tokens > 0)
    }

    /// The first name in `architectures`.
    pub(super) fn class_name(&self) -> Option<&str> {
        self.outer.get("architectures")?.get(0)?.as_str()
    }

    /// A value of the language model. A null counts as absent.
    pub(super) fn value(&self, key: &str) -> Option<&Value> {
        let map = self.inner.as_ref().unwrap_or(&self.outer);
        map.get(key).filter(|value| !value.is_null())
    }

    /// The value of the first of `keys` that is present.
    pub(super) fn optional(&self, keys: &[&str]) -> Result<Option<u64>, Why> {
        let Some((key, value)) = keys.iter().find_map(|key| Some((key, self.value(key)?))) else {
            return Ok(None);
        };
        value.as_u64().map(Some).ok_or_else(|| format!("`{key}` in config.json is not a whole number"))
    }

    /// The value of the first of `keys` that is present. It must be above zero.
    pub(super) fn required(&self, keys: &[&str]) -> Result<u64, Why> {
        match self.optional(keys)? {
            Some(0) => Err(format!("`{}` in config.json is zero", keys[0])),
            Some(number) => Ok(number),
            None => Err(format!("config.json has no `{}`", keys[0])),
        }
    }

    /// A value that is true or false.
    pub(super) fn flag(&self, key: &str) -> Option<bool> {
        self.value(key).and_then(Value::as_bool)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_configuration_is_refused() {
        for text in ["", "[]", "{", "7"] {
            let error = ModelConfig::parse("here/config.json", text.as_bytes()).unwrap_err();
            assert!(error.to_string().contains("here/config.json"), "{error}");
        }
    }

    #[test]
    fn a_wrapped_language_model_is_the_one_that_counts() {
        let text = r#"{"model_type": "gemma3", "tie_word_embeddings": false,
            "text_config": {"model_type": "gemma3_text", "hidden_size": 8}, "hidden_size": 9}"#;
        let config = ModelConfig::parse("c", text.as_bytes()).unwrap();
        assert_eq!(config.model_type(), Some("gemma3_text"));
        assert_eq!(config.required(&["hidden_size"]), Ok(8));
        assert_eq!(config.ties_embeddings(), Some(false));
    }

    #[test]
    fn wrong_values_are_named() {
        let text = r#"{"a": "x", "b": -1, "c": 0, "d": null, "e": 2}"#;
        let config = ModelConfig::parse("c", text.as_bytes()).unwrap();
        for (key, expected) in
            [("a", "whole number"), ("b", "whole number"), ("c", "is zero"), ("d", "has no")]
        {
            assert!(config.required(&[key]).unwrap_err().contains(expected), "{key}");
        }
        assert_eq!(config.required(&["d", "e"]), Ok(2));
    }
}
