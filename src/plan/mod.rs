//! Checkpoint + layers + limits -> a deterministic, printable list of reads and copies.
//!
//! A plan is made from headers alone. It names and sums every term of the peak memory, so a budget that
//! cannot work is refused here, before any tensor byte is read, with the smallest one that would. The
//! loader then only carries the list out:
//!
//! ```text
//! tensors of a layer (file order)
//!    -> arena layout      every tensor at a 256-byte aligned place of its layer's arena
//!    -> runs              neighbours in the file, small gaps read through
//!    -> reads             at most one slot each, phased to 4096 bytes
//!    -> casts             of what is delivered as another type, if asked for: in the slot
//!    -> copies            slot -> arena, neighbours joined
//!    -> moves             arena -> arena, of what could not land in its place
//! ```
//!
//! Nothing here opens a file or allocates in proportion to a tensor's bytes.

use std::ops::Range;

use crate::checkpoint::{Checkpoint, DType, TensorId};
use crate::layers::{LayerId, Layers};
use crate::units::{ByteRange, to_u64, to_usize};

#[cfg(feature = "convert")]
pub(crate) use self::cast::is_plain;
pub use self::cast::{Cast, FloatType};
pub use self::decision::{CacheManners, FileSystem, IoDecision, IoGroup, IoReason, IoWays, ResidencyBy};
pub(crate) use self::decision::{is_most, is_mostly_direct};
pub use self::error::PlanError;
use self::layout::Layout;
pub use self::limits::{Landing, PlanLimits, ResidentKind, Window};
#[cfg(test)]
pub(crate) use self::memory::LAYER_STATE_BYTES;
pub use self::memory::{HOST_BUDGET_FLOOR_BYTES, MemoryTerm, MemoryTerms, RingShape};
pub use self::order::ReadOrder;
pub(crate) use self::order::{IssuePlace, Turn};
pub use self::reads::Copies;
use self::reads::ReadList;
pub use self::request::{IoMode, ReadRequest};

mod cast;
mod decision;
mod display;
mod error;
#[cfg(test)]
mod for_tests;
mod landing;
mod layout;
mod limits;
mod memory;
mod order;
mod reads;
pub(crate) mod request;

/// One read: a stretch of one file that fits one slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadOp {
    /// Where the bytes are.
    pub request: ReadRequest,
    /// The tensors of its run, as indices of placements.
    placements: Range<u32>,
}

/// One copy from a slot to the arena of the read's layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOp {
    /// Where the bytes start in the slot.
    pub slot_offset_bytes: u64,
    /// Where they go in the arena.
    pub arena_offset_bytes: u64,
    /// How many there are.
    pub len_bytes: u64,
}

/// One stretch of a slot that is cast before it is copied, in place: what comes out begins where the elements began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// One move inside the arena, once all copies of its layer are complete: of a tensor that could not land in its place.
///
/// No move reads or overwrites what another one of its layer has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
pub struct Placement {
    /// The tensor.
    pub tensor: TensorId,
    /// Where its bytes are in its file.
    pub extent: ByteRange,
    /// Where it starts in the arena, after the moves; a multiple of
    /// [`Alignment::TENSOR`](crate::units::Alignment::TENSOR).
    pub arena_offset_bytes: u64,
    /// What it is cast to on the way; `None` if it arrives as it is in its file.
    pub cast: Option<Cast>,
}

impl Placement {
    /// Bytes it takes in the arena.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.delivered_bytes(self.extent.len_bytes())
    }

    /// What whole elements of so many bytes in the file take in the arena, in bytes.
    #[must_use]
    pub fn delivered_bytes(&self, source_bytes: u64) -> u64 {
        self.cast.map_or(source_bytes, |cast| cast.delivered_bytes(source_bytes))
    }

    /// The type of the delivered elements, for a tensor that has the type `dtype` in its file.
    #[must_use]
    pub fn delivered_dtype(&self, dtype: DType) -> DType {
        self.cast.map_or(dtype, |cast| cast.to().into())
    }

    /// The name of that type, which an opaque one keeps.
    #[cfg(feature = "convert")]
    pub(crate) fn delivered_dtype_name<'a>(&self, entry: &crate::checkpoint::TensorEntry<'a>) -> &'a str {
        self.cast.map_or(entry.dtype_name, |cast| DType::from(cast.to()).name())
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
    moves: Range<u32>,
    /// Bytes of its tensors, as they are delivered.
    pub tensor_bytes: u64,
    /// Bytes of its arena: the tensors with their alignment and where they land before they are moved, rounded up to
    /// 2 MiB, or to 4 KiB if they are less than 2 MiB.
    pub arena_bytes: u64,
}

/// A deterministic list of reads and copies, with every term of the peak memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadPlan {
    layers: Vec<PlannedLayer>,
    placements: Vec<Placement>,
    moves: Vec<MoveOp>,
    reads: ReadList,
    memory: MemoryTerms,
    io: IoMode,
    decisions: Vec<IoDecision>,
    window: Window,
    order: ReadOrder,
    dtype: Option<FloatType>,
}

impl LoadPlan {
    /// Plans a load of every tensor for which `select` says yes.
    ///
    /// # Errors
    /// [`PlanError::BudgetTooSmall`] with the smallest budget that works, [`PlanError::Overflow`] for sizes
    /// that no machine has, [`PlanError::NothingSelected`] if a non-empty checkpoint has no tensor left.
    pub fn build(
        checkpoint: &Checkpoint,
        layers: &Layers,
        limits: &PlanLimits,
        select: impl FnMut(TensorId) -> bool,
    ) -> Result<Self, PlanError> {
        let groups =
            layers.as_slice().iter().map(|layer| Group { id: &layer.id, tensors: layer.tensors.as_ref() });
        let narrow = |tensor| limits.dtype.and_then(|to| cast::narrowing_of(checkpoint, layers, tensor, to));
        let layout = layout::arrange(checkpoint, groups, limits.landing, select, narrow)?;
        Self::finish(checkpoint, layout, layers.peak_bytes(), limits)
    }

    /// Plans a load of groups of the caller's, each with an arena of its own. The tensors of a group keep the order in which
    /// they are given, those without bytes at its end, and each is cast as `cast` says. `grouping_bytes` is host memory that
    /// made the groups.
    ///
    /// # Errors
    /// As [`Self::build`].
    #[cfg(feature = "convert")]
    pub(crate) fn build_groups<'a>(
        checkpoint: &Checkpoint,
        groups: impl ExactSizeIterator<Item = Group<'a>>,
        limits: &PlanLimits,
        cast: impl FnMut(TensorId) -> Option<Cast>,
        grouping_bytes: u64,
    ) -> Result<Self, PlanError> {
        let layout = layout::arrange(checkpoint, groups, limits.landing, |_| true, cast)?;
        Self::finish(checkpoint, layout, grouping_bytes, limits)
    }

    fn finish(
        checkpoint: &Checkpoint,
        mut layout: Layout,
        grouping_bytes: u64,
        limits: &PlanLimits,
    ) -> Result<Self, PlanError> {
        if layout.placements.is_empty() && checkpoint.tensor_count() > 0 {
            return Err(PlanError::NothingSelected { tensors: to_u64(checkpoint.tensor_count()) });
        }
        let runs = reads::join(checkpoint, &layout);
        let order = order::permutation(&runs, limits.order_had());
        // Both lists are as long as they are large.
        let run_bytes = to_u64(size_of_val(&*runs)) + to_u64(size_of_val(&*order));
        let memory = MemoryTerms::settle(checkpoint, grouping_bytes, &layout, run_bytes, limits)?;
        let slot_bytes = memory.ring().slot_bytes;
        let reads = ReadList::number(runs, order, &mut layout, slot_bytes, limits.alignment)?;
        let Layout { layers, placements, moves } = layout;
        Ok(Self {
            layers,
            placements,
            moves,
            reads,
            memory,
            io: limits.io,
            decisions: limits.decisions.clone(),
            window: limits.window,
            order: limits.order_had(),
            dtype: limits.dtype,
        })
    }

    /// The layers, in execution order. Layers without a selected tensor are left out.
    #[must_use]
    pub fn layers(&self) -> &[PlannedLayer] {
        &self.layers
    }

    /// All reads, layer by layer. [`Self::reads_in_order`] has them as they are issued.
    pub fn reads(&self) -> impl ExactSizeIterator<Item = ReadOp> {
        (0..self.reads.count()).map(|index| self.read(index))
    }

    /// One read.
    ///
    /// # Panics
    /// If there is no read of this index.
    #[must_use]
    pub fn read(&self, index: u32) -> ReadOp {
        self.reads.read(index, &self.placements)
    }

    /// The copies of one read, in file order.
    #[must_use]
    pub fn copies(&self, read: &ReadOp) -> Copies<'_> {
        // A run, and so a read, is of one layer.
        let layer = self.layers.partition_point(|layer| layer.placements.end <= read.placements.start);
        let moves = self.layers.get(layer).map_or(&[][..], |layer| self.moves(layer));
        Copies::new(read.request, &self.placements[index_range(&read.placements)], moves)
    }

    /// What of one read is cast before its copies, in file order.
    pub fn casts(&self, read: &ReadOp) -> impl Iterator<Item = CastOp> + Clone {
        reads::casts(read.request, &self.placements[index_range(&read.placements)])
    }

    /// The tensors of one layer and their places, in file order.
    #[must_use]
    pub fn placements(&self, layer: &PlannedLayer) -> &[Placement] {
        &self.placements[index_range(&layer.placements)]
    }

    /// The moves of one layer, to be made once all its copies are complete.
    #[must_use]
    pub fn moves(&self, layer: &PlannedLayer) -> &[MoveOp] {
        &self.moves[index_range(&layer.moves)]
    }

    /// Every term of the peak.
    #[must_use]
    pub fn memory(&self) -> &MemoryTerms {
        &self.memory
    }

    /// How files are read.
    #[must_use]
    pub fn io(&self) -> IoMode {
        self.io
    }

    /// How each file is read and why, in the order of the files, where that is left to the loader ([`IoMode::Auto`]); else
    /// nothing.
    #[must_use]
    pub fn decisions(&self) -> &[IoDecision] {
        &self.decisions
    }

    /// How many layers are resident at once.
    #[must_use]
    pub fn window(&self) -> Window {
        self.window
    }

    /// What wider floats are narrowed to on the way, if they are.
    #[must_use]
    pub fn dtype(&self) -> Option<FloatType> {
        self.dtype
    }

    /// Bytes of all selected tensors in their files.
    #[must_use]
    pub fn source_bytes(&self) -> u64 {
        self.placements.iter().map(|placement| placement.extent.len_bytes()).sum()
    }

    /// Bytes of all selected tensors, as they are delivered.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.tensor_bytes).sum()
    }

    /// Bytes that an aligned source reads: [`Self::source_bytes`] and what alignment and read-through gaps add.
    #[must_use]
    pub fn aligned_read_bytes(&self) -> u64 {
        self.reads().map(|read| read.request.extent.len_bytes()).sum()
    }

    /// Bytes that are read and thrown away: at most, since an unaligned source reads only payloads.
    #[must_use]
    pub fn over_read_bytes(&self) -> u64 {
        self.aligned_read_bytes() - self.source_bytes()
    }
}

fn index_range(range: &Range<u32>) -> Range<usize> {
    to_usize(u64::from(range.start))..to_usize(u64::from(range.end))
}
