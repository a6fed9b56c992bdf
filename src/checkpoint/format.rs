//! The seam between file formats and the table of tensors.
//!
//! Each format reads its header from an [`Input`], adds its tensors to the table with
//! [`Input::add`], and returns [`Contents`]. Everything behind the table (layers, plans, reads,
//! conversions) works on the tensors without knowing the format.
//!
//! A tensor in a file is an element type, a shape, and the place of its first byte. It may lie
//! anywhere in the file: between paddings, over the bytes of another tensor, or with strides of its
//! own inside a larger storage.

use std::fs::File;
use std::path::Path;

use super::error::{CheckpointError, kept, shape_text};
use super::metadata::FileMetadata;
use super::options::OpenOptions;
use super::tensor::{Record, Span, StoredUnit, TensorTable, View};
use super::{DType, FileFormat};
use crate::units::ByteRange;

/// One open file, for the reader of its format.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    pub(super) path: &'a Path,
    pub(super) file: &'a File,
    pub(super) len_bytes: u64,
    pub(super) format: FileFormat,
    /// Put before the name of each tensor.
    pub(super) prefix: &'a str,
    pub(super) options: &'a OpenOptions,
    /// What the first file of its set says about the model; `None` for the first file.
    pub(super) first_keys: Option<&'a FileMetadata>,
}

/// What a file holds beside its tensors.
pub(super) struct Contents {
    pub(super) metadata: FileMetadata,
    /// Sentences for people, as in [`Checkpoint::notes`](super::Checkpoint::notes).
    pub(super) notes: Vec<String>,
    /// Tensors that were not added to the table.
    pub(super) left_out: u64,
}

/// One tensor, as a header describes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct FoundTensor<'a> {
    /// Its name, without the prefix.
    pub(super) name: &'a str,
    pub(super) dtype: DType,
    /// Elements per dimension, outermost first.
    pub(super) shape: &'a [u64],
    /// The dimensions that `strides` belong to: the shape, or a division of it with the same
    /// elements.
    pub(super) dims: &'a [u64],
    /// Elements from one index to the next, for each of `dims`; empty if row-major.
    pub(super) strides: &'a [u64],
    /// Its first byte, counted from the start of the file.
    pub(super) start: u64,
}

impl Input<'_> {
    /// Adds a tensor. Its bytes have to lie inside the file; they may be those of other tensors
    /// too.
    pub(super) fn add(
        &self,
        table: &mut TensorTable,
        tensor: FoundTensor<'_>,
    ) -> Result<(), CheckpointError> {
        let FoundTensor { name, dtype, shape, dims, strides, start } = tensor;
        let too_many = |what| {
            let limit = u64::from(u32::MAX);
            CheckpointError::TooMany { path: self.path.to_owned(), what, limit }
        };
        let Some(packed_bytes) = dtype.tensor_bytes(shape) else {
            let (path, tensor, shape) = (self.path.to_owned(), kept(name), shape_text(shape));
            return Err(CheckpointError::SizeOverflow { path, tensor, dtype, shape });
        };
        let is_strided = !strides.is_empty() && packed_bytes > 0 && !is_row_major(dims, strides);
        let spanned_bytes = match is_strided {
            true => self.spanned_bytes(&tensor)?,
            false => packed_bytes,
        };
        let extent =
            ByteRange::with_len(start, spanned_bytes).filter(|extent| extent.end() <= self.len_bytes);
        let Some(extent) = extent else {
            return Err(CheckpointError::Truncated {
                path: self.path.to_owned(),
                tensor: kept(name),
                expected_bytes: u128::from(start) + u128::from(spanned_bytes),
                found_bytes: self.len_bytes,
            });
        };
        let name_start = table.names.len();
        table.names.push_str(self.prefix);
        table.names.push_str(name);
        let spelled = Span::tail(name_start, table.names.len());
        let spelled = spelled.ok_or_else(|| too_many("bytes of tensor names"))?;
        let known = table.records.last().map(|last| last.shape).filter(|&last| table.shape(last) == shape);
        let shape = match known {
            Some(known) => known,
            None => table.add_dims(shape).ok_or_else(|| too_many("dimensions"))?,
        };
        let mut detail = 0;
        if is_strided {
            let strides = table.add_dims(strides).ok_or_else(|| too_many("dimensions"))?;
            let dims = match dims == table.shape(shape) {
                true => shape,
                false => table.add_dims(dims).ok_or_else(|| too_many("dimensions"))?,
            };
            table.views.push(View { dims, strides });
            detail = u32::try_from(table.views.len()).map_err(|_| too_many("views"))?;
        }
        let (start, end) = (extent.start(), extent.end());
        table.records.push(Record { start, end, name: spelled, shape, detail, dtype });
        Ok(())
    }

    /// Bytes from the first element of a strided tensor to the end of its last.
    fn spanned_bytes(&self, tensor: &FoundTensor<'_>) -> Result<u64, CheckpointError> {
        let refuse = |advice| {
            let (strides, dims) = (shape_text(tensor.strides), shape_text(tensor.dims));
            self.refused(tensor.name, format!("strides {strides} for shape {dims}"), advice)
        };
        let mut steps = tensor.dims.iter().zip(tensor.strides);
        if tensor.dims.len() != tensor.strides.len() {
            return Err(refuse("the file is not what torch.save writes"));
        }
        if steps.clone().any(|(&len, &stride)| len > 1 && stride == 0) {
            return Err(refuse("expanded tensors are not read: save tensor.contiguous()"));
        }
        let unit = StoredUnit::of(tensor.dtype).ok_or_else(|| refuse("packed types cannot have strides"))?;
        let is_cut = |(&len, &stride): (&u64, &u64)| len > 1 && !stride.is_multiple_of(unit.elements);
        let rows = tensor.dims.len().saturating_sub(1);
        if unit.elements > 1 && (steps.clone().take(rows).any(is_cut) || tensor.strides.last() != Some(&1)) {
            return Err(refuse("blocks cannot be cut"));
        }
        let last =
            steps.try_fold(0_u64, |last, (&len, &stride)| last.checked_add((len - 1).checked_mul(stride)?));
        let spanned = last.and_then(|last| (last.checked_add(1)? / unit.elements).checked_mul(unit.bytes));
        spanned.ok_or_else(|| refuse("no file has so many bytes"))
    }

    /// The longest pickle, in bytes. It spells a tensor at greater length than a JSON header does.
    pub(super) fn pickle_bytes_max(&self) -> u64 {
        self.options.header_bytes_max.saturating_mul(2)
    }

    /// The system refused to read.
    pub(super) fn io(&self, source: std::io::Error) -> CheckpointError {
        CheckpointError::Io { path: self.path.to_owned(), operation: "read", source }
    }

    /// An error about the file's format: `reason` at byte `offset`.
    pub(super) fn invalid(&self, offset: u64, reason: impl Into<String>) -> CheckpointError {
        let (path, format) = (self.path.to_owned(), self.format);
        CheckpointError::InvalidFile { path, format, offset, reason: reason.into() }
    }

    /// The file is well-formed, but `tensor` cannot be read: what was found, and what to do.
    pub(super) fn refused(
        &self,
        tensor: &str,
        found: impl Into<String>,
        advice: &'static str,
    ) -> CheckpointError {
        let (path, tensor) = (self.path.to_owned(), kept(tensor));
        CheckpointError::NotStreamable { path, tensor, found: found.into(), advice }
    }
}

/// True if the strides are those of a row-major tensor. Dimensions of one element may have any.
fn is_row_major(shape: &[u64], strides: &[u64]) -> bool {
    let mut expected = 1_u64;
    shape.len() == strides.len()
        && shape.iter().zip(strides).rev().all(|(&len, &stride)| {
            let fits = len == 1 || stride == expected;
            expected = expected.saturating_mul(len);
            fits
        })
}
