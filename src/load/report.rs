//! What a load did, once it is over.

use std::time::Duration;

use crate::source::Fallback;
use crate::staging::RingMode;

/// What a load did. Memory is measured by the [`probe`](crate::probe), not claimed here.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LoadReport {
    /// From the start of the stream to the last delivery (or the error).
    pub elapsed: Duration,
    /// Layers handed out.
    pub layers: u64,
    /// Bytes of tensors that arrived.
    pub tensor_bytes: u64,
    /// Bytes moved from files, over-read included.
    pub read_bytes: u64,
    /// Time all readers together spent reading.
    pub reading: Duration,
    /// Time the caller spent waiting for layers.
    pub caller_waited: Duration,
    /// How the ring's memory was obtained.
    pub ring_mode: RingMode,
    /// Files that were not read the way that was asked for.
    pub fallbacks: Vec<Fallback>,
}
