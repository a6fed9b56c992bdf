//! Configurations of published models, embedded in the program.
//!
//! The data is in `presets.json`. Each preset has a line for the help text, the published parameter
//! count (which the tests compare), and the entries of its `config.json` that decide the tensors or
//! that loaders require.

use serde_json::{Map, Value};

use super::config::ModelConfig;
use super::error::SynthError;

/// The embedded data.
const PRESETS_JSON: &str = include_str!("presets.json");

/// One preset.
#[derive(Clone, Debug)]
pub struct Preset {
    /// The name to give on the command line.
    pub name: String,
    /// One line for the help text.
    pub about: String,
    /// The published number of parameters, for the help text.
    pub parameter_count: u64,
    config: Map<String, Value>,
}

/// Every preset, in the order of the help text.
pub fn presets() -> Vec<Preset> {
    let Ok(Value::Object(entries)) = serde_json::from_str(PRESETS_JSON) else {
        unreachable!("presets.json is an object, as a test checks")
    };
    entries.into_iter().filter_map(|(name, value)| preset(name, &value)).collect()
}

/// Reads one entry. A test checks that none is dropped.
fn preset(name: String, value: &Value) -> Option<Preset> {
    Some(Preset {
        name,
        about: value.get("about")?.as_str()?.to_owned(),
        parameter_count: value.get("parameters")?.as_u64()?,
        config: value.get("config")?.as_object()?.clone(),
    })
}

/// The configuration of a preset. Case does not matter.
///
/// # Errors
///
/// [`SynthError::UnknownPreset`], with the most similar name if there is one.
pub(super) fn find(given: &str) -> Result<ModelConfig, SynthError> {
    let presets = presets();
    match presets.iter().find(|preset| preset.name.eq_ignore_ascii_case(given)) {
        Some(preset) => {
            Ok(ModelConfig::from_entries(format!("preset {}", preset.name), preset.config.clone()))
        }
        None => Err(unknown(given, &presets)),
    }
}

/// The error for an unknown name.
fn unknown(given: &str, presets: &[Preset]) -> SynthError {
    let wanted = given.to_ascii_lowercase();
    let nearest = presets
        .iter()
        .map(|preset| (edit_distance(&wanted, &preset.name), &preset.name))
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, name)| *distance <= name.len().div_ceil(3));
    SynthError::UnknownPreset {
        given: given.to_owned(),
        suggestion: nearest.map(|(_, name)| name.clone()),
        known: presets.iter().map(|preset| preset.name.as_str()).collect::<Vec<_>>().join(", "),
    }
}

/// The number of single characters to insert, delete or replace to turn one text into the other
/// (Levenshtein).
fn edit_distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (line, left_char) in left.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = line + 1;
        for (column, right_char) in right.iter().enumerate() {
            let replace = diagonal + usize::from(left_char != *right_char);
            diagonal = row[column + 1];
            row[column + 1] = replace.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use super::super::{architecture, shards};
    use super::*;

    #[test]
    fn every_entry_of_the_data_is_a_preset() {
        let Value::Object(entries) = serde_json::from_str(PRESETS_JSON).unwrap() else { panic!("no object") };
        assert_eq!(presets().len(), entries.len());
    }

    /// The layout has exactly the parameters that the model's authors publish.
    #[test]
    fn parameter_counts_are_the_published_ones() {
        for preset in presets() {
            let config = find(&preset.name).unwrap();
            let tensors = architecture::layout(&config).unwrap().tensors;
            let plan = shards::plan(&config, &tensors, config.dtype().unwrap(), 5_000_000_000).unwrap();
            assert_eq!(plan.parameter_count, preset.parameter_count, "{}", preset.name);
        }
    }

    #[test]
    fn gemma_7b_is_four_shards_as_published() {
        let config = find("gemma-7b").unwrap();
        let tensors = architecture::layout(&config).unwrap().tensors;
        let plan = shards::plan(&config, &tensors, config.dtype().unwrap(), 5_000_000_000).unwrap();
        assert_eq!(plan.shards.len(), 4);
        assert_eq!(plan.tensor_bytes, 17_075_361_792);
        assert_eq!(tensors[0].shape, [256_000, 3072]);
        assert!(tensors.iter().all(|tensor| tensor.name != "lm_head.weight"));
    }

    #[test]
    fn a_near_name_is_suggested_and_a_far_one_is_not() {
        let suggestion = |given| match find(given) {
            Err(SynthError::UnknownPreset { suggestion, .. }) => suggestion,
            other => panic!("{other:?}"),
        };
        assert_eq!(suggestion("gema-7b").as_deref(), Some("gemma-7b"));
        assert_eq!(suggestion("llama3-8b").as_deref(), Some("llama-3-8b"));
        assert_eq!(suggestion("zzzzzzzzzzzz"), None);
        assert!(find("Gemma-7B").is_ok());
    }
}
