//! A loaded layer, shared by its Python object and those of its tensors.

use std::sync::{Mutex, MutexGuard, PoisonError};

use onelayer::{LoadedLayer, LoadedTensor, Target};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;

/// A layer that may be closed. Shared with its tensor objects.
pub(crate) struct Held {
    layer: Mutex<Option<LoadedLayer>>,
    pub(crate) name: String,
    pub(crate) target: Target,
}

impl Held {
    pub(crate) fn new(layer: LoadedLayer, target: Target) -> Self {
        let name = layer.id().as_str().to_owned();
        Self { layer: Mutex::new(Some(layer)), name, target }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().is_none()
    }

    /// Closes the layer. `None` if it was closed already.
    pub(crate) fn take(&self) -> Option<LoadedLayer> {
        self.lock().take()
    }

    /// A lease of one tensor, which keeps the memory even if the layer is closed.
    pub(crate) fn lease(&self, tensor: &str) -> PyResult<LoadedTensor> {
        let layer = self.lock();
        let layer = layer.as_ref().ok_or_else(|| {
            PyValueError::new_err(format!("tensor {tensor:?}: its layer {:?} was closed", self.name))
        })?;
        layer.tensor(tensor).ok_or_else(|| PyKeyError::new_err(tensor.to_owned()))
    }

    /// Held only briefly, and never while waiting for the interpreter.
    fn lock(&self) -> MutexGuard<'_, Option<LoadedLayer>> {
        self.layer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
