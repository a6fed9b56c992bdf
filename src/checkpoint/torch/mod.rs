//! PyTorch files: what `torch.save` writes. Nothing in them is executed.
//!
//! A file here uses only files further down this list, and this one:
//!
//! | file | does |
//! |---|---|
//! | `parts` | chooses a part of the file, and fills the table of tensors |
//! | `tree` | containers of the pickle: which hold tensors, under which names |
//! | `zip` | archives of torch 1.6 and later |
//! | `legacy`, `tar` | the formats before |
//! | `storage_id` | how a pickle names its storages |
//! | `pickle` | a machine that reads pickles |
//! | `element`, `stream` | torch's element types; reading a part of a file |

use super::CheckpointError;
use super::FileFormat;
use super::format::{Contents, Input};
use super::metadata::FileMetadata;
use super::tensor::TensorTable;

use self::legacy::Legacy;
use self::parts::Contained;
use self::pickle::{Arena, Ref};
use self::tar::Tar;
use self::tree::Survey;
use self::zip::Archive;
use crate::footprint::Held;

mod element;
mod legacy;
mod parts;
mod pickle;
mod storage_id;
mod stream;
mod tar;
mod tree;
mod zip;

/// The magic number of the legacy format, as a pickle spells it.
const LEGACY_MAGIC: [u8; 12] = *b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";

/// True for the first bytes of a zip archive.
pub(super) fn is_zip(first: &[u8]) -> bool {
    first.starts_with(b"PK\x03\x04") || first.starts_with(b"PK\x05\x06")
}

/// True for the first bytes of a legacy file: a pickle of the magic number, in a frame or not.
pub(super) fn is_legacy(first: &[u8]) -> bool {
    let body = match first {
        [0x80, 2..=5, 0x95, frame @ ..] => frame.get(8..).unwrap_or_default(),
        [0x80, 2..=5, body @ ..] => body,
        body => return body.starts_with(b"L119547037146038801333356L\n."),
    };
    body.starts_with(&LEGACY_MAGIC)
}

/// True for the first bytes of a tar archive.
pub(super) fn is_tar(first: &[u8]) -> bool {
    first.get(257..262) == Some(b"ustar")
}

/// Reads the tensors of a file.
pub(super) fn read(input: &Input<'_>, table: &mut TensorTable) -> Result<Contents, CheckpointError> {
    let mut arena = Arena::new(input.pickle_bytes_max());
    let notes = match input.format {
        FileFormat::TorchZip => {
            let (archive, root) = Archive::read(input, &mut arena)?;
            let held = archive.add_to(arena.held());
            deliver(input, table, &arena, root, held, |storage| Some(archive.start_of(storage)))?
        }
        FileFormat::TorchTar => {
            let (tar, root) = Tar::read(input, &mut arena)?;
            let held = tar.add_to(arena.held());
            deliver(input, table, &arena, root, held, |storage| Some(tar.start_of(storage)))?
        }
        _ => {
            let (legacy, root) = Legacy::read(input, &mut arena)?;
            let held = legacy.add_to(arena.held());
            deliver(input, table, &arena, root, held, |storage| legacy.start_of(storage))?
        }
    };
    Ok(Contents { metadata: FileMetadata::default(), notes, left_out: 0 })
}

/// Fills the table with the tensors below `root`. `held` is what was needed to read the pickle.
fn deliver(
    input: &Input<'_>,
    table: &mut TensorTable,
    arena: &Arena,
    root: Ref,
    held: Held,
    start_of: impl Fn(u32) -> Option<u64>,
) -> Result<Vec<String>, CheckpointError> {
    let survey = Survey::of(arena, root);
    table.note_beside(held.and(survey.heap_bytes()));
    Contained { arena, survey: &survey, root }.deliver(input, table, start_of)
}

/// Helpers of the tests below this module.
#[cfg(test)]
mod testing {
    use std::io::Write;

    use super::super::options::OpenOptions;
    use super::Input;
    use crate::checkpoint::FileFormat;

    /// Gives a file with these bytes to a reader.
    pub(super) fn with_file<T>(bytes: &[u8], read: impl FnOnce(&Input<'_>) -> T) -> T {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let options = OpenOptions::new();
        let input = Input {
            path: "file.pt".as_ref(),
            file: &file,
            len_bytes: bytes.len().try_into().unwrap(),
            format: FileFormat::TorchZip,
            prefix: "",
            first_keys: None,
            options: &options,
        };
        read(&input)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_told_apart_by_their_first_bytes() {
        let magic = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
        for start in [&b"\x80\x02"[..], b"\x80\x03", b"\x80\x04\x95\x0d\0\0\0\0\0\0\0", b"\x80\x05"] {
            assert!(is_legacy(&[start, magic].concat()));
            assert!(!is_legacy(start));
        }
        assert!(is_legacy(b"L119547037146038801333356L\n.M\xe9\x03."));
        // The length of a safetensors header, and a pickle that torch did not write.
        assert!(!is_legacy(b"\x80\x02\0\0\0\0\0\0{}") && !is_legacy(b"\x80\x02}q\0."));
        assert!(is_zip(b"PK\x03\x04") && is_zip(b"PK\x05\x06") && !is_zip(b"PK\x01\x02"));
        let mut tar = [0; 512];
        tar[257..262].copy_from_slice(b"ustar");
        assert!(is_tar(&tar) && !is_tar(&tar[..261]));
    }
}
