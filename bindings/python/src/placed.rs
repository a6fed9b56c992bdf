//! A model on several devices, host and disk, by a device map.

use std::sync::{Mutex, MutexGuard, PoisonError};

use onelayer::{LoadError, Part, Target};
use onelayer_fit::{PlacedLoader, PlacedModel, PlacedTensor, Tier};
use pyo3::prelude::*;

use crate::checkpoint::NativeCheckpoint;
use crate::errors;
use crate::fitting::{Config, TierName, config_of, parse_map};
use crate::model::{HolderParts, NativeReceipt, holder_parts};
use crate::options::Options;
use crate::report::Report;
use crate::tensor::Tensor;

/// A model that was loaded by a device map.
#[pyclass(frozen, module = "onelayer._native")]
pub(crate) struct NativePlacedModel {
    /// Locked only while detached from the interpreter.
    model: Mutex<PlacedModel>,
    /// Names of tensors that stay in the files.
    #[pyo3(get)]
    on_disk: Vec<String>,
}

impl NativePlacedModel {
    fn lock(&self) -> MutexGuard<'_, PlacedModel> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the model, detached from the interpreter.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut PlacedModel) -> Result<T, LoadError> + Send,
    ) -> PyResult<T> {
        py.detach(|| work(&mut self.lock())).map_err(|error| errors::of_load(py, &error))
    }
}

#[pymethods]
impl NativePlacedModel {
    /// Loads the layers of each tier, one tier after the other. Signals are checked at each layer.
    #[new]
    fn load(
        py: Python<'_>,
        checkpoint: &NativeCheckpoint,
        device_map: &str,
        config: Option<Config>,
        options: Options,
    ) -> PyResult<Self> {
        let map = parse_map(device_map)?;
        let config = config.as_ref().map(config_of).transpose()?;
        let (builder, callbacks) = options.builder()?;
        let mut stopped = None;
        let loaded = py.detach(|| {
            let loader = PlacedLoader::new(builder, &map, &checkpoint.inner, config.as_ref())?;
            loader.load_while(|_, _| {
                stopped = Python::attach(|py| py.check_signals().and_then(|()| callbacks.call(py))).err();
                stopped.is_none()
            })
        });
        if let Some(error) = stopped {
            return Err(error);
        }
        let model = loaded.map_err(|error| errors::of_placed(py, &error))?;
        callbacks.call(py)?;
        let names = checkpoint.inner.tensors().map(|tensor| tensor.name);
        let is_on_disk = |name: &&str| matches!(model.tensor(name), Ok(PlacedTensor::OnDisk(_)));
        let on_disk = names.filter(is_on_disk).map(str::to_owned).collect();
        Ok(Self { model: Mutex::new(model), on_disk })
    }

    /// Name, tier and memory of each resident layer.
    fn layers(&self, py: Python<'_>) -> Vec<(String, TierName, u64)> {
        py.detach(|| {
            let model = self.lock();
            let layers = model.layers();
            layers
                .map(|(tier, layer)| (layer.id().as_str().to_owned(), tier.into(), layer.resident_bytes()))
                .collect()
        })
    }

    /// Names of the tensors of resident layers.
    fn names(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| {
            let model = self.lock();
            let tensors = model.layers().flat_map(|(_, layer)| layer.tensors());
            tensors.map(|tensor| tensor.name().to_owned()).collect()
        })
    }

    /// A resident tensor; `None` for one that stays in the files.
    fn tensor(&self, py: Python<'_>, name: &str) -> PyResult<Option<Tensor>> {
        self.with(py, |model| {
            Ok(match model.tensor(name)? {
                PlacedTensor::Resident(tier, tensor) => Some(Tensor::of_model(tensor, target_of(tier))),
                _ => None,
            })
        })
    }

    /// Frees a part on every tier.
    fn unload(&self, py: Python<'_>, name: Option<&str>) -> PyResult<NativeReceipt> {
        let part = name.map_or(Part::All, Part::Prefix);
        self.with(py, |model| Ok(NativeReceipt::new(model.unload(part)?)))
    }

    /// Tensors that were taken and keep their layer.
    fn holders(&self, py: Python<'_>) -> Vec<HolderParts> {
        py.detach(|| self.lock().holders().into_iter().map(holder_parts).collect())
    }

    #[getter]
    fn resident_bytes(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.lock().resident_bytes())
    }

    /// The report of each tier, in the order of loading.
    #[getter]
    fn reports(&self, py: Python<'_>) -> Vec<(TierName, Report)> {
        py.detach(|| {
            let model = self.lock();
            let reports = model.report().into_iter();
            reports
                .filter_map(|report| {
                    let plan = model.model(report.tier)?.plan();
                    Some((report.tier.into(), Report::new(&report.load, plan)))
                })
                .collect()
        })
    }
}

fn target_of(tier: Tier) -> Target {
    match tier {
        Tier::Device(number) => Target::Cuda(number),
        _ => Target::Host,
    }
}
