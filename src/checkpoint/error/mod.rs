//! Errors about checkpoints.
//!
//! Every variant names the file, the tensor if there is one, the expected and the found value.
//! Fields hold names as the file spells them, control characters included: escape them before
//! printing to a terminal. Messages shorten long names; fields hold up to 64 KiB of a name.

use std::io;
use std::path::PathBuf;

pub use self::text::JsonSection;
use self::text::{Listed, OfTensor, Others, PartOf, Quoted};
pub(super) use self::text::{kept, shape_text};
use super::{FileFormat, FileIdentity, FileKind};
use crate::units::HumanBytes;

mod predicates;
mod text;

/// An error about a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The system refused to open, read or list.
    #[error("{}: cannot {operation}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The operation: `open`, `read the header of`, ...
        operation: &'static str,
        /// The system's error.
        source: io::Error,
    },

    /// The path does not exist.
    #[error("{}: no such file or directory", path.display())]
    NotFound {
        /// The path.
        path: PathBuf,
    },

    /// The target of a symbolic link is missing. In a hub cache, this is a download that did not
    /// finish.
    #[error("{}: links to {}, which is missing{}; download it again", path.display(), target.display(),
        PartOf(partial_bytes.as_ref()))]
    DanglingLink {
        /// The link.
        path: PathBuf,
        /// Its target.
        target: PathBuf,
        /// Bytes of an unfinished download beside the target.
        partial_bytes: Option<u64>,
    },

    /// The path names something other than a regular file.
    #[error("{}: expected a regular file, found a {found}", path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
        /// The thing found.
        found: FileKind,
    },

    /// A directory holds no weights.
    #[error("{}: no weights here: expected {expected}, found {found}", path.display())]
    NoWeights {
        /// The directory.
        path: PathBuf,
        /// The files that would have been read.
        expected: &'static str,
        /// The files found instead.
        found: String,
    },

    /// A directory holds several files that may be the checkpoint.
    #[error("{}: {count} files may be the checkpoint: {}; {advice}", path.display(), Listed(files, *count))]
    Ambiguous {
        /// The directory.
        path: PathBuf,
        /// The files, the first 64 of them.
        files: Vec<String>,
        /// How many there are.
        count: u64,
        /// What to do.
        advice: &'static str,
    },

    /// The file is of no format that is read: safetensors, PyTorch, GGUF.
    #[error("{}: expected a safetensors, PyTorch or GGUF file, found {found}", path.display())]
    UnknownFormat {
        /// The file.
        path: PathBuf,
        /// A guess from its first bytes, or its length if it is too short.
        found: String,
    },

    /// The file breaks the rules of its format.
    #[error("{}: not a valid {format} file, at byte {offset}: {reason}", path.display())]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// Its format, by its content.
        format: FileFormat,
        /// Byte offset from the start of the file.
        offset: u64,
        /// What was expected, and what was found.
        reason: String,
    },

    /// A tensor that the format allows and that cannot be streamed.
    #[error("{}: {}found {found}; {advice}", path.display(), OfTensor(tensor))]
    NotStreamable {
        /// The file.
        path: PathBuf,
        /// The tensor; empty if it is about the whole file.
        tensor: String,
        /// What was found.
        found: String,
        /// What to do instead.
        advice: &'static str,
    },

    /// A tensor does not lie inside the storage that it is a view of.
    #[error("{}: tensor {}: expected its {needed_bytes} bytes inside its storage, found a storage of \
        {storage_bytes}", path.display(), Quoted(tensor))]
    OutsideStorage {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// From the start of the storage to the end of the tensor.
        needed_bytes: u64,
        /// Bytes of the storage.
        storage_bytes: u64,
    },

    /// A file has no part of the selected name.
    #[error("{}: expected a part {} with tensors, found {found}", path.display(), Quoted(part))]
    NoSuchPart {
        /// The file.
        path: PathBuf,
        /// The selected name.
        part: String,
        /// The parts that it has.
        found: String,
    },

    /// The announced header is longer than the file.
    #[error("{}: header of {header_bytes} bytes announced, but only {} of the file's {file_bytes} bytes follow: \
        interrupted download, or not a safetensors file", path.display(), file_bytes.saturating_sub(8))]
    HeaderExceedsFile {
        /// The file.
        path: PathBuf,
        /// Announced length of the header.
        header_bytes: u64,
        /// Length of the file.
        file_bytes: u64,
    },

    /// A header or an index is longer than the limit.
    #[error("{}: {what} of {found_bytes} bytes ({}) is over the limit of {limit_bytes} ({}); raise the limit if \
        you trust the file", path.display(), HumanBytes(*found_bytes), HumanBytes(*limit_bytes))]
    OverLimit {
        /// The file.
        path: PathBuf,
        /// `header`, `index`, ...
        what: &'static str,
        /// Its length.
        found_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },

    /// More items than the tables of this crate can count.
    #[error("{}: more than {limit} {what}", path.display())]
    TooMany {
        /// The file that went over.
        path: PathBuf,
        /// `tensors`, `bytes of tensor names`, ...
        what: &'static str,
        /// The largest number that works.
        limit: u64,
    },

    /// The text of a header or an index breaks its format.
    #[error("{}: in {section}, at byte {offset}: expected {expected}, found {found}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The section of the text: `the header`, ``tensor `x` ``, ...
        section: JsonSection,
        /// Byte offset from the start of the file.
        offset: u64,
        /// The allowed text.
        expected: &'static str,
        /// The text found.
        found: String,
    },

    /// An object has a key twice.
    #[error("{}: in {section}: expected each key once, found {} twice", path.display(), Quoted(key))]
    DuplicateKey {
        /// The file.
        path: PathBuf,
        /// The object.
        section: JsonSection,
        /// The key, escapes resolved.
        key: String,
    },

    /// A tensor lacks one of its three fields.
    #[error("{}: tensor {}: expected the fields dtype, shape and data_offsets, found no {field}", path.display(),
        Quoted(tensor))]
    MissingField {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The field that is not there.
        field: &'static str,
    },

    /// An element type this version does not know.
    #[error("{}: tensor {}: expected a dtype of safetensors 0.8, found {}; opaque dtypes must be allowed \
        explicitly", path.display(), Quoted(tensor), Quoted(found))]
    UnknownDType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name of the type.
        found: String,
    },

    /// The shape has more bits than 64-bit arithmetic can count. A dimension of zero does not
    /// excuse this, so that the result does not depend on the order of the dimensions.
    #[error("{}: tensor {}: expected a size below 2^64 bits, found {dtype} of shape {shape}", path.display(),
        Quoted(tensor))]
    SizeOverflow {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its element type.
        dtype: super::DType,
        /// Its shape, shortened if long.
        shape: String,
    },

    /// Elements smaller than a byte do not fill the last byte.
    #[error("{}: tensor {}: expected whole bytes, found {bits} bits ({dtype} of shape {shape})", path.display(),
        Quoted(tensor))]
    PartialByte {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its element type.
        dtype: super::DType,
        /// Its shape, shortened if long.
        shape: String,
        /// Bits of all its elements.
        bits: u64,
    },

    /// The end offset of a tensor is below its start offset.
    #[error("{}: tensor {}: expected data_offsets in ascending order, found [{start}, {end}]", path.display(),
        Quoted(tensor))]
    ReversedOffsets {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// First offset.
        start: u64,
        /// Second offset.
        end: u64,
    },

    /// Shape and dtype need a different number of bytes than the offsets span.
    #[error("{}: tensor {}: expected {expected_bytes} bytes ({dtype} of shape {shape}), found data_offsets that \
        span {found_bytes}", path.display(), Quoted(tensor))]
    SizeMismatch {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its element type.
        dtype: super::DType,
        /// Its shape, shortened if long.
        shape: String,
        /// Bytes that dtype and shape need.
        expected_bytes: u64,
        /// Bytes that the offsets span.
        found_bytes: u64,
    },

    /// Some bytes of the data section belong to no tensor.
    #[error("{}: tensor {}: expected its bytes to start at offset {expected_start} of the data section, found \
        {found_start}: {} bytes belong to no tensor", path.display(), Quoted(tensor),
        found_start.saturating_sub(*expected_start))]
    Hole {
        /// The file.
        path: PathBuf,
        /// The tensor after the hole.
        tensor: String,
        /// End of the tensor before.
        expected_start: u64,
        /// Where the tensor starts.
        found_start: u64,
    },

    /// Some bytes belong to two tensors.
    #[error("{}: tensor {}: expected its bytes to start at offset {expected_start} of the data section, found \
        {found_start}, inside tensor {}", path.display(), Quoted(tensor), Quoted(other))]
    Overlap {
        /// The file.
        path: PathBuf,
        /// The later tensor.
        tensor: String,
        /// The tensor before it.
        other: String,
        /// End of the tensor before.
        expected_start: u64,
        /// Where the later tensor starts.
        found_start: u64,
    },

    /// The file ends before its tensors do.
    #[error("{}: expected {expected_bytes} bytes, found {found_bytes}: file is {} bytes short, cut inside tensor {}: \
        interrupted download?", path.display(), expected_bytes.saturating_sub(u128::from(*found_bytes)), Quoted(tensor))]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The first tensor that is not whole.
        tensor: String,
        /// Length of the file that the header describes; offsets near 2^64 make it larger than a
        /// `u64`.
        expected_bytes: u128,
        /// Length of the file.
        found_bytes: u64,
    },

    /// The file has bytes after its last tensor.
    #[error("{}: expected {expected_bytes} bytes, found {found_bytes}: {} bytes follow the last tensor", path.display(),
        found_bytes.saturating_sub(*expected_bytes))]
    TrailingBytes {
        /// The file.
        path: PathBuf,
        /// Length of the file that the header describes.
        expected_bytes: u64,
        /// Length of the file.
        found_bytes: u64,
    },

    /// The file changed while its header was read.
    #[error("{}: changed while it was read: expected {}, found {}", path.display(), states.0, states.1)]
    FileChanged {
        /// The file.
        path: PathBuf,
        /// Before and after.
        states: Box<(FileIdentity, FileIdentity)>,
    },

    /// An index lists no tensors.
    #[error("{}: expected an index with a weight_map, found {found}", path.display())]
    NotAnIndex {
        /// The index.
        path: PathBuf,
        /// Its contents.
        found: String,
    },

    /// A name would lead out of its directory, or is not a file name.
    #[error("{}: expected a relative path inside the directory for {}, found {}: {reason}", path.display(),
        Quoted(key), Quoted(found))]
    UnsafeName {
        /// The file that holds the name.
        path: PathBuf,
        /// Its key: a tensor, a component, a revision.
        key: String,
        /// The name.
        found: String,
        /// Which rule it breaks.
        reason: &'static str,
    },

    /// Files that an index or a numbered set announces are missing.
    #[error("{}: {} of {expected_count} files missing: {}; download them again", path.display(), missing_count,
        Listed(missing, *missing_count))]
    MissingShards {
        /// The index or the directory.
        path: PathBuf,
        /// The missing files, the first 64 of them.
        missing: Vec<String>,
        /// How many are missing.
        missing_count: u64,
        /// How many there should be.
        expected_count: u64,
    },

    /// Tensors that the index lists are missing from their shard.
    #[error("{}: expected {} in {}, found no such tensor there{}", path.display(), Quoted(tensor), Quoted(shard),
        Others(*count))]
    MissingTensor {
        /// The index.
        path: PathBuf,
        /// The first such tensor.
        tensor: String,
        /// The shard the index names for it.
        shard: String,
        /// How many tensors are like that.
        count: u64,
    },

    /// A shard holds tensors that the index does not list.
    #[error("{}: expected every tensor of its shards to be listed, found {} only in {}{}", path.display(),
        Quoted(tensor), shard.display(), Others(*count))]
    UnindexedTensor {
        /// The index.
        path: PathBuf,
        /// The first such tensor.
        tensor: String,
        /// The shard that holds it.
        shard: PathBuf,
        /// How many tensors are like that.
        count: u64,
    },

    /// A tensor is in a different shard than the index says.
    #[error("{}: expected {} in {}, found it in {}{}", path.display(), Quoted(tensor), Quoted(expected),
        found.display(), Others(*count))]
    WrongShard {
        /// The index.
        path: PathBuf,
        /// The first such tensor.
        tensor: String,
        /// The shard the index names for it.
        expected: String,
        /// The shard that holds it.
        found: PathBuf,
        /// How many tensors are like that.
        count: u64,
    },

    /// Two files hold a tensor of the same name.
    #[error("{}: expected tensor {} in one file, found it in {} too{}", path.display(), Quoted(tensor),
        other.display(), Others(*count))]
    DuplicateTensor {
        /// The first file.
        path: PathBuf,
        /// The first such tensor.
        tensor: String,
        /// The second file.
        other: PathBuf,
        /// How many tensors are like that.
        count: u64,
    },

    /// The text is not the name of a hub repository.
    #[error(
        "expected a repository `name` or `org/name`, then perhaps `@revision`, found {}: {reason}",
        Quoted(found)
    )]
    InvalidRepository {
        /// The text.
        found: String,
        /// Which rule it breaks.
        reason: &'static str,
    },

    /// The hub cache does not hold this revision of the repository.
    #[error("{}: expected revision {} of {} in the cache, found {found}; download it first", path.display(),
        Quoted(revision), Quoted(repository))]
    NotCached {
        /// Its expected path.
        path: PathBuf,
        /// The repository.
        repository: String,
        /// The revision.
        revision: String,
        /// The thing found.
        found: String,
    },

    /// Several files of a set are faulty.
    #[error("{}{}", problems.first().map_or(String::new(), ToString::to_string), Others(problems.len().try_into().unwrap_or(u64::MAX)))]
    Several {
        /// One error per faulty file, the first 32 of them.
        problems: Vec<CheckpointError>,
    },
}
