//! CUDA devices, through the driver API.
//!
//! ```text
//! detect    finds the driver and every function that is called
//! context   the device's primary context, or the caller's
//! stream    streams and events
//! memory    device memory: the stream-ordered pool, recycling, freeing in order
//! window    one allocation that layers share, pass after pass
//! pinned    the ring's memory, registered for DMA, on the device's NUMA node (numa)
//! session   the streams and the pool of one load
//! read_back bytes of the device, copied to the host
//! arena     device memory of one layer, until it is freed
//! backend   allocate, copy, seal: the loader's trait
//! ```
//!
//! The safe layer of the bindings is not used: its destructors report their errors to the next
//! caller.

use cudarc::driver::sys::CUresult;

pub(crate) use self::backend::CudaBackend;
pub(crate) use self::context::Context;
pub(crate) use self::detect::{Driver, driver};
pub(crate) use self::pinned::Registrar;
pub(crate) use self::session::{CudaSession, SessionOptions};
pub(crate) use self::stream::{Event, Stream};
use super::{CudaCode, DeviceError};

mod arena;
mod backend;
mod context;
mod detect;
mod memory;
mod numa;
mod pinned;
mod read_back;
mod session;
#[cfg(not(loom))]
#[cfg(test)]
mod simulated;
mod stream;
mod window;

/// The driver's answer to a call, as a result.
fn call(call: &'static str, answer: CUresult) -> Result<(), DeviceError> {
    code_of(answer).map_err(|code| DeviceError::Cuda { call, code })
}

#[expect(
    clippy::as_conversions,
    reason = "the bindings give the codes as an enum without another way to the number"
)]
fn code_of(answer: CUresult) -> Result<(), CudaCode> {
    CudaCode::check(answer as u32)
}

/// True if the awaited work is over: the wait succeeded, or the context is lost, and then nothing
/// runs any more.
fn is_over(waited: &Result<(), DeviceError>) -> bool {
    match waited {
        Ok(()) => true,
        Err(error) => error.cuda_code().is_some_and(CudaCode::is_fatal),
    }
}

/// A handle that a caller passed as an integer.
fn handle_of_caller<T>(handle: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(usize::try_from(handle).unwrap_or(0))
}

/// Frees something, for destructors, which cannot report errors. A refused call has done nothing
/// and is made once more. A call that fails because the context is lost has nothing left to free.
/// False if it was refused twice.
fn retry_once(mut give_back: impl FnMut() -> CUresult) -> bool {
    let mut is_refused = || code_of(give_back()).is_err_and(|code| !code.is_fatal());
    !is_refused() || !is_refused()
}
