//! What fits where: the memory that a model needs on GPUs, host and disk, and its device map.

use onelayer::layers::{LayerMap, Layers};
use onelayer_fit::{
    CacheModel, CacheType, Demand, DeviceMap, FitPlan, Limits, ModelConfig, Precision, Tier, Weights,
    Workload,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::checkpoint::NativeCheckpoint;
use crate::errors;
use crate::options::{float, layer_map, quantisation, unknown};

/// A dictionary with all of these keys; `None` where nothing was said.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct FitOptions {
    /// Bytes of each GPU.
    vram: Vec<u64>,
    host: Option<u64>,
    /// Host memory for the load itself.
    budget: u64,
    /// Tokens; zero for no cache.
    context: u64,
    batch: u64,
    kv_dtype: String,
    dtype: Option<String>,
    quantise: Option<String>,
    precision: Option<String>,
    /// A map to check, as JSON.
    device_map: Option<String>,
    config: Option<Config>,
    layer_map: Option<String>,
}

/// The path of a `config.json`, and its bytes.
pub(crate) type Config = (String, Vec<u8>);

/// A tier as device maps of Python have it: a number, `cpu` or `disk`.
#[derive(IntoPyObject)]
pub(crate) enum TierName {
    Gpu(u32),
    Other(&'static str),
}

impl From<Tier> for TierName {
    fn from(tier: Tier) -> Self {
        match tier {
            Tier::Device(number) => Self::Gpu(number),
            Tier::Disk => Self::Other("disk"),
            _ => Self::Other("cpu"),
        }
    }
}

/// What fits where; a dictionary in Python.
#[derive(IntoPyObject)]
pub(crate) struct FitParts {
    /// As JSON.
    device_map: String,
    computes_on: TierName,
    tiers: Vec<TierParts>,
    /// Name, tier, bytes of weights, bytes of the cache.
    layers: Vec<(String, TierName, u64, u64)>,
    weight_bytes: u64,
    cache_bytes: Option<u64>,
    cache_unknown: Option<String>,
    activation_bytes: Option<u64>,
    model_context: Option<u64>,
    largest_context: Option<u64>,
    largest_context_on_gpus: Option<u64>,
    largest_batch: Option<u64>,
    largest_batch_on_gpus: Option<u64>,
}

/// The use of one tier; a dictionary in Python.
#[derive(IntoPyObject)]
pub(crate) struct TierParts {
    tier: TierName,
    limit_bytes: Option<u64>,
    layers: u64,
    weight_bytes: u64,
    cache_bytes: u64,
    activation_bytes: u64,
    landing_bytes: u64,
    needed_bytes: u64,
}

/// The tier of each layer, under limits of memory.
#[pyfunction]
pub(crate) fn fit(py: Python<'_>, checkpoint: &NativeCheckpoint, options: FitOptions) -> PyResult<FitParts> {
    let checkpoint = &checkpoint.inner;
    let map = options.layer_map.as_deref().map_or(Ok(LayerMap::default()), layer_map)?;
    let layers = Layers::group_with(checkpoint, &map).map_err(|error| errors::of_load(py, &error.into()))?;
    let config = options.config.as_ref().map(config_of).transpose()?;
    let workload = Workload {
        context_tokens: options.context,
        batch: options.batch,
        cache_type: cache_type(&options.kv_dtype)?,
    };
    let limits = Limits {
        device_bytes: options.vram.clone(),
        host_bytes: options.host,
        staging_bytes: options.budget,
    };
    let demand = Demand::of(checkpoint, &layers, config.as_ref(), weights(&options)?);
    let plan = match &options.device_map {
        None => demand.place(&limits, &workload).map_err(|error| errors::of_fit(py, &error))?,
        Some(text) => {
            let map = parse_map(text)?;
            let checked = demand.check(&map, checkpoint, &layers, &limits, &workload);
            checked.map_err(|faults| errors::of_faults(py, &faults))?
        }
    };
    let map = DeviceMap::of(&plan, &demand, checkpoint, &layers).to_json();
    // The search for the largest context takes a while.
    Ok(py.detach(|| parts(map, &demand, &plan, &limits, &workload)))
}

fn parts(
    device_map: String,
    demand: &Demand,
    plan: &FitPlan,
    limits: &Limits,
    workload: &Workload,
) -> FitParts {
    let tiers = plan.uses.iter().map(|share| TierParts {
        tier: share.tier.into(),
        limit_bytes: share.limit_bytes,
        layers: share.layers,
        weight_bytes: share.weight_bytes,
        cache_bytes: share.cache_bytes,
        activation_bytes: share.activation_bytes,
        landing_bytes: share.landing_bytes,
        needed_bytes: share.needed_bytes(),
    });
    let layers = demand.units.iter().zip(&plan.tiers).map(|(unit, tier)| {
        (unit.id.to_string(), TierName::from(*tier), unit.weight_bytes, unit.cache_bytes(workload))
    });
    FitParts {
        device_map,
        computes_on: plan.executor.into(),
        tiers: tiers.collect(),
        layers: layers.collect(),
        weight_bytes: demand.weight_bytes(),
        cache_bytes: demand.cache.bytes(workload),
        cache_unknown: match &demand.cache {
            CacheModel::Unknown { why } => Some(why.clone()),
            _ => None,
        },
        activation_bytes: demand.activation.map(|activation| activation.bytes(workload)),
        model_context: demand.context_max,
        largest_context: demand.largest_context(limits, workload, false),
        largest_context_on_gpus: demand.largest_context(limits, workload, true),
        largest_batch: demand.largest_batch(limits, workload, false),
        largest_batch_on_gpus: demand.largest_batch(limits, workload, true),
    }
}

/// A configuration, from its path and bytes.
pub(crate) fn config_of((origin, text): &Config) -> PyResult<ModelConfig> {
    ModelConfig::parse(origin, text).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// A device map, from JSON.
pub(crate) fn parse_map(text: &str) -> PyResult<DeviceMap> {
    DeviceMap::parse(text.as_bytes()).map_err(|error| PyValueError::new_err(error.to_string()))
}

fn cache_type(name: &str) -> PyResult<CacheType> {
    match name {
        "bf16" | "f16" => Ok(CacheType::Half),
        "f32" => Ok(CacheType::F32),
        "fp8" => Ok(CacheType::Fp8),
        _ => Err(unknown("kv_dtype", name, "bf16, f16, f32, fp8")),
    }
}

fn weights(options: &FitOptions) -> PyResult<Weights> {
    let dtype = options.dtype.as_deref().map(float).transpose()?;
    if let Some(name) = &options.precision {
        let found = Precision::ALL.into_iter().find(|precision| precision.name() == name);
        return found
            .map(Weights::Derived)
            .ok_or_else(|| unknown("precision", name, "bf16, fp8, int8, int4"));
    }
    Ok(match (&options.quantise, dtype) {
        (Some(form), dtype) => Weights::Quantised { to: quantisation(form)?, dtype },
        (None, Some(dtype)) => Weights::Narrowed(dtype),
        (None, None) => Weights::AsStored,
    })
}
