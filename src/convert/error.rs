//! The errors of a conversion.

use std::path::PathBuf;

use crate::checkpoint::CheckpointError;
use crate::layers::LayersError;
use crate::load::LoadError;
use crate::plan::PlanError;
use crate::units::HumanBytes;

/// An error of a conversion. Files that were published before it stay, and the same call goes on
/// after them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The source cannot be opened.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Its tensors cannot be grouped.
    #[error(transparent)]
    Layers(#[from] LayersError),
    /// The conversion cannot be planned, mostly because the budget is too small.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The source cannot be read, or a thread failed.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The source has no tensors.
    #[error("{}: has no tensors to convert", path.display())]
    NoTensors {
        /// The source.
        path: PathBuf,
    },
    /// No tensor is left to convert.
    #[error("no tensor is selected: the source has {tensors}")]
    NothingSelected {
        /// Tensors of the source.
        tensors: u64,
    },
    /// A tensor's type cannot be cast.
    #[error("{tensor:?} is {dtype}, which cannot be cast to {wanted}; leave it out of the rules")]
    CannotCast {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: String,
        /// The type that a rule asks for.
        wanted: String,
    },
    /// Source and target are one directory.
    #[error("{}: the target is the directory of the source; choose another one", path.display())]
    SameDirectory {
        /// The directory.
        path: PathBuf,
    },
    /// This conversion would replace or remove a file of the source.
    #[error(
        "{}: belongs to the source, and this conversion would replace or remove it; choose another target", path.display()
    )]
    OfSource {
        /// The file, by its path in the target.
        path: PathBuf,
    },
    /// A file in the target is in the way.
    #[error("{}: {found} that this conversion did not make; remove it, or overwrite it on purpose (--force)", path.display())]
    Exists {
        /// Its path.
        path: PathBuf,
        /// Its kind: a file, a directory, a symbolic link.
        found: &'static str,
    },
    /// The target holds a conversion of another source, or with other options.
    #[error("{}: holds {what}; convert into another directory, or replace it on purpose (--force)", path.display())]
    OtherConversion {
        /// The target.
        path: PathBuf,
        /// The conversion in the target, in words.
        what: String,
    },
    /// Another process is converting into this target.
    #[error("{}: is being written by process {process}", path.display())]
    Locked {
        /// The target.
        path: PathBuf,
        /// The other process, from its journal.
        process: String,
    },
    /// The file system of the target has too little room. Nothing was written.
    #[error(
        "{}: needs {} and {} are free: {} short", path.display(),
        HumanBytes(*needed_bytes), HumanBytes(*free_bytes), HumanBytes(needed_bytes.saturating_sub(*free_bytes))
    )]
    NoSpace {
        /// The target.
        path: PathBuf,
        /// Bytes that are still to be written.
        needed_bytes: u64,
        /// Bytes that are free.
        free_bytes: u64,
    },
    /// The system refused an operation in the target.
    #[error("{}: cannot {operation}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The operation.
        operation: &'static str,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The system refused to read a side file.
    #[error("{}: cannot {operation}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operation.
        operation: &'static str,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A file would have a longer header than readers accept.
    #[error(
        "{file} would have a header of {}, and readers accept at most {}; make smaller files (--max-shard-size)",
        HumanBytes(*header_bytes), HumanBytes(*limit_bytes)
    )]
    HeaderTooLong {
        /// The file's path below the target.
        file: String,
        /// Length of its header.
        header_bytes: u64,
        /// The longest header that readers accept.
        limit_bytes: u64,
    },
    /// The source has more files beside its weights than a model has.
    #[error("{}: has more than {limit} files beside its weights; is that the directory of a model?", path.display())]
    TooManySideFiles {
        /// The source.
        path: PathBuf,
        /// Most files that are copied.
        limit: u64,
    },
    /// Parts of the conversion are missing.
    #[error(
        "{}: {missing_count} {} missing, {first} to begin with; run the parts again that make them", path.display(),
        if *missing_count == 1 { "file is" } else { "files are" }
    )]
    Incomplete {
        /// The target.
        path: PathBuf,
        /// The first file that is missing.
        first: String,
        /// How many are missing.
        missing_count: u64,
    },
    /// A manifest cannot be understood.
    #[error("{}: not a manifest of this program: {reason}", path.display())]
    BadManifest {
        /// The file.
        path: PathBuf,
        /// The reason, with line and column where they are known.
        reason: String,
    },
}
