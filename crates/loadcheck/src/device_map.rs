//! Device maps, and the configuration beside a checkpoint: as every command reads and spells them.

use std::path::{Path, PathBuf};

use onelayer_fit::{DeviceMap, ModelConfig, Tier};

use crate::problem::{Code, Problem};
use onelayer_system::small_file::{self, SmallFileError};

/// Configurations take kilobytes.
const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// A line for each of a million layers.
const DEVICE_MAP_BYTES_MAX: u64 = 256 << 20;

/// Reads a map.
///
/// # Errors
/// It cannot be read, or it is none.
pub(crate) fn read(path: &Path) -> Result<DeviceMap, Problem> {
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
