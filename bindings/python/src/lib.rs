//! The native half of the Python package `onelayer`.
//!
//! ```text
//! Python code                                     here
//! onelayer.Checkpoint.stream(...)  -- options --> Checkpoint -> LayerStream -> Layer -> Tensor
//! torch.from_dlpack(tensor)        <- capsule --- Tensor.__dlpack__
//! ```
//!
//! Everything that waits or reads does so detached from the interpreter. A lock that somebody may
//! hold while waiting is only taken while detached: a thread that waited for one with the
//! interpreter in its hands would stop the thread that has it. What a consumer gets is
//! freed by plain Rust code, on whichever thread lets go of it last, the interpreter being there or
//! not; freeing memory of a device may wait for its copies there.
//!
//! The Python half (`python/onelayer`) has the names, defaults and documentation that users see,
//! and whatever needs numpy or torch.

use pyo3::prelude::*;

mod capsule;
mod checkpoint;
mod errors;
mod layer;
mod measuring;
mod memory;
mod options;
mod plan;
mod reading;
mod report;
mod stream;
mod tensor;

/// The native half of `onelayer`: use it through the package.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::checkpoint::NativeCheckpoint;
    #[pymodule_export]
    use super::checkpoint::locate_in_cache;
    #[pymodule_export]
    use super::layer::Layer;
    #[pymodule_export]
    use super::measuring::MemoryMeter;
    #[pymodule_export]
    use super::plan::Plan;
    #[pymodule_export]
    use super::reading::{NativeMapping, NativeReader};
    #[pymodule_export]
    use super::report::Report;
    #[pymodule_export]
    use super::stream::LayerStream;
    #[pymodule_export]
    use super::tensor::Tensor;

    use super::*;

    /// Version of the package.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
