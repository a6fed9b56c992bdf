//! What a plan is made of: layers, the places of their tensors, and the reads, casts, copies and
//! moves that bring the bytes there.

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
    /// How many there are.
    pub len_bytes: u64,
}

/// One stretch of a slot that is cast before it is copied, in place: what comes out begins where
/// the elements began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CastOp {
    /// The tensor.
    pub tensor: TensorId,
    /// Where the elements start in the slot; at any byte.
    pub slot_offset_bytes: u64,
    /// How many bytes they take there: whole elements.
    pub source_len_bytes: u64,
    /// From which type to which.
    pub cast: Cast,
}

/// One move inside the arena, once all copies of its layer are complete: of a tensor that could not
/// land in its place.
///
/// No move reads or overwrites what another one of its layer has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MoveOp {
    /// Where the bytes landed.
    pub source_arena_offset_bytes: u64,
    /// Where they go: the place of their tensor.
    pub target_arena_offset_bytes: u64,
    /// How many there are.
    pub len_bytes: u64,
}

/// Where one tensor lies in the arena of its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Placement {
    /// The tensor.
    pub tensor: TensorId,
    /// Where its bytes are in its file: of a part, from the first byte that is wanted to the last.
    pub extent: ByteRange,
    /// Where it starts in the arena, after the moves; a multiple of
    /// [`Alignment::TENSOR`](crate::units::Alignment::TENSOR).
    pub arena_offset_bytes: u64,
    /// What it is cast to on the way; `None` if it arrives as it is in its file.
    pub cast: Option<Cast>,
    /// Which bytes of the extent are wanted; all of them if `None`.
    pub gather: Option<Gather>,
    /// How it is quantised on the way, and whether this is its values or its scales; `None` if it
    /// is not.
    pub quantised: Option<Quantised>,
}

impl ReadOp {
    /// True if it is of the run of that placement, by its index in the plan.
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

    /// Bytes that are wanted of its file.
    #[must_use]
    pub fn source_bytes(&self) -> u64 {
        self.source_bytes_before(self.extent.end())
    }

    /// Bytes of it that lie before a place of its file, which is no place before its extent.
    pub(super) fn source_bytes_before(&self, place: u64) -> u64 {
        let len_bytes = place - self.extent.start();
        self.gather.map_or(len_bytes, |gather| gather.wanted_bytes(len_bytes))
    }

    /// Bytes of it in a piece of its extent.
    pub(super) fn source_bytes_in(&self, piece: ByteRange) -> u64 {
        self.source_bytes_before(piece.end()) - self.source_bytes_before(piece.start())
    }

    /// What a piece of its extent takes in the arena, in bytes. The piece is of whole elements.
    pub(crate) fn delivered_bytes_in(&self, piece: ByteRange) -> u64 {
        self.delivered_bytes(self.source_bytes_in(piece))
    }

    /// What whole elements of so many bytes in the file take in the arena, in bytes.
    #[must_use]
    pub fn delivered_bytes(&self, source_bytes: u64) -> u64 {
        if let Some(form) = self.quantised {
            return form.delivered_bytes(source_bytes);
        }
        self.cast.map_or(source_bytes, |cast| cast.delivered_bytes(source_bytes))
    }

    /// The type of the delivered elements, for a tensor that has the type `dtype` in its file.
    #[must_use]
    pub fn delivered_dtype(&self, dtype: DType) -> DType {
        let cast = self.cast.map(|cast| cast.to().into());
        self.quantised.map(Quantised::delivered_dtype).or(cast).unwrap_or(dtype)
    }

    /// The name of that type, which an opaque one keeps.
    #[cfg(feature = "convert")]
    pub(crate) fn delivered_dtype_name<'a>(&self, entry: &crate::checkpoint::TensorEntry<'a>) -> &'a str {
        match (self.quantised, self.cast) {
            (None, None) => entry.dtype_name,
            _ => self.delivered_dtype(entry.dtype).name(),
        }
    }

    /// True if it has reads of its own.
    #[must_use]
    pub fn has_reads(&self) -> bool {
        !self.extent.is_empty() && !self.quantised.is_some_and(Quantised::has_no_reads)
    }
}

/// What becomes of a tensor on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transform {
    /// It arrives as it is.
    Keep,
    Cast(Cast),
    Quantise(Quantised),
}

impl From<Option<Cast>> for Transform {
    fn from(cast: Option<Cast>) -> Self {
        cast.map_or(Self::Keep, Self::Cast)
    }
}

/// What gets one arena: a layer, or a file to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group<'a> {
    /// Its name.
    pub(crate) id: &'a LayerId,
    /// Its tensors, in the order in which they are read and lie in the arena.
    pub(crate) tensors: &'a [TensorId],
}

/// One layer of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlannedLayer {
    /// The layer's name.
    pub id: LayerId,
    /// Its reads, as indices for [`LoadPlan::read`].
    pub reads: Range<u32>,
    /// Its tensors, as indices for [`LoadPlan::placements`].
    pub placements: Range<u32>,
    /// Its moves.
    pub(super) moves: Range<u32>,
    /// True if it stays where it is from the first pass to the last.
    pub is_kept: bool,
    /// Bytes of its tensors, as they are delivered.
    pub tensor_bytes: u64,
    /// Bytes of its arena: the tensors with their alignment and where they land before they are
    /// moved, rounded up to 2 MiB, or to 4 KiB if they are less than 2 MiB.
    pub arena_bytes: u64,
}

#[cfg(test)]
impl PlannedLayer {
    /// A layer without tensors whose arena has so many bytes.
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
