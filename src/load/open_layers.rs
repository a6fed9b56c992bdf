//! The layers of a load in order: turns, and the layers that are open.
//!
//! A stream of several passes counts its layers on from one pass to the next, and so its reads:
//!
//! ```text
//! turn     0   1   2   3 | 4   5   6   7 | 8 ...
//! layer    0   1   2   3 | 0   1   2   3 | 0 ...
//! read     .   .   .   . |     .   .     |          layers 0 and 3 are kept: they are read once
//! ```
//!
//! A layer is open from when it may be read until it is sealed, that is, until all its copies are
//! queued.

use std::collections::VecDeque;
use std::sync::Arc;

use super::hash::TensorHash;
use super::permits::Permit;
use super::times::LayerTimer;
use crate::device::Backend;
use crate::plan::{IssuePlace, LoadPlan, NextRead, PlannedLayer, ReadOrder};
use crate::staging::{Filled, Slot};

/// The turns of a stream, and the next read to issue.
#[derive(Debug)]
pub(super) struct Turns {
    plan: Arc<LoadPlan>,
    /// The number of turns; the largest number if there is no end.
    total: usize,
    pass: usize,
    place: IssuePlace,
    /// True if some layer is read in every pass.
    goes_on: bool,
}

/// The number of turns of a plan; the largest number if there is no end.
pub(super) fn turns_total(plan: &LoadPlan) -> usize {
    let passes =
        plan.passes().count().map_or(usize::MAX, |count| usize::try_from(count).unwrap_or(usize::MAX));
    plan.layers().len().saturating_mul(passes)
}

impl Turns {
    /// At the first read.
    pub(super) fn new(plan: &Arc<LoadPlan>) -> Self {
        let goes_on = plan.layers().iter().any(|layer| !layer.is_kept && !layer.reads.is_empty());
        let total = turns_total(plan);
        Self { plan: Arc::clone(plan), total, pass: 0, place: IssuePlace::default(), goes_on }
    }

    /// The number of turns.
    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// The index of the layer of a turn.
    pub(super) fn index(&self, turn: usize) -> usize {
        turn % self.plan.layers().len()
    }

    /// The pass of a turn, from 0.
    pub(super) fn pass(&self, turn: usize) -> usize {
        turn / self.plan.layers().len()
    }

    /// The layer of a turn.
    pub(super) fn layer(&self, turn: usize) -> &PlannedLayer {
        &self.plan.layers()[self.index(turn)]
    }

    /// True if the layer of a turn is resident from an earlier pass.
    pub(super) fn is_there(&self, turn: usize) -> bool {
        self.layer(turn).is_kept && self.pass(turn) > 0
    }

    /// The turn of the next read to issue, and its number; `None` after the last one.
    pub(super) fn next_read(&self) -> Option<(usize, u32)> {
        let layers = self.plan.layers().len();
        let NextRead { layer, read } = self.plan.read_at(self.place)?;
        let turn = self.pass.checked_mul(layers)?.checked_add(layer)?;
        (turn < self.total).then_some((turn, read))
    }

    /// Moves past the next read, into the next pass if there is one. Kept layers are not read
    /// again.
    pub(super) fn advance(&mut self) {
        self.place = self.plan.behind(self.place);
        loop {
            match self.plan.read_at(self.place) {
                Some(read) if self.pass == 0 || !self.plan.layers()[read.layer].is_kept => return,
                Some(_) => self.place = self.plan.behind(self.place),
                None if self.goes_on
                    && (self.pass + 1).saturating_mul(self.plan.layers().len()) < self.total =>
                {
                    (self.pass, self.place) = (self.pass + 1, IssuePlace::default());
                }
                None => return,
            }
        }
    }
}

/// A filled slot that waits for the arena of its layer.
pub(super) struct WaitingSlot {
    pub(super) turn: usize,
    pub(super) read: u32,
    pub(super) slot: Slot<Filled>,
}

/// An open layer: what it has and what it waits for.
pub(super) struct OpenLayer<B: Backend> {
    /// `None` until the window has room, and for a kept layer.
    pub(super) permit: Option<Permit>,
    pub(super) arena: Option<Arc<B::Arena>>,
    /// Reads whose copies are not queued yet.
    pub(super) reads_left: u32,
    /// Complete with the last read, if the load hashes.
    pub(super) hashes: Vec<TensorHash>,
    /// True once its arena was requested.
    pub(super) is_placed: bool,
    is_sealed: bool,
    /// True if it is resident from an earlier pass: it needs nothing.
    pub(super) is_there: bool,
    pub(super) timer: LayerTimer,
}

impl<B: Backend> OpenLayer<B> {
    fn new(turn: usize, reads: u32, is_there: bool) -> Self {
        Self {
            permit: None,
            arena: None,
            reads_left: if is_there { 0 } else { reads },
            hashes: Vec::new(),
            is_placed: false,
            is_sealed: false,
            is_there,
            timer: LayerTimer::start(turn),
        }
    }

    /// True if its arena was requested and is not there yet.
    fn awaits_arena(&self) -> bool {
        self.is_placed && self.arena.is_none() && !self.is_sealed
    }

    /// True if all its copies are queued.
    fn is_whole(&self) -> bool {
        self.is_there || self.reads_left == 0 && self.arena.is_some()
    }
}

/// The open layers, in order.
pub(super) struct OpenLayers<B: Backend> {
    order: ReadOrder,
    /// From the first layer that is not sealed, whose turn is `sealed`.
    layers: VecDeque<OpenLayer<B>>,
    /// The number of sealed layers before the first one that is not.
    sealed: usize,
    /// Layers that can be sealed, in [`ReadOrder::Files`], where they need not wait for earlier
    /// ones.
    whole: VecDeque<usize>,
}

impl<B: Backend> OpenLayers<B> {
    /// With room for this many before the list grows.
    pub(super) fn new(order: ReadOrder, room: usize) -> Self {
        Self { order, layers: VecDeque::with_capacity(room), sealed: 0, whole: VecDeque::new() }
    }

    /// The number of sealed layers before the first one that is not.
    pub(super) fn sealed(&self) -> usize {
        self.sealed
    }

    /// The turn after the last open layer.
    pub(super) fn end(&self) -> usize {
        self.sealed + self.layers.len()
    }

    /// Opens the next layers, up to the turn `end`.
    pub(super) fn open_until(&mut self, end: usize, turns: &Turns) {
        for turn in self.end()..end {
            let reads = &turns.layer(turn).reads;
            self.layers.push_back(OpenLayer::new(turn, reads.end - reads.start, turns.is_there(turn)));
        }
    }

    /// The open layer of a turn.
    pub(super) fn get(&self, turn: usize) -> &OpenLayer<B> {
        &self.layers[turn - self.sealed]
    }

    /// The open layer of a turn.
    pub(super) fn get_mut(&mut self, turn: usize) -> &mut OpenLayer<B> {
        &mut self.layers[turn - self.sealed]
    }

    /// The first open layer.
    pub(super) fn first(&self) -> Option<&OpenLayer<B>> {
        self.layers.front()
    }

    /// True if any layer waits for its arena.
    pub(super) fn await_an_arena(&self) -> bool {
        self.layers.iter().any(OpenLayer::awaits_arena)
    }

    /// Remembers a layer that has become whole, if it need not wait for earlier ones.
    pub(super) fn note_if_whole(&mut self, turn: usize) {
        // Both the last copy and the arena may find the layer whole.
        let is_new = !self.whole.contains(&turn);
        if self.order == ReadOrder::Files && is_new && self.get(turn).is_whole() {
            self.whole.push_back(turn);
        }
    }

    /// The next layer that can be sealed.
    pub(super) fn next_whole(&mut self) -> Option<usize> {
        match self.order {
            ReadOrder::Layers => self.first().is_some_and(OpenLayer::is_whole).then_some(self.sealed),
            ReadOrder::Files => self.whole.pop_front(),
        }
    }

    /// Marks a layer as sealed and takes what it has.
    pub(super) fn seal(&mut self, turn: usize) -> SealedLayer<B> {
        let open = self.get_mut(turn);
        open.is_sealed = true;
        let sealed = SealedLayer {
            arena: open.arena.take(),
            permit: open.permit.take(),
            hashes: std::mem::take(&mut open.hashes),
            timer: open.timer,
        };
        while self.first().is_some_and(|layer| layer.is_sealed) {
            self.layers.pop_front();
            self.sealed += 1;
        }
        sealed
    }
}

/// The parts of a layer when it is sealed.
pub(super) struct SealedLayer<B: Backend> {
    /// `None` if the layer is resident from an earlier pass.
    pub(super) arena: Option<Arc<B::Arena>>,
    pub(super) permit: Option<Permit>,
    pub(super) hashes: Vec<TensorHash>,
    pub(super) timer: LayerTimer,
}
