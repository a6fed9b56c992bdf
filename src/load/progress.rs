//! The progress of a running load, as counters that any thread may read, and the report of a
//! finished one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::times::Waits;
use crate::checkpoint::TensorId;
use crate::plan::IoWays;
use crate::source::{Fallback, Queueing};
use crate::staging::cast::Loss;
use crate::staging::{Pinning, RingMode};

/// A view of a running load. Cheap to clone; the counters only grow.
#[derive(Debug, Clone)]
pub struct Progress {
    counters: Arc<Counters>,
}

#[derive(Debug, Default)]
struct Counters {
    tensor_bytes_total: u64,
    tensor_bytes_done: AtomicU64,
    read_bytes: AtomicU64,
    read_ns: AtomicU64,
    layers_done: AtomicU64,
    /// Elements that a cast has made infinite, per tensor that has any: rare.
    overflowed: Mutex<BTreeMap<TensorId, u64>>,
    /// Quantisation errors, per tensor that is quantised.
    lost: Mutex<BTreeMap<TensorId, Loss>>,
}

/// The difference between a quantised tensor and its original, in single precision.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct QuantisationError {
    /// The tensor.
    pub tensor: TensorId,
    /// Elements that have been quantised.
    pub elements: u64,
    /// The largest magnitude of an element.
    pub max_abs: f32,
    /// The largest difference between an element and `value * scale`, both in single precision.
    pub max_abs_error: f32,
    /// Root of the mean of the squares of these differences.
    pub rms_error: f32,
}

impl Progress {
    pub(super) fn new(tensor_bytes_total: u64) -> Self {
        let counters = Counters { tensor_bytes_total, ..Counters::default() };
        Self { counters: Arc::new(counters) }
    }

    /// Bytes of all tensors of the load.
    #[must_use]
    pub fn tensor_bytes_total(&self) -> u64 {
        self.counters.tensor_bytes_total
    }

    /// Bytes of tensors that have arrived. Alignment and gaps do not count.
    #[must_use]
    pub fn tensor_bytes_done(&self) -> u64 {
        self.counters.tensor_bytes_done.load(Ordering::Relaxed)
    }

    /// Bytes moved from files, over-read included.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        self.counters.read_bytes.load(Ordering::Relaxed)
    }

    /// Time that all readers together spent reading, in nanoseconds.
    #[must_use]
    pub fn read_ns(&self) -> u64 {
        self.counters.read_ns.load(Ordering::Relaxed)
    }

    /// Layers that are complete: handed out, or ready to be.
    #[must_use]
    pub fn layers_done(&self) -> u64 {
        self.counters.layers_done.load(Ordering::Relaxed)
    }

    pub(super) fn add_read(&self, bytes: u64, ns: u64) {
        self.counters.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.counters.read_ns.fetch_add(ns, Ordering::Relaxed);
    }

    pub(super) fn add_tensor_bytes(&self, bytes: u64) {
        self.counters.tensor_bytes_done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Elements that were finite in the file and became infinite in the delivered type, per tensor
    /// that has any.
    #[must_use]
    pub fn overflowed(&self) -> Vec<(TensorId, u64)> {
        let overflowed = self.counters.overflowed.lock().unwrap_or_else(PoisonError::into_inner);
        overflowed.iter().map(|(&tensor, &elements)| (tensor, elements)).collect()
    }

    pub(super) fn add_overflowed(&self, tensor: TensorId, elements: u64) {
        if elements > 0 {
            let mut overflowed = self.counters.overflowed.lock().unwrap_or_else(PoisonError::into_inner);
            *overflowed.entry(tensor).or_default() += elements;
        }
    }

    /// The error of each quantised tensor so far. Final once the layer of the tensor is complete.
    #[must_use]
    pub fn quantisation_errors(&self) -> Vec<QuantisationError> {
        let lost = self.counters.lost.lock().unwrap_or_else(PoisonError::into_inner);
        let error = |(&tensor, loss): (&TensorId, &Loss)| QuantisationError {
            tensor,
            elements: loss.elements,
            max_abs: loss.max_abs,
            max_abs_error: loss.max_abs_error,
            rms_error: loss.rms(),
        };
        lost.iter().map(error).collect()
    }

    pub(super) fn add_loss(&self, tensor: TensorId, loss: Loss) {
        if loss.elements > 0 {
            let mut lost = self.counters.lost.lock().unwrap_or_else(PoisonError::into_inner);
            lost.entry(tensor).or_default().add(loss);
        }
    }

    pub(super) fn add_layer(&self) {
        self.counters.layers_done.fetch_add(1, Ordering::Relaxed);
    }
}

/// The report of a load. Its memory is not in here: `onelayer-probe` measures it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LoadReport {
    /// Time from the start of the load (before the ring is mapped) until the last layer, or the
    /// error that ended the load, was handed to the caller; while the load runs, until now.
    /// Includes the time of the caller in between.
    pub elapsed: Duration,
    /// Time from the start of the load until reading began: for planning, mapping and pinning the
    /// ring, opening files and starting threads.
    pub preparing: Duration,
    /// Passes whose last layer was ready for the caller.
    pub passes: u64,
    /// Waiting times.
    pub waits: Waits,
    /// Layers that were handed to the caller.
    pub layers: u64,
    /// Bytes of tensors that arrived.
    pub tensor_bytes: u64,
    /// Bytes moved from files, over-read included.
    pub read_bytes: u64,
    /// The same bytes by the way they were read, and how many went another way than planned.
    pub ways: IoWays,
    /// Time all readers together spent reading.
    pub reading: Duration,
    /// Time that the caller waited for layers, in the stream's `next`.
    pub caller_waited: Duration,
    /// How the ring's memory was obtained.
    pub ring_mode: RingMode,
    /// How much of the ring is pinned for the device.
    pub pinning: Pinning,
    /// Bytes of the ring that are pinned.
    pub pinned_bytes: u64,
    /// How reads were queued with the kernel.
    pub queueing: Queueing,
    /// Files that were not read in the requested way.
    pub fallbacks: Vec<Fallback>,
}
