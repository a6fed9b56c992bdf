//! Assigns tensors to files, and makes file names, headers and the index.
//!
//! Sharding follows `split_torch_state_dict_into_shards` of huggingface_hub: greedy, in the order
//! of the state dict, with a separate file for a tensor above the limit. Inside a file the order is
//! that of the safetensors crate (larger alignment first, then name), whose types write the header.

use onelayer_system::units::to_u64;
use std::collections::HashMap;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::{Map, Value, json};

use super::config::ModelConfig;
use super::error::SynthError;
use super::tensor_list::Tensor;
use onelayer_system::FloatType;

/// Readers of the format refuse a longer header.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// A tensor's position in its file.
#[derive(Clone, Debug)]
pub(super) struct Placed {
    /// Its position in the state dict. Its bytes depend on it.
    pub(super) index: u64,
    /// Its first byte, counted from the start of the file.
    pub(super) begin_bytes: u64,
    /// Its length. Zero is possible, and harmless.
    pub(super) len_bytes: u64,
}

/// One file of tensors.
#[derive(Debug)]
pub(super) struct Shard {
    /// The file's name.
    pub(super) name: String,
    /// The bytes before the tensors: the length of the header, and the header.
    pub(super) head: Vec<u8>,
    /// The tensors, in file order and without gaps.
    pub(super) tensors: Vec<Placed>,
    /// The length of the file.
    pub(super) file_bytes: u64,
}

/// All files of a checkpoint except `config.json`.
#[derive(Debug)]
pub(super) struct ShardPlan {
    /// The files of tensors, in the order of their numbers.
    pub(super) shards: Vec<Shard>,
    /// The text of the index, if there is more than one file.
    pub(super) index_text: Option<String>,
    /// Bytes of all tensors.
    pub(super) tensor_bytes: u64,
    /// Elements of all tensors.
    pub(super) parameter_count: u64,
}

impl ShardPlan {
    /// Bytes of all shards.
    pub(super) fn file_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.file_bytes).sum()
    }
}

/// Distributes the tensors over files of at most `shard_bytes_max` bytes of tensors.
///
/// # Errors
///
/// If a size exceeds 63 bits, a header exceeds the format's limit, or the limit is zero.
pub(super) fn plan(
    config: &ModelConfig,
    tensors: &[Tensor],
    dtype: FloatType,
    shard_bytes_max: u64,
) -> Result<ShardPlan, SynthError> {
    if shard_bytes_max == 0 {
        return Err(SynthError::ZeroShardSize);
    }
    let lengths = lengths(config, tensors, dtype)?;
    let groups = split(tensors, &lengths, shard_bytes_max);
    let count = groups.len();
    let mut shards = Vec::with_capacity(count);
    for (number, members) in groups.into_iter().enumerate() {
        let name = if count == 1 {
            "model.safetensors".to_owned()
        } else {
            format!("model-{:05}-of-{count:05}.safetensors", number + 1)
        };
        shards.push(shard(config, name, tensors, &lengths, members, dtype)?);
    }
    let tensor_bytes = lengths.iter().sum::<u64>();
    let parameter_count = tensor_bytes / dtype.bytes();
    let index_text = (count > 1).then(|| index_text(&shards, tensors, tensor_bytes, parameter_count));
    Ok(ShardPlan { shards, index_text, tensor_bytes, parameter_count })
}

/// The bytes of every tensor. Their sum fits a file offset.
fn lengths(config: &ModelConfig, tensors: &[Tensor], dtype: FloatType) -> Result<Vec<u64>, SynthError> {
    // A file offset has 63 bits, and headers need some of that.
    let limit = u64::MAX / 4;
    let mut total = 0_u64;
    let mut lengths = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let length = tensor.shape.iter().try_fold(dtype.bytes(), |size, side| size.checked_mul(*side));
        let sum = length.and_then(|length| total.checked_add(length)).filter(|sum| *sum <= limit);
        let (Some(length), Some(sum)) = (length, sum) else {
            return Err(SynthError::TooLarge {
                origin: config.origin().to_owned(),
                what: format!("the number of bytes up to `{}`", tensor.name),
                limit,
            });
        };
        total = sum;
        lengths.push(length);
    }
    Ok(lengths)
}

/// The positions of the tensors in each file. The tensors of a unit go together where the first one
/// goes.
fn split(tensors: &[Tensor], lengths: &[u64], shard_bytes_max: u64) -> Vec<Vec<usize>> {
    let mut units: Vec<(u64, Vec<usize>)> = Vec::new();
    let mut place_of_unit = HashMap::new();
    for (number, tensor) in tensors.iter().enumerate() {
        let place = *place_of_unit.entry(tensor.unit).or_insert(units.len());
        if place == units.len() {
            units.push((0, Vec::new()));
        }
        units[place].0 += lengths[number];
        units[place].1.push(number);
    }
    let mut shards = Vec::new();
    let mut current = Vec::new();
    let mut current_bytes = 0;
    for (unit_bytes, members) in units {
        if unit_bytes > shard_bytes_max {
            // A separate file, before the one that is being filled.
            shards.push(members);
            continue;
        }
        if current_bytes + unit_bytes > shard_bytes_max {
            shards.push(std::mem::take(&mut current));
            current_bytes = 0;
        }
        current.extend(members);
        current_bytes += unit_bytes;
    }
    if !current.is_empty() {
        shards.push(current);
    }
    shards
}

/// Lays out one file.
fn shard(
    config: &ModelConfig,
    name: String,
    tensors: &[Tensor],
    lengths: &[u64],
    mut members: Vec<usize>,
    dtype: FloatType,
) -> Result<Shard, SynthError> {
    // All tensors have the same type, so the order is by name.
    members.sort_by(|left, right| tensors[*left].name.cmp(&tensors[*right].name));
    let header_error = |reason: String| SynthError::Header { file: name.clone(), reason };
    let to_usize = |value: u64| usize::try_from(value).map_err(|error| header_error(error.to_string()));
    let mut infos = Vec::with_capacity(members.len());
    let mut end = 0;
    for &member in &members {
        let begin = end;
        end += lengths[member];
        let shape = tensors[member].shape.iter().map(|side| to_usize(*side)).collect::<Result<_, _>>()?;
        let data_offsets = (to_usize(begin)?, to_usize(end)?);
        infos.push((
            tensors[member].name.clone(),
            TensorInfo { dtype: header_dtype(dtype), shape, data_offsets },
        ));
    }
    let head = head(infos).map_err(header_error)?;
    let head_bytes = to_u64(head.len());
    if head_bytes > HEADER_BYTES_MAX {
        return Err(SynthError::TooLarge {
            origin: config.origin().to_owned(),
            what: format!("the header of {name}"),
            limit: HEADER_BYTES_MAX,
        });
    }
    let mut placed = Vec::with_capacity(members.len());
    let mut position = head_bytes;
    for member in members {
        let index = u64::try_from(member).expect("a number of tensors fits 64 bits");
        placed.push(Placed { index, begin_bytes: position, len_bytes: lengths[member] });
        position += lengths[member];
    }
    Ok(Shard { name, head, tensors: placed, file_bytes: position })
}

/// The type as a safetensors header names it.
pub(super) fn header_dtype(float: FloatType) -> Dtype {
    match float {
        FloatType::Bf16 => Dtype::BF16,
        FloatType::F16 => Dtype::F16,
        FloatType::F32 => Dtype::F32,
    }
}

/// The length and the header, padded with spaces so that the tensors start at a multiple of 8.
fn head(infos: Vec<(String, TensorInfo)>) -> Result<Vec<u8>, String> {
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), infos).map_err(|error| error.to_string())?;
    let mut header = serde_json::to_vec(&metadata).map_err(|error| error.to_string())?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let length = u64::try_from(header.len()).map_err(|error| error.to_string())?;
    let mut head = length.to_le_bytes().to_vec();
    head.append(&mut header);
    Ok(head)
}

/// The text of `model.safetensors.index.json`.
fn index_text(shards: &[Shard], tensors: &[Tensor], total_size: u64, total_parameters: u64) -> String {
    let mut files: Vec<(&str, &str)> = Vec::with_capacity(tensors.len());
    for shard in shards {
        for placed in &shard.tensors {
            let index = usize::try_from(placed.index).expect("it was an index");
            files.push((&tensors[index].name, &shard.name));
        }
    }
    files.sort_unstable();
    let weight_map: Map<String, Value> =
        files.into_iter().map(|(tensor, file)| (tensor.to_owned(), file.into())).collect();
    let index = json!({
        "metadata": { "total_parameters": total_parameters, "total_size": total_size },
        "weight_map": weight_map,
    });
    format!("{index:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensors(sizes: &[(u64, u64)]) -> Vec<Tensor> {
        let named = |(number, (length, unit)): (usize, &(u64, u64))| Tensor {
            name: format!("t{number}"),
            shape: vec![*length],
            unit: *unit,
        };
        sizes.iter().enumerate().map(named).collect()
    }

    fn split_lengths(sizes: &[(u64, u64)], limit: u64) -> Vec<Vec<usize>> {
        let lengths: Vec<u64> = sizes.iter().map(|size| size.0).collect();
        split(&tensors(sizes), &lengths, limit)
    }

    #[test]
    fn filling_is_greedy_and_a_full_file_is_exactly_the_limit() {
        assert_eq!(split_lengths(&[(4, 1), (6, 2), (1, 3)], 10), [vec![0, 1], vec![2]]);
    }

    #[test]
    fn an_oversized_tensor_comes_before_the_file_being_filled() {
        assert_eq!(split_lengths(&[(4, 1), (11, 2), (6, 3)], 10), [vec![1], vec![0, 2]]);
        assert_eq!(split_lengths(&[(11, 1)], 10), [vec![0]]);
    }

    #[test]
    fn a_unit_stays_together_where_its_first_tensor_falls() {
        assert_eq!(split_lengths(&[(4, 1), (3, 2), (3, 3), (3, 2)], 10), [vec![0, 1, 3], vec![2]]);
    }

    #[test]
    fn sizes_beyond_a_file_offset_are_refused() {
        let config = ModelConfig::parse("test".to_owned(), b"{}").unwrap();
        for shape in [vec![1 << 40, 1 << 40], vec![1 << 40, 1 << 22]] {
            let tensor = Tensor { name: "w".to_owned(), shape, unit: 0 };
            let error = plan(&config, &[tensor], FloatType::F32, 10).unwrap_err();
            assert!(matches!(error, SynthError::TooLarge { .. }), "{error}");
        }
    }
}
