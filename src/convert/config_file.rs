//! `config.json` of weights whose types change: it names the new types, and describes quantised
//! weights to a public reader that knows them. The rest of the file stays, byte by byte.
//!
//! The reader is compressed-tensors (through transformers, vLLM and others): its formats
//! `int-quantized` and `float-quantized` with one scale for each row are `int8` and `fp8` of ours,
//! names included. No public reader knows how `int4` is packed here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::Conversion;
use super::file_plan::FilePlan;
use super::layout::Component;
use super::side_files::SideFile;
use crate::plan::Quantisation;
use onelayer_system::{FloatType, small_file};

/// The name of a model's configuration in the Hugging Face layout.
const NAME: &str = "config.json";
/// The key that describes quantised weights.
const QUANTISATION: &str = "quantization_config";
/// Longest configuration in bytes that is looked into.
const BYTES_MAX: u64 = 1 << 20;
/// Heads that share the weight of the embedding in many models: no file has a tensor of theirs.
const TIED_HEADS: [&str; 3] = ["cls.predictions.decoder", "embed_out", "lm_head"];
/// Most modules that a description leaves out by name.
const IGNORED_MAX: usize = 10_000;

/// What was changed in the configurations of a conversion.
#[derive(Debug, Default)]
pub(super) struct ConfigChanges {
    /// A sentence for each change.
    pub(super) notes: Vec<String>,
    /// Every component with quantised weights is described.
    pub(super) is_described: bool,
}

/// Replaces the contents of those configurations among `side_files` that have to change.
pub(super) fn change(settings: &Conversion, files: &FilePlan, side_files: &mut [SideFile]) -> ConfigChanges {
    let mut changes = ConfigChanges::default();
    let (dtype, quantises) = (settings.options.dtype, settings.options.quantise.is_some());
    if dtype.is_none() && !quantises {
        return changes;
    }
    let mut is_described = quantises;
    for component in &files.layout.components {
        let description = match quantises {
            true => Description::new(files, component),
            false => Description::NotQuantised,
        };
        let name = format!("{}{NAME}", component.prefix);
        let changed = side_files
            .iter_mut()
            .find(|file| file.name == name)
            .and_then(|file| Config::read(&file.path).map(|config| (file, config)))
            .map(|(file, mut config)| {
                let noted = changes.notes.len();
                config.set_dtype(dtype, &name, &mut changes.notes);
                let known = config.describe(&description, &name, &mut changes.notes);
                // Each change has a note; without one, the file is copied.
                if changes.notes.len() > noted {
                    file.set_contents(config.text);
                }
                known
            });
        is_described &= changed.unwrap_or(description == Description::NotQuantised);
    }
    changes.is_described = is_described;
    changes
}

/// How the weights of a component are described to their reader.
#[derive(Debug, PartialEq)]
enum Description {
    /// Nothing is quantised.
    NotQuantised,
    /// No public reader takes such weights.
    NoReader,
    /// The value of `quantization_config`.
    CompressedTensors(Value),
}

impl Description {
    /// That of the quantised weights of `component`.
    fn new(files: &FilePlan, component: &Component) -> Self {
        let mut form = None;
        let mut ignored = BTreeSet::from(TIED_HEADS);
        for file in &files.layout.files[component.files.clone()] {
            for &id in files.layout.tensors(file) {
                let entry = files.checkpoint.tensor(id);
                let name = entry.name.strip_prefix(&*component.prefix).unwrap_or(entry.name);
                let module = name.strip_suffix(".weight");
                match (files.quantisation(id), module) {
                    (None, Some(module)) if entry.shape.len() == 2 => drop(ignored.insert(module)),
                    (None, _) => {}
                    (Some(to), Some(module)) if is_linear(files, entry.name, entry.shape) => {
                        form = Some(to);
                        ignored.remove(module);
                    }
                    (Some(_), _) => return Self::NoReader,
                }
                if ignored.len() > IGNORED_MAX {
                    return Self::NoReader;
                }
            }
        }
        let Some(form) = form else { return Self::NotQuantised };
        let (format, kind) = match form {
            Quantisation::Int8 => ("int-quantized", "int"),
            Quantisation::Fp8 => ("float-quantized", "float"),
            _ => return Self::NoReader,
        };
        Self::CompressedTensors(json!({
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": format,
            "config_groups": {"group_0": {
                "targets": ["Linear"],
                "format": format,
                "weights": {
                    "num_bits": 8,
                    "type": kind,
                    "symmetric": true,
                    "strategy": "channel",
                    "dynamic": false,
                },
            }},
            "ignore": ignored,
        }))
    }
}

/// True unless the weight is stored as `[in, out]` or is no matrix: the reader scales rows of
/// `[out, in]`. A bias, where there is one, has as many elements as there are outputs.
fn is_linear(files: &FilePlan, weight: &str, shape: &[u64]) -> bool {
    let bias = weight.strip_suffix("weight").map(|module| format!("{module}bias"));
    let bias = bias.and_then(|bias| files.checkpoint.find(&bias));
    shape.len() == 2 && bias.is_none_or(|bias| bias.shape == [shape[0]])
}

/// A configuration that is being changed.
struct Config {
    text: String,
}

impl Config {
    /// The configuration at `path`; `None` if it is no JSON object of a sensible size. Then it is
    /// copied as it is.
    fn read(path: &Path) -> Option<Self> {
        let text = String::from_utf8(small_file::read(path, BYTES_MAX).ok()?).ok()?;
        members(&without_infinities(&text))?;
        Some(Self { text })
    }

    /// Makes every dtype of floats the one that weights were cast to.
    fn set_dtype(&mut self, dtype: Option<FloatType>, name: &str, notes: &mut Vec<String>) {
        let Some(to) = dtype.map(FloatType::config_name) else { return };
        let plain = without_infinities(&self.text);
        let mut places = Vec::new();
        for (key, value) in members(&plain).unwrap_or_default() {
            let parts = members(value.get()).filter(|_| key.ends_with("_config") && key != QUANTISATION);
            places.extend(parts.unwrap_or_default());
            places.push((key, value));
        }
        places.retain(|(key, value)| is_dtype(key, value));
        let mut edits: Vec<(usize, usize, String)> = places
            .into_iter()
            .map(|(key, value)| (start_of(&plain, value.get()), value.get().len(), key))
            .filter(|&(start, len, _)| self.text[start..start + len] != format!("\"{to}\""))
            .collect();
        // From the end, so that places in front keep their offsets.
        edits.sort_unstable_by(|left, right| right.cmp(left));
        for (start, len, key) in &edits {
            let was = self.text[*start..start + len].trim_matches('"').to_owned();
            notes.push(format!("{name}: {key} was {was} and is {to} now, like the weights"));
            self.text.replace_range(*start..start + len, &format!("\"{to}\""));
        }
    }

    /// Adds the description of quantised weights. True if they are described, or there are none.
    fn describe(&mut self, description: &Description, name: &str, notes: &mut Vec<String>) -> bool {
        let value = match description {
            Description::NotQuantised => return true,
            Description::NoReader => return false,
            Description::CompressedTensors(value) => value,
        };
        let plain = without_infinities(&self.text);
        let has_key = |wanted: &str| members(&plain).is_some_and(|found| found.contains_key(wanted));
        if has_key(QUANTISATION) || !has_key("model_type") {
            return false;
        }
        let Some(end) = self.text.rfind('}') else { return false };
        let pretty = serde_json::to_string_pretty(value).unwrap_or_default().replace('\n', "\n  ");
        let kept = self.text[..end].trim_end().len();
        self.text.replace_range(kept..end, &format!(",\n  \"{QUANTISATION}\": {pretty}\n"));
        notes.push(format!("{name}: {QUANTISATION} was added, for compressed-tensors"));
        true
    }
}

/// `text` with other numbers for those that Python writes and JSON does not know, such as the
/// `Infinity` of a Mamba's `time_step_limit`. All else stays in its place.
fn without_infinities(text: &str) -> String {
    let (mut plain, mut rest) = (String::with_capacity(text.len()), text);
    let (mut in_text, mut is_escaped) = (false, false);
    while let Some(next) = rest.chars().next() {
        let word = ["NaN", "Infinity"].into_iter().find(|word| !in_text && rest.starts_with(word));
        let len = word.map_or(next.len_utf8(), str::len);
        match word {
            // No number begins with a zero, but for zero.
            Some(word) => plain.extend(std::iter::repeat_n('1', word.len())),
            None => plain.push(next),
        }
        in_text ^= next == '"' && !is_escaped;
        is_escaped = in_text && next == '\\' && !is_escaped;
        rest = &rest[len..];
    }
    plain
}

/// The members of a JSON object, as they are written; `None` for anything else.
fn members(text: &str) -> Option<BTreeMap<String, &RawValue>> {
    serde_json::from_str(text).ok()
}

/// Where in `text` one of its parts begins.
fn start_of(text: &str, part: &str) -> usize {
    part.as_ptr().addr() - text.as_ptr().addr()
}

/// True for the type of a model's floats: older releases of transformers call it `torch_dtype`.
fn is_dtype(key: &str, value: &RawValue) -> bool {
    let floats = ["\"float64\"", "\"float32\"", "\"float16\"", "\"bfloat16\""];
    matches!(key, "dtype" | "torch_dtype") && floats.contains(&value.get())
}
