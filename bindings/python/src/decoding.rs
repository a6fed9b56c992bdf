//! Decodes quantised weights in memory of torch.
#![allow(unsafe_code, reason = "torch gives addresses of its tensors; the Python half checks them")]

use onelayer::dequantise;
use pyo3::prelude::*;

use crate::options::{float, quantisation};

/// An address and its length in bytes.
type Bytes = (usize, usize);

/// Decodes whole rows of `columns` elements to `target`. `torch/_quantised.py` passes contiguous
/// tensors on the CPU, which it keeps alive, and `target` overlaps neither of the others.
///
/// # Panics
/// If the lengths do not fit each other; Python sees a `PanicException`.
#[pyfunction]
pub(crate) fn decode_rows(
    py: Python<'_>,
    form: &str,
    to: &str,
    columns: usize,
    values: Bytes,
    scales: Bytes,
    target: Bytes,
) -> PyResult<()> {
    let (form, to) = (quantisation(form)?, float(to)?);
    py.detach(|| {
        // SAFETY: the caller's promise: so many readable bytes, which nobody writes meanwhile.
        let values =
            unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(values.0), values.1) };
        // SAFETY: as above.
        let scales =
            unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(scales.0), scales.1) };
        // SAFETY: the caller's promise: so many writable bytes, which nobody else uses meanwhile.
        let target = unsafe {
            std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(target.0), target.1)
        };
        dequantise(form, to, columns, values, scales, target);
    });
    Ok(())
}
