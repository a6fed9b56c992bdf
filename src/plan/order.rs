//! In which order reads are issued, and how much of it is one long sequential read.
//!
//! Reads are numbered layer by layer, whatever the order. Where files come first, the runs are
//! sorted by file and offset, and only their permutation is kept:
//!
//! ```text
//! file       | q.0 | q.1 | q.2 | k.0 | k.1 | k.2 |
//! layers     | q.0 | k.0 | q.1 | k.1 | q.2 | k.2 |     a jump after each
//! files      | q.0 | q.1 | q.2 | k.0 | k.1 | k.2 |     none, and every layer is open at once
//! ```
//!
//! A run that reads through a small hole goes on behind it; the run of another layer that lies in
//! the hole comes next, a step back.

use std::fmt;

use super::reads::Run;
use super::{LoadPlan, Placement, ReadOp};
use crate::units::to_usize;

/// In which order reads are issued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReadOrder {
    /// One layer after the other, in execution order; within a layer as the files have them.
    #[default]
    Layers,
    /// As the files have them, whatever layer they are of: for loads that keep everything. Layers
    /// complete in any order.
    Files,
}

impl fmt::Display for ReadOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Layers => "layers",
            Self::Files => "files",
        })
    }
}

/// Indices of the runs in the order in which they are read; empty if that is the order they have.
pub(super) fn permutation(runs: &[Run], order: ReadOrder) -> Vec<u32> {
    let place = |run: &Run| (run.shard().index(), run.bytes().start());
    if order == ReadOrder::Layers || runs.is_sorted_by_key(place) {
        return Vec::new();
    }
    // More runs than reads there are not, and those are counted with a u32.
    let mut indices: Vec<u32> = (0..u32::try_from(runs.len()).unwrap_or(u32::MAX)).collect();
    indices.sort_unstable_by_key(|&index| (place(&runs[to_usize(u64::from(index))]), index));
    indices
}

/// A place in the order of a plan's reads: in front of one of them, or behind the last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IssuePlace {
    /// Of the runs in their order.
    run: usize,
    /// Reads of that run before it.
    reads: u32,
}

/// A read whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Its layer.
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

    /// The read at a place of the order; `None` behind the last one.
    pub(crate) fn turn(&self, place: IssuePlace) -> Option<Turn> {
        let read = self.reads.reads_at(place.run)?.start + place.reads;
        Some(Turn { layer: self.layers.partition_point(|layer| layer.reads.end <= read), read })
    }

    /// The place behind the read at this one.
    pub(crate) fn behind(&self, place: IssuePlace) -> IssuePlace {
        let is_last = self.reads.reads_at(place.run).is_none_or(|run| run.start + place.reads + 1 >= run.end);
        if is_last {
            IssuePlace { run: place.run + 1, reads: 0 }
        } else {
            IssuePlace { reads: place.reads + 1, ..place }
        }
    }

    /// The layer that is the first to need an arena: that of the first read if files come first,
    /// else the first one, even if it has no bytes.
    pub(crate) fn first_layer(&self) -> usize {
        match self.order {
            ReadOrder::Layers => 0,
            ReadOrder::Files => self.turn(IssuePlace::default()).map_or(0, |turn| turn.layer),
        }
    }

    /// All reads, in the order in which they are issued.
    pub fn reads_in_order(&self) -> impl Iterator<Item = ReadOp> {
        let mut place = IssuePlace::default();
        std::iter::from_fn(move || {
            let turn = self.turn(place)?;
            place = self.behind(place);
            Some(self.read(turn.read))
        })
    }

    /// Tensors in the order in which their reads are issued, with the indices of their layers.
    /// Those without bytes may be left out.
    pub fn arrivals(&self) -> impl Iterator<Item = (usize, &Placement)> {
        (0..self.reads.run_count()).flat_map(move |run| {
            let placements = self.reads.placements_at(run);
            let layer = self.layers.partition_point(|layer| layer.placements.end <= placements.start);
            self.placements[super::index_range(&placements)].iter().map(move |placement| (layer, placement))
        })
    }

    /// Reads that begin elsewhere than where the one issued before them ended: what a disk has to
    /// seek for, and what ends the kernel's reading ahead. A read that begins in the last block
    /// of the one before it goes on where that ended.
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
