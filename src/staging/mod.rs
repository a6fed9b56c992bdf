//! The staging ring: N slots of S bytes, allocated once. A reader needs a slot to read, so slots
//! bound the memory.
//!
//! ```text
//!       claim, take          fill            copy issued        copy complete
//! free list ------> Empty ---------> Filled ------------> in flight ---------> free list
//!                     |                |                      |
//!                     +------ drop ----+---- drop (waits) ----+--> free list
//! ```
//!
//! The states are types ([`Slot<Empty>`], [`Slot<Filled>`]; in flight: the device's pending copy
//! owns the slot, or the packer of a conversion), so a slot that is being read or copied cannot be
//! filled again. Leaking a slot shrinks the ring, but is sound. A conversion has a second ring: its
//! write buffers.
//!
//! The files, in the order of what they need of each other: `memory`, `pin`, `free_list`, `ring`;
//! `gather`, `permute`, `cast` and `copy` work on the bytes of a slot.

pub use self::cast::{decode_blocks, dequantise};
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
pub(crate) mod permute;
mod pin;
mod ring;
