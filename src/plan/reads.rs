//! Extents of a layer -> runs, reads of at most one slot each, and the copies out of them.
//!
//! Only runs are stored: a read is a slot-sized cut of a run, and its copies follow from the places of the run's
//! tensors. So a plan grows with the number of tensors and not with their bytes.

use std::ops::Range;

use super::layout::{LaidOutLayer, Layout};
use super::{CopyOp, Placement, PlanError, ReadOp, ReadRequest, index_range};
use crate::checkpoint::{Checkpoint, ShardId};
use crate::units::{Alignment, ByteRange, KIB};

/// A hole between two wanted extents that is cheaper to read through than to seek over: what a disk moves in
/// the time of one more request.
const GAP_BYTES_MAX: u64 = 64 * KIB;

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

/// All runs, layer by layer. A run never spans two layers: files often hold `layers.10` next to `layers.1`, and
/// a slot that waits for a layer outside the window would never be freed.
pub(super) fn join(checkpoint: &Checkpoint, layout: &Layout) -> Vec<Vec<Run>> {
    layout.layers.iter().map(|layer| runs_of(checkpoint, layout, layer)).collect()
}

fn runs_of(checkpoint: &Checkpoint, layout: &Layout, layer: &LaidOutLayer) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (index, placement) in layer.placements.clone().zip(&layout.placements[index_range(&layer.placements)])
    {
        let extent = placement.extent;
        if extent.is_empty() {
            continue;
        }
        let shard = checkpoint.tensor(placement.tensor).shard;
        let near = |run: &&mut Run| {
            run.shard == shard && extent.start() <= run.bytes.end().saturating_add(GAP_BYTES_MAX)
        };
        match runs.last_mut().filter(near) {
            Some(run) => {
                run.bytes = run.bytes.join(extent);
                run.placements.end = index + 1;
            }
            None => runs.push(Run { shard, bytes: extent, placements: index..index + 1, first_read: 0 }),
        }
    }
    runs.shrink_to_fit();
    runs
}

/// The reads of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReadList {
    runs: Vec<Run>,
    slot_bytes: u64,
    alignment: Alignment,
    count: u32,
}

impl ReadList {
    /// Numbers the reads of all runs; the second value has the reads of each layer.
    pub(super) fn number(
        runs_of_layers: Vec<Vec<Run>>,
        layers: &[LaidOutLayer],
        slot_bytes: u64,
        alignment: Alignment,
    ) -> Result<(Self, Vec<Range<u32>>), PlanError> {
        let runs = Vec::with_capacity(runs_of_layers.iter().map(Vec::len).sum());
        let mut list = Self { runs, slot_bytes, alignment, count: 0 };
        let mut reads_of_layers = Vec::with_capacity(layers.len());
        for (runs, layer) in runs_of_layers.into_iter().zip(layers) {
            let first = list.count;
            for mut run in runs {
                run.first_read = list.count;
                let reads = list.reads_in(&run).and_then(|reads| list.count.checked_add(reads));
                let overflow = || PlanError::Overflow { what: "the reads", layer: layer.id.to_string() };
                list.count = reads.ok_or_else(overflow)?;
                list.runs.push(run);
            }
            reads_of_layers.push(first..list.count);
        }
        Ok((list, reads_of_layers))
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// How many slots a run fills; `None` if there are too many, or if its aligned end does not fit.
    fn reads_in(&self, run: &Run) -> Option<u32> {
        let aligned = run.bytes.align_outward(self.alignment)?;
        u32::try_from(aligned.len_bytes().div_ceil(self.slot_bytes)).ok()
    }

    /// One read.
    ///
    /// # Panics
    /// If the index is not below [`Self::count`].
    pub(super) fn read(&self, index: u32) -> ReadOp {
        assert!(index < self.count, "read {index} of {}", self.count);
        let run = &self.runs[self.runs.partition_point(|run| run.first_read <= index) - 1];
        // Neither sum nor product overflows: all lie below the aligned end of the run, which fits.
        let start =
            self.alignment.down(run.bytes.start()) + u64::from(index - run.first_read) * self.slot_bytes;
        let slot = ByteRange::with_len(start, self.slot_bytes).unwrap_or(run.bytes);
        let payload = run.bytes.intersect(slot).expect("every read of a run has bytes");
        let extent = payload.align_outward(self.alignment).expect("the run's aligned end fits");
        let request = ReadRequest { shard: run.shard, extent, payload };
        ReadOp { request, placements: run.placements.clone() }
    }
}

/// The copies of one read, in file order; neighbours are joined.
#[derive(Clone, Debug)]
pub struct Copies<'a> {
    request: ReadRequest,
    /// Tensors that may still have bytes in the read.
    rest: &'a [Placement],
}

impl<'a> Copies<'a> {
    /// `placements` are those of the read's run.
    pub(super) fn new(request: ReadRequest, placements: &'a [Placement]) -> Self {
        let done = placements.partition_point(|placement| placement.extent.end() <= request.payload.start());
        Self { request, rest: &placements[done..] }
    }

    /// The copy of one tensor's bytes in this read.
    fn copy_of(&self, placement: &Placement) -> Option<CopyOp> {
        let piece = placement.extent.intersect(self.request.payload)?;
        Some(CopyOp {
            slot_offset_bytes: piece.start() - self.request.extent.start(),
            arena_offset_bytes: placement.arena_offset_bytes + (piece.start() - placement.extent.start()),
            len_bytes: piece.len_bytes(),
        })
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
                (_, None) => {} // a tensor without bytes
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
