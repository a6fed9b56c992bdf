//! Says where two tensors differ, by reading both again.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use super::against::Pair;
use super::{CheckpointError, ConvertError};
use crate::checkpoint::{Checkpoint, OpenFault, TensorEntry, open_regular};
use crate::plan::CastOp;
use crate::staging::cast::cast_step;
use crate::units::{to_u64, to_usize};

/// Bytes of the source that are read at once: whole elements of every type that is cast.
const PIECE_BYTES: u64 = 256 << 10;

/// The first byte in which the tensors of a pair differ, in words.
///
/// # Errors
/// [`ConvertError::Read`], [`ConvertError::Checkpoint`].
pub(super) fn first_difference(
    source: &Checkpoint,
    target: &Checkpoint,
    pair: Pair,
) -> Result<String, ConvertError> {
    let (expected, found) = (source.tensor(pair.source), target.tensor(pair.target));
    let (expected_file, found_file) = (open(source, &expected)?, open(target, &found)?);
    let (mut read_bytes, mut compared_bytes) = (0, 0);
    while read_bytes < expected.extent.len_bytes() {
        let len = PIECE_BYTES.min(expected.extent.len_bytes() - read_bytes);
        let delivered = pair.cast.map_or(len, |cast| cast.delivered_bytes(len));
        // What comes out of a cast may be more than what went in.
        let mut wanted = vec![0; to_usize(len.max(delivered))];
        expected_file.read(expected.extent.start() + read_bytes, &mut wanted[..to_usize(len)])?;
        if let Some(cast) = pair.cast {
            let tensor = pair.source;
            let all = CastOp { tensor, slot_offset_bytes: 0, source_len_bytes: len, cast };
            cast_step(&mut wanted, &all);
        }
        wanted.truncate(to_usize(delivered));
        let mut is = vec![0; wanted.len()];
        found_file.read(found.extent.start() + compared_bytes, &mut is)?;
        if let Some(at) = is.iter().zip(&wanted).position(|(left, right)| left != right) {
            let cast = pair.cast.map_or(String::new(), |cast| format!(", cast from {}", cast.source()));
            return Ok(format!(
                "differs from the source first at its byte {} of {}: {:#04x}, in the source {:#04x}{cast}",
                compared_bytes + to_u64(at),
                found.extent.len_bytes(),
                is[at],
                wanted[at]
            ));
        }
        read_bytes += len;
        compared_bytes += delivered;
    }
    Ok("had other bytes than in the source, but not when both were read again: check the storage".to_owned())
}

/// A file, and its path for errors.
struct Opened {
    file: File,
    path: PathBuf,
}

impl Opened {
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), ConvertError> {
        self.file.read_exact_at(buffer, offset).map_err(|source| ConvertError::Read {
            path: self.path.clone(),
            operation: "read",
            source,
        })
    }
}

fn open(checkpoint: &Checkpoint, tensor: &TensorEntry<'_>) -> Result<Opened, ConvertError> {
    let path = checkpoint.shard(tensor.shard).path.clone();
    match open_regular(&path) {
        Ok((file, _)) => Ok(Opened { file, path }),
        Err(OpenFault::Io(source)) => Err(ConvertError::Read { path, operation: "open", source }),
        Err(OpenFault::NotRegular(found)) => Err(CheckpointError::NotRegular { path, found }.into()),
    }
}
