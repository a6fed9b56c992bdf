//! Errors while a checkpoint is made.
//!
//! Every error names its file. The program derives its exit code from the predicates.

use std::io;
use std::path::PathBuf;

/// An error of `loadcheck synth`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SynthError {
    /// The source is neither a preset nor a file.
    #[error(
        "unknown preset `{given}`{}; known presets: {known}; \
         to use a configuration file, give its path (`./config.json`)",
        suggestion.as_ref().map(|name| format!("; did you mean `{name}`?")).unwrap_or_default()
    )]
    UnknownPreset {
        /// The given name.
        given: String,
        /// The most similar preset, if there is one.
        suggestion: Option<String>,
        /// All presets, separated by commas.
        known: String,
    },
    /// A configuration file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    ReadConfig {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A thread could not be started.
    #[error("cannot start a thread: {source}")]
    Thread {
        /// The error of the system.
        source: io::Error,
    },
    /// A configuration file is far too large to be one.
    #[error("{} holds {found_bytes} bytes; a configuration has at most {limit_bytes}", path.display())]
    ConfigTooLarge {
        /// The file.
        path: PathBuf,
        /// Its length.
        found_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// A configuration is not JSON, or no JSON object.
    #[error("{origin} is not a JSON object: {reason}")]
    ParseConfig {
        /// The file or preset.
        origin: String,
        /// The message of the parser.
        reason: String,
    },
    /// The architecture of the configuration is not supported.
    #[error("{origin} has model_type `{model_type}`, whose tensors synth does not know; known: {known}")]
    UnknownModelType {
        /// The file or preset.
        origin: String,
        /// The `model_type` found.
        model_type: String,
        /// All known values, separated by commas.
        known: String,
    },
    /// The configuration lacks a key that a shape depends on.
    #[error("{origin} lacks `{key}`, which is needed to lay out a {model_type} model")]
    MissingKey {
        /// The file or preset.
        origin: String,
        /// The key.
        key: &'static str,
        /// The architecture.
        model_type: String,
    },
    /// A value of the configuration has the wrong type or is out of range.
    #[error("{origin}: `{key}` must be {expected}, found {found}")]
    BadValue {
        /// The file or preset.
        origin: String,
        /// The key.
        key: &'static str,
        /// The accepted values.
        expected: String,
        /// The value found, as JSON.
        found: String,
    },
    /// The configuration would change the tensors in an unknown way.
    #[error("{origin}: `{key}` is {found}; {reason}")]
    Unsupported {
        /// The file or preset.
        origin: String,
        /// The key.
        key: &'static str,
        /// The value found, as JSON.
        found: String,
        /// The supported value and what to do.
        reason: &'static str,
    },
    /// The model has fewer layers than asked for.
    #[error("--layers {asked} is not possible: {origin} has {available} layers; give 1 to {available}")]
    Layers {
        /// The file or preset.
        origin: String,
        /// Layers asked for.
        asked: u64,
        /// Layers that the model has.
        available: u64,
    },
    /// The model is too large for a file or a header.
    #[error("{origin}: the model is too large: {what} exceeds {limit}")]
    TooLarge {
        /// The file or preset.
        origin: String,
        /// The number that is too large.
        what: String,
        /// The limit.
        limit: u64,
    },
    /// The largest size of a shard is zero.
    #[error("the largest size of a shard must be at least 1 byte")]
    ZeroShardSize,
    /// The target exists and is no directory.
    #[error("{} exists and is not a directory; nothing was written", path.display())]
    NotADirectory {
        /// The target.
        path: PathBuf,
    },
    /// The target directory is not empty.
    #[error(
        "{} is not empty (it holds `{}`); nothing was written; \
         choose another directory, or pass --force to overwrite files of the same names \
         and to remove what an interrupted run left",
        path.display(), entry.escape_debug()
    )]
    NotEmpty {
        /// The target.
        path: PathBuf,
        /// One of its entries.
        entry: String,
    },
    /// Overwriting would leave files of another checkpoint beside the new ones.
    #[error(
        "{} holds `{}` of another checkpoint, which would be mixed up with the new one; \
         --force overwrites only files of the same names; remove it, or choose another directory",
        path.display(), entry.escape_debug()
    )]
    ForeignCheckpoint {
        /// The target.
        path: PathBuf,
        /// The file that would be left over.
        entry: String,
    },
    /// A file of the same name was created by something else during the run.
    #[error("{} appeared during the run and was not overwritten; what this run had written was removed", path.display())]
    Appeared {
        /// The file.
        path: PathBuf,
    },
    /// The file system has too little room; nothing was written.
    #[error(
        "not enough space in {}: {needed_bytes} bytes are needed, {available_bytes} are free; \
         nothing was written; use --layers to make a smaller one",
        path.display()
    )]
    NoSpace {
        /// The target.
        path: PathBuf,
        /// Bytes that the files take.
        needed_bytes: u64,
        /// Bytes that are free.
        available_bytes: u64,
    },
    /// The file system or the quota filled up during the run.
    #[error(
        "the file system filled up while writing {} (the checkpoint needs {needed_bytes} bytes in all); \
         what this run had written was removed: {source}",
        path.display()
    )]
    Full {
        /// The file that was being written.
        path: PathBuf,
        /// Bytes that all files take.
        needed_bytes: u64,
        /// The error of the system.
        source: io::Error,
    },
    /// A system call on the target failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The operation, as a verb.
        action: &'static str,
        /// Its path.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The safetensors crate refused the layout.
    #[error("cannot make the header of {file}: {reason}")]
    Header {
        /// The shard.
        file: String,
        /// The message of the crate.
        reason: String,
    },
    /// The caller stopped the run.
    #[error(
        "interrupted after {written_bytes} of {total_bytes} bytes; what this run had written was removed"
    )]
    Interrupted {
        /// Bytes written until then.
        written_bytes: u64,
        /// Bytes that were to be written.
        total_bytes: u64,
    },
}

impl SynthError {
    /// True if the request cannot be met: a wrong name, a target in use, too little space.
    pub fn is_request(&self) -> bool {
        matches!(
            self,
            Self::UnknownPreset { .. }
                | Self::Layers { .. }
                | Self::ZeroShardSize
                | Self::NotADirectory { .. }
                | Self::NotEmpty { .. }
                | Self::ForeignCheckpoint { .. }
                | Self::NoSpace { .. }
        )
    }

    /// True if the configuration file is missing, unreadable, malformed or of an unknown kind.
    pub fn is_invalid_config(&self) -> bool {
        matches!(
            self,
            Self::ReadConfig { .. }
                | Self::ConfigTooLarge { .. }
                | Self::ParseConfig { .. }
                | Self::UnknownModelType { .. }
                | Self::MissingKey { .. }
                | Self::BadValue { .. }
                | Self::Unsupported { .. }
                | Self::TooLarge { .. }
        )
    }

    /// True if the caller stopped the run.
    pub fn is_interrupted(&self) -> bool {
        matches!(self, Self::Interrupted { .. })
    }

    /// The error of a failed system call on `path`. A full file system or quota has its own
    /// variant.
    pub(super) fn from_io(action: &'static str, path: PathBuf, needed_bytes: u64, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::Full { path, needed_bytes, source }
            }
            _ => Self::Io { action, path, source },
        }
    }
}
