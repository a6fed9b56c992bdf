//! A model's configuration: read from a Hugging Face `config.json` or a preset, queried with types,
//! and written back with the changes.
//!
//! It applies the rules for missing and null keys. `architecture` interprets the values.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::error::SynthError;
use onelayer_system::FloatType;
use onelayer_system::small_file::{self, SmallFileError};

/// The longest `config.json` that is read. Real ones have a few kilobytes; the limit keeps a
/// mistaken argument from filling memory.
const CONFIG_BYTES_MAX: u64 = 8 << 20;

/// The largest number that is accepted, far above any real model. It keeps products from
/// overflowing.
const NUMBER_MAX: u64 = 1 << 40;

/// A parsed configuration and its origin.
#[derive(Clone, Debug)]
pub(super) struct ModelConfig {
    /// The path or `preset NAME`, for messages.
    origin: String,
    entries: Map<String, Value>,
}

impl ModelConfig {
    /// Reads a `config.json`, or the one in a directory.
    pub(super) fn read(path: &Path) -> Result<Self, SynthError> {
        let path = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
        let text = read_small_file(&path)?;
        Self::parse(path.display().to_string(), &text)
    }

    /// Parses the text of a configuration; `origin` is named in errors.
    pub(super) fn parse(origin: String, text: &[u8]) -> Result<Self, SynthError> {
        match serde_json::from_slice(text) {
            Ok(Value::Object(entries)) => Ok(Self { origin, entries }),
            Ok(_) => {
                Err(SynthError::ParseConfig { origin, reason: "the top level is another type".to_owned() })
            }
            Err(error) => Err(SynthError::ParseConfig { origin, reason: error.to_string() }),
        }
    }

    /// A configuration of parsed entries.
    pub(super) fn from_entries(origin: String, entries: Map<String, Value>) -> Self {
        Self { origin, entries }
    }

    /// Its origin, for messages.
    pub(super) fn origin(&self) -> &str {
        &self.origin
    }

    /// The architecture's name; empty if there is none.
    pub(super) fn model_type(&self) -> &str {
        self.entries.get("model_type").and_then(Value::as_str).unwrap_or_default()
    }

    /// A key's value. A null counts as absent, as in transformers.
    fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key).filter(|value| !value.is_null())
    }

    /// A positive whole number that must be there.
    pub(super) fn number(&self, key: &'static str) -> Result<u64, SynthError> {
        self.number_or_none(key)?.ok_or_else(|| SynthError::MissingKey {
            origin: self.origin.clone(),
            key,
            model_type: self.model_type().to_owned(),
        })
    }

    /// A positive whole number, or `default` if the key is absent or null.
    pub(super) fn number_or(&self, key: &'static str, default: u64) -> Result<u64, SynthError> {
        Ok(self.number_or_none(key)?.unwrap_or(default))
    }

    /// A positive whole number, or `None` if the key is absent or null.
    pub(super) fn number_or_none(&self, key: &'static str) -> Result<Option<u64>, SynthError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(number @ 1..=NUMBER_MAX) => Ok(Some(number)),
            _ => Err(self.bad_value(key, format!("a whole number from 1 to {NUMBER_MAX}"))),
        }
    }

    /// True if the key is present with the value null.
    pub(super) fn is_null(&self, key: &str) -> bool {
        self.entries.get(key).is_some_and(Value::is_null)
    }

    /// The product of two numbers. If it is too large, the error names `key`.
    pub(super) fn product(&self, key: &'static str, left: u64, right: u64) -> Result<u64, SynthError> {
        left.checked_mul(right)
            .filter(|product| *product <= NUMBER_MAX)
            .ok_or_else(|| self.bad_value(key, format!("such that {left} x {right} is at most {NUMBER_MAX}")))
    }

    /// True or false, or `default` if the key is absent or null.
    pub(super) fn flag_or(&self, key: &'static str, default: bool) -> Result<bool, SynthError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.bad_value(key, "true or false".to_owned())),
        }
    }

    /// A text, or `default` if the key is absent or null.
    pub(super) fn text_or<'a>(&'a self, key: &'static str, default: &'a str) -> Result<&'a str, SynthError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::String(text)) => Ok(text),
            Some(_) => Err(self.bad_value(key, "a text".to_owned())),
        }
    }

    /// A list of whole numbers; empty if the key is absent or null.
    pub(super) fn numbers(&self, key: &'static str) -> Result<Vec<u64>, SynthError> {
        let wrong = || self.bad_value(key, "a list of whole numbers".to_owned());
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(items)) => items.iter().map(|item| item.as_u64().ok_or_else(wrong)).collect(),
            Some(_) => Err(wrong()),
        }
    }

    /// Refuses the configuration if `key` has a value other than `accepted`.
    pub(super) fn require(
        &self,
        key: &'static str,
        accepted: &Value,
        reason: &'static str,
    ) -> Result<(), SynthError> {
        match self.get(key) {
            Some(value) if value != accepted => Err(SynthError::Unsupported {
                origin: self.origin.clone(),
                key,
                found: shorten(value),
                reason,
            }),
            _ => Ok(()),
        }
    }

    /// The element type of the configuration; `float32` if there is none, as in transformers.
    pub(super) fn dtype(&self) -> Result<FloatType, SynthError> {
        let key = if self.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
        let name = self.text_or(key, "float32")?;
        FloatType::parse(name).ok_or_else(|| self.bad_value(key, "bfloat16, float16 or float32".to_owned()))
    }

    /// Sets a key.
    pub(super) fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.entries.insert(key.to_owned(), value.into());
    }

    /// Writes the element type under the keys that the configuration uses. If there is none, adds
    /// `torch_dtype`, which every release of transformers reads.
    pub(super) fn set_dtype(&mut self, dtype: FloatType) {
        let mut found = false;
        for key in ["dtype", "torch_dtype"] {
            if self.entries.contains_key(key) {
                self.set(key, dtype.config_name());
                found = true;
            }
        }
        if !found {
            self.set("torch_dtype", dtype.config_name());
        }
    }

    /// Cuts a list with one item per layer. Other values are unchanged.
    pub(super) fn truncate_list(&mut self, key: &str, layer_count: u64) {
        if let Some(Value::Array(items)) = self.entries.get_mut(key) {
            items.truncate(usize::try_from(layer_count).unwrap_or(usize::MAX));
        }
    }

    /// Removes the numbers of layers that are cut off from a list.
    pub(super) fn drop_layers_from(&mut self, key: &str, layer_count: u64) {
        if let Some(Value::Array(items)) = self.entries.get_mut(key) {
            items.retain(|item| item.as_u64().is_none_or(|layer| layer < layer_count));
        }
    }

    /// The text of the file as transformers writes it: sorted keys, indented by two, with a final
    /// newline.
    pub(super) fn to_text(&self) -> String {
        let mut entries = self.entries.clone();
        entries.sort_keys();
        format!("{:#}\n", Value::Object(entries))
    }

    /// An error about one key's value.
    pub(super) fn bad_value(&self, key: &'static str, expected: String) -> SynthError {
        let found = self.entries.get(key).map_or_else(|| "nothing".to_owned(), shorten);
        SynthError::BadValue { origin: self.origin.clone(), key, expected, found }
    }
}

/// A value as JSON, shortened for a message.
fn shorten(value: &Value) -> String {
    const CHARACTERS_MAX: usize = 60;
    let text = value.to_string();
    if text.chars().count() <= CHARACTERS_MAX {
        return text;
    }
    text.chars().take(CHARACTERS_MAX).chain("...".chars()).collect()
}

/// Reads a small regular file.
fn read_small_file(path: &Path) -> Result<Vec<u8>, SynthError> {
    small_file::read(path, CONFIG_BYTES_MAX).map_err(|error| match error {
        SmallFileError::Io(source) => SynthError::ReadConfig { path: PathBuf::from(path), source },
        SmallFileError::TooLarge { found_bytes, limit_bytes } => {
            SynthError::ConfigTooLarge { path: PathBuf::from(path), found_bytes, limit_bytes }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> ModelConfig {
        ModelConfig::parse("test".to_owned(), text.as_bytes()).unwrap()
    }

    #[test]
    fn null_is_absent_and_wrong_types_are_named() {
        let config = parse(r#"{"a": null, "b": "x", "c": 0, "d": -1, "e": 1.5}"#);
        assert_eq!(config.number_or("a", 4).unwrap(), 4);
        for key in ["b", "c", "d", "e"] {
            let error = config.number_or(key, 4).unwrap_err();
            assert!(error.is_invalid_config());
            assert!(error.to_string().contains(&format!("`{key}`")), "{error}");
        }
        assert!(matches!(config.number("z"), Err(SynthError::MissingKey { key: "z", .. })));
    }

    #[test]
    fn dtype_is_read_and_written_under_either_key() {
        assert_eq!(parse("{}").dtype().unwrap(), FloatType::F32);
        let mut config = parse(r#"{"dtype": "bfloat16"}"#);
        assert_eq!(config.dtype().unwrap(), FloatType::Bf16);
        config.set_dtype(FloatType::F16);
        assert_eq!(config.to_text(), "{\n  \"dtype\": \"float16\"\n}\n");
        let error = parse(r#"{"torch_dtype": "float8_e4m3fn"}"#).dtype().unwrap_err();
        assert!(error.to_string().contains("float8_e4m3fn"), "{error}");
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for text in ["", "[]", "{", "version https://git-lfs"] {
            assert!(matches!(
                ModelConfig::parse("test".to_owned(), text.as_bytes()),
                Err(SynthError::ParseConfig { .. })
            ));
        }
    }
}
