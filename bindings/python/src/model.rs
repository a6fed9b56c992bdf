//! A resident model: its tensors, and how parts of it leave and come back.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use onelayer::{Holder, LayerId, LoadError, Model, ParkTo, Part, Receipt, Target};
use pyo3::prelude::*;

use crate::checkpoint::NativeCheckpoint;
use crate::errors;
use crate::options::Options;
use crate::plan::Plan;
use crate::report::Report;
use crate::tensor::Tensor;

/// Layer, tensor, and number of owners.
pub(crate) type HolderParts = (String, String, usize);

/// A model that is resident, in part or whole.
#[pyclass(frozen, module = "onelayer._native")]
pub(crate) struct NativeModel {
    /// Locked only while detached from the interpreter.
    model: Mutex<Model>,
    target: Target,
}

impl NativeModel {
    fn lock(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the model, detached from the interpreter.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Model) -> Result<T, LoadError> + Send,
    ) -> PyResult<T> {
        py.detach(|| work(&mut self.lock())).map_err(|error| errors::of_load(py, &error))
    }
}

/// Everything below a name, or all of it.
fn part(name: Option<&str>) -> Part<'_> {
    name.map_or(Part::All, Part::Prefix)
}

#[pymethods]
impl NativeModel {
    /// Loads all layers. Signals are checked at each layer.
    #[new]
    fn load(py: Python<'_>, checkpoint: &NativeCheckpoint, options: Options) -> PyResult<Self> {
        let target = options.target()?;
        let (builder, callbacks) = options.builder()?;
        let mut stopped = None;
        let loaded = py.detach(|| {
            builder.build()?.load_while(&checkpoint.inner, |_| {
                stopped = Python::attach(|py| py.check_signals().and_then(|()| callbacks.call(py))).err();
                stopped.is_none()
            })
        });
        if let Some(error) = stopped {
            return Err(error);
        }
        let model = loaded.map_err(|error| errors::of_load(py, &error))?;
        callbacks.call(py)?;
        Ok(Self { model: Mutex::new(model), target })
    }

    /// Name and memory of each resident layer, in execution order.
    fn layers(&self, py: Python<'_>) -> Vec<(String, u64)> {
        let describe = |model: &Model| {
            model.layers().map(|layer| (layer.id().as_str().to_owned(), layer.resident_bytes())).collect()
        };
        py.detach(|| describe(&self.lock()))
    }

    /// Names of the tensors of resident layers.
    fn names(&self, py: Python<'_>) -> Vec<String> {
        let names = |model: &Model| {
            let tensors = model.layers().flat_map(onelayer::LoadedLayer::tensors);
            tensors.map(|tensor| tensor.name().to_owned()).collect()
        };
        py.detach(|| names(&self.lock()))
    }

    /// A tensor of a resident layer. It keeps its layer.
    fn tensor(&self, py: Python<'_>, name: &str) -> PyResult<Tensor> {
        let target = self.target;
        self.with(py, |model| Ok(Tensor::of_model(model.tensor(name)?, target)))
    }

    /// Frees a part.
    fn unload(&self, py: Python<'_>, name: Option<&str>) -> PyResult<NativeReceipt> {
        self.with(py, |model| Ok(NativeReceipt::new(model.unload(part(name))?)))
    }

    /// Copies a part out of its memory: to a file in a folder, or to host memory.
    fn park(&self, py: Python<'_>, name: Option<&str>, folder: Option<PathBuf>) -> PyResult<NativeReceipt> {
        let to = folder.as_deref().map_or(ParkTo::Memory, ParkTo::Folder);
        self.with(py, |model| Ok(NativeReceipt::new(model.park(part(name), to)?)))
    }

    /// Brings parked layers of a part back. Returns their memory.
    fn restore(&self, py: Python<'_>, name: Option<&str>) -> PyResult<u64> {
        self.with(py, |model| model.restore(part(name)))
    }

    /// Replaces a layer by the one of the same name in another checkpoint.
    fn replace(
        &self,
        py: Python<'_>,
        layer: &str,
        checkpoint: &NativeCheckpoint,
        options: Options,
    ) -> PyResult<NativeReceipt> {
        let (builder, _) = options.builder()?;
        self.with(py, |model| {
            let receipt = model.replace(&LayerId::new(layer), &builder.build()?, &checkpoint.inner)?;
            Ok(NativeReceipt::new(receipt))
        })
    }

    /// Tensors that were taken and keep their layer.
    fn holders(&self, py: Python<'_>) -> Vec<HolderParts> {
        py.detach(|| self.lock().holders().into_iter().map(holder_parts).collect())
    }

    #[getter]
    fn resident_bytes(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.lock().resident_bytes())
    }

    #[getter]
    fn parked_bytes(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.lock().parked_bytes())
    }

    #[getter]
    fn report(&self, py: Python<'_>) -> Report {
        py.detach(|| {
            let model = self.lock();
            Report::new(model.report(), model.plan())
        })
    }

    #[getter]
    fn plan(&self, py: Python<'_>) -> Plan {
        py.detach(|| Plan::new(self.lock().plan()))
    }
}

pub(crate) fn holder_parts(holder: Holder) -> HolderParts {
    (holder.layer.as_str().to_owned(), holder.tensor, holder.owners)
}

/// The result of an unload, with the names of the Python class.
#[pyclass(frozen, get_all, module = "onelayer._native")]
pub(crate) struct NativeReceipt {
    asked: u64,
    returned: u64,
    kept_by_pool: u64,
    queued: u64,
    reused: u64,
    lent: u64,
    unconfirmed: u64,
    held: u64,
    parked: u64,
    held_by: Vec<HolderParts>,
}

impl NativeReceipt {
    pub(crate) fn new(receipt: Receipt) -> Self {
        Self {
            asked: receipt.asked_bytes,
            returned: receipt.returned_bytes,
            kept_by_pool: receipt.kept_bytes,
            queued: receipt.queued_bytes,
            reused: receipt.recycled_bytes,
            lent: receipt.lent_bytes,
            unconfirmed: receipt.unconfirmed_bytes,
            held: receipt.held_bytes,
            parked: receipt.parked_bytes,
            held_by: receipt.holders.into_iter().map(holder_parts).collect(),
        }
    }
}
