//! The order in which reads are issued, and how sequential it is.
//!
//! Reads are always numbered layer by layer. In file order, the runs are sorted by file and offset,
//! and only the permutation is kept:
//!
//! ```text
//! file       | q.0 | q.1 | q.2 | k.0 | k.1 | k.2 |
//! layers     | q.0 | k.0 | q.1 | k.1 | q.2 | k.2 |     a jump after each
//! files      | q.0 | q.1 | q.2 | k.0 | k.1 | k.2 |     none, and every layer is open at once
//! ```
//!
//! If a run reads through a small hole, a run of another layer in that hole comes next: a small
//! step back.

use super::reads::Run;
use super::{LoadPlan, Placement, ReadOp, ReadOrder};
use crate::units::to_usize;

/// Indices of the runs in the order of their reads; empty if they are in order already.
pub(super) fn permutation(runs: &[Run], order: ReadOrder) -> Vec<u32> {
    let place = |run: &Run| (run.shard().index(), run.bytes().start());
    if order == ReadOrder::Layers || runs.is_sorted_by_key(place) {
        return Vec::new();
    }
    // No more runs than reads, which are counted with a u32.
    let mut indices: Vec<u32> = (0..u32::try_from(runs.len()).unwrap_or(u32::MAX)).collect();
    indices.sort_unstable_by_key(|&index| (place(&runs[to_usize(u64::from(index))]), index));
    indices
}

/// A position in the order of a plan's reads: in front of a read, or at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IssuePlace {
    /// Index in the order of runs.
    run: usize,
    /// Reads of that run in front of it.
    reads: u32,
}

/// The read at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NextRead {
    /// The index of its layer in the plan.
    pub(crate) layer: usize,
    /// Its number.
    pub(crate) read: u32,
}

impl LoadPlan {
    /// In which order reads are issued.
    #[must_use]
    pub fn order(&self) -> ReadOrder {
        self.order
    }

    /// The read at a position; `None` at the end.
    pub(crate) fn read_at(&self, place: IssuePlace) -> Option<NextRead> {
        let read = self.reads.reads_at(place.run)?.start + place.reads;
        Some(NextRead { layer: self.layers.partition_point(|layer| layer.reads.end <= read), read })
    }

    /// The position behind this one.
    pub(crate) fn behind(&self, place: IssuePlace) -> IssuePlace {
        let is_last = self.reads.reads_at(place.run).is_none_or(|run| run.start + place.reads + 1 >= run.end);
        if is_last {
            IssuePlace { run: place.run + 1, reads: 0 }
        } else {
            IssuePlace { reads: place.reads + 1, ..place }
        }
    }

    /// The first layer that needs an arena: in file order the layer of the first read, else the
    /// first layer, even if it has no bytes.
    pub(crate) fn first_layer(&self) -> usize {
        match self.order {
            ReadOrder::Layers => 0,
            ReadOrder::Files => self.read_at(IssuePlace::default()).map_or(0, |read| read.layer),
        }
    }

    /// All reads, in the order in which they are issued.
    pub fn reads_in_order(&self) -> impl Iterator<Item = ReadOp> {
        let mut place = IssuePlace::default();
        std::iter::from_fn(move || {
            let next = self.read_at(place)?;
            place = self.behind(place);
            Some(self.read(next.read))
        })
    }

    /// Tensors in the order of their reads, with the indices of their layers. Tensors without bytes
    /// may be missing.
    pub fn arrivals(&self) -> impl Iterator<Item = (usize, &Placement)> {
        (0..self.reads.run_count()).flat_map(move |run| {
            let placements = self.reads.placements_at(run);
            let layer = self.layers.partition_point(|layer| layer.placements.end <= placements.start);
            self.placements[super::index_range(&placements)].iter().map(move |placement| (layer, placement))
        })
    }

    /// Reads that do not begin where the previous read ended: a disk has to seek, and the kernel's
    /// read-ahead ends. A read that begins in the last block of the previous one does not count.
    #[must_use]
    pub fn jumps(&self) -> u64 {
        let mut before: Option<ReadOp> = None;
        let mut jumps = 0;
        for read in self.reads_in_order() {
            let goes_on = |before: &ReadOp| {
                let (last, next) = (before.request, read.request);
                let is_at_end = (last.extent.start()..=last.extent.end()).contains(&next.extent.start());
                last.shard == next.shard && is_at_end && next.payload.start() >= last.payload.end()
            };
            jumps += u64::from(!before.as_ref().is_none_or(goes_on));
            before = Some(read);
        }
        jumps
    }
}
