//! Checkpoint + layers + limits -> a deterministic, printable list of reads and copies.
//!
//! A plan is made from headers alone. It names and sums every term of the peak memory, so a budget
//! that is too small is refused before a tensor byte is read, with the smallest one that works. The
//! loader carries the list out:
//!
//! ```text
//! tensors of a layer (file order)
//!    -> arena layout      every tensor at a 256-byte aligned place of its layer's arena
//!    -> runs              neighbours in the file, small gaps read through
//!    -> reads             at most one slot each, phased to 4096 bytes
//!    -> gathers           of what is wanted in part, if asked for: in the slot
//!    -> permutations      of what is not row-major in its file: in the slot
//!    -> casts             of what is delivered as another type, if asked for: in the slot
//!    -> quantising        of rows into values and scales, if asked for: in the slot
//!    -> copies            slot -> arena, neighbours joined
//!    -> moves             arena -> arena, of what could not land in its place
//! ```
//!
//! Planning opens no file, and allocates nothing in proportion to a tensor's bytes.
//!
//! The files, in the order of what they need of each other: `terms`, `io`, `cast`, `gather`,
//! `permute` and `quantise` define values; `options` and `limits` say what to plan; `operations`
//! are the parts of a plan; `landing` and `layout` arrange arenas; `reads` and `order` cut files
//! into reads; `resident`, `tensors` and `memory` sum the peak; `display` prints.

use std::ops::Range;

use crate::checkpoint::{Checkpoint, TensorEntry, TensorId};
use crate::layers::Layers;
use crate::ranks::{Cut, Rank, RankPart, SplitRules, Splitter};
use crate::units::{to_u64, to_usize};

pub use self::cast::Cast;
#[cfg(feature = "convert")]
pub(crate) use self::cast::is_plain;
pub use self::cast::narrowing_of;
pub use self::error::PlanError;
pub use self::gather::{Gather, GatherOp};
pub use self::io::{
    CacheEffect, FileSystem, IoDecision, IoGroup, IoMode, IoReason, IoWays, ReadRequest, ResidencyBy,
};
pub(crate) use self::io::{is_most, is_mostly_direct};
use self::layout::Layout;
pub use self::limits::{Landing, PlanLimits, ResidentKind};
#[cfg(test)]
pub(crate) use self::memory::LAYER_STATE_BYTES;
pub(crate) use self::memory::grouping_peak_bytes;
pub use self::memory::{HOST_BUDGET_FLOOR_BYTES, MemoryTerms, RingShape};
pub use self::operations::{CastOp, CopyOp, MoveOp, Placement, PlannedLayer, ReadOp};
pub(crate) use self::operations::{Group, Transform};
pub use self::options::{HandOut, LoadOptions, Passes, ReadOrder, Window};
pub(crate) use self::order::{IssuePlace, NextRead};
pub use self::permute::{Permutation, PermuteOp};
use self::permute::{Permutations, Wanted};
pub use self::quantise::QuantiseRule;
pub use self::quantise::{
    Quantisation, QuantiseChoice, QuantiseOp, Quantised, QuantisedPart, SCALE_SUFFIX, UnknownQuantisation,
};
pub use self::reads::Copies;
use self::reads::ReadList;
pub use self::resident::WindowShape;
pub use self::tensors::QuantisedTensor;
use self::tensors::{Parts, QuantisedTensors};
pub use self::terms::{MemoryTerm, TermKind};
pub use onelayer_system::FloatType;

mod cast;
mod display;
mod error;
mod gather;
pub(crate) mod io;
mod landing;
mod layout;
mod limits;
mod memory;
mod operations;
mod options;
mod order;
mod permute;
mod quantise;
mod reads;
mod resident;
mod tensors;
mod terms;

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
    permutations: Permutations,
}

impl LoadPlan {
    /// Plans a load of every tensor for which `select` returns true.
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

    /// The same for one of several ranks, which gets its parts of tensors as the rules say.
    ///
    /// # Errors
    /// As [`Self::build`], and [`PlanError::Split`] for a tensor that a rule cannot divide.
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
        let choice = limits.options.quantise_choice.as_ref();
        let rule = limits.options.quantise.map(|to| QuantiseRule::new(checkpoint, layers, to, choice));
        let transform = |tensor| match rule.as_ref().and_then(|rule| rule.of(tensor)) {
            Some(form) => Transform::Quantise(form),
            None => limits.options.dtype.and_then(|to| narrowing_of(checkpoint, layers, tensor, to)).into(),
        };
        if let (Some(form), Some(_)) = (limits.options.quantise, splitter) {
            return Err(PlanError::QuantisedShard { form });
        }
        let mut parts = Vec::new();
        let mut wanted = |tensor| {
            let whole = || permute::wanted(checkpoint, tensor);
            let Some(splitter) = splitter else { return whole() };
            let Some(Cut { part, bytes }) = splitter.cut(tensor)? else { return whole() };
            if !checkpoint.strides_of(tensor).is_empty() {
                return Err(permute::scattered(&checkpoint.tensor(tensor)));
            }
            let too_far = || PlanError::TooFarApart { tensor: checkpoint.name_of(tensor).to_owned() };
            let start = checkpoint.extent_of(tensor).start();
            let (stretch, gather) = Gather::of(start, bytes).ok_or_else(too_far)?;
            parts.push((tensor, part));
            Ok(Wanted::InOrder(stretch, gather))
        };
        let layout = layout::arrange(checkpoint, groups, limits, select, transform, &mut wanted)?;
        // Looks at the whole checkpoint: the selection (of one place or one rank) may be an
        // embedding alone.
        let finds_none = |rule: &QuantiseRule<'_>| !layout.has_quantised() && !rule.finds_any();
        if let Some(form) = limits.options.quantise.filter(|_| rule.as_ref().is_some_and(finds_none)) {
            return Err(PlanError::NothingToQuantise { form });
        }
        drop(rule);
        let parts = splitter.map(|splitter| Parts::new(splitter.rank(), parts));
        Self::finish(checkpoint, layout, parts, grouping_peak_bytes(checkpoint, layers), limits)
    }

    /// Plans a load of the caller's groups of tensors, each with its own arena. The tensors of a
    /// group keep their order, those without bytes at its end, and `transform` says what each
    /// becomes. In a group with quantised tensors, wider elements come before narrower ones.
    /// `grouping_bytes` is the host memory that grouping took.
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
        let mut whole = |tensor| permute::wanted(checkpoint, tensor);
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
        for layer in layout.layers.iter_mut().filter(|_| !limits.options.passes.is_one()) {
            layer.is_kept = limits.kept.contains(&layer.id);
        }
        if layout.placements.is_empty() && checkpoint.tensor_count() > 0 {
            return Err(PlanError::NothingSelected { tensors: to_u64(checkpoint.tensor_count()) });
        }
        let runs = reads::join(checkpoint, &layout, limits.options.hole_bytes_max);
        let order = order::permutation(&runs, limits.possible_order());
        // Neither list has spare capacity.
        let list_bytes = to_u64(size_of_val(&*runs)) + to_u64(size_of_val(&*order));
        let quantised = QuantisedTensors::of(checkpoint, &layout.placements);
        let list_bytes = list_bytes + parts.as_ref().map_or(0, Parts::held_bytes) + quantised.held_bytes();
        let permutations = Permutations::new(std::mem::take(&mut layout.permutations));
        let list_bytes = list_bytes + permutations.held_bytes();
        let memory = MemoryTerms::divide(checkpoint, grouping_bytes, &layout, list_bytes, limits)?;
        let slot_bytes = memory.ring().slot_bytes;
        let reads = ReadList::number(runs, order, &mut layout, slot_bytes, limits.alignment)?;
        let Layout { layers, placements, moves, .. } = layout;
        Ok(Self {
            layers,
            placements,
            moves,
            reads,
            memory,
            io: limits.options.io,
            decisions: limits.decisions.clone(),
            window: limits.options.window,
            passes: limits.options.passes,
            order: limits.possible_order(),
            dtype: limits.options.dtype,
            parts,
            quantised,
            permutations,
        })
    }

    /// The layers, in execution order. Layers without a selected tensor are left out.
    #[must_use]
    pub fn layers(&self) -> &[PlannedLayer] {
        &self.layers
    }

    /// All reads, layer by layer. [`Self::reads_in_order`] has the order in which they are issued.
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
        // A run, and so a read, belongs to one layer.
        let layer = self.layers.partition_point(|layer| layer.placements.end <= read.placements.start);
        let moves = self.layers.get(layer).map_or(&[][..], |layer| self.moves(layer));
        Copies::new(read.request, &self.placements[index_range(&read.placements)], moves)
    }

    /// The gathers of one read, which come before its casts and copies; in file order.
    pub fn gathers(&self, read: &ReadOp) -> impl Iterator<Item = GatherOp> + Clone {
        reads::gathers(read.request, &self.placements[index_range(&read.placements)])
    }

    /// The stretches of one read that are permuted before its casts and copies, in file order.
    pub fn permuting<'a>(&'a self, read: &ReadOp) -> impl Iterator<Item = PermuteOp<'a>> + Clone {
        let placements = &self.placements[index_range(&read.placements)];
        reads::permuting(read.request, placements, |tensor| self.permutations.find(tensor))
    }

    /// The casts of one read, which come before its copies; in file order.
    pub fn casts(&self, read: &ReadOp) -> impl Iterator<Item = CastOp> + Clone {
        reads::casts(read.request, &self.placements[index_range(&read.placements)])
    }

    /// The stretches of one read that are quantised before its copies, in file order.
    pub fn quantising(&self, read: &ReadOp) -> impl Iterator<Item = QuantiseOp> + Clone {
        reads::quantising(read.request, &self.placements[index_range(&read.placements)])
    }

    /// The tensors of one layer and their places, in file order. A quantised tensor has two
    /// placements: its values, then its scales.
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

    /// How each file is read and why, in the order of the files, for [`IoMode::Auto`]; empty for
    /// other modes.
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

    /// The type that wider floats are narrowed to, if any.
    #[must_use]
    pub fn dtype(&self) -> Option<FloatType> {
        self.dtype
    }

    /// The quantised tensors, by id.
    #[must_use]
    pub fn quantised(&self) -> &[QuantisedTensor] {
        self.quantised.as_slice()
    }

    /// How one tensor is quantised; `None` if it is not.
    #[must_use]
    pub fn quantised_tensor(&self, tensor: TensorId) -> Option<&QuantisedTensor> {
        self.quantised.find(tensor)
    }

    /// The name and the shape under which a placement is delivered, for the tensor described by
    /// `entry`.
    pub(crate) fn delivered<'a>(
        &'a self,
        placement: &Placement,
        entry: &TensorEntry<'a>,
    ) -> (&'a str, &'a [u64]) {
        let quantised =
            placement.quantised.and_then(|form| Some((form, self.quantised.find(placement.tensor)?)));
        match quantised {
            Some((form, tensor)) if form.is_scales() => (&tensor.scale_name, &tensor.scale_shape),
            Some((_, tensor)) => (entry.name, &tensor.value_shape),
            None => (entry.name, self.part(placement.tensor).map_or(entry.shape, |part| &part.shape)),
        }
    }

    /// The rank whose parts are loaded, if there are several.
    #[must_use]
    pub fn rank(&self) -> Option<Rank> {
        self.parts.as_ref().map(|parts| parts.rank)
    }

    /// The part of a tensor that is loaded; `None` for the whole tensor.
    #[must_use]
    pub fn part(&self, tensor: TensorId) -> Option<&RankPart> {
        self.parts.as_ref()?.find(tensor)
    }

    /// Number of tensors that are loaded in part.
    #[must_use]
    pub fn part_count(&self) -> usize {
        self.parts.as_ref().map_or(0, Parts::count)
    }

    /// Bytes of all selected tensors (or of their parts) in their files. Bytes that are read twice
    /// count twice.
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

    /// Bytes that an aligned source reads: [`Self::source_bytes`], plus alignment and gaps that are
    /// read through.
    #[must_use]
    pub fn aligned_read_bytes(&self) -> u64 {
        self.reads().map(|read| read.request.extent.len_bytes()).sum()
    }

    /// Unwanted bytes inside payloads, which every source reads: short holes between tensors, and
    /// gaps of gathered parts.
    #[must_use]
    pub fn gap_bytes(&self) -> u64 {
        self.reads().map(|read| read.request.payload.len_bytes()).sum::<u64>() - self.source_bytes()
    }

    /// Bytes that are read and thrown away (alignment, holes, gaps of gathered parts). An upper
    /// bound: an unaligned source reads payloads alone.
    #[must_use]
    pub fn over_read_bytes(&self) -> u64 {
        self.aligned_read_bytes() - self.source_bytes()
    }
}

fn index_range(range: &Range<u32>) -> Range<usize> {
    to_usize(u64::from(range.start))..to_usize(u64::from(range.end))
}
