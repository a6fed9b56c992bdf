//! The list of the package's allocations.

use onelayer::live;
use pyo3::prelude::*;

/// Name, type, shape, bytes and number of owners of a tensor.
type TensorParts = (String, String, Vec<u64>, u64, usize);

/// One allocation.
#[pyclass(frozen, get_all, module = "onelayer._native")]
pub(crate) struct NativeAllocation {
    number: u64,
    memory: String,
    used_for: String,
    nbytes: u64,
    age_seconds: f64,
    layer: Option<String>,
    tensors: Vec<TensorParts>,
}

/// All current allocations, oldest first.
#[pyfunction]
pub(crate) fn live_allocations(py: Python<'_>) -> Vec<NativeAllocation> {
    py.detach(|| live::snapshot().allocations().iter().map(describe).collect())
}

fn describe(allocation: &live::Allocation) -> NativeAllocation {
    let tensor = |tensor: &live::LiveTensor| {
        let dtype = tensor.dtype.name().to_owned();
        (tensor.name.clone(), dtype, tensor.shape.to_vec(), tensor.bytes, tensor.owners)
    };
    NativeAllocation {
        number: allocation.number,
        memory: allocation.memory.to_string().replace("host", "cpu"),
        used_for: allocation.used_for.to_string(),
        nbytes: allocation.bytes,
        age_seconds: allocation.age.as_secs_f64(),
        layer: allocation.layer.as_ref().map(|layer| layer.as_str().to_owned()),
        tensors: allocation.tensors.iter().map(tensor).collect(),
    }
}
