//! PyTorch files: what `torch.save` writes. Nothing in them is executed.
//!
//! A file here uses only files further down this list, and this one:
//!
//! | file | does |
//! |---|---|
//! | `parts` | chooses a part of the file, and fills the table of tensors |
//! | `tree` | containers of the pickle: which hold tensors, under which names |
//! | `zip` | archives of torch 1.6 and later |
//! | `pickle` | a machine that reads pickles |
//! | `element`, `stream` | torch's element types; reading a part of a file |

use super::CheckpointError;
use super::FileFormat;
use super::format::{Contents, Input};
use super::metadata::FileMetadata;
use super::tensor::TensorTable;

use self::parts::Contained;
use self::pickle::Arena;
use self::tree::Survey;
use self::zip::Archive;

mod element;
mod parts;
mod pickle;
mod stream;
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
            let survey = Survey::of(&arena, root);
            let held = archive.add_to(arena.held()).and(survey.heap_bytes());
            table.note_beside(held);
            let contained = Contained { arena: &arena, survey: &survey, root };
            contained.deliver(input, table, |storage| Some(archive.start_of(storage)))?
        }
        _ => return Err(input.refused("", "an old PyTorch file", "not yet read")),
    };
    Ok(Contents { metadata: FileMetadata::default(), notes })
}
