//! What a load did, once it is over.

use std::time::Duration;

use super::Waits;
use crate::plan::IoWays;
use crate::source::{Fallback, Queueing};
use crate::staging::{Pinning, RingMode};

/// What a load did. Memory is measured by the [`probe`](crate::probe), not claimed here.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LoadReport {
    /// From the start of the load (before the ring is mapped) to the moment the last layer, or the
    /// error that ended the load, was handed to the caller. What the caller did in between
    /// counts too. Until then: to now.
    pub elapsed: Duration,
    /// From the start of the load until reading began: planning, mapping and pinning the ring,
    /// opening files and threads.
    pub preparing: Duration,
    /// Passes whose last layer was ready for the caller.
    pub passes: u64,
    /// What was waited for.
    pub waits: Waits,
    /// Layers that were handed to the caller.
    pub layers: u64,
    /// Bytes of tensors that arrived.
    pub tensor_bytes: u64,
    /// Bytes moved from files, over-read included.
    pub read_bytes: u64,
    /// Of these, bytes by the way they were read, and how many went another way than the plan said.
    pub ways: IoWays,
    /// Time all readers together spent reading.
    pub reading: Duration,
    /// Time the caller spent waiting for layers, in the stream's `next`.
    pub caller_waited: Duration,
    /// How the ring's memory was obtained.
    pub ring_mode: RingMode,
    /// How much of the ring is pinned for the device.
    pub pinning: Pinning,
    /// Bytes of the ring that are pinned.
    pub pinned_bytes: u64,
    /// How reads were queued with the kernel.
    pub queueing: Queueing,
    /// Files that were not read the way that was asked for.
    pub fallbacks: Vec<Fallback>,
}
