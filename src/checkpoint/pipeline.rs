//! Reads the `model_index.json` of a diffusers pipeline: the folders of its components.
//!
//! ```text
//! { "_class_name": "...", "unet": ["diffusers", "UNet2DConditionModel"], "safety_checker": [null, null], ... }
//! ```
//!
//! A component is a key whose value is a library and a class. Keys that start with `_`, null
//! entries and plain settings are no components. A component need not have weights: tokenizers and
//! schedulers have none.

use std::path::Path;

use super::error::{CheckpointError, JsonSection, kept};
use super::file;
use super::json::OpenKeys;
use super::json::{JsonFault, JsonReader};
use super::options::OpenOptions;
use super::path_rule;
use crate::units::{ByteRange, to_u64};

/// The name of the file.
pub(super) const FILE_NAME: &str = "model_index.json";

/// The most components of one pipeline.
const COMPONENTS_MAX: usize = 256;

/// The most bytes of a component's name, which is put before the name of each of its tensors.
const NAME_BYTES_MAX: usize = 128;

/// The folders of the components, in the order of the file.
pub(super) fn components(path: &Path, options: &OpenOptions) -> Result<Vec<String>, CheckpointError> {
    let (file, identity) = file::open(path)?;
    let (found_bytes, limit_bytes) = (identity.len_bytes, options.header_bytes_max);
    if found_bytes > limit_bytes {
        let path = path.to_owned();
        return Err(CheckpointError::OverLimit { path, what: "pipeline index", found_bytes, limit_bytes });
    }
    let text = ByteRange::with_len(0, found_bytes).expect("a length fits behind 0");
    let mut json = file::json_reader(&file, text);
    let components = parse(path, &mut json);
    file::check_unchanged(path, &file, identity)?;
    components
}

fn parse<R: std::io::Read>(path: &Path, json: &mut JsonReader<R>) -> Result<Vec<String>, CheckpointError> {
    let at = |fault: JsonFault| fault.at(path, JsonSection::Pipeline);
    let mut components = Vec::new();
    let mut keys = OpenKeys::default();
    json.open_object("`{`, the start of a pipeline's index").map_err(at)?;
    keys.open(true);
    let mut first = true;
    let mut key = String::new();
    loop {
        key.clear();
        if !json.next_key(&mut first, &mut key).map_err(at)? {
            break;
        }
        if !keys.push(&key) {
            let limit = u64::from(u32::MAX);
            return Err(CheckpointError::TooMany { path: path.to_owned(), what: "bytes of keys", limit });
        }
        if key.starts_with('_') {
            json.skip_value(&mut keys).map_err(at)?;
        } else if is_component(json, &mut keys).map_err(at)? {
            components.push(checked(path, &key)?);
            if components.len() > COMPONENTS_MAX {
                let (path, limit) = (path.to_owned(), to_u64(COMPONENTS_MAX));
                return Err(CheckpointError::TooMany { path, what: "components", limit });
            }
        }
    }
    json.finish().map_err(at)?;
    keys.close().map_err(|key| at(JsonFault::Duplicate(key)))?;
    Ok(components)
}

/// Reads a value. True for a pair of strings, or of a string and a null.
fn is_component<R: std::io::Read>(json: &mut JsonReader<R>, keys: &mut OpenKeys) -> Result<bool, JsonFault> {
    if !json.next_is(b'[')? {
        json.skip_value(keys)?;
        return Ok(false);
    }
    json.open_array("an array")?;
    let (mut texts, mut nulls, mut others) = (0_u64, 0_u64, 0_u64);
    let mut first = true;
    while json.next_element(&mut first)? {
        if json.next_is(b'"')? {
            texts += 1;
        } else if json.next_is(b'n')? {
            nulls += 1;
        } else {
            others += 1;
        }
        json.skip_value(keys)?;
    }
    Ok(texts > 0 && texts + nulls == 2 && others == 0)
}

fn checked(path: &Path, key: &str) -> Result<String, CheckpointError> {
    let reason = match path_rule::single(key) {
        Ok(_) if key.len() > NAME_BYTES_MAX => "it is longer than 128 bytes",
        Ok(name) => return Ok(name.to_owned()),
        Err(reason) => reason,
    };
    let (path, found) = (path.to_owned(), kept(key));
    Err(CheckpointError::UnsafeName { path, key: "a component".to_owned(), found, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<String>, CheckpointError> {
        parse(Path::new("model_index.json"), &mut JsonReader::new(text.as_bytes(), 0, 16))
    }

    #[test]
    fn only_pairs_with_a_class_are_components() {
        let text = r#"{
            "_class_name": "StableDiffusionPipeline", "_ignored": ["a", "b"],
            "unet": ["diffusers", "UNet2DConditionModel"], "vae": [null, "AutoencoderKL"],
            "safety_checker": [null, null], "image_encoder": null, "requires_safety_checker": true,
            "boundary_ratio": 0.9, "mean": [0.5, 0.5], "names": ["a", "b", "c"], "nested": {"x": ["a", "b"]}
        }"#;
        assert_eq!(parsed(text).unwrap(), ["unet", "vae"]);
        assert_eq!(parsed("{}").unwrap(), [""; 0]);
    }

    #[test]
    fn components_are_folders_of_the_pipeline() {
        for name in ["../unet", "a/b", "/unet", "..", "", &"x".repeat(129)] {
            let text = format!(r#"{{"{name}": ["diffusers", "X"]}}"#);
            assert!(matches!(parsed(&text), Err(CheckpointError::UnsafeName { .. })), "{name}");
        }
        for text in [r#"{"a":["x","y"],"a":1}"#, r#"[]"#, r#"{"a":["x","y"]"#, r#"{"a":{"b":1,"b":2}}"#] {
            assert!(parsed(text).is_err(), "{text}");
        }
        let many: Vec<String> = (0..257).map(|number| format!(r#""c{number}":["x","y"]"#)).collect();
        let many = parsed(&format!("{{{}}}", many.join(",")));
        assert!(matches!(many, Err(CheckpointError::TooMany { what: "components", limit: 256, .. })));
    }
}
