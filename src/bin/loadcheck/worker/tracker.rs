//! Which layer and tensor a load is at, from the number of bytes that have arrived.
//!
//! Reads are issued in the order of the plan, so a running sum over its tensors tells the place to within the reads that
//! are in flight. The tracker walks forward and keeps nothing per tensor.

use onelayer::LoadPlan;
use onelayer::checkpoint::Checkpoint;
use onelayer::plan::Placement;

/// A position in a plan.
#[derive(Debug)]
pub(crate) struct Tracker<'a> {
    checkpoint: &'a Checkpoint,
    plan: &'a LoadPlan,
    layer: usize,
    tensor: usize,
    end_bytes: u64,
}

impl<'a> Tracker<'a> {
    /// At the first tensor.
    pub(crate) fn new(checkpoint: &'a Checkpoint, plan: &'a LoadPlan) -> Self {
        let mut tracker = Self { checkpoint, plan, layer: 0, tensor: 0, end_bytes: 0 };
        tracker.end_bytes = tracker.tensor_bytes();
        tracker
    }

    /// Walks to where `done_bytes` of all tensors have arrived; returns whether the layer and the tensor changed.
    pub(crate) fn advance(&mut self, done_bytes: u64) -> (bool, bool) {
        let before = (self.layer, self.tensor);
        while self.end_bytes <= done_bytes && self.step() {
            self.end_bytes = self.end_bytes.saturating_add(self.tensor_bytes());
        }
        (self.layer != before.0, (self.layer, self.tensor) != before)
    }

    /// The layer's name; empty for a plan without layers.
    pub(crate) fn layer(&self) -> &'a str {
        self.plan.layers().get(self.layer).map_or("", |layer| layer.id.as_str())
    }

    /// The tensor's name; empty for a layer without tensors.
    pub(crate) fn tensor(&self) -> &'a str {
        let placement =
            self.plan.layers().get(self.layer).and_then(|layer| self.plan.placements(layer).get(self.tensor));
        placement.map_or("", |placement| self.checkpoint.tensor(placement.tensor).name)
    }

    fn tensor_bytes(&self) -> u64 {
        let placement =
            self.plan.layers().get(self.layer).and_then(|layer| self.plan.placements(layer).get(self.tensor));
        placement.map_or(0, Placement::len_bytes)
    }

    /// To the next tensor; false at the last one.
    fn step(&mut self) -> bool {
        let layers = self.plan.layers();
        let Some(layer) = layers.get(self.layer) else { return false };
        if self.tensor + 1 < self.plan.placements(layer).len() {
            self.tensor += 1;
            return true;
        }
        if self.layer + 1 < layers.len() {
            (self.layer, self.tensor) = (self.layer + 1, 0);
            return true;
        }
        false
    }
}
