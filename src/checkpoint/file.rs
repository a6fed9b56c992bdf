//! Opens one file, finds its format by its content, reads its header and checks its layout.
//!
//! The announced length of the header is compared with the length of the file and with the limit
//! before anything is allocated. The header passes through a buffer of at most 64 KiB; its whole
//! text is never in memory.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::error::{CheckpointError, JsonSection, kept};
use super::format::{Contents, Input};
use super::header::HeaderParser;
use super::identity::{FileIdentity, OpenFault, open_regular};
use super::json::JsonReader;
use super::metadata::FileMetadata;
use super::options::{OpenOptions, Selection};
use super::tensor::{Coverage, LayoutFault, Mark, Shard, TensorTable};
use super::{FileFormat, gguf, torch};
use crate::units::{ByteRange, to_u64, to_usize};

/// Bytes of the header's length, which comes first in the file.
const PREFIX_BYTES: u64 = 8;

/// Bytes from the start of a file that tell its format: up to the magic of a tar archive.
const FIRST_BYTES: usize = 512;

/// Bytes of text in memory at a time. Small enough for the processor's second-level cache.
const BUFFER_BYTES: u64 = 64 << 10;

/// A file to read.
#[derive(Clone, Copy)]
pub(super) struct OneFile<'a> {
    pub(super) path: &'a Path,
    /// Put before the names of its tensors.
    pub(super) prefix: &'a str,
    pub(super) options: &'a OpenOptions,
    /// The free text of the first file of its set; `None` for the first file.
    pub(super) first_keys: Option<&'a FileMetadata>,
}

/// A file that was read.
pub(super) struct FileRead {
    pub(super) shard: Shard,
    /// Sentences for people.
    pub(super) notes: Vec<String>,
    /// Its tensors that are not in the table.
    pub(super) left_out: u64,
}

/// Reads one file and appends its tensors. If the file is refused, the table is unchanged.
pub(super) fn read(one: OneFile<'_>, table: &mut TensorTable) -> Result<FileRead, CheckpointError> {
    let path = one.path;
    let (file, identity) = open(path)?;
    let mark = table.mark();
    let outcome = read_open(one, &file, identity, table, mark);
    if outcome.is_err() {
        table.rewind(mark);
    }
    // A result, good or bad, counts only if the file did not change meanwhile.
    check_unchanged(path, &file, identity)?;
    outcome
}

fn read_open(
    one: OneFile<'_>,
    file: &File,
    identity: FileIdentity,
    table: &mut TensorTable,
    mark: Mark,
) -> Result<FileRead, CheckpointError> {
    let OneFile { path, prefix, options, first_keys } = one;
    let format = format_of(file);
    let input = Input { path, file, len_bytes: identity.len_bytes, format, prefix, options, first_keys };
    if let (Selection::Named(part), FileFormat::Safetensors | FileFormat::Gguf) = (&options.selection, format)
    {
        let (path, part, found) =
            (path.to_owned(), kept(part), format!("a {format} file, which has no parts"));
        return Err(CheckpointError::NoSuchPart { path, part, found });
    }
    let (contents, coverage) = match format {
        FileFormat::Safetensors => safetensors(&input, table)?,
        FileFormat::TorchZip | FileFormat::TorchLegacy | FileFormat::TorchTar => {
            (torch::read(&input, table)?, Coverage::Any)
        }
        FileFormat::Gguf => (gguf::read(&input, table)?, Coverage::Apart),
    };
    let sealed = table.seal_file(mark, coverage);
    let data = sealed.map_err(|fault| layout_error(path, fault, coverage))?;
    let Contents { metadata, notes, left_out } = contents;
    let (path, name_prefix) = (path.to_owned(), prefix.into());
    let shard = Shard { path, format, identity, data, metadata, name_prefix };
    Ok(FileRead { shard, notes, left_out })
}

/// Reads the header of a safetensors file. Its tensors take all bytes behind it.
fn safetensors(input: &Input<'_>, table: &mut TensorTable) -> Result<(Contents, Coverage), CheckpointError> {
    let &Input { path, file, len_bytes, prefix, options, .. } = input;
    let header = header_range(path, file, len_bytes, options)?;
    let json = json_reader(file, header);
    let allow_opaque = options.allow_opaque_dtypes;
    let metadata = HeaderParser { path, prefix, allow_opaque, json, table }.parse()?;
    let data = ByteRange::new(header.end(), len_bytes).expect("the header lies inside the file");
    Ok((Contents { metadata, notes: Vec::new(), left_out: 0 }, Coverage::Exact(data)))
}

/// The format, by the first bytes; safetensors if they are of no other.
fn format_of(file: &File) -> FileFormat {
    let mut first = [0; FIRST_BYTES];
    let len = file.read_at(&mut first, 0).unwrap_or(0);
    let first = &first[..len];
    let formats = [
        (FileFormat::TorchZip, torch::is_zip(first)),
        (FileFormat::TorchLegacy, torch::is_legacy(first)),
        (FileFormat::TorchTar, torch::is_tar(first)),
        (FileFormat::Gguf, gguf::is_gguf(first)),
    ];
    formats.into_iter().find(|(_, is)| *is).map_or(FileFormat::Safetensors, |(format, _)| format)
}

/// Opens a regular file.
pub(super) fn open(path: &Path) -> Result<(File, FileIdentity), CheckpointError> {
    open_regular(path).map_err(|fault| match fault {
        OpenFault::NotRegular(found) => CheckpointError::NotRegular { path: path.to_owned(), found },
        OpenFault::Io(source) if source.kind() == io::ErrorKind::NotFound => missing(path),
        OpenFault::Io(source) => CheckpointError::Io { path: path.to_owned(), operation: "open", source },
    })
}

/// The error for a path that does not exist: a link without a target, or nothing.
pub(super) fn missing(path: &Path) -> CheckpointError {
    let path = path.to_owned();
    let Ok(link) = std::fs::read_link(&path) else { return CheckpointError::NotFound { path } };
    let target = path.parent().unwrap_or(Path::new("")).join(link);
    let mut partial = target.clone().into_os_string();
    partial.push(".incomplete");
    let partial_bytes = std::fs::metadata(partial).ok().map(|metadata| metadata.len());
    CheckpointError::DanglingLink { path, target, partial_bytes }
}

pub(super) fn check_unchanged(path: &Path, file: &File, was: FileIdentity) -> Result<(), CheckpointError> {
    let now = FileIdentity::of(file).map_err(|source| CheckpointError::Io {
        path: path.to_owned(),
        operation: "stat",
        source,
    })?;
    if now == was {
        return Ok(());
    }
    Err(CheckpointError::FileChanged { path: path.to_owned(), states: Box::new((was, now)) })
}

/// A JSON reader of a part of a file.
pub(super) fn json_reader(file: &File, text: ByteRange) -> JsonReader<FilePart<'_>> {
    let buffer_bytes = to_usize(text.len_bytes().min(BUFFER_BYTES));
    JsonReader::new(FilePart { file, rest: text }, text.start(), buffer_bytes)
}

/// The bytes of the header's text.
fn header_range(
    path: &Path,
    file: &File,
    file_bytes: u64,
    options: &OpenOptions,
) -> Result<ByteRange, CheckpointError> {
    let path = || path.to_owned();
    if file_bytes < PREFIX_BYTES {
        let found = match sniff(file) {
            Some(kind) => kind.to_owned(),
            None => format!("{file_bytes} bytes, where 8 announce the length of the header"),
        };
        return Err(CheckpointError::UnknownFormat { path: path(), found });
    }
    let mut prefix = [0; 8];
    file.read_exact_at(&mut prefix, 0).map_err(|source| CheckpointError::Io {
        path: path(),
        operation: "read",
        source,
    })?;
    let header_bytes = u64::from_le_bytes(prefix);
    match ByteRange::with_len(PREFIX_BYTES, header_bytes) {
        Some(header) if header.end() <= file_bytes => {
            let limit_bytes = options.header_bytes_max;
            if header_bytes <= limit_bytes {
                return Ok(header);
            }
            let what = "header";
            Err(CheckpointError::OverLimit { path: path(), what, found_bytes: header_bytes, limit_bytes })
        }
        _ => Err(match sniff(file) {
            Some(kind) => CheckpointError::UnknownFormat { path: path(), found: kind.to_owned() },
            None => CheckpointError::HeaderExceedsFile { path: path(), header_bytes, file_bytes },
        }),
    }
}

/// Pickles begin with their protocol.
const PICKLE: &str = "a Python pickle that torch.save did not write";

/// The kind of a file that is not safetensors, by its first bytes.
pub(super) fn sniff(file: &File) -> Option<&'static str> {
    const KINDS: [(&[u8], &str); 10] = [
        (b"\x80\x02", PICKLE),
        (b"\x80\x03", PICKLE),
        (b"\x80\x04", PICKLE),
        (b"\x80\x05", PICKLE),
        (b"version https://git-lfs", "a Git LFS pointer: fetch the file itself, with `git lfs pull`"),
        (b"\x89HDF", "an HDF5 file"),
        (b"\x7fELF", "a program"),
        (b"<", "HTML or XML, perhaps an error page in place of a download"),
        (b"{", "JSON text (the name of an index ends in .json)"),
        (b"\xef\xbb\xbf", "text with a byte order mark"),
    ];
    let mut first = [0; 32];
    let len = file.read_at(&mut first, 0).ok()?;
    if len == 0 {
        return Some("an empty file");
    }
    KINDS.into_iter().find(|(magic, _)| first[..len].starts_with(magic)).map(|(_, kind)| kind)
}

fn layout_error(path: &Path, fault: LayoutFault, coverage: Coverage) -> CheckpointError {
    let path = path.to_owned();
    let data = match coverage {
        Coverage::Exact(data) => data,
        Coverage::Any | Coverage::Apart => ByteRange::default(),
    };
    match fault {
        LayoutFault::Duplicate(key) => {
            CheckpointError::DuplicateKey { path, section: JsonSection::Header, key: kept(&key) }
        }
        LayoutFault::Hole { tensor, expected_start, found_start } => {
            CheckpointError::Hole { path, tensor: kept(&tensor), expected_start, found_start }
        }
        LayoutFault::Overlap { tensor, other, expected_start, found_start }
            if coverage == Coverage::Apart =>
        {
            let (tensor, other) = (kept(&tensor), kept(&other));
            let reason = format!(
                "tensor `{}`: expected its bytes behind those of `{}`, which end at byte {expected_start}",
                tensor.escape_debug(),
                other.escape_debug()
            );
            CheckpointError::InvalidFile { path, format: FileFormat::Gguf, offset: found_start, reason }
        }
        LayoutFault::Overlap { tensor, other, expected_start, found_start } => {
            let (tensor, other) = (kept(&tensor), kept(&other));
            CheckpointError::Overlap { path, tensor, other, expected_start, found_start }
        }
        LayoutFault::Truncated { tensor, data_bytes } => {
            let expected_bytes = u128::from(data.start()) + u128::from(data_bytes);
            let (tensor, found_bytes) = (kept(&tensor), data.end());
            CheckpointError::Truncated { path, tensor, expected_bytes, found_bytes }
        }
        LayoutFault::Trailing { data_bytes } => {
            let expected_bytes = data.start() + data_bytes;
            CheckpointError::TrailingBytes { path, expected_bytes, found_bytes: data.end() }
        }
        LayoutFault::TooMany => {
            CheckpointError::TooMany { path, what: "tensors", limit: u64::from(u32::MAX) }
        }
    }
}

/// A part of a file, read by offset.
pub(super) struct FilePart<'a> {
    file: &'a File,
    rest: ByteRange,
}

impl Read for FilePart<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = to_usize(self.rest.len_bytes().min(to_u64(buffer.len())));
        let count = self.file.read_at(&mut buffer[..wanted], self.rest.start())?;
        let start = self.rest.start() + to_u64(count);
        self.rest = ByteRange::new(start, self.rest.end()).expect("no more was read than was wanted");
        Ok(count)
    }
}

/// Reads a small text file whole.
pub(super) fn read_small(
    path: &Path,
    limit_bytes: u64,
    what: &'static str,
) -> Result<String, CheckpointError> {
    let (file, identity) = open(path)?;
    let found_bytes = identity.len_bytes;
    if found_bytes > limit_bytes {
        let path = path.to_owned();
        return Err(CheckpointError::OverLimit { path, what, found_bytes, limit_bytes });
    }
    let mut text = String::new();
    let io_error = |source| CheckpointError::Io { path: PathBuf::from(path), operation: "read", source };
    file.take(limit_bytes).read_to_string(&mut text).map_err(io_error)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_touched_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file.safetensors");
        std::fs::write(&path, b"\x02\0\0\0\0\0\0\0{}").unwrap();
        let (file, identity) = open(&path).unwrap();
        check_unchanged(&path, &file, identity).unwrap();
        std::fs::write(&path, b"\x03\0\0\0\0\0\0\0{} ").unwrap();
        let error = check_unchanged(&path, &file, identity).unwrap_err();
        let CheckpointError::FileChanged { states, .. } = &error else { panic!("{error}") };
        assert_eq!((states.0.len_bytes, states.1.len_bytes), (10, 11));
        assert!(!error.is_invalid() && !error.is_missing());
    }

    #[test]
    fn a_file_that_is_refused_leaves_nothing_in_the_table() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file.safetensors");
        let mut table = TensorTable::default();
        let mut read_text = |header: &str| {
            let len = to_u64(header.len()).to_le_bytes();
            std::fs::write(&path, [&len[..], header.as_bytes(), b"x"].concat()).unwrap();
            let options = &OpenOptions::new();
            let one = OneFile { path: &path, prefix: "part/", options, first_keys: None };
            let outcome = read(one, &mut table);
            (outcome.is_ok(), table.len(), table.names.len(), table.dims.len())
        };
        let good = r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        for bad in [&good.replace("0,1", "1,2"), &good.replace("}}", "}"), &good.replace("U8", "U9")] {
            assert_eq!(read_text(bad), (false, 0, 0, 0), "{bad}");
        }
        assert_eq!(read_text(good), (true, 1, "part/t".len(), 1));
    }
}
