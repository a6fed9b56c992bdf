//! Which layer and tensor a load is at, from the number of bytes that have arrived.
//!
//! Reads are issued in an order that the plan tells, so a running sum over its tensors tells the
//! place to within the reads that are in flight. The tracker walks forward and keeps nothing per
//! tensor.

use onelayer::LoadPlan;
use onelayer::checkpoint::Checkpoint;
use onelayer::plan::Placement;

/// A position in a plan.
pub(crate) struct Tracker<'a> {
    checkpoint: &'a Checkpoint,
    plan: &'a LoadPlan,
    /// Tensors to come, with their layers.
    rest: Box<dyn Iterator<Item = (usize, &'a Placement)> + Send + 'a>,
    layer: usize,
    tensor: Option<&'a Placement>,
    end_bytes: u64,
}

impl<'a> Tracker<'a> {
    /// At the first tensor.
    pub(crate) fn new(checkpoint: &'a Checkpoint, plan: &'a LoadPlan) -> Self {
        let rest = Box::new(plan.arrivals());
        // A plan that reads nothing is at its first layer.
        let tensor = plan.layers().first().and_then(|layer| plan.placements(layer).first());
        let mut tracker = Self { checkpoint, plan, rest, layer: 0, tensor, end_bytes: 0 };
        tracker.step();
        tracker
    }

    /// Walks to where `done_bytes` of all tensors have arrived; returns whether the layer and the
    /// tensor changed.
    pub(crate) fn advance(&mut self, done_bytes: u64) -> (bool, bool) {
        let place = |tracker: &Self| (tracker.layer, tracker.tensor.map(|placement| placement.tensor));
        let before = place(self);
        while self.end_bytes <= done_bytes && self.step() {}
        let now = place(self);
        (now.0 != before.0, now != before)
    }

    /// The layer's name; empty for a plan without layers.
    pub(crate) fn layer(&self) -> &'a str {
        self.plan.layers().get(self.layer).map_or("", |layer| layer.id.as_str())
    }

    /// The tensor's name; empty for a layer without tensors.
    pub(crate) fn tensor(&self) -> &'a str {
        self.tensor.map_or("", |placement| self.checkpoint.tensor(placement.tensor).name)
    }

    /// To the next tensor; false at the last one.
    fn step(&mut self) -> bool {
        let Some((layer, placement)) = self.rest.next() else { return false };
        (self.layer, self.tensor) = (layer, Some(placement));
        self.end_bytes = self.end_bytes.saturating_add(placement.len_bytes());
        true
    }
}
