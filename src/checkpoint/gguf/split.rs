//! Models in several files: `NAME-00001-of-00003.gguf`, and the keys `split.no`, `split.count` and
//! `split.tensors.count` in each.

use std::path::Path;

use super::super::{CheckpointError, FileFormat};
use super::Shard;
use crate::units::to_u64;

/// Checks that files, in the order of their names, are all files of one model. `tensors` is the
/// number of tensors in all of them.
///
/// A lone file of a model in several is refused too: half a model would load as if it were whole.
pub(in super::super) fn check_split(shards: &[Shard], tensors: u64) -> Result<(), CheckpointError> {
    let found = to_u64(shards.len());
    for (position, shard) in shards.iter().enumerate() {
        let say = |reason| Err(invalid(&shard.path, reason));
        let number = |key: &str| shard.metadata.get(key).map(str::parse::<u64>);
        let Some(count) = number("split.count") else {
            match found {
                1 => return Ok(()),
                _ => return say(format!("expected split.count = {found}, found no such key")),
            }
        };
        if count != Ok(found) && !(found == 1 && count == Ok(0)) {
            let count = shard.metadata.get("split.count").unwrap_or_default();
            return say(format!(
                "expected the files of a model of {count} parts (split.count), found {found}"
            ));
        }
        if number("split.no") != Some(Ok(to_u64(position))) {
            let number = shard.metadata.get("split.no").unwrap_or("no such key");
            return say(format!("expected split.no = {position}, found {number}"));
        }
        let announced = number("split.tensors.count");
        if announced.as_ref().is_some_and(|announced| *announced != Ok(tensors)) {
            let announced = shard.metadata.get("split.tensors.count").unwrap_or_default();
            return say(format!("expected {announced} tensors (split.tensors.count), found {tensors}"));
        }
    }
    Ok(())
}

fn invalid(path: &Path, reason: String) -> CheckpointError {
    CheckpointError::InvalidFile { path: path.to_owned(), format: FileFormat::Gguf, offset: 0, reason }
}
