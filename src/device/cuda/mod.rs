//! CUDA devices, through the driver API.
//!
//! ```text
//! detect    is there a driver, with every function we call?
//! context   the device's primary context, or the caller's
//! stream    streams and events
//! memory    arenas: the stream-ordered pool, recycling, freeing in order
//! window    one piece of memory that layers share, pass after pass
//! pinned    the ring's memory, registered for DMA, on the device's NUMA node (numa)
//! session   what one load shares: its streams, its pool
//! read_back bytes of the device, copied to the host
//! backend   arena, copy, seal: what the loader drives
//! ```
//!
//! Nothing here depends on the safe layer of the bindings, whose destructors report their errors to
//! whoever calls next.

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

/// The driver's answer to a call as a result.
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

/// True if what was waited for is over: it was waited for, or the context is lost, which moves
/// nothing any more.
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

/// Gives something back, for destructors, which have nobody to tell. A call that is refused has not
/// done its work and is made once more; one that fails because the context is lost has nothing left
/// to give back. False if it was refused twice.
fn retry_once(mut give_back: impl FnMut() -> CUresult) -> bool {
    let mut is_refused = || code_of(give_back()).is_err_and(|code| !code.is_fatal());
    !is_refused() || !is_refused()
}
