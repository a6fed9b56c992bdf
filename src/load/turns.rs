//! Which layer is whose turn: a stream of several passes counts its layers on from one pass to the
//! next, and so do its reads.
//!
//! ```text
//! turn     0   1   2   3 | 4   5   6   7 | 8 ...
//! layer    0   1   2   3 | 0   1   2   3 | 0 ...
//! read     .   .   .   . |     .   .     |          layers 0 and 3 are kept: they are read once
//! ```

use std::sync::Arc;

use crate::plan::{IssuePlace, LoadPlan, PlannedLayer, Turn};

/// The turns of a stream, and the next read to issue.
#[derive(Debug)]
pub(super) struct Turns {
    plan: Arc<LoadPlan>,
    /// How many turns there are; as many as can be counted if there is no end.
    total: usize,
    pass: usize,
    place: IssuePlace,
    /// True if some layer is read in every pass.
    goes_on: bool,
}

/// How many turns a plan has; as many as can be counted if there is no end.
pub(super) fn turns_total(plan: &LoadPlan) -> usize {
    let passes =
        plan.passes().count().map_or(usize::MAX, |count| usize::try_from(count).unwrap_or(usize::MAX));
    plan.layers().len().saturating_mul(passes)
}

impl Turns {
    /// Before the first.
    pub(super) fn new(plan: &Arc<LoadPlan>) -> Self {
        let goes_on = plan.layers().iter().any(|layer| !layer.is_kept && !layer.reads.is_empty());
        let total = turns_total(plan);
        Self { plan: Arc::clone(plan), total, pass: 0, place: IssuePlace::default(), goes_on }
    }

    /// How many turns there are.
    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// Index of the layer whose turn it is.
    pub(super) fn index(&self, turn: usize) -> usize {
        turn % self.plan.layers().len()
    }

    /// The pass of a turn, from 0.
    pub(super) fn pass(&self, turn: usize) -> usize {
        turn / self.plan.layers().len()
    }

    /// The layer whose turn it is.
    pub(super) fn layer(&self, turn: usize) -> &PlannedLayer {
        &self.plan.layers()[self.index(turn)]
    }

    /// True if the layer of a turn is there from an earlier pass.
    pub(super) fn is_there(&self, turn: usize) -> bool {
        self.layer(turn).is_kept && self.pass(turn) > 0
    }

    /// The next read to issue, with the turn of its layer; `None` behind the last one.
    pub(super) fn next_read(&self) -> Option<Turn> {
        let layers = self.plan.layers().len();
        let Turn { layer, read } = self.plan.turn(self.place)?;
        let turn = self.pass.checked_mul(layers)?.checked_add(layer)?;
        (turn < self.total).then_some(Turn { layer: turn, read })
    }

    /// Goes on behind the next read, into the next pass if there is one. What is kept is not read
    /// again.
    pub(super) fn advance(&mut self) {
        self.place = self.plan.behind(self.place);
        loop {
            match self.plan.turn(self.place) {
                Some(turn) if self.pass == 0 || !self.plan.layers()[turn.layer].is_kept => return,
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
