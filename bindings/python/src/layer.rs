//! A Python layer: a mapping from names to tensors, and a context manager that closes it.

use std::sync::Arc;

use onelayer::{LoadedLayer, Target};
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyList};

use crate::held::Held;
use crate::tensor::Tensor;

/// A resident layer.
#[pyclass(frozen, mapping, module = "onelayer")]
pub(crate) struct Layer {
    held: Arc<Held>,
    names: Vec<String>,
    /// Index in execution order.
    #[pyo3(get)]
    index: usize,
    /// The pass in which it was handed out.
    #[pyo3(get, name = "pass_number")]
    pass: u64,
    /// Size of its tensors.
    #[pyo3(get)]
    nbytes: u64,
    /// Memory on its device.
    #[pyo3(get)]
    resident_bytes: u64,
}

impl Layer {
    pub(crate) fn new(layer: LoadedLayer, target: Target) -> Self {
        let aliases = layer.aliases().map(str::to_owned);
        let names = layer.tensors().map(|tensor| tensor.name().to_owned()).chain(aliases).collect();
        let (index, pass, nbytes) = (layer.index(), layer.pass(), layer.tensor_bytes());
        let resident_bytes = layer.resident_bytes();
        let held = Arc::new(Held::new(layer, target));
        Self { held, names, index, pass, nbytes, resident_bytes }
    }

    fn tensor(&self, name: &str) -> PyResult<Tensor> {
        Ok(Tensor::of_layer(&self.held, &self.held.lease(name)?))
    }
}

#[pymethods]
impl Layer {
    #[getter]
    fn name(&self) -> &str {
        &self.held.name
    }

    #[getter]
    fn closed(&self) -> bool {
        self.held.is_closed()
    }

    fn __len__(&self) -> usize {
        self.names.len()
    }

    fn __contains__(&self, name: &Bound<'_, PyAny>) -> bool {
        // Only strings are names.
        name.extract::<&str>().is_ok_and(|name| self.names.iter().any(|known| known == name))
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        PyList::new(py, &self.names)?.try_iter()
    }

    fn __getitem__(&self, name: &str) -> PyResult<Tensor> {
        self.tensor(name)
    }

    #[pyo3(signature = (name, default=None))]
    fn get(&self, py: Python<'_>, name: &str, default: Option<Py<PyAny>>) -> PyResult<Option<Py<PyAny>>> {
        match self.tensor(name) {
            Ok(tensor) => Ok(Some(tensor.into_pyobject(py)?.into_any().unbind())),
            Err(error) if error.is_instance_of::<PyKeyError>(py) => Ok(default),
            Err(error) => Err(error),
        }
    }

    fn keys(&self) -> Vec<&str> {
        self.names.iter().map(String::as_str).collect()
    }

    fn values(&self) -> PyResult<Vec<Tensor>> {
        self.names.iter().map(|name| self.tensor(name)).collect()
    }

    fn items(&self) -> PyResult<Vec<(&str, Tensor)>> {
        self.names.iter().map(|name| Ok((name.as_str(), self.tensor(name)?))).collect()
    }

    /// Closes the layer. Exported tensors stay valid.
    fn close(&self, py: Python<'_>) {
        let layer = self.held.take();
        // Freeing a large layer takes time, and may wait for a device.
        py.detach(|| drop(layer));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let Held { name, target, .. } = &*self.held;
        format!("<onelayer.Layer {name:?}: {} tensors, {} bytes on {target}>", self.names.len(), self.nbytes)
    }
}
