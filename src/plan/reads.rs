//! Extents of a layer -> runs, reads of at most one slot each, and the copies out of them.
//!
//! Only runs are stored: a read is a slot-sized cut of a run, and its copies follow from the places
//! of the run's tensors. So a plan grows with the number of tensors and not with their bytes.
//!
//! What is widened grows in its slot, from where its elements began. It is a run of its own, and
//! its reads are short:
//!
//! ```text
//! slot    |..|elements|                    after the read
//!         |..|elements, widened     |..|   `..` at most one block: the phase of the elements in the file
//! ```

use std::ops::Range;

use super::gather::stretches;
use super::landing::landing_of;
use super::layout::Layout;
use super::quantise::first_row;
use super::{
    Cast, CastOp, CopyOp, GatherOp, MoveOp, Placement, PlanError, QuantiseOp, Quantised, ReadOp, ReadRequest,
    index_range,
};
use crate::checkpoint::{Checkpoint, ShardId, TensorId};
use crate::units::{Alignment, ByteRange, to_usize};

/// A stretch of one file that is wanted as a whole, and the tensors in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    shard: ShardId,
    bytes: ByteRange,
    /// Its tensors, tensors without bytes left out at its ends.
    placements: Range<u32>,
    /// Index of its first read in the plan.
    first_read: u32,
}

/// All runs, layer by layer. A run never spans two layers: files often hold `layers.10` next to
/// `layers.1`, and a slot that waits for a layer outside the window would never be freed.
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
                    // Tensors of a caller's group may stand in another order than in their file.
                    let hole_bytes = bytes.start().checked_sub(run.bytes.end());
                    run.shard == shard
                        && hole_bytes.is_some_and(|bytes| bytes <= hole_bytes_max)
                        && widening(placement).or_else(|| run.widening(&layout.placements)).is_none()
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

/// One more read is little from here on.
const LONG_RUN_READS: u64 = 8;

/// The reads of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReadList {
    runs: Vec<Run>,
    /// Indices of the runs in the order in which they are read; empty if that is theirs.
    order: Vec<u32>,
    cuts: Cuts,
    count: u32,
}

/// Where runs are cut into reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cuts {
    slot_bytes: u64,
    alignment: Alignment,
    /// The longest of what may lie across such a place and is not to be cut, in whole blocks: an
    /// element that is cast, or a row that is quantised.
    uncut_bytes: u64,
}

impl ReadList {
    /// Numbers the reads of all runs and tells each layer which are its own.
    pub(super) fn number(
        mut runs: Vec<Run>,
        order: Vec<u32>,
        layout: &mut Layout,
        slot_bytes: u64,
        alignment: Alignment,
    ) -> Result<Self, PlanError> {
        let elements = if layout.placements.iter().any(is_split) { alignment.bytes() } else { 0 };
        let uncut_bytes = elements.max(row_blocks(&layout.placements, alignment));
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

    /// Index of the run at a place of the order; `None` behind the last one.
    fn run_at(&self, place: usize) -> Option<usize> {
        match self.order.is_empty() {
            true => Some(place).filter(|&place| place < self.runs.len()),
            false => self.order.get(place).map(|&index| to_usize(u64::from(index))),
        }
    }

    /// The reads of the run at a place of the order; `None` behind the last one.
    pub(super) fn reads_at(&self, place: usize) -> Option<Range<u32>> {
        let index = self.run_at(place)?;
        let end = self.runs.get(index + 1).map_or(self.count, |next| next.first_read);
        Some(self.runs[index].first_read..end)
    }

    /// The tensors of the run at a place of the order.
    pub(super) fn placements_at(&self, place: usize) -> Range<u32> {
        self.run_at(place).map_or(0..0, |index| self.runs[index].placements.clone())
    }

    /// One read. `placements` are all of the plan.
    ///
    /// # Panics
    /// If the index is not below [`Self::count`].
    pub(super) fn read(&self, index: u32, placements: &[Placement]) -> ReadOp {
        assert!(index < self.count, "read {index} of {}", self.count);
        let run = &self.runs[self.runs.partition_point(|run| run.first_read <= index) - 1];
        let Cuts { alignment, uncut_bytes, .. } = self.cuts;
        let stride_bytes = self.cuts.stride_bytes(run, placements);
        // Neither sum nor product overflows: all lie below the aligned end of the run, which fits.
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

    /// What all of it is widened by. `placements` are all of the plan.
    fn widening(&self, placements: &[Placement]) -> Option<Cast> {
        widening(&placements[to_usize(u64::from(self.placements.start))])
    }
}

fn widening(placement: &Placement) -> Option<Cast> {
    placement.cast.filter(|cast| cast.is_widening())
}

/// True if a cut may fall into an element that is cast: cuts are multiples of the alignment, and so
/// of every element's size.
fn is_split(placement: &Placement) -> bool {
    let element_bytes = placement.cast.map(Cast::source_element_bytes);
    element_bytes.is_some_and(|bytes| !placement.extent.start().is_multiple_of(bytes))
}

impl Cuts {
    /// From where one read of a run begins to where the next one does, before both are cut between
    /// elements: at least two blocks, so that every read has bytes.
    fn stride_bytes(&self, run: &Run, placements: &[Placement]) -> u64 {
        // A cut goes down to the start of its element or row: the read behind it may begin so much earlier.
        let Some(cast) = run.widening(placements) else { return self.slot_bytes - self.uncut_bytes };
        let shorter =
            |is_split| if is_split { self.slot_bytes - self.alignment.bytes() } else { self.slot_bytes };
        let only = &placements[to_usize(u64::from(run.placements.start))];
        // Widened, the first read of a run is no longer than the others: `phase + ratio * (stride -
        // phase)`.
        self.alignment.down(shorter(is_split(only)) * cast.source_element_bytes() / cast.to().bytes())
    }

    /// How many reads a run takes; `None` if there are too many, or if its aligned end does not
    /// fit.
    fn reads_in(&self, run: &Run, placements: &[Placement]) -> Option<u32> {
        let aligned = run.bytes.align_outward(self.alignment)?;
        let stride_bytes = self.stride_bytes(run, placements);
        u32::try_from((aligned.end() - self.base(run, stride_bytes)).div_ceil(stride_bytes)).ok()
    }

    /// From where the reads of a run are counted. Those of a long run lie on multiples of their
    /// length in the file, as its blocks on a disk mostly do: its first read is shorter then. A
    /// short run could become two reads for it.
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

/// `at`, or the start of the element across it if that is one to be cast, or of the row if that is
/// to be quantised. `placements` are those of a run.
fn start_of_unit(placements: &[Placement], at: u64) -> u64 {
    let index = placements.partition_point(|placement| placement.extent.end() <= at);
    let Some(across) = placements.get(index).filter(|placement| placement.extent.start() < at) else {
        return at;
    };
    let row_bytes = across.quantised.map(Quantised::source_row_bytes);
    let unit_bytes = row_bytes.or(across.cast.map(Cast::source_element_bytes));
    unit_bytes.map_or(at, |bytes| at - (at - across.extent.start()) % bytes)
}

/// The longest row that is quantised: its bytes in the file, and its tensor.
pub(super) fn longest_row(placements: &[Placement]) -> Option<(u64, TensorId)> {
    let rows = placements.iter().filter_map(|placement| {
        Some((placement.quantised?.source_row_bytes(), std::cmp::Reverse(placement.tensor)))
    });
    rows.max().map(|(bytes, tensor)| (bytes, tensor.0))
}

/// The blocks that a row to be quantised takes at most, in bytes.
pub(super) fn row_blocks(placements: &[Placement], alignment: Alignment) -> u64 {
    longest_row(placements).map_or(0, |(bytes, _)| alignment.up(bytes).unwrap_or(u64::MAX))
}

/// The copies of one read, in file order; neighbours are joined.
#[derive(Clone, Debug)]
pub struct Copies<'a> {
    request: ReadRequest,
    /// Tensors that may still have bytes in the read.
    rest: &'a [Placement],
    /// Those of the layer.
    moves: &'a [MoveOp],
}

/// Those of a run's tensors that lie in a read or behind it.
fn not_before<'a>(request: &ReadRequest, placements: &'a [Placement]) -> &'a [Placement] {
    &placements[placements.partition_point(|placement| placement.extent.end() <= request.payload.start())..]
}

impl<'a> Copies<'a> {
    /// `placements` are those of the read's run, `moves` those of its layer.
    pub(super) fn new(request: ReadRequest, placements: &'a [Placement], moves: &'a [MoveOp]) -> Self {
        Self { request, rest: not_before(&request, placements), moves }
    }

    /// The copies of a read that holds one tensor and nothing else: for tests of devices.
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
        // A piece may lie between two runs.
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

/// What of a read is cast, in file order. `placements` are those of its run.
pub(super) fn casts(request: ReadRequest, placements: &[Placement]) -> impl Iterator<Item = CastOp> + Clone {
    let behind = move |placement: &&Placement| placement.extent.start() < request.payload.end();
    not_before(&request, placements).iter().take_while(behind).filter_map(move |placement| {
        let cast = placement.cast?;
        let piece = placement.extent.intersect(request.payload)?;
        let slot_offset_bytes = piece.start() - request.extent.start();
        let source_len_bytes = placement.source_bytes_in(piece);
        Some(CastOp { tensor: placement.tensor, slot_offset_bytes, source_len_bytes, cast })
    })
}

/// What of a read is quantised, in file order. `placements` are those of its run.
pub(super) fn quantising(
    request: ReadRequest,
    placements: &[Placement],
) -> impl Iterator<Item = QuantiseOp> + Clone {
    let behind = move |placement: &&Placement| placement.extent.start() < request.payload.end();
    not_before(&request, placements).iter().take_while(behind).filter_map(move |placement| {
        let form = placement.quantised.filter(|form| !form.has_no_reads())?;
        let piece = placement.extent.intersect(request.payload)?;
        Some(QuantiseOp {
            tensor: placement.tensor,
            slot_offset_bytes: piece.start() - request.extent.start(),
            source_len_bytes: piece.len_bytes(),
            first_row: first_row(placement.extent, piece, form),
            form,
        })
    })
}

/// What of a read is gathered, in file order. `placements` are those of its run.
pub(super) fn gathers(
    request: ReadRequest,
    placements: &[Placement],
) -> impl Iterator<Item = GatherOp> + Clone {
    let behind = move |placement: &&Placement| placement.extent.start() < request.payload.end();
    let wanted = not_before(&request, placements).iter().take_while(behind).filter_map(move |placement| {
        let gather = placement.gather?;
        let piece = placement.extent.intersect(request.payload)?;
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
