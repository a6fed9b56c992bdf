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

#[cfg(test)]
mod tests {
    use super::super::super::for_tests::{Tensor, tensor, write_file};
    use super::*;
    use crate::checkpoint::DType;
    use crate::plan::{Cast, FloatType};

    fn opened(folder: &std::path::Path, name: &str, tensor: &Tensor) -> Checkpoint {
        let path = folder.join(name);
        write_file(&path, std::slice::from_ref(tensor));
        Checkpoint::open(path).unwrap()
    }

    #[test]
    fn the_first_difference_is_found_in_every_piece_and_behind_every_cast() {
        for (dtype, to) in [
            (DType::F64, Some(FloatType::F32)),
            (DType::U8, Some(FloatType::F32)),
            (DType::F16, Some(FloatType::Bf16)),
            (DType::Bf16, None),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let source = tensor("t", dtype, &[300, 1001], 1);
            let cast = to.map(|to| Cast::between(dtype, to).unwrap());
            let len = to_u64(source.bytes.len());
            let delivered = to_usize(cast.map_or(len, |cast| cast.delivered_bytes(len)));
            let mut bytes = source.bytes.clone();
            bytes.resize(bytes.len().max(delivered), 0);
            if let Some(cast) = cast {
                let tensor = crate::checkpoint::TensorId(0);
                cast_step(&mut bytes, &CastOp { tensor, slot_offset_bytes: 0, source_len_bytes: len, cast });
            }
            bytes.truncate(delivered);
            let dtype = to.map_or(dtype, DType::from);
            let original = opened(folder.path(), "original", &source);
            let compare = |bytes: Vec<u8>| {
                let target = Tensor { dtype, bytes, ..source.clone() };
                let target = opened(folder.path(), "target", &target);
                let [source, target_id] = [&original, &target].map(|side| side.find("t").unwrap().id);
                first_difference(
                    &original,
                    &target,
                    Pair { source, target: target_id, cast, quantised: None },
                )
                .unwrap()
            };
            for at in [0, 7, delivered / 2 + 1, delivered - 1] {
                let mut changed = bytes.clone();
                changed[at] ^= 0x81;
                changed[delivered - 1] ^= 0x02;
                let found = compare(changed);
                let start = format!("differs from the source first at its byte {at} of {delivered}: ");
                assert!(found.starts_with(&start), "{dtype}: {found}, not {start}");
            }
            assert!(compare(bytes).contains("but not when both were read again"));
        }
    }
}
