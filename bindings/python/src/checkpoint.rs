//! An open checkpoint: the native part of `onelayer.Checkpoint`.

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::PathBuf;

use onelayer::checkpoint::{CacheVariables, HubCache};
use onelayer::layers::{LayerKind, LayerMap, Layers};
use onelayer::{Checkpoint, LoadError, Share};
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;

use crate::converting::Opening;
use crate::errors;
use crate::options::{Options, layer_map};
use crate::plan::Plan;
use crate::reading::{NativeMapping, NativeReader};
use crate::stream::LayerStream;

/// A checked description of a checkpoint.
#[pyclass(frozen, module = "onelayer._native")]
pub(crate) struct NativeCheckpoint {
    pub(crate) inner: Checkpoint,
}

/// Name, stack, bytes and names of the tensors of a layer.
type LayerParts<'a> = (String, Option<String>, u64, Vec<&'a str>);

#[pymethods]
impl NativeCheckpoint {
    #[new]
    fn open(py: Python<'_>, path: PathBuf, opening: Opening) -> PyResult<Self> {
        let inner = py.detach(|| opening.options().open(&path));
        Ok(Self { inner: inner.map_err(|error| errors::of_checkpoint(py, &error))? })
    }

    /// Names of all tensors, in file order, and then the further names of tied weights.
    fn names(&self) -> Vec<&str> {
        let aliases = self.inner.aliases().map(|(name, _)| name);
        self.inner.tensors().map(|tensor| tensor.name).chain(aliases).collect()
    }

    /// Further names of tied weights, each with the name of the tensor.
    fn aliases(&self) -> Vec<(&str, &str)> {
        self.inner.aliases().map(|(name, id)| (name, self.inner.tensor(id).name)).collect()
    }

    fn __len__(&self) -> usize {
        self.inner.tensor_count() + self.inner.aliases().len()
    }

    fn __contains__(&self, name: &str) -> bool {
        self.inner.find(name).is_some()
    }

    /// Type as spelled in the file, shape, bytes and file of one tensor.
    fn describe(&self, name: &str) -> PyResult<(&str, Vec<u64>, u64, PathBuf)> {
        let tensor = self.inner.find(name).ok_or_else(|| PyKeyError::new_err(name.to_owned()))?;
        let path = self.inner.shard(tensor.shard).path.clone();
        Ok((tensor.dtype_name, tensor.shape.to_vec(), tensor.len_bytes(), path))
    }

    /// Name, stack (if it is in one), bytes and names of the tensors of each layer, in execution
    /// order.
    fn layers(&self, py: Python<'_>, rules: Option<String>) -> PyResult<Vec<LayerParts<'_>>> {
        let map = rules.as_deref().map_or(Ok(LayerMap::default()), layer_map)?;
        let layers = py.detach(|| Layers::group_with(&self.inner, &map));
        let layers = layers.map_err(|error| errors::of_load(py, &LoadError::Layers(error)))?;
        let describe = |layer: &onelayer::layers::Layer| {
            let tensors = || layer.tensors.iter().map(|&id| self.inner.tensor(id));
            let bytes = tensors().map(|tensor| tensor.len_bytes()).sum();
            let stack = match layer.kind {
                LayerKind::Member { stack } => Some(layers.stacks()[stack].as_str().to_owned()),
                _ => None,
            };
            (layer.id.as_str().to_owned(), stack, bytes, tensors().map(|tensor| tensor.name).collect())
        };
        Ok(layers.as_slice().iter().map(describe).collect())
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.tensor_bytes()
    }

    /// Host memory of the description.
    #[getter]
    fn metadata_bytes(&self) -> u64 {
        self.inner.metadata_bytes()
    }

    /// The files, and the metadata of each header.
    fn files(&self) -> Vec<(PathBuf, Vec<(&str, &str)>)> {
        let shards = self.inner.shards().iter();
        shards.map(|shard| (shard.path.clone(), shard.metadata.iter().collect())).collect()
    }

    /// Decisions made while opening.
    #[getter]
    fn notes(&self) -> Vec<&str> {
        self.inner.notes().iter().map(String::as_str).collect()
    }

    fn plan(&self, py: Python<'_>, options: Options) -> PyResult<Plan> {
        let (builder, _) = options.builder()?;
        let plan = py.detach(|| builder.plan(&self.inner)).map_err(|error| errors::of_load(py, &error))?;
        Ok(Plan::new(&plan))
    }

    /// Assigns each of these tensors to one of `world` ranks.
    fn owners(&self, py: Python<'_>, world: u32, names: HashSet<String>) -> PyResult<Vec<(&str, u32)>> {
        let share = py.detach(|| {
            let layers = Layers::group(&self.inner)?;
            let is_meant = |tensor| names.contains(self.inner.tensor(tensor).name);
            Ok(Share::divide(&self.inner, &layers, world, is_meant))
        });
        let share = share.map_err(|error| errors::of_load(py, &LoadError::Layers(error)))?;
        let owned = self.inner.tensors().filter_map(|tensor| Some((tensor.name, share.owner(tensor.id)?)));
        Ok(owned.collect())
    }

    /// A reader of single tensors.
    fn reader(&self, py: Python<'_>) -> PyResult<NativeReader> {
        NativeReader::open(py, &self.inner)
    }

    /// Mappings of the files, created on first use.
    fn mapping(&self) -> NativeMapping {
        NativeMapping::new(&self.inner)
    }

    fn stream(&self, py: Python<'_>, options: Options) -> PyResult<LayerStream> {
        let target = options.target()?;
        let (builder, callbacks) = options.builder()?;
        let stream = py.detach(|| builder.build()?.stream(&self.inner));
        let stream = stream.map_err(|error| errors::of_load(py, &error))?;
        Ok(LayerStream::new(stream, target, callbacks))
    }
}

/// The directory of `org/name@revision` in the local cache of the hub. The cache is `root`, or
/// given by environment variables, whose values are in the order of `CacheVariables`.
#[pyfunction]
pub(crate) fn locate_in_cache(
    py: Python<'_>,
    name: &str,
    root: Option<PathBuf>,
    variables: [Option<OsString>; 5],
) -> PyResult<Option<PathBuf>> {
    let [hf_hub_cache, huggingface_hub_cache, hf_home, xdg_cache_home, home] = variables;
    let variables = CacheVariables { hf_hub_cache, huggingface_hub_cache, hf_home, xdg_cache_home, home };
    let Some(root) = root.or_else(|| HubCache::locate(&variables)) else { return Ok(None) };
    let found = py.detach(|| HubCache::new(root).resolve(name));
    found.map(Some).map_err(|error| errors::of_checkpoint(py, &error))
}
