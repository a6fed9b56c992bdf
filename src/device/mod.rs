//! Where layers live: allocate an arena, copy from a slot, wait for the copy, free.
//!
//! What callers name is a [`Target`]; what the loader drives is a private trait with one implementation per kind of
//! device, so that no type of a driver shows in a public signature.

pub(crate) use self::backend::{Backend, PendingCopy, Resident};
pub use self::error::DeviceError;
pub(crate) use self::host::HostBackend;
pub(crate) use self::none::NoneBackend;

mod backend;
mod error;
mod host;
mod none;
mod pool;

/// Where a load goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Target {
    /// Host memory: every layer an arena of its own mapping, given back to the system when dropped.
    Host,
    /// Nowhere: bytes are read, hashed if asked, and dropped. For measuring sources.
    None,
}
