//! A Python plan: its numbers and its text.

use onelayer::LoadPlan;
use pyo3::prelude::*;

/// The plan of a load.
#[pyclass(frozen, get_all, module = "onelayer")]
pub(crate) struct Plan {
    /// Host budget, in bytes.
    budget: u64,
    /// Smallest host budget that these settings accept, in bytes.
    min_budget: u64,
    /// Host memory that counts against the budget, in bytes.
    host_bytes: u64,
    /// The same, term by term.
    terms: Vec<(&'static str, u64)>,
    /// Maximum bytes of resident layers on their device.
    resident_bytes: u64,
    /// Bytes of all tensors as they are delivered.
    nbytes: u64,
    /// Bytes that are read, over-read included.
    read_bytes: u64,
    /// Layers, in delivery order.
    layers: Vec<String>,
    /// Memory of each of them on its device.
    layer_bytes: Vec<u64>,
    /// Names of the scales of tensors that are quantised during the load.
    scales: Vec<String>,
    text: String,
}

impl Plan {
    pub(crate) fn new(plan: &LoadPlan) -> Self {
        let memory = plan.memory();
        Self {
            budget: memory.budget_bytes(),
            min_budget: memory.smallest_budget_bytes(),
            host_bytes: memory.budgeted_bytes(),
            terms: memory.terms().iter().map(|term| (term.kind.name(), term.bytes)).collect(),
            resident_bytes: memory.resident_bytes(),
            nbytes: plan.tensor_bytes(),
            read_bytes: plan.aligned_read_bytes(),
            layers: plan.layers().iter().map(|layer| layer.id.as_str().to_owned()).collect(),
            layer_bytes: plan.layers().iter().map(|layer| layer.arena_bytes).collect(),
            scales: plan.quantised().iter().map(|tensor| tensor.scale_name.to_string()).collect(),
            text: plan.to_string(),
        }
    }
}

#[pymethods]
impl Plan {
    fn __str__(&self) -> &str {
        &self.text
    }

    fn __repr__(&self) -> String {
        format!("<onelayer.Plan: {} layers, {} bytes of {}>", self.layers.len(), self.host_bytes, self.budget)
    }
}
