//! The native half of the Python package `onelayer`.
//!
//! ```text
//! Python code                                     here
//! onelayer.Checkpoint.stream(...)  -- options --> Checkpoint -> LayerStream -> Layer -> Tensor
//! torch.from_dlpack(tensor)        <- capsule --- Tensor.__dlpack__
//! ```
//!
//! Code that waits or reads is detached from the interpreter. Locks that may be held during a wait
//! are taken only while detached: a thread that holds the interpreter and waits for such a lock
//! would block the lock's owner. Exported memory is freed by plain Rust code, on the thread that
//! drops it last, even without an interpreter. Freeing device memory may wait for copies to it.
//!
//! The Python half (`python/onelayer`) has the public names, defaults and documentation, and all
//! code for numpy and torch.

use pyo3::prelude::*;

mod capsule;
mod checkpoint;
mod converting;
mod decoding;
mod errors;
mod events;
mod fitting;
mod held;
mod layer;
mod live;
mod measuring;
mod memory;
mod model;
mod options;
mod placed;
mod plan;
mod reading;
mod report;
mod spare;
mod stream;
mod tensor;
mod watched;

/// The native module of the package `onelayer`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::checkpoint::NativeCheckpoint;
    #[pymodule_export]
    use super::checkpoint::locate_in_cache;
    #[pymodule_export]
    use super::converting::{convert, verify};
    #[pymodule_export]
    use super::decoding::decode_rows;
    #[pymodule_export]
    use super::events::{LayerTimes, PassTimes};
    #[pymodule_export]
    use super::fitting::fit;
    #[pymodule_export]
    use super::layer::Layer;
    #[pymodule_export]
    use super::live::{NativeAllocation, live_allocations};
    #[pymodule_export]
    use super::measuring::MemoryMeter;
    #[pymodule_export]
    use super::measuring::{held_memory, slope_of};
    #[pymodule_export]
    use super::model::{NativeModel, NativeReceipt};
    #[pymodule_export]
    use super::placed::NativePlacedModel;
    #[pymodule_export]
    use super::plan::Plan;
    #[pymodule_export]
    use super::reading::{NativeMapping, NativeReader};
    #[pymodule_export]
    use super::report::Report;
    #[pymodule_export]
    use super::spare::NativeSpare;
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
