//! The parts of a plan: layers, the places of their tensors, and the reads, casts, copies and moves
//! that bring the bytes there.

use std::num::NonZeroU32;
use std::ops::Range;

use super::{Cast, Gather, Quantised, ReadRequest};
use crate::checkpoint::{DType, TensorId};
use crate::layers::LayerId;
use crate::units::ByteRange;

/// One read: a stretch of one file that fits one slot.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadOp {
    /// Where the bytes are.
    pub request: ReadRequest,
    /// The tensors of its run, as indices of placements.
    pub(super) placements: Range<u32>,
}

/// One copy from a slot to the arena of the read's layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopyOp {
    /// Where the bytes start in the slot.
    pub slot_offset_bytes: u64,
    /// Where they go in the arena.
    pub arena_offset_bytes: u64,
    /// Their length.
    pub len_bytes: u64,
}

/// One stretch of a slot that is cast in place before it is copied. The result begins where the
/// elements began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CastOp {
    /// The tensor.
    pub tensor: TensorId,
    /// Where the elements start in the slot; at any byte.
    pub slot_offset_bytes: u64,
    /// Their length in the slot: whole elements.
    pub source_len_bytes: u64,
    /// Source and target type.
    pub cast: Cast,
}

/// One move inside the arena, after all copies of its layer: for a tensor that could not land in
/// its place.
///
/// Moves of a layer do not overlap each other's source or target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MoveOp {
    /// Where the bytes landed.
    pub source_arena_offset_bytes: u64,
    /// Where they go: the place of their tensor.
    pub target_arena_offset_bytes: u64,
    /// Their length.
    pub len_bytes: u64,
}

/// Where one tensor lies in the arena of its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Placement {
    /// The tensor.
    pub tensor: TensorId,
    /// Its bytes in the file; of a part, from the first wanted byte to the last.
    pub extent: ByteRange,
    /// Where it starts in the arena, after the moves; a multiple of
    /// [`Alignment::TENSOR`](crate::units::Alignment::TENSOR).
    pub arena_offset_bytes: u64,
    /// Its cast on the way; `None` if it keeps its type.
    pub cast: Option<Cast>,
    /// The wanted bytes of the extent; all of them if `None`.
    pub gather: Option<Gather>,
    /// Bytes of a unit that is permuted within itself, if the tensor is not row-major in its file.
    pub permuted_unit_bytes: Option<NonZeroU32>,
    /// How it is quantised, and whether this is its values or its scales; `None` if it is not.
    pub quantised: Option<Quantised>,
}

impl ReadOp {
    /// True if its run holds the placement with this index in the plan.
    pub(crate) fn is_of(&self, placement: u32) -> bool {
        self.placements.contains(&placement)
    }
}

impl Placement {
    /// Bytes it takes in the arena.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.delivered_bytes(self.source_bytes())
    }

    /// Wanted bytes of its file.
    #[must_use]
    pub fn source_bytes(&self) -> u64 {
        self.source_bytes_before(self.extent.end())
    }

    /// Wanted bytes in front of a file offset, which must not be before the extent.
    pub(super) fn source_bytes_before(&self, place: u64) -> u64 {
        let len_bytes = place - self.extent.start();
        self.gather.map_or(len_bytes, |gather| gather.wanted_bytes(len_bytes))
    }

    /// Wanted bytes in a piece of its extent.
    pub(super) fn source_bytes_in(&self, piece: ByteRange) -> u64 {
        self.source_bytes_before(piece.end()) - self.source_bytes_before(piece.start())
    }

    /// Bytes that a piece of its extent takes in the arena. The piece holds whole elements.
    pub(crate) fn delivered_bytes_in(&self, piece: ByteRange) -> u64 {
        self.delivered_bytes(self.source_bytes_in(piece))
    }

    /// Bytes in the arena of whole elements that take `source_bytes` in the file.
    #[must_use]
    pub fn delivered_bytes(&self, source_bytes: u64) -> u64 {
        if let Some(form) = self.quantised {
            return form.delivered_bytes(source_bytes);
        }
        self.cast.map_or(source_bytes, |cast| cast.delivered_bytes(source_bytes))
    }

    /// The type of the delivered elements of a tensor of type `dtype`.
    #[must_use]
    pub fn delivered_dtype(&self, dtype: DType) -> DType {
        let cast = self.cast.map(|cast| cast.to().into());
        self.quantised.map(Quantised::delivered_dtype).or(cast).unwrap_or(dtype)
    }

    /// The name of that type. An opaque tensor keeps its name.
    #[cfg(feature = "convert")]
    pub(crate) fn delivered_dtype_name<'a>(&self, entry: &crate::checkpoint::TensorEntry<'a>) -> &'a str {
        match (self.quantised, self.cast) {
            (None, None) => entry.dtype_name,
            _ => self.delivered_dtype(entry.dtype).name(),
        }
    }

    /// Bytes that must not be cut: of a unit to be permuted, a row to be quantised, or an element to
    /// be cast.
    pub(super) fn uncut_bytes(&self) -> Option<u64> {
        let permuted = self.permuted_unit_bytes.map(|bytes| u64::from(bytes.get()));
        let row = self.quantised.map(Quantised::source_row_bytes);
        permuted.or(row).or(self.cast.map(Cast::source_unit_bytes))
    }

    /// True if reads are planned for it.
    #[must_use]
    pub fn has_reads(&self) -> bool {
        !self.extent.is_empty() && !self.quantised.is_some_and(Quantised::has_no_reads)
    }
}

/// The change to a tensor on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transform {
    /// None.
    Keep,
    Cast(Cast),
    Quantise(Quantised),
}

impl From<Option<Cast>> for Transform {
    fn from(cast: Option<Cast>) -> Self {
        cast.map_or(Self::Keep, Self::Cast)
    }
}

/// Tensors that share an arena: a layer, or a file to be written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group<'a> {
    /// Its name.
    pub(crate) id: &'a LayerId,
    /// Its tensors, in the order of their reads and of the arena.
    pub(crate) tensors: &'a [TensorId],
}

/// One layer of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlannedLayer {
    /// The layer's name.
    pub id: LayerId,
    /// Its reads, as indices for [`LoadPlan::read`](crate::plan::LoadPlan::read).
    pub reads: Range<u32>,
    /// Its tensors, as indices for [`LoadPlan::placements`](crate::plan::LoadPlan::placements).
    pub placements: Range<u32>,
    /// Its moves.
    pub(super) moves: Range<u32>,
    /// True if it stays resident from the first pass to the last.
    pub is_kept: bool,
    /// Bytes of its tensors, as they are delivered.
    pub tensor_bytes: u64,
    /// Bytes of its arena: the tensors, alignment, and where tensors land before they are moved;
    /// rounded up to 2 MiB, or to 4 KiB below 2 MiB.
    pub arena_bytes: u64,
}

#[cfg(test)]
impl PlannedLayer {
    /// A layer without tensors, with an arena of `arena_bytes`.
    pub(crate) fn of_bytes(arena_bytes: u64) -> Self {
        let id = LayerId::parse("layers.0").expect("a name");
        Self {
            id,
            reads: 0..0,
            placements: 0..0,
            moves: 0..0,
            is_kept: false,
            tensor_bytes: arena_bytes,
            arena_bytes,
        }
    }
}
