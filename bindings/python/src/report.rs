//! A Python report of a load.

use std::collections::HashMap;

use onelayer::units::HumanBytes;
use onelayer::{LoadPlan, LoadReport};
use pyo3::prelude::*;

use crate::events::seconds_by_cause;

/// The report of a load so far. Memory is the planned amount; the `loadcheck` marker and program
/// measure it.
#[pyclass(frozen, get_all, module = "onelayer")]
pub(crate) struct Report {
    /// Duration of the load in seconds, including the caller's work between layers.
    seconds: f64,
    /// Seconds until reading began.
    preparing_seconds: f64,
    /// Seconds the caller waited for layers.
    waited_seconds: f64,
    /// Seconds of waiting by cause: `disk`, `fill`, `link`, `engine`.
    waits: HashMap<String, f64>,
    /// Complete passes over all layers.
    passes: u64,
    /// Number of layers handed out.
    layers: u64,
    /// Tensor bytes that have arrived.
    nbytes: u64,
    /// Bytes read, over-read included.
    read_bytes: u64,
    /// Host budget, in bytes.
    budget: u64,
    /// Reserved part of the host budget, in bytes.
    host_bytes: u64,
    /// Page-locked host memory, in bytes.
    pinned_bytes: u64,
    /// Maximum bytes of resident layers.
    resident_bytes: u64,
    /// Files that were not read in the requested way, with reasons.
    fallbacks: Vec<String>,
}

impl Report {
    pub(crate) fn new(report: &LoadReport, plan: &LoadPlan) -> Self {
        let memory = plan.memory();
        Self {
            seconds: report.elapsed.as_secs_f64(),
            preparing_seconds: report.preparing.as_secs_f64(),
            waited_seconds: report.caller_waited.as_secs_f64(),
            waits: seconds_by_cause(&report.waits),
            passes: report.passes,
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
