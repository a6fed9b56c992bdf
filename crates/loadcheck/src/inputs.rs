//! The files that describe a load: headers of a checkpoint, layer rules, `config.json`, device
//! maps.

use onelayer_system::units::to_u64;
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use onelayer::checkpoint::Checkpoint;
use onelayer::layers::{LayerMap, Layers};
use onelayer_fit::{DeviceMap, ModelConfig, Tier};
use onelayer_system::small_file::{self, SmallFileError};

use crate::config::Opening;
use crate::library_errors;
use crate::machine::memory_limit_bytes;
use crate::problem::{Code, Problem};
use crate::report::{DtypeShare, Largest, Source};
use crate::sizes::SizeContext;

/// Layer rules are written by hand. A larger file was given by mistake.
const LAYER_MAP_BYTES_MAX: u64 = 256 << 10;
/// Configurations take kilobytes.
const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// A line for each of a million layers.
const DEVICE_MAP_BYTES_MAX: u64 = 256 << 20;

/// Opens a checkpoint.
///
/// # Errors
/// Everything that is wrong with it.
pub(crate) fn open_checkpoint(path: &Path, opening: &Opening) -> Result<Checkpoint, Vec<Problem>> {
    opening.options().open(path).map_err(|error| library_errors::checkpoint(&error))
}

/// Reads the override of the grouping, if there is one.
pub(crate) fn layer_map(path: Option<&Path>) -> Result<LayerMap, Problem> {
    let Some(path) = path else { return Ok(LayerMap::default()) };
    let failed = |error: &dyn std::fmt::Display| {
        Problem::new(Code::LayerMap, format!("cannot use the layer rules: {error}"))
            .at(path.display().to_string())
    };
    let text = small_file::read(path, LAYER_MAP_BYTES_MAX).map_err(|error| failed(&error))?;
    let text = String::from_utf8(text).map_err(|error| failed(&error))?;
    LayerMap::parse(&text).map_err(|error| failed(&error))
}

/// The layers of a checkpoint, by the rules of a file if there is one.
///
/// # Errors
/// The file cannot be used, or its rules do not fit the checkpoint.
pub(crate) fn group(checkpoint: &Checkpoint, rules: Option<&Path>) -> Result<Layers, Problem> {
    let map = layer_map(rules)?;
    Layers::group_with(checkpoint, &map).map_err(|error| library_errors::layers(&error, rules))
}

/// The quantities that relative sizes refer to.
pub(crate) fn context_of(checkpoint: &Checkpoint, layers: &Layers) -> SizeContext {
    SizeContext {
        limit_bytes: memory_limit_bytes(),
        layer_bytes: layer_sizes(checkpoint, layers).map(|(_, bytes)| bytes).max(),
        tensor_bytes: checkpoint.tensors().map(|tensor| tensor.len_bytes()).max(),
        device_bytes: None,
    }
}

fn layer_sizes<'a>(checkpoint: &'a Checkpoint, layers: &'a Layers) -> impl Iterator<Item = (&'a str, u64)> {
    layers.as_slice().iter().map(|layer| {
        let bytes = layer.tensors.iter().map(|tensor| checkpoint.tensor(*tensor).len_bytes()).sum();
        (layer.id.as_str(), bytes)
    })
}

/// The checkpoint as a report has it, without who named it.
pub(crate) fn describe(checkpoint: &Checkpoint, layers: &Layers) -> Source {
    let mut shares: HashMap<&str, DtypeShare> = HashMap::new();
    for tensor in checkpoint.tensors() {
        let share = shares.entry(tensor.dtype_name).or_insert_with(|| DtypeShare {
            dtype: tensor.dtype_name.to_owned(),
            tensors: 0,
            bytes: 0,
        });
        share.tensors += 1;
        share.bytes = share.bytes.saturating_add(tensor.len_bytes());
    }
    let formats: BTreeSet<&str> = checkpoint.shards().iter().map(|shard| shard.format.name()).collect();
    let mut dtypes: Vec<DtypeShare> = shares.into_values().collect();
    dtypes.sort_by(|left, right| right.bytes.cmp(&left.bytes).then_with(|| left.dtype.cmp(&right.dtype)));
    let largest = |(name, bytes): (&str, u64)| Largest { name: name.to_owned(), bytes };
    let tensors = checkpoint.tensors().map(|tensor| (tensor.name, tensor.len_bytes()));
    Source {
        bytes: Some(checkpoint.tensor_bytes()),
        files: Some(to_u64(checkpoint.shards().len())),
        formats: formats.into_iter().map(str::to_owned).collect(),
        tensors: Some(to_u64(checkpoint.tensor_count())),
        layers: Some(to_u64(layers.as_slice().len())),
        dtypes,
        largest_tensor: first_largest(tensors).map(largest),
        largest_layer: first_largest(layer_sizes(checkpoint, layers)).map(largest),
        ..Source::default()
    }
}

/// The largest, the first of equals.
fn first_largest<'a>(sizes: impl Iterator<Item = (&'a str, u64)>) -> Option<(&'a str, u64)> {
    sizes.reduce(|best, next| if next.1 > best.1 { next } else { best })
}

/// Reads a map.
///
/// # Errors
/// It cannot be read, or it is none.
pub(crate) fn device_map(path: &Path) -> Result<DeviceMap, Problem> {
    let wrong = |message: String| Problem::new(Code::DeviceMap, message).at(path.display().to_string());
    let text = small_file::read(path, DEVICE_MAP_BYTES_MAX)
        .map_err(|error| wrong(format!("cannot read the device map: {error}")))?;
    DeviceMap::parse(&text).map_err(|error| wrong(error.to_string()))
}

/// `config.json` beside the source, where there is one.
///
/// # Errors
/// It is there and cannot be used.
pub(crate) fn config_beside(source: &Path) -> Result<Option<(PathBuf, ModelConfig)>, Problem> {
    let folder = if source.is_dir() { source } else { source.parent().unwrap_or(Path::new("")) };
    let path = folder.join("config.json");
    let place = path.display().to_string();
    let wrong = |message: String| Problem::new(Code::SourceInvalid, message).at(place.clone());
    match small_file::read(&path, CONFIG_BYTES_MAX) {
        Ok(text) => match ModelConfig::parse("config.json", &text) {
            Ok(config) => Ok(Some((path, config))),
            Err(error) => Err(wrong(error.to_string())),
        },
        Err(SmallFileError::Io(error)) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(wrong(format!("cannot read it: {error}"))),
    }
}

/// As device maps spell it.
pub(crate) fn tier_name(tier: Tier) -> String {
    match tier {
        Tier::Device(device) => device.to_string(),
        Tier::Host => "cpu".to_owned(),
        _ => "disk".to_owned(),
    }
}
