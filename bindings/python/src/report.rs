//! What a load did, as Python sees it.

use onelayer::units::HumanBytes;
use onelayer::{LoadPlan, LoadReport};
use pyo3::prelude::*;

/// What a load did so far. Memory is what was planned: measuring it is for the `loadcheck` marker
/// and program.
#[pyclass(frozen, get_all, module = "onelayer")]
pub(crate) struct Report {
    /// From the start of the load to its end, in seconds, what the caller did in between included.
    seconds: f64,
    /// Of these, seconds until reading began.
    preparing_seconds: f64,
    /// Of these, seconds that the caller waited for layers.
    waited_seconds: f64,
    /// Layers that were handed out.
    layers: u64,
    /// Bytes of tensors that arrived.
    nbytes: u64,
    /// Bytes that were read, over-read included.
    read_bytes: u64,
    /// Host memory that the load was allowed, in bytes.
    budget: u64,
    /// Host memory that the load reserved of it, in bytes.
    host_bytes: u64,
    /// Page-locked host memory, in bytes.
    pinned_bytes: u64,
    /// Most bytes of layers that could be resident at once.
    resident_bytes: u64,
    /// Files that were read in another way than was asked for, and why.
    fallbacks: Vec<String>,
}

impl Report {
    pub(crate) fn new(report: &LoadReport, plan: &LoadPlan) -> Self {
        let memory = plan.memory();
        Self {
            seconds: report.elapsed.as_secs_f64(),
            preparing_seconds: report.preparing.as_secs_f64(),
            waited_seconds: report.caller_waited.as_secs_f64(),
            layers: report.layers,
            nbytes: report.tensor_bytes,
            read_bytes: report.read_bytes,
            budget: memory.budget_bytes(),
            host_bytes: memory.budgeted_bytes(),
            pinned_bytes: report.pinned_bytes,
            resident_bytes: memory.resident_bytes(),
            fallbacks: report.fallbacks.iter().map(|fallback| fallback.reason.clone()).collect(),
        }
    }
}

#[pymethods]
impl Report {
    fn __str__(&self) -> String {
        format!(
            "{} layers, {} in {:.2} s ({} read, waited {:.2} s for them); host {} of a budget of {}, {} of it pinned; \
             at most {} resident",
            self.layers,
            HumanBytes(self.nbytes),
            self.seconds,
            HumanBytes(self.read_bytes),
            self.waited_seconds,
            HumanBytes(self.host_bytes),
            HumanBytes(self.budget),
            HumanBytes(self.pinned_bytes),
            HumanBytes(self.resident_bytes),
        )
    }

    fn __repr__(&self) -> String {
        format!("<onelayer.Report: {}>", self.__str__())
    }
}
