//! Memory that a device reads by itself: the ring's pages are pinned by whoever can, as far as that is granted.
//!
//! ```text
//! whole ring in one piece --refused--> slot by slot, as many as are granted --too few--> pageable
//! ```
//!
//! Containers limit pinned memory, and some drivers limit the size of one piece. Each step down is a named mode of the
//! report: the load goes on, with fewer slots or slower copies.
#![allow(unsafe_code, reason = "the contract of a trait; each block says why it holds")]

use std::fmt;
use std::ptr::NonNull;

use super::memory::AnonymousMemory;
use crate::plan::RingShape;
use crate::units::to_usize;

/// Fewer pinned slots than this are worth less than a whole ring that is pageable: reads and copies would wait for each
/// other.
const PINNED_SLOTS_MIN: u32 = 4;

/// Pins memory for a device.
pub(crate) trait Pinner {
    /// Pins memory until the value returned is dropped.
    ///
    /// # Safety
    /// `len_bytes` bytes from `start` are mapped for as long as the value returned lives, and no two values cover the same
    /// page.
    unsafe fn pin(&self, start: NonNull<u8>, len_bytes: usize) -> Result<Box<dyn Pinned>, PinRefused>;
}

/// Memory that is pinned until this is dropped.
pub(crate) trait Pinned: Send + Sync + fmt::Debug {}

/// Why memory was not pinned, in the words of whoever refused it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PinRefused(pub(crate) String);

/// How much of the ring is pinned. A named mode of the report.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pinning {
    /// Nothing has to be: the device is the host, or keeps nothing.
    NotNeeded,
    /// All of it, in one piece.
    Whole,
    /// All of it, slot by slot, since one piece was refused.
    SlotBySlot {
        /// The driver's answer for the whole.
        reason: String,
    },
    /// Only so many slots were granted; the ring has no others.
    FewerSlots {
        /// How many.
        slots: u32,
        /// The driver's answer for the next one.
        reason: String,
    },
    /// None of it. Copies go through a buffer of the driver's own and are slower.
    Pageable {
        /// The driver's answer.
        reason: String,
    },
}

impl fmt::Display for Pinning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotNeeded => f.write_str("not needed"),
            Self::Whole => f.write_str("whole"),
            Self::SlotBySlot { reason } => write!(f, "slot by slot ({reason})"),
            Self::FewerSlots { slots, reason } => write!(f, "{slots} slots ({reason})"),
            Self::Pageable { reason } => write!(f, "pageable ({reason})"),
        }
    }
}

impl Pinning {
    /// One word for it: `not_needed`, `whole`, `slot_by_slot`, `fewer_slots` or `pageable`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::NotNeeded => "not_needed",
            Self::Whole => "whole",
            Self::SlotBySlot { .. } => "slot_by_slot",
            Self::FewerSlots { .. } => "fewer_slots",
            Self::Pageable { .. } => "pageable",
        }
    }

    /// The driver's answer, where it refused something.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::NotNeeded | Self::Whole => None,
            Self::SlotBySlot { reason } | Self::FewerSlots { reason, .. } | Self::Pageable { reason } => {
                Some(reason)
            }
        }
    }
}

/// What is pinned of a ring.
#[derive(Debug)]
pub(super) struct PinnedRing {
    /// Held for their destructors.
    _pieces: Vec<Box<dyn Pinned>>,
    pub(super) pinning: Pinning,
    /// Slots that may be used, from the first on.
    pub(super) slots: u32,
}

impl PinnedRing {
    /// A ring that needs no pinning.
    pub(super) fn not_needed(shape: RingShape) -> Self {
        Self { _pieces: Vec::new(), pinning: Pinning::NotNeeded, slots: shape.slots }
    }

    /// Pins as much as is granted.
    ///
    /// # Safety
    /// The memory outlives the value returned, and nothing else pins it.
    pub(super) unsafe fn new(memory: &AnonymousMemory, shape: RingShape, pinner: &dyn Pinner) -> Self {
        // SAFETY: the whole of the memory, which outlives the value returned (the caller's promise).
        let whole = unsafe { pinner.pin(memory.pointer_to(0, shape.bytes()), to_usize(shape.bytes())) };
        let refused = match whole {
            Ok(piece) => {
                return Self { _pieces: vec![piece], pinning: Pinning::Whole, slots: shape.slots };
            }
            Err(PinRefused(reason)) => reason,
        };
        let mut pieces = Vec::new();
        let mut last_refused = None;
        for slot in 0..shape.slots {
            let start = memory.pointer_to(u64::from(slot) * shape.slot_bytes, shape.slot_bytes);
            // SAFETY: one slot of the memory, which outlives the value returned; slots are whole pages and do not overlap.
            match unsafe { pinner.pin(start, to_usize(shape.slot_bytes)) } {
                Ok(piece) => pieces.push(piece),
                Err(PinRefused(reason)) => {
                    last_refused = Some(reason);
                    break;
                }
            }
        }
        match (last_refused, u32::try_from(pieces.len())) {
            (None, _) => {
                Self { _pieces: pieces, pinning: Pinning::SlotBySlot { reason: refused }, slots: shape.slots }
            }
            (Some(reason), Ok(slots)) if slots >= PINNED_SLOTS_MIN => {
                Self { _pieces: pieces, pinning: Pinning::FewerSlots { slots, reason }, slots }
            }
            (Some(reason), _) => {
                Self { _pieces: Vec::new(), pinning: Pinning::Pageable { reason }, slots: shape.slots }
            }
        }
    }
}
