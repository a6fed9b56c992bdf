//! Pinned memory, which a device reads by DMA: as much of the ring as the driver grants.
//!
//! ```text
//! whole ring in one piece --refused--> slot by slot, as many as are granted --too few--> pageable
//! ```
//!
//! Containers limit pinned memory, and some drivers limit the size of one piece. Each step down is
//! part of the report: the load continues, with fewer slots or slower copies.
#![allow(unsafe_code, reason = "the contract of a trait; each block says why it holds")]

use std::fmt;
use std::ptr::NonNull;

use super::memory::AnonymousMemory;
use crate::plan::RingShape;
use crate::units::to_usize;

/// With fewer pinned slots, reads and copies would wait for each other; a whole pageable ring is
/// better.
const PINNED_SLOTS_MIN: u32 = 4;

/// Pins memory for a device.
pub(crate) trait Pinner {
    /// Prepares memory for pinning, once for all of it and before its first touch.
    ///
    /// # Safety
    /// `len_bytes` bytes from `start` are a mapping of this process, `start` on a page.
    unsafe fn prepare(&self, _start: NonNull<u8>, _len_bytes: usize) {}

    /// Pins memory until the value returned is dropped.
    ///
    /// # Safety
    /// `len_bytes` bytes from `start` are mapped for as long as the value returned lives, and no
    /// two values cover the same page.
    unsafe fn pin(&self, start: NonNull<u8>, len_bytes: usize) -> Result<Box<dyn Pinned>, PinRefused>;
}

/// Memory that is pinned until this is dropped.
pub(crate) trait Pinned: Send + Sync + fmt::Debug {
    /// Unpins it. False if that is refused: then it stays pinned and must stay mapped, since new
    /// memory at its address would be taken for it.
    fn unpin(&mut self) -> bool;
}

/// Why memory was not pinned: the driver's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PinRefused(pub(crate) String);

/// How much of the ring is pinned. Part of the report.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pinning {
    /// Nothing needs to be: the device is the host, or keeps nothing.
    NotNeeded,
    /// All of it, in one piece.
    Whole,
    /// All of it, slot by slot: one piece was refused.
    SlotBySlot {
        /// The driver's answer for the whole ring.
        reason: String,
    },
    /// Only this many slots were granted, and the ring has no others.
    FewerSlots {
        /// Number of slots.
        slots: u32,
        /// The driver's answer for the next one.
        reason: String,
    },
    /// None of it. Copies go through a buffer of the driver and are slower.
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
    /// Its name in reports: `not_needed`, `whole`, `slot_by_slot`, `fewer_slots` or `pageable`.
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

/// The pinned memory of a ring.
#[derive(Debug)]
pub(super) struct PinnedRing {
    pieces: Vec<Box<dyn Pinned>>,
    pub(super) pinning: Pinning,
    /// Number of usable slots, from the first on.
    pub(super) slots: u32,
}

impl PinnedRing {
    /// Unpins everything. False if some of it stays pinned.
    pub(super) fn unpin(&mut self) -> bool {
        let refused = self.pieces.iter_mut().filter_map(|piece| (!piece.unpin()).then_some(()));
        refused.count() == 0
    }

    /// A ring that needs no pinning.
    pub(super) fn not_needed(shape: RingShape) -> Self {
        Self { pieces: Vec::new(), pinning: Pinning::NotNeeded, slots: shape.slots }
    }

    /// Pins as much as is granted.
    ///
    /// # Safety
    /// The memory outlives the value returned, and nothing else pins it.
    pub(super) unsafe fn new(memory: &AnonymousMemory, shape: RingShape, pinner: &dyn Pinner) -> Self {
        let (start, len_bytes) = (memory.pointer_to(0, shape.bytes()), to_usize(shape.bytes()));
        // SAFETY: the whole of the memory, which starts on a page.
        unsafe { pinner.prepare(start, len_bytes) };
        // SAFETY: the whole of the memory, which outlives the value returned (the caller's promise).
        let whole = unsafe { pinner.pin(start, len_bytes) };
        let refused = match whole {
            Ok(piece) => {
                return Self { pieces: vec![piece], pinning: Pinning::Whole, slots: shape.slots };
            }
            Err(PinRefused(reason)) => reason,
        };
        let mut pieces = Vec::new();
        let mut last_refused = None;
        for slot in 0..shape.slots {
            let start = memory.pointer_to(u64::from(slot) * shape.slot_bytes, shape.slot_bytes);
            // SAFETY: one slot of the memory, which outlives the value returned; slots are whole pages and do
            // not overlap.
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
                Self { pieces, pinning: Pinning::SlotBySlot { reason: refused }, slots: shape.slots }
            }
            (Some(reason), Ok(slots)) if slots >= PINNED_SLOTS_MIN => {
                Self { pieces, pinning: Pinning::FewerSlots { slots, reason }, slots }
            }
            (Some(reason), _) => {
                // What cannot be unpinned is kept as long as the memory.
                pieces.retain_mut(|piece| !piece.unpin());
                Self { pieces, pinning: Pinning::Pageable { reason }, slots: shape.slots }
            }
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::units::{KIB, to_u64};

    /// Grants `bytes` in all, in pieces of at most `piece_bytes_max`, and records what is pinned.
    struct Grants {
        bytes: u64,
        piece_bytes_max: u64,
        pinned: Arc<Mutex<Vec<(usize, u64)>>>,
    }

    #[derive(Debug)]
    struct Granted {
        start: usize,
        pinned: Arc<Mutex<Vec<(usize, u64)>>>,
    }

    impl Pinned for Granted {
        fn unpin(&mut self) -> bool {
            self.pinned.lock().unwrap().retain(|&(start, _)| start != self.start);
            true
        }
    }

    impl Drop for Granted {
        fn drop(&mut self) {
            self.unpin();
        }
    }

    impl Pinner for Grants {
        unsafe fn pin(&self, start: NonNull<u8>, len_bytes: usize) -> Result<Box<dyn Pinned>, PinRefused> {
            let (start, len_bytes) = (start.as_ptr().addr(), to_u64(len_bytes));
            let mut pinned = self.pinned.lock().unwrap();
            let overlaps = |&(other, len): &(usize, u64)| {
                start < other + to_usize(len) && other < start + to_usize(len_bytes)
            };
            assert!(!pinned.iter().any(overlaps), "pinned twice");
            let sum = pinned.iter().map(|&(_, len)| len).sum::<u64>();
            if len_bytes > self.piece_bytes_max || sum + len_bytes > self.bytes {
                return Err(PinRefused(format!("{sum} are all")));
            }
            pinned.push((start, len_bytes));
            Ok(Box::new(Granted { start, pinned: Arc::clone(&self.pinned) }))
        }
    }

    const SLOT_BYTES: u64 = 512 * KIB;

    /// The pinning of a ring of eight slots, and its number of pieces.
    fn pin(bytes: u64, piece_bytes_max: u64) -> (Pinning, u32, usize) {
        let shape = RingShape { slots: 8, slot_bytes: SLOT_BYTES, readers: 1 };
        let memory = AnonymousMemory::new(shape.bytes()).unwrap();
        let grants = Grants { bytes, piece_bytes_max, pinned: Arc::default() };
        // SAFETY: the memory is dropped after what is pinned of it, and nothing else pins it.
        let ring = unsafe { PinnedRing::new(&memory, shape, &grants) };
        let pieces = grants.pinned.lock().unwrap().len();
        let result = (ring.pinning.clone(), ring.slots, pieces);
        drop(ring);
        assert!(grants.pinned.lock().unwrap().is_empty(), "everything is given up");
        result
    }

    #[test]
    fn pins_as_much_as_is_granted() {
        let reason = |bytes| format!("{bytes} are all");
        let (all, none) = (8 * SLOT_BYTES, 0);
        assert_eq!(pin(all, u64::MAX), (Pinning::Whole, 8, 1));
        assert_eq!(pin(all, SLOT_BYTES), (Pinning::SlotBySlot { reason: reason(none) }, 8, 8));
        for slots in 4..8_u32 {
            let bytes = u64::from(slots) * SLOT_BYTES;
            assert_eq!(
                pin(bytes, u64::MAX),
                (
                    Pinning::FewerSlots { slots, reason: reason(bytes) },
                    slots,
                    usize::try_from(slots).unwrap()
                )
            );
        }
        for slots in 0..4 {
            let bytes = slots * SLOT_BYTES + 1;
            let expected = Pinning::Pageable { reason: reason(slots * SLOT_BYTES) };
            assert_eq!(pin(bytes, u64::MAX), (expected, 8, 0), "too few to be worth it: none is kept");
        }
    }

    #[test]
    fn each_mode_has_a_name_and_its_reason() {
        let reason = "no".to_owned();
        for (pinning, name, has_reason) in [
            (Pinning::NotNeeded, "not_needed", false),
            (Pinning::Whole, "whole", false),
            (Pinning::SlotBySlot { reason: reason.clone() }, "slot_by_slot", true),
            (Pinning::FewerSlots { slots: 5, reason: reason.clone() }, "fewer_slots", true),
            (Pinning::Pageable { reason: reason.clone() }, "pageable", true),
        ] {
            assert_eq!((pinning.name(), pinning.reason().is_some()), (name, has_reason));
            assert_eq!(pinning.to_string().contains("(no)"), has_reason, "{pinning}");
        }
    }
}
