//! Checkpoint + layers + limits -> a deterministic, printable list of reads and copies.
//!
//! A plan is made from headers alone. It names and sums every term of the peak memory, so a budget
//! that cannot work is refused here, before any tensor byte is read, with the smallest one that
//! would. The loader then only carries the list out:
//!
//! ```text
//! tensors of a layer (file order)
//!    -> arena layout      every tensor at a 256-byte aligned place of its layer's arena
//!    -> runs              neighbours in the file, small gaps read through
//!    -> reads             at most one slot each, phased to 4096 bytes
//!    -> gathers           of what is wanted in part, if asked for: in the slot
//!    -> casts             of what is delivered as another type, if asked for: in the slot
//!    -> quantising        of rows into values and scales, if asked for: in the slot
//!    -> copies            slot -> arena, neighbours joined
//!    -> moves             arena -> arena, of what could not land in its place
//! ```
//!
//! Nothing here opens a file or allocates in proportion to a tensor's bytes.

use std::ops::Range;

use crate::checkpoint::{Checkpoint, DType, TensorId};
use crate::layers::{LayerId, Layers};
use crate::ranks::{Cut, Rank, RankPart, SplitRules, Splitter};
use crate::units::{ByteRange, to_u64, to_usize};

pub use self::cast::Cast;
#[cfg(feature = "convert")]
pub(crate) use self::cast::is_plain;
pub use self::cast::narrowing_of;
pub use self::decision::{CacheManners, FileSystem, IoDecision, IoGroup, IoReason, IoWays, ResidencyBy};
pub(crate) use self::decision::{is_most, is_mostly_direct};
pub use self::error::PlanError;
pub use self::gather::{Gather, GatherOp};
use self::layout::Layout;
pub use self::limits::{Landing, PlanLimits, ResidentKind, Window};
#[cfg(test)]
pub(crate) use self::memory::LAYER_STATE_BYTES;
pub(crate) use self::memory::grouping_peak_bytes;
pub use self::memory::{HOST_BUDGET_FLOOR_BYTES, MemoryTerm, MemoryTerms, RingShape};
pub use self::order::ReadOrder;
pub(crate) use self::order::{IssuePlace, Turn};
use self::parts::Parts;
pub use self::passes::{Passes, WindowShape};
pub use self::quantise::QuantiseRule;
use self::quantise::QuantisedTensors;
pub use self::quantise::{
    Quantisation, QuantiseChoice, QuantiseOp, Quantised, QuantisedPart, QuantisedTensor, SCALE_SUFFIX,
    UnknownQuantisation,
};
pub use self::reads::Copies;
use self::reads::ReadList;
pub use self::request::{IoMode, ReadRequest};
pub use onelayer_system::FloatType;

mod cast;
mod decision;
mod display;
mod error;
#[cfg(test)]
mod for_tests;
mod gather;
mod landing;
mod layout;
mod limits;
mod memory;
mod order;
mod parts;
mod passes;
mod quantise;
mod reads;
pub(crate) mod request;

/// One read: a stretch of one file that fits one slot.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadOp {
    /// Where the bytes are.
    pub request: ReadRequest,
    /// The tensors of its run, as indices of placements.
    placements: Range<u32>,
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
    fn source_bytes_before(&self, place: u64) -> u64 {
        let len_bytes = place - self.extent.start();
        self.gather.map_or(len_bytes, |gather| gather.wanted_bytes(len_bytes))
    }

    /// Bytes of it in a piece of its extent.
    fn source_bytes_in(&self, piece: ByteRange) -> u64 {
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
    moves: Range<u32>,
    /// True if it stays where it is from the first pass to the last.
    pub is_kept: bool,
    /// Bytes of its tensors, as they are delivered.
    pub tensor_bytes: u64,
    /// Bytes of its arena: the tensors with their alignment and where they land before they are
    /// moved, rounded up to 2 MiB, or to 4 KiB if they are less than 2 MiB.
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
    passes: Passes,
    order: ReadOrder,
    dtype: Option<FloatType>,
    parts: Option<Parts>,
    quantised: QuantisedTensors,
}

impl LoadPlan {
    /// Plans a load of every tensor for which `select` says yes.
    ///
    /// # Errors
    /// [`PlanError::BudgetTooSmall`] with the smallest budget that works, [`PlanError::Overflow`]
    /// for sizes that no machine has, [`PlanError::NothingSelected`] if a non-empty checkpoint
    /// has no tensor left.
    pub fn build(
        checkpoint: &Checkpoint,
        layers: &Layers,
        limits: &PlanLimits,
        select: impl FnMut(TensorId) -> bool,
    ) -> Result<Self, PlanError> {
        Self::build_for(checkpoint, layers, limits, None, select)
    }

    /// The same for one of several ranks, which has the parts of tensors that the rules give it.
    ///
    /// # Errors
    /// As [`Self::build`], and [`PlanError::Split`] for a tensor that cannot be divided as a rule
    /// says.
    pub fn build_shard(
        checkpoint: &Checkpoint,
        layers: &Layers,
        limits: &PlanLimits,
        rank: Rank,
        rules: &SplitRules,
        select: impl FnMut(TensorId) -> bool,
    ) -> Result<Self, PlanError> {
        let splitter = Splitter::new(checkpoint, layers, rank, rules);
        Self::build_for(checkpoint, layers, limits, Some(&splitter), select)
    }

    fn build_for(
        checkpoint: &Checkpoint,
        layers: &Layers,
        limits: &PlanLimits,
        splitter: Option<&Splitter<'_>>,
        select: impl FnMut(TensorId) -> bool,
    ) -> Result<Self, PlanError> {
        let groups =
            layers.as_slice().iter().map(|layer| Group { id: &layer.id, tensors: layer.tensors.as_ref() });
        let choice = limits.quantise_choice.as_ref();
        let rule = limits.quantise.map(|to| QuantiseRule::new(checkpoint, layers, to, choice));
        let transform = |tensor| match rule.as_ref().and_then(|rule| rule.of(tensor)) {
            Some(form) => Transform::Quantise(form),
            None => limits.dtype.and_then(|to| narrowing_of(checkpoint, layers, tensor, to)).into(),
        };
        if let (Some(form), Some(_)) = (limits.quantise, splitter) {
            return Err(PlanError::QuantisedShard { form });
        }
        let mut parts = Vec::new();
        let mut stretch = |tensor| {
            let whole = (checkpoint.extent_of(tensor), None);
            let Some(splitter) = splitter else { return Ok(whole) };
            let Some(Cut { part, bytes }) = splitter.cut(tensor)? else { return Ok(whole) };
            let too_far = || PlanError::TooFarApart { tensor: checkpoint.name_of(tensor).to_owned() };
            let stretch = Gather::of(whole.0.start(), bytes).ok_or_else(too_far)?;
            parts.push((tensor, part));
            Ok(stretch)
        };
        let layout = layout::arrange(checkpoint, groups, limits, select, transform, &mut stretch)?;
        // Of the checkpoint, not of what is selected: what one place or one rank gets of it may be an
        // embedding.
        let finds_none = |rule: &QuantiseRule<'_>| !layout.has_quantised() && !rule.finds_any();
        if let Some(form) = limits.quantise.filter(|_| rule.as_ref().is_some_and(finds_none)) {
            return Err(PlanError::NothingToQuantise { form });
        }
        drop(rule);
        let parts = splitter.map(|splitter| Parts::new(splitter.rank(), parts));
        Self::finish(checkpoint, layout, parts, grouping_peak_bytes(checkpoint, layers), limits)
    }

    /// Plans a load of groups of the caller's, each with an arena of its own. The tensors of a
    /// group keep the order in which they are given, those without bytes at its end, and each
    /// becomes what `transform` says. Of a group in which any is quantised, wider elements come
    /// before narrower ones. `grouping_bytes` is host memory that made the groups.
    ///
    /// # Errors
    /// As [`Self::build`].
    #[cfg(any(test, feature = "convert"))]
    pub(crate) fn build_groups<'a>(
        checkpoint: &Checkpoint,
        groups: impl ExactSizeIterator<Item = Group<'a>>,
        limits: &PlanLimits,
        transform: impl FnMut(TensorId) -> Transform,
        grouping_bytes: u64,
    ) -> Result<Self, PlanError> {
        let mut whole = |tensor| Ok((checkpoint.extent_of(tensor), None));
        let layout = layout::arrange(checkpoint, groups, limits, |_| true, transform, &mut whole)?;
        Self::finish(checkpoint, layout, None, grouping_bytes, limits)
    }

    fn finish(
        checkpoint: &Checkpoint,
        mut layout: Layout,
        parts: Option<Parts>,
        grouping_bytes: u64,
        limits: &PlanLimits,
    ) -> Result<Self, PlanError> {
        for layer in layout.layers.iter_mut().filter(|_| !limits.passes.is_one()) {
            layer.is_kept = limits.kept.contains(&layer.id);
        }
        if layout.placements.is_empty() && checkpoint.tensor_count() > 0 {
            return Err(PlanError::NothingSelected { tensors: to_u64(checkpoint.tensor_count()) });
        }
        let runs = reads::join(checkpoint, &layout, limits.hole_bytes_max);
        let order = order::permutation(&runs, limits.order_had());
        // Both lists are as long as they are large.
        let list_bytes = to_u64(size_of_val(&*runs)) + to_u64(size_of_val(&*order));
        let quantised = QuantisedTensors::of(checkpoint, &layout.placements);
        let list_bytes = list_bytes + parts.as_ref().map_or(0, Parts::held_bytes) + quantised.held_bytes();
        let memory = MemoryTerms::settle(checkpoint, grouping_bytes, &layout, list_bytes, limits)?;
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
            passes: limits.passes,
            order: limits.order_had(),
            dtype: limits.dtype,
            parts,
            quantised,
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

    /// What of one read is gathered before its casts and copies, in file order.
    pub fn gathers(&self, read: &ReadOp) -> impl Iterator<Item = GatherOp> + Clone {
        reads::gathers(read.request, &self.placements[index_range(&read.placements)])
    }

    /// What of one read is cast before its copies, in file order.
    pub fn casts(&self, read: &ReadOp) -> impl Iterator<Item = CastOp> + Clone {
        reads::casts(read.request, &self.placements[index_range(&read.placements)])
    }

    /// What of one read is quantised before its copies, in file order.
    pub fn quantising(&self, read: &ReadOp) -> impl Iterator<Item = QuantiseOp> + Clone {
        reads::quantising(read.request, &self.placements[index_range(&read.placements)])
    }

    /// The tensors of one layer and their places, in file order. A quantised one has two: its
    /// values, then its scales.
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

    /// How each file is read and why, in the order of the files, where that is left to the loader
    /// ([`IoMode::Auto`]); else nothing.
    #[must_use]
    pub fn decisions(&self) -> &[IoDecision] {
        &self.decisions
    }

    /// How many layers are resident at once.
    #[must_use]
    pub fn window(&self) -> Window {
        self.window
    }

    /// How often the layers are streamed.
    #[must_use]
    pub fn passes(&self) -> Passes {
        self.passes
    }

    /// What wider floats are narrowed to on the way, if they are.
    #[must_use]
    pub fn dtype(&self) -> Option<FloatType> {
        self.dtype
    }

    /// The tensors that are quantised on the way, by id.
    #[must_use]
    pub fn quantised(&self) -> &[QuantisedTensor] {
        self.quantised.as_slice()
    }

    /// How one tensor is quantised; `None` if it is not.
    #[must_use]
    pub fn quantised_tensor(&self, tensor: TensorId) -> Option<&QuantisedTensor> {
        self.quantised.find(tensor)
    }

    /// The name under which a placement is delivered, and its shape, of a tensor with that
    /// description.
    pub(crate) fn delivered<'a>(
        &'a self,
        placement: &Placement,
        entry: &crate::checkpoint::TensorEntry<'a>,
    ) -> (&'a str, &'a [u64]) {
        let quantised =
            placement.quantised.and_then(|form| Some((form, self.quantised.find(placement.tensor)?)));
        match quantised {
            Some((form, tensor)) if form.is_scales() => (&tensor.scale_name, &tensor.scale_shape),
            Some((_, tensor)) => (entry.name, &tensor.value_shape),
            None => (entry.name, self.part(placement.tensor).map_or(entry.shape, |part| &part.shape)),
        }
    }

    /// The rank whose parts are loaded, if it is one of several.
    #[must_use]
    pub fn rank(&self) -> Option<Rank> {
        self.parts.as_ref().map(|parts| parts.rank)
    }

    /// The part of a tensor that is loaded; `None` if that is all of it.
    #[must_use]
    pub fn part(&self, tensor: TensorId) -> Option<&RankPart> {
        self.parts.as_ref()?.find(tensor)
    }

    /// How many tensors are loaded in part.
    #[must_use]
    pub fn part_count(&self) -> usize {
        self.parts.as_ref().map_or(0, Parts::count)
    }

    /// Bytes of all selected tensors in their files, and of their parts where that is what is
    /// loaded. What is read twice counts twice.
    #[must_use]
    pub fn source_bytes(&self) -> u64 {
        let with_reads = self.placements.iter().filter(|placement| placement.has_reads());
        with_reads.map(Placement::source_bytes).sum()
    }

    /// Bytes of all selected tensors, as they are delivered.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.tensor_bytes).sum()
    }

    /// Bytes that an aligned source reads: [`Self::source_bytes`], and what alignment and gaps that
    /// are read through add.
    #[must_use]
    pub fn aligned_read_bytes(&self) -> u64 {
        self.reads().map(|read| read.request.extent.len_bytes()).sum()
    }

    /// Bytes between those that are wanted which every source reads: short holes between tensors,
    /// and the gaps of gathered parts.
    #[must_use]
    pub fn gap_bytes(&self) -> u64 {
        self.reads().map(|read| read.request.payload.len_bytes()).sum::<u64>() - self.source_bytes()
    }

    /// Bytes that are read and thrown away, alignment, holes and the gaps of gathered parts: at
    /// most, since an unaligned source reads only payloads.
    #[must_use]
    pub fn over_read_bytes(&self) -> u64 {
        self.aligned_read_bytes() - self.source_bytes()
    }
}

fn index_range(range: &Range<u32>) -> Range<usize> {
    to_usize(u64::from(range.start))..to_usize(u64::from(range.end))
}
