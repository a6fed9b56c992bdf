//! What can go wrong while a checkpoint is made.
//!
//! Every error names the file it is about. The predicates sort them for the program's exit code;
//! this file knows no exit code itself.

use std::io;
use std::path::PathBuf;

/// An error of `loadcheck synth`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SynthError {
    /// The source names neither a preset nor a file.
    #[error(
        "unknown preset `{given}`{}; known presets: {known}; \
         to use a configuration file, give its path (`./config.json`)",
        suggestion.as_ref().map(|name| format!("; did you mean `{name}`?")).unwrap_or_default()
    )]
    UnknownPreset {
        /// What was asked for.
        given: String,
        /// The nearest preset, if one is near.
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
    /// The system refused a thread.
    #[error("cannot start a thread: {source}")]
    Thread {
        /// The system's answer.
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
        /// What the parser says.
        reason: String,
    },
    /// The configuration belongs to an architecture whose tensors are not known here.
    #[error("{origin} has model_type `{model_type}`, whose tensors synth does not know; known: {known}")]
    UnknownModelType {
        /// The file or preset.
        origin: String,
        /// The `model_type` found.
        model_type: String,
        /// All known values, separated by commas.
        known: String,
    },
    /// The configuration lacks what decides a shape.
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
        /// What is accepted.
        expected: String,
        /// The value found, as JSON.
        found: String,
    },
    /// The configuration asks for something that changes the tensors in a way not known here.
    #[error("{origin}: `{key}` is {found}; {reason}")]
    Unsupported {
        /// The file or preset.
        origin: String,
        /// The key.
        key: &'static str,
        /// The value found, as JSON.
        found: String,
        /// What is supported and what to do.
        reason: &'static str,
    },
    /// More layers were asked for than the model has.
    #[error("--layers {asked} is not possible: {origin} has {available} layers; give 1 to {available}")]
    Layers {
        /// The file or preset.
        origin: String,
        /// Layers asked for.
        asked: u64,
        /// Layers that the model has.
        available: u64,
    },
    /// The model is larger than a file or a header can say.
    #[error("{origin}: the model is too large: {what} exceeds {limit}")]
    TooLarge {
        /// The file or preset.
        origin: String,
        /// What overflowed.
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
    /// The target directory holds something.
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
    /// Somebody made a file of the same name while this run was writing.
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
        /// What the system said.
        source: io::Error,
    },
    /// A system call on the target failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was being done, as a verb.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The header crate refused the layout.
    #[error("cannot make the header of {file}: {reason}")]
    Header {
        /// The shard.
        file: String,
        /// What the crate said.
        reason: String,
    },
    /// The caller asked to stop.
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
    /// The request itself cannot be met: a wrong name, a target in use, too little room.
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

    /// The configuration file is missing, unreadable, malformed or of an unknown kind.
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

    /// The caller stopped the run.
    pub fn is_interrupted(&self) -> bool {
        matches!(self, Self::Interrupted { .. })
    }

    /// Turns a failed system call on `path` into an error; a full file system or quota gets its
    /// own.
    pub(super) fn from_io(action: &'static str, path: PathBuf, needed_bytes: u64, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::Full { path, needed_bytes, source }
            }
            _ => Self::Io { action, path, source },
        }
    }
}
