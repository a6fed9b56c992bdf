//! How far a load is: counters that any thread may read while it runs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::checkpoint::TensorId;
use crate::staging::cast::Loss;

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
    /// What quantising has lost, per tensor that is quantised.
    lost: Mutex<BTreeMap<TensorId, Loss>>,
}

/// How far what is left of a quantised tensor lies from what it was in single precision.
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

    /// Bytes that have arrived at their place. Alignment and gaps are not counted.
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

    /// Elements that were finite in the file and are infinite in the type that was asked for, per
    /// tensor that has any.
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

    /// How much every quantised tensor has lost so far; all of it once the tensor's layer is
    /// complete.
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
