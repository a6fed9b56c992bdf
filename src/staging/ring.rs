//! The ring and its slots.
#![allow(unsafe_code, reason = "a slot is the exclusive owner of its part of the ring; each block says why")]

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::free_list::FreeList;
use super::memory::{AnonymousMemory, RingMode};
use super::pin::{PinnedRing, Pinner, Pinning};
use crate::budget::Reservation;
use crate::live::MemoryUse;
use crate::plan::RingShape;
use crate::source::ReadBuffer;
use crate::units::{HumanBytes, to_usize};

/// Errors of staging memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StagingError {
    /// The system refused the ring's memory.
    #[error("cannot map a ring of {}; a smaller host budget makes a smaller ring", HumanBytes(*bytes))]
    Map {
        /// Bytes of the ring.
        bytes: u64,
        /// The system's error.
        source: std::io::Error,
    },
    /// The system refused the buffer for reading a tensor.
    #[error("cannot map a buffer of {} for reading a tensor", HumanBytes(*bytes))]
    Piece {
        /// Bytes of the buffer.
        bytes: u64,
        /// The system's error.
        source: std::io::Error,
    },
}

/// A slot that may be filled.
#[derive(Debug)]
pub(crate) enum Empty {}
/// A slot that holds bytes of a file.
#[derive(Debug)]
pub(crate) enum Filled {}

/// N slots of S bytes in one mapping.
#[derive(Debug)]
pub(crate) struct Ring {
    free: FreeList,
    pinned: PinnedRing,
    /// Dropped when none of it is pinned any more.
    memory: ManuallyDrop<AnonymousMemory>,
    shape: RingShape,
    _reservation: Reservation,
}

impl Ring {
    /// Maps a ring whose bytes are reserved, and pins it if there is a pinner.
    pub(crate) fn new(
        shape: RingShape,
        reservation: Reservation,
        pinner: Option<&dyn Pinner>,
    ) -> Result<Arc<Self>, StagingError> {
        let bytes = shape.bytes();
        assert!(reservation.bytes() >= bytes, "the ring is larger than its reservation");
        let memory = AnonymousMemory::new(bytes).map_err(|source| StagingError::Map { bytes, source })?;
        memory.live().note(MemoryUse::Ring, None);
        let pinned = match pinner {
            // SAFETY: the memory is the ring's own and is dropped after what is pinned of it.
            Some(pinner) => unsafe { PinnedRing::new(&memory, shape, pinner) },
            None => PinnedRing::not_needed(shape),
        };
        let free = FreeList::new(pinned.slots);
        let memory = ManuallyDrop::new(memory);
        Ok(Arc::new(Self { free, pinned, memory, shape, _reservation: reservation }))
    }

    /// A claim on an empty slot, if one is free and not claimed.
    pub(crate) fn try_claim(self: &Arc<Self>) -> Option<Claim> {
        self.free.try_claim().then(|| Claim { ring: Some(Arc::clone(self)) })
    }

    /// An empty slot, if one is free.
    #[cfg(any(test, feature = "convert"))]
    pub(crate) fn try_take(self: &Arc<Self>) -> Option<Slot<Empty>> {
        self.try_claim().map(Claim::take)
    }

    pub(crate) fn mode(&self) -> RingMode {
        self.memory.mode()
    }

    /// How much of it is pinned.
    pub(crate) fn pinning(&self) -> &Pinning {
        &self.pinned.pinning
    }

    /// Bytes that are pinned.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        match self.pinned.pinning {
            Pinning::NotNeeded | Pinning::Pageable { .. } => 0,
            Pinning::Whole => self.shape.bytes(),
            Pinning::SlotBySlot { .. } | Pinning::FewerSlots { .. } => {
                u64::from(self.pinned.slots) * self.shape.slot_bytes
            }
        }
    }

    /// Number of free slots.
    #[cfg(test)]
    pub(crate) fn free_slots(&self) -> usize {
        self.free.len()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.pinned.unpin() {
            // SAFETY: not used after this: nothing pins it any more, and no slot is left that would be in it.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

/// The right to a free slot: to the one that was returned last, which is the warmest in the CPU
/// cache. Dropping it gives up the right.
#[derive(Debug)]
pub(crate) struct Claim {
    /// `None` once the slot is taken.
    ring: Option<Arc<Ring>>,
}

impl Claim {
    /// Takes the slot.
    pub(crate) fn take(mut self) -> Slot<Empty> {
        let ring = self.ring.take().expect("only taking the slot uses a claim up");
        let index = ring.free.take_claimed();
        Slot { ring, index, state: PhantomData }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(ring) = &self.ring {
            ring.free.give_up_claim();
        }
    }
}

/// Exclusive ownership of one slot of the ring; dropping it gives the slot back.
#[derive(Debug)]
pub(crate) struct Slot<State> {
    ring: Arc<Ring>,
    index: u32,
    state: PhantomData<State>,
}

impl<State> Slot<State> {
    /// Its number in the ring, from 0.
    #[cfg(feature = "cuda")]
    pub(crate) fn index(&self) -> usize {
        to_usize(u64::from(self.index))
    }

    fn offset_bytes(&self) -> u64 {
        u64::from(self.index) * self.ring.shape.slot_bytes
    }

    /// The same slot in another state, without going through the free list.
    fn into_state<Next>(self) -> Slot<Next> {
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is never used again nor dropped, so the `Arc` is moved, not duplicated.
        let ring = unsafe { std::ptr::read(&raw const this.ring) };
        Slot { ring, index: this.index, state: PhantomData }
    }
}

// SAFETY: a slot is the only owner of its part of the ring (the free list gave its number to it
// alone), that part does not move while any slot keeps the ring, and a number means the same part
// for as long as there is the ring: a queue is given slots of one ring.
unsafe impl ReadBuffer for Slot<Empty> {
    fn bytes_mut(&mut self) -> &mut [u8] {
        Slot::bytes_mut(self)
    }

    fn number(&self) -> Option<u32> {
        Some(self.index)
    }
}

impl Slot<Empty> {
    /// The slot's memory.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the free list gave this index to this slot alone, slots do not overlap, and `&mut self`
        // excludes any other reference through it.
        unsafe { self.ring.memory.part_mut(self.offset_bytes(), self.ring.shape.slot_bytes) }
    }

    /// Marks the slot as filled.
    pub(crate) fn into_filled(self) -> Slot<Filled> {
        self.into_state()
    }
}

impl Slot<Filled> {
    /// The slot's memory.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: only a `Slot<Empty>` of this index could be written to, and this slot is its only owner.
        unsafe { self.ring.memory.part(self.offset_bytes(), self.ring.shape.slot_bytes) }
    }

    /// `len_bytes` bytes from `offset_bytes` of the slot.
    pub(crate) fn part(&self, offset_bytes: u64, len_bytes: u64) -> &[u8] {
        &self.bytes()[to_usize(offset_bytes)..to_usize(offset_bytes + len_bytes)]
    }

    /// The bytes are not needed any more: the slot may be filled again.
    pub(crate) fn into_empty(self) -> Slot<Empty> {
        self.into_state()
    }
}

impl<State> Drop for Slot<State> {
    fn drop(&mut self) {
        self.ring.free.give(self.index);
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::ptr::NonNull;
    use std::sync::Mutex;

    use super::super::pin::{PinRefused, Pinned};
    use super::*;
    use crate::budget::MemoryBudget;
    use crate::units::to_u64;

    fn ring(slots: u32) -> (MemoryBudget, Arc<Ring>) {
        let shape = RingShape { slots, slot_bytes: 8192, readers: 1 };
        let budget = MemoryBudget::new(shape.bytes());
        let reservation = budget.reserve("ring", shape.bytes()).unwrap();
        (budget, Ring::new(shape, reservation, None).unwrap())
    }

    #[test]
    fn slots_are_exhausted_returned_and_taken_again() {
        let (budget, ring) = ring(2);
        let (first, second) = (ring.try_take().unwrap(), ring.try_take().unwrap());
        assert!(ring.try_take().is_none());
        drop(first.into_filled());
        assert_eq!(ring.free_slots(), 1);
        assert!(ring.try_take().is_some());
        drop(ring);
        assert!(budget.used_bytes() > 0, "a slot keeps the ring alive");
        drop(second);
        assert_eq!(budget.used_bytes(), 0);
    }

    /// Pins everything, and never takes it back. Notes where it was.
    #[derive(Default)]
    struct PinsForEver(Mutex<usize>);

    #[derive(Debug)]
    struct ForEver;

    impl Pinned for ForEver {
        fn unpin(&mut self) -> bool {
            false
        }
    }

    impl Pinner for PinsForEver {
        unsafe fn pin(&self, start: NonNull<u8>, _len_bytes: usize) -> Result<Box<dyn Pinned>, PinRefused> {
            *self.0.lock().unwrap() = start.as_ptr().addr();
            Ok(Box::new(ForEver))
        }
    }

    /// New memory at the address of memory that a driver believes to be pinned would be copied from
    /// the old pages.
    #[test]
    #[cfg(not(miri))]
    fn memory_that_stays_pinned_stays_mapped() {
        let shape = RingShape { slots: 2, slot_bytes: 1 << 20, readers: 1 };
        let budget = MemoryBudget::new(shape.bytes());
        let reservation = budget.reserve("ring", shape.bytes()).unwrap();
        let pinner = PinsForEver::default();
        drop(Ring::new(shape, reservation, Some(&pinner)).unwrap());
        assert_eq!(budget.used_bytes(), 0);
        let start = *pinner.0.lock().unwrap();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let holds_start = |line: &&str| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let ends =
                range.map(|(low, high)| (usize::from_str_radix(low, 16), usize::from_str_radix(high, 16)));
            matches!(ends, Some((Ok(low), Ok(high))) if (low..high).contains(&start))
        };
        // Not inherited by forks: this tells it from what another test may have mapped there since.
        let entry = maps.lines().skip_while(|line| !holds_start(line));
        let flags = entry.take_while(|line| holds_start(line) || !line.contains('-')).last();
        assert!(flags.is_some_and(|flags| flags.split(' ').any(|flag| flag == "dc")), "{flags:?}");
    }

    #[test]
    fn a_claim_is_a_slot_or_is_given_up() {
        let (budget, ring) = ring(2);
        let (first, second) = (ring.try_claim().unwrap(), ring.try_claim().unwrap());
        assert!(ring.try_claim().is_none() && ring.try_take().is_none());
        drop(first);
        assert_eq!(ring.free_slots(), 1);
        let third = ring.try_take().unwrap();
        assert!(ring.try_take().is_none());
        let second = second.take();
        drop(third);
        assert_eq!(ring.free_slots(), 1);
        drop(ring);
        assert!(budget.used_bytes() > 0);
        drop(second);
        assert_eq!(budget.used_bytes(), 0);
    }

    #[test]
    fn slots_do_not_overlap() {
        let (_budget, ring) = ring(3);
        let mut slots: Vec<_> = std::iter::from_fn(|| ring.try_take()).collect();
        for (value, slot) in (1_u8..).zip(&mut slots) {
            slot.bytes_mut().fill(value);
        }
        for (value, slot) in (1_u8..).zip(slots) {
            let slot = slot.into_filled();
            assert!(slot.bytes().iter().all(|&byte| byte == value));
            assert_eq!(to_u64(slot.part(100, 50).len()), 50);
        }
    }
}
