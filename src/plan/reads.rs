//! From extents of a layer to runs, reads of at most one slot each, and the copies out of them.
//!
//! Only runs are stored. A read is a slot-sized cut of a run, and its copies follow from the places
//! of the run's tensors. So a plan grows with the number of tensors, not with their bytes.
//!
//! Elements that are widened, and blocks that become floats, grow in the slot, from their start.
//! Such a tensor is a run of its own, with shorter reads:
//!
//! ```text
//! slot    |..|elements|                    after the read
//!         |..|elements, widened     |..|   `..` at most one block: the phase of the elements in the file
//! ```

use std::ops::Range;

use super::gather::stretches;
use super::landing::landing_of;
use super::layout::Layout;
use super::permute::unit_blocks;
use super::quantise::first_row;
use super::{
    Cast, CastOp, CopyOp, GatherOp, MoveOp, Permutation, PermuteOp, Placement, PlanError, QuantiseOp,
    Quantised, ReadOp, ReadRequest, index_range,
};
use crate::checkpoint::{Checkpoint, ShardId, TensorId};
use crate::units::{Alignment, ByteRange, to_usize};

/// A stretch of one file that is read as a whole, and its tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    shard: ShardId,
    bytes: ByteRange,
    /// Its tensors, without empty ones at its ends.
    placements: Range<u32>,
    /// Index of its first read in the plan.
    first_read: u32,
}

/// All runs, layer by layer. A run never spans two layers: files often hold `layers.10` next to
/// `layers.1`, and a slot waiting for a layer outside the window would never be freed.
pub(super) fn join(checkpoint: &Checkpoint, layout: &Layout, hole_bytes_max: u64) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for layer in &layout.layers {
        let first_run = runs.len();
        for index in layer.placements.clone() {
            let placement = &layout.placements[to_usize(u64::from(index))];
            if placement.quantised.is_some_and(Quantised::has_no_reads) {
                let run = runs[first_run..].last_mut().expect("its values have rows, and stand before it");
                run.placements.end = index + 1;
                continue;
            }
            let shard = checkpoint.shard_of(placement.tensor);
            for bytes in stretches(placement.extent, placement.gather, hole_bytes_max) {
                let near = |run: &&mut Run| {
                    // The tensors of a caller's group may be in another order than in their file.
                    let hole_bytes = bytes.start().checked_sub(run.bytes.end());
                    run.shard == shard
                        && hole_bytes.is_some_and(|bytes| bytes <= hole_bytes_max)
                        && !stands_alone(placement)
                        && !stands_alone(run.first(&layout.placements))
                };
                match runs[first_run..].last_mut().filter(near) {
                    Some(run) => {
                        run.bytes = run.bytes.join(bytes);
                        run.placements.end = index + 1;
                    }
                    None => runs.push(Run { shard, bytes, placements: index..index + 1, first_read: 0 }),
                }
            }
        }
    }
    runs.shrink_to_fit();
    runs
}

/// Bytes of a read whose blocks became floats: blocks and floats stay in the second-level cache of
/// a core until they are copied.
const DECODED_BYTES: u64 = 512 << 10;

/// Aligned blocks of a file that such a read has room for, at least: floats may take 21 times the
/// bytes.
pub(super) const SLOT_BLOCKS_OF_FLOATS_MIN: u64 = 64;

/// With so many reads, one more costs little.
const LONG_RUN_READS: u64 = 8;

/// The reads of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReadList {
    runs: Vec<Run>,
    /// Indices of the runs in the order of their reads; empty if they are in order already.
    order: Vec<u32>,
    cuts: Cuts,
    count: u32,
}

/// How runs are cut into reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cuts {
    slot_bytes: u64,
    alignment: Alignment,
    /// Longest unit that must not be cut (an element or block to be cast, a row to be quantised),
    /// rounded up to the alignment.
    uncut_bytes: u64,
}

impl ReadList {
    /// Numbers the reads of all runs, and sets the reads of each layer.
    pub(super) fn number(
        mut runs: Vec<Run>,
        order: Vec<u32>,
        layout: &mut Layout,
        slot_bytes: u64,
        alignment: Alignment,
    ) -> Result<Self, PlanError> {
        let units = layout.placements.iter().filter(|placement| is_split(placement, alignment));
        let units = units.filter_map(|placement| alignment.up(placement.cast?.source_unit_bytes()));
        let uncut_bytes = units.max().unwrap_or(0).max(row_blocks(&layout.placements, alignment));
        let uncut_bytes = uncut_bytes.max(unit_blocks(&layout.placements, alignment));
        let cuts = Cuts { slot_bytes, alignment, uncut_bytes };
        let mut count = 0_u32;
        let mut rest = runs.iter_mut().peekable();
        for layer in &mut layout.layers {
            let first = count;
            while let Some(run) = rest.next_if(|run| run.placements.start < layer.placements.end) {
                run.first_read = count;
                let reads = cuts.reads_in(run, &layout.placements);
                let reads = reads.and_then(|reads| count.checked_add(reads));
                let overflow = || PlanError::Overflow { what: "the reads", layer: layer.id.to_string() };
                count = reads.ok_or_else(overflow)?;
            }
            layer.reads = first..count;
        }
        Ok(Self { runs, order, cuts, count })
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    pub(super) fn run_count(&self) -> usize {
        self.runs.len()
    }

    /// Index of the run at a position of the order; `None` at the end.
    fn run_at(&self, place: usize) -> Option<usize> {
        match self.order.is_empty() {
            true => Some(place).filter(|&place| place < self.runs.len()),
            false => self.order.get(place).map(|&index| to_usize(u64::from(index))),
        }
    }

    /// The reads of the run at a position of the order; `None` at the end.
    pub(super) fn reads_at(&self, place: usize) -> Option<Range<u32>> {
        let index = self.run_at(place)?;
        let end = self.runs.get(index + 1).map_or(self.count, |next| next.first_read);
        Some(self.runs[index].first_read..end)
    }

    /// The tensors of the run at a position of the order.
    pub(super) fn placements_at(&self, place: usize) -> Range<u32> {
        self.run_at(place).map_or(0..0, |index| self.runs[index].placements.clone())
    }

    /// One read. `placements` are all placements of the plan.
    ///
    /// # Panics
    /// If the index is not below [`Self::count`].
    pub(super) fn read(&self, index: u32, placements: &[Placement]) -> ReadOp {
        assert!(index < self.count, "read {index} of {}", self.count);
        let run = &self.runs[self.runs.partition_point(|run| run.first_read <= index) - 1];
        let Cuts { alignment, uncut_bytes, .. } = self.cuts;
        let stride_bytes = self.cuts.stride_bytes(run, placements);
        // Nothing overflows: everything is below the aligned end of the run, which fits.
        let start = self.cuts.base(run, stride_bytes) + u64::from(index - run.first_read) * stride_bytes;
        let end = start.checked_add(stride_bytes).unwrap_or(run.bytes.end());
        let cut = |at: u64| match uncut_bytes {
            0 => at,
            _ => start_of_unit(&placements[index_range(&run.placements)], at),
        };
        let stretch = ByteRange::new(cut(start), cut(end)).unwrap_or(run.bytes);
        let payload = run.bytes.intersect(stretch).expect("every read of a run has bytes");
        let extent = payload.align_outward(alignment).expect("the run's aligned end fits");
        let request = ReadRequest { shard: run.shard, extent, payload };
        ReadOp { request, placements: run.placements.clone() }
    }
}

impl Run {
    pub(super) fn shard(&self) -> ShardId {
        self.shard
    }

    pub(super) fn bytes(&self) -> ByteRange {
        self.bytes
    }

    /// Its first tensor. `placements` are all placements of the plan.
    fn first<'a>(&self, placements: &'a [Placement]) -> &'a Placement {
        &placements[to_usize(u64::from(self.placements.start))]
    }
}

/// True for a tensor that has a run to itself, with shorter reads: it grows in the slot, or needs
/// room there to be permuted.
fn stands_alone(placement: &Placement) -> bool {
    widening(placement).is_some() || placement.permuted_unit_bytes.is_some()
}

fn widening(placement: &Placement) -> Option<Cast> {
    placement.cast.filter(|cast| cast.is_widening())
}

/// True if a cut may fall into a unit to be cast: cuts are multiples of the alignment, and so of
/// every element size, but not of every block's.
fn is_split(placement: &Placement, alignment: Alignment) -> bool {
    let unit_bytes = placement.cast.map(Cast::source_unit_bytes);
    let is_whole = |at: u64, bytes| at.is_multiple_of(bytes);
    unit_bytes.is_some_and(|bytes| {
        !is_whole(placement.extent.start(), bytes) || !is_whole(alignment.bytes(), bytes)
    })
}

impl Cuts {
    /// Distance between the starts of two reads of a run, before they are moved to the start of an
    /// element: at least two blocks, so that every read has bytes.
    fn stride_bytes(&self, run: &Run, placements: &[Placement]) -> u64 {
        // A cut moves down to the start of its element or row, so the read behind it may begin that
        // much earlier.
        let only = run.first(placements);
        // The scratch of a unit to be permuted is at the end of the slot.
        let scratch_bytes = unit_blocks(std::slice::from_ref(only), self.alignment);
        let Some(cast) = widening(only) else { return self.slot_bytes - self.uncut_bytes - scratch_bytes };
        let (source, target) = (cast.source_unit_bytes(), cast.target_unit_bytes());
        if only.permuted_unit_bytes.is_some() {
            // `phase + ratio * (stride + unit) <= slot`, and so with the scratch before the cast.
            let widened = (self.slot_bytes - self.alignment.bytes()) / target * source;
            let before = self.slot_bytes - scratch_bytes;
            return self.alignment.down(widened.min(before)) - scratch_bytes;
        }
        let slot_bytes = match cast.unit_elements() {
            1 => self.slot_bytes,
            _ => self.slot_bytes.min(DECODED_BYTES.max(self.alignment.bytes() * SLOT_BLOCKS_OF_FLOATS_MIN)),
        };
        // The first read of a run, widened, is no longer than the others: `phase + ratio * (stride
        // - phase)`.
        if !is_split(only, self.alignment) {
            return self.alignment.down(slot_bytes * source / target);
        }
        // A read may begin almost a unit early, somewhere in its first block of the file:
        // `phase + ratio * (stride + unit) <= slot`. Elements of whole alignments begin and end
        // equally early, so they have no unit more.
        let early = if self.alignment.bytes().is_multiple_of(source) { 0 } else { source };
        let widened = (slot_bytes - self.alignment.bytes()) / target * source - early;
        self.alignment.down(widened)
    }

    /// Number of reads of a run; `None` if there are too many, or if its aligned end overflows.
    fn reads_in(&self, run: &Run, placements: &[Placement]) -> Option<u32> {
        let aligned = run.bytes.align_outward(self.alignment)?;
        let stride_bytes = self.stride_bytes(run, placements);
        u32::try_from((aligned.end() - self.base(run, stride_bytes)).div_ceil(stride_bytes)).ok()
    }

    /// The file offset from which the reads of a run are counted. The reads of a long run lie on
    /// multiples of their length in the file, as disk blocks mostly do, so its first read is
    /// shorter. A short run could need a second read for that.
    fn base(&self, run: &Run, stride_bytes: u64) -> u64 {
        let start = run.bytes.start();
        let is_long = run.bytes.len_bytes() / stride_bytes >= LONG_RUN_READS;
        if is_long && stride_bytes == self.slot_bytes && self.alignment.divides(stride_bytes) {
            start - start % stride_bytes
        } else {
            self.alignment.down(start)
        }
    }
}

/// `at`, or the start of the bytes around it that must not be cut.
/// `placements` are those of one run.
fn start_of_unit(placements: &[Placement], at: u64) -> u64 {
    let index = placements.partition_point(|placement| placement.extent.end() <= at);
    let Some(across) = placements.get(index).filter(|placement| placement.extent.start() < at) else {
        return at;
    };
    across.uncut_bytes().map_or(at, |bytes| at - (at - across.extent.start()) % bytes)
}

/// The longest row to be quantised: its bytes in the file, and its tensor.
pub(super) fn longest_row(placements: &[Placement]) -> Option<(u64, TensorId)> {
    let rows = placements.iter().filter_map(|placement| {
        Some((placement.quantised?.source_row_bytes(), std::cmp::Reverse(placement.tensor)))
    });
    rows.max().map(|(bytes, tensor)| (bytes, tensor.0))
}

/// Bytes of the blocks that hold one row to be quantised, at most.
pub(super) fn row_blocks(placements: &[Placement], alignment: Alignment) -> u64 {
    longest_row(placements).map_or(0, |(bytes, _)| alignment.up(bytes).unwrap_or(u64::MAX))
}

/// The copies of one read, in file order. Neighbours are joined.
#[derive(Clone, Debug)]
pub struct Copies<'a> {
    request: ReadRequest,
    /// Tensors that may still have bytes in the read.
    rest: &'a [Placement],
    /// The moves of the layer.
    moves: &'a [MoveOp],
}

/// The tensors of a run that end behind the start of a read.
fn not_before<'a>(request: &ReadRequest, placements: &'a [Placement]) -> &'a [Placement] {
    &placements[placements.partition_point(|placement| placement.extent.end() <= request.payload.start())..]
}

impl<'a> Copies<'a> {
    /// `placements` are those of the read's run, `moves` those of its layer.
    pub(super) fn new(request: ReadRequest, placements: &'a [Placement], moves: &'a [MoveOp]) -> Self {
        Self { request, rest: not_before(&request, placements), moves }
    }

    /// The copies of a read of exactly one tensor, for tests of devices.
    #[cfg(test)]
    pub(crate) fn of_one_tensor(placement: &'a Placement) -> Self {
        let request = ReadRequest { shard: ShardId(0), extent: placement.extent, payload: placement.extent };
        Self { request, rest: std::slice::from_ref(placement), moves: &[] }
    }

    /// The copy of one tensor's bytes in this read.
    fn copy_of(&self, placement: &Placement) -> Option<CopyOp> {
        let piece = placement.extent.intersect(self.request.payload)?;
        let before = placement.delivered_bytes(placement.source_bytes_before(piece.start()));
        let values = placement.quantised.filter(|form| form.has_no_reads());
        let behind_bytes = values.map_or(0, |form| form.value_bytes(piece.len_bytes()));
        let copy = CopyOp {
            slot_offset_bytes: piece.start() - self.request.extent.start() + behind_bytes,
            arena_offset_bytes: landing_of(placement, self.moves) + before,
            len_bytes: placement.delivered_bytes_in(piece),
        };
        // The piece may lie in a gap between two runs.
        Some(copy).filter(|copy| copy.len_bytes > 0)
    }
}

impl Iterator for Copies<'_> {
    type Item = CopyOp;

    fn next(&mut self) -> Option<CopyOp> {
        let mut joined: Option<CopyOp> = None;
        while let Some((placement, rest)) = self.rest.split_first() {
            if placement.extent.start() >= self.request.payload.end() {
                break;
            }
            match (&mut joined, self.copy_of(placement)) {
                (_, None) => {} // a tensor without bytes here
                (None, copy) => joined = copy,
                (Some(open), Some(copy)) if open.is_continued_by(&copy) => open.len_bytes += copy.len_bytes,
                (Some(_), Some(_)) => break,
            }
            self.rest = rest;
        }
        joined
    }
}

impl CopyOp {
    fn is_continued_by(&self, next: &Self) -> bool {
        self.slot_offset_bytes + self.len_bytes == next.slot_offset_bytes
            && self.arena_offset_bytes + self.len_bytes == next.arena_offset_bytes
    }
}

/// The tensors of a read, each with its piece of the payload, in file order. `placements` are those
/// of the read's run.
fn pieces(
    request: ReadRequest,
    placements: &[Placement],
) -> impl Iterator<Item = (&Placement, ByteRange)> + Clone {
    not_before(&request, placements)
        .iter()
        .take_while(move |placement| placement.extent.start() < request.payload.end())
        .filter_map(move |placement| Some((placement, placement.extent.intersect(request.payload)?)))
}

/// The casts of a read, in file order. `placements` are those of its run.
pub(super) fn casts(request: ReadRequest, placements: &[Placement]) -> impl Iterator<Item = CastOp> + Clone {
    pieces(request, placements).filter_map(move |(placement, piece)| {
        let cast = placement.cast?;
        Some(CastOp {
            tensor: placement.tensor,
            slot_offset_bytes: piece.start() - request.extent.start(),
            source_len_bytes: placement.source_bytes_in(piece),
            cast,
        })
    })
}

/// The stretches of a read that are quantised, in file order. `placements` are those of its run.
pub(super) fn quantising(
    request: ReadRequest,
    placements: &[Placement],
) -> impl Iterator<Item = QuantiseOp> + Clone {
    pieces(request, placements).filter_map(move |(placement, piece)| {
        let form = placement.quantised.filter(|form| !form.has_no_reads())?;
        Some(QuantiseOp {
            tensor: placement.tensor,
            slot_offset_bytes: piece.start() - request.extent.start(),
            source_len_bytes: piece.len_bytes(),
            first_row: first_row(placement.extent, piece, form),
            form,
        })
    })
}

/// The gathers of a read, in file order. `placements` are those of its run.
pub(super) fn gathers(
    request: ReadRequest,
    placements: &[Placement],
) -> impl Iterator<Item = GatherOp> + Clone {
    let wanted = pieces(request, placements).filter_map(move |(placement, piece)| {
        let gather = placement.gather?;
        Some(GatherOp {
            tensor: placement.tensor,
            slot_offset_bytes: piece.start() - request.extent.start(),
            source_len_bytes: piece.len_bytes(),
            phase_bytes: (piece.start() - placement.extent.start()) % gather.stride_bytes(),
            gather,
        })
    });
    wanted.filter(|step| !step.is_one_run())
}

/// The stretches of a read that are permuted, in file order. `placements` are those of its run.
pub(super) fn permuting<'a>(
    request: ReadRequest,
    placements: &[Placement],
    permutation: impl Fn(TensorId) -> Option<&'a Permutation> + Clone,
) -> impl Iterator<Item = PermuteOp<'a>> + Clone {
    pieces(request, placements).filter_map(move |(placement, piece)| {
        placement.permuted_unit_bytes?;
        Some(PermuteOp {
            tensor: placement.tensor,
            slot_offset_bytes: piece.start() - request.extent.start(),
            len_bytes: piece.len_bytes(),
            scratch_offset_bytes: request.extent.len_bytes(),
            permutation: permutation(placement.tensor)?,
        })
    })
}
