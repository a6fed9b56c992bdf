//! The ring: N slots of S bytes, allocated once. The slot is the permit.
//!
//! ```text
//!       claim, take          fill            copy issued        copy complete
//! free list ------> Empty ---------> Filled ------------> in flight ---------> free list
//!                     |                |                      |
//!                     +------ drop ----+---- drop (waits) ----+--> free list
//! ```
//!
//! The states are types ([`Slot<Empty>`], [`Slot<Filled>`]; in flight means that a pending copy
//! owns the slot), so a slot that is being read or copied cannot be filled again. Leaking a slot
//! starves the ring and stays sound. The loader is the only caller.

pub use self::memory::RingMode;
pub(crate) use self::pin::Pinner;
pub use self::pin::Pinning;
#[cfg(feature = "cuda")]
pub(crate) use self::pin::{PinRefused, Pinned};
pub use self::ring::StagingError;
pub(crate) use self::ring::{Claim, Empty, Filled, Ring, Slot};

pub(crate) mod cast;
pub(crate) mod copy;
#[cfg(not(loom))]
pub(crate) mod for_benches;
mod free_list;
pub(crate) mod gather;
pub(crate) mod memory;
mod pin;
mod ring;
