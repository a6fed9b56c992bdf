//! GGUF files, versions 2 and 3, of either byte order.
//!
//! ```text
//! "GGUF"  version u32  tensors u64  keys u64
//! keys     name, type, value               skipped, or kept if short (`metadata`)
//! tensors  name, dimensions, type, offset  innermost dimension first
//! padding, data                            tensors may not overlap; there may be gaps
//! ```
//!
//! The offsets of tensors count from the data, whose start is known only behind the last tensor. So
//! the list of tensors is read twice. Only a buffer and the keys are in memory.

use super::CheckpointError;
use super::format::{Contents, FoundTensor, Input};
use super::tensor::TensorTable;
use super::{DType, Shard, TensorNames};
use crate::units::to_u64;

use self::cursor::Cursor;
use self::names::Names;
use self::types::{TensorType, tensor_type};

mod cursor;
mod metadata;
mod names;
mod split;
mod types;

pub(super) use self::split::check_split;

const MAGIC: &[u8; 4] = b"GGUF";
/// ggml stores names in 64 bytes that end with a zero.
const NAME_BYTES_MAX: usize = 63;
const DIMENSIONS_MAX: usize = 4;
/// A tensor without a name and dimensions: lengths, type and offset.
const TENSOR_BYTES_MIN: u64 = 8 + 4 + 4 + 8;

/// True for the first bytes of a GGUF file.
pub(super) fn is_gguf(first: &[u8]) -> bool {
    first.starts_with(MAGIC)
}

/// One tensor of the list.
struct Tensor {
    /// Of its entry in the file.
    entry: u64,
    name: [u8; NAME_BYTES_MAX],
    name_len: usize,
    /// Outermost first.
    shape: [u64; DIMENSIONS_MAX],
    rank: usize,
    dtype: DType,
    /// From the start of the data.
    offset: u64,
}

impl Tensor {
    fn name(&self) -> &str {
        std::str::from_utf8(&self.name[..self.name_len]).expect("checked as it was read")
    }
}

/// Where the tensors of a file lie, and how.
#[derive(Clone, Copy)]
struct Place {
    data_start: u64,
    is_big_endian: bool,
}

/// Reads the tensors of a file.
pub(super) fn read(input: &Input<'_>, table: &mut TensorTable) -> Result<Contents, CheckpointError> {
    let is_big_endian = is_big_endian(input)?;
    let mut cursor = Cursor::new(input, to_u64(MAGIC.len()) + 4, is_big_endian);
    let tensor_count = cursor.u64("the number of tensors")?;
    let key_count = cursor.u64("the number of keys")?;
    let (keys, held) = metadata::read(input, &mut cursor, key_count)?;
    table.note_beside(held);
    let list = cursor.offset();
    if tensor_count > cursor.rest_bytes() / TENSOR_BYTES_MIN {
        let reason = format!("{tensor_count} tensors announced, more than the rest of the file can hold");
        return Err(input.invalid(list, reason));
    }
    for _ in 0..tensor_count {
        tensor(input, &mut cursor)?;
    }
    let data_start = cursor.offset().next_multiple_of(keys.alignment);
    let names = match input.options.names {
        TensorNames::AsStored => None,
        TensorNames::HuggingFace => Some(Names::of(input, input.first_keys.unwrap_or(&keys.metadata))?),
    };
    let place = Place { data_start, is_big_endian };
    let mut cursor = Cursor::new(input, list, is_big_endian);
    let (mut notes, mut left_out) = (Vec::new(), 0);
    for _ in 0..tensor_count {
        let tensor = tensor(input, &mut cursor)?;
        if !add(input, table, place, names.as_ref(), &tensor)? {
            let note = format!("{} is left out: models compute it themselves", tensor.name());
            if notes.contains(&note) {
                return Err(
                    input.invalid(tensor.entry, format!("tensor `{}`: is there twice", tensor.name()))
                );
            }
            notes.push(note);
            left_out += 1;
        }
    }
    Ok(Contents { metadata: keys.metadata, notes, left_out })
}

/// The byte order, by the version, which has to be 2 or 3.
fn is_big_endian(input: &Input<'_>) -> Result<bool, CheckpointError> {
    let offset = to_u64(MAGIC.len());
    let little = Cursor::new(input, offset, false).u32("the version")?;
    let (version, is_big_endian) = match little & 0xFFFF {
        0 => (little.swap_bytes(), true),
        _ => (little, false),
    };
    match version {
        2 | 3 => Ok(is_big_endian),
        1 => Err(input.refused(
            "",
            "GGUF version 1",
            "convert it with a llama.cpp of 2023, or download it anew",
        )),
        _ => Err(input.invalid(offset, format!("expected version 2 or 3, found {version}"))),
    }
}

/// Reads one tensor of the list.
fn tensor(input: &Input<'_>, cursor: &mut Cursor<'_>) -> Result<Tensor, CheckpointError> {
    let entry = cursor.offset();
    let name_bytes = cursor.u64("the length of a tensor's name")?;
    let name_len = usize::try_from(name_bytes).ok().filter(|&len| len <= NAME_BYTES_MAX);
    let name_len = name_len.ok_or_else(|| {
        let reason =
            format!("expected a tensor's name of at most {NAME_BYTES_MAX} bytes, found {name_bytes}");
        input.invalid(entry, reason)
    })?;
    let mut name = [0; NAME_BYTES_MAX];
    name[..name_len].copy_from_slice(cursor.take(name_len, "a tensor's name")?);
    let text = std::str::from_utf8(&name[..name_len]);
    let text = text.map_err(|_| input.invalid(entry, "expected a tensor's name in UTF-8"))?;
    let invalid =
        |offset, reason: String| input.invalid(offset, format!("tensor `{}`: {reason}", text.escape_debug()));
    let at = cursor.offset();
    let dimensions = cursor.u32("the number of dimensions")?;
    let rank = usize::try_from(dimensions).ok().filter(|&rank| rank <= DIMENSIONS_MAX);
    let rank = rank.ok_or_else(|| {
        invalid(at, format!("expected at most {DIMENSIONS_MAX} dimensions, found {dimensions}"))
    })?;
    let mut shape = [0; DIMENSIONS_MAX];
    for dimension in shape[..rank].iter_mut().rev() {
        let at = cursor.offset();
        *dimension = cursor.u64("a dimension")?;
        if *dimension == 0 {
            return Err(invalid(at, "expected dimensions above zero, found 0".to_owned()));
        }
    }
    let at = cursor.offset();
    let number = cursor.u32("the type of a tensor")?;
    let dtype = match tensor_type(number) {
        TensorType::Known(dtype) => dtype,
        TensorType::Refused(found, advice) => {
            return Err(input.refused(text, format!("type {number} ({found})"), advice));
        }
        TensorType::Unknown => {
            return Err(invalid(at, format!("expected a known type, found number {number}")));
        }
    };
    let offset = cursor.u64("the offset of a tensor")?;
    Ok(Tensor { entry, name, name_len, shape, rank, dtype, offset })
}

/// Adds a tensor to the table; false if it is left out.
fn add(
    input: &Input<'_>,
    table: &mut TensorTable,
    place: Place,
    names: Option<&Names>,
    tensor: &Tensor,
) -> Result<bool, CheckpointError> {
    let name = tensor.name();
    let shape = &tensor.shape[..tensor.rank];
    let dtype = tensor.dtype;
    if let DType::Block(block) = dtype {
        let columns = shape.last().copied().unwrap_or(1);
        if !columns.is_multiple_of(block.elements()) {
            let reason = format!(
                "tensor `{}`: expected rows of whole blocks ({block} has {} elements), found {columns}",
                name.escape_debug(),
                block.elements()
            );
            return Err(input.invalid(tensor.entry, reason));
        }
    }
    if place.is_big_endian && dtype.bits() != Some(8) {
        let advice = "convert it: python -m gguf.scripts.gguf_convert_endian FILE little";
        return Err(input.refused(name, format!("{dtype} in big-endian order"), advice));
    }
    let start = place.data_start.checked_add(tensor.offset).ok_or_else(|| {
        let reason = format!(
            "tensor `{}`: expected an offset inside the file, found {}",
            name.escape_debug(),
            tensor.offset
        );
        input.invalid(tensor.entry, reason)
    })?;
    let Some(names) = names else {
        input.add(table, FoundTensor { name, dtype, shape, dims: &[], strides: &[], start })?;
        return Ok(true);
    };
    let Some(renamed) = names.rename(input, name, dtype, shape)? else { return Ok(false) };
    let (name, shape) = (&*renamed.name, &*renamed.shape);
    let (dims, strides) = (&*renamed.dims, &*renamed.strides);
    input.add(table, FoundTensor { name, dtype, shape, dims, strides, start })?;
    Ok(true)
}
