//! Host memory that is kept from one load to the next.

use onelayer::SpareMemory;
use pyo3::prelude::*;

/// Memory of dropped layers for the next load.
#[pyclass(frozen, module = "onelayer._native")]
pub(crate) struct NativeSpare {
    pub(crate) inner: SpareMemory,
}

#[pymethods]
impl NativeSpare {
    #[new]
    fn new(bytes_max: u64) -> Self {
        Self { inner: SpareMemory::new(bytes_max) }
    }

    /// Bytes that no layer uses.
    #[getter]
    fn idle_bytes(&self) -> u64 {
        self.inner.idle_bytes()
    }

    /// Returns the idle memory to the system.
    fn free(&self, py: Python<'_>) {
        py.detach(|| self.inner.free());
    }
}
