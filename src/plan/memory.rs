//! The peak, term by term: what the load will hold, and how the ring is cut so that it fits.

use crate::checkpoint::Checkpoint;
use crate::layers::Layers;
use crate::units::{Alignment, HumanBytes, MIB, to_u64};

use super::decision::is_mostly_direct;
use super::layout::Layout;
use super::passes::{ResidentMemory, WindowShape};
use super::quantise::{SCALE_SHARE, longest_row};
use super::reads::row_blocks;
use super::request;
use super::{IoMode, MoveOp, Placement, PlanError, PlanLimits, PlannedLayer, ResidentKind};

/// Fewer slots than this leave a reader or a copy without one.
const SLOTS_MIN: u32 = 4;
/// Smaller slots cost more system calls than they save memory.
const SLOT_BYTES_MIN: u64 = MIB;
/// Aligned blocks that a slot holds at least.
const SLOT_BLOCKS_MIN: u64 = 8;
/// Larger slots gain nothing: from here on reads and copies run at the speed of the link.
const SLOT_BYTES_MAX: u64 = 4 * MIB;
/// The same where there is no link: a disk and a copy run at their speed from here on, and the less
/// memory is in use at once, the more of it stays in the cache.
const SLOT_BYTES_MAX_UNLINKED: u64 = 2 * MIB;
/// The same where bytes that come past the page cache are copied on: others are being read
/// meanwhile, so several slots are in use.
const SLOT_BYTES_MAX_COPIED: u64 = MIB;
/// How many slots the ring should have before its slots are made larger: one for each reader, and
/// these for copies in flight, but never fewer or more than so many.
const SLOTS_WANTED_FOR_COPIES: u32 = 4;
const SLOTS_WANTED: std::ops::RangeInclusive<u32> = 8..=16;
/// More slots than this only cost first touches and cache: the ring never grows past 256 MiB,
/// whatever the budget.
const SLOTS_MAX: u32 = 64;

/// No host budget below this works for any checkpoint: the fewest slots of the smallest size. What
/// a checkpoint's description takes comes on top of it.
pub const HOST_BUDGET_FLOOR_BYTES: u64 = 4 * SLOT_BYTES_MIN;
const _: () = assert!(SLOTS_MIN == 4, "the floor is that many slots");

/// What the loader keeps for a layer that is open or resident, from above: its entry, its handle,
/// its permit, its place in a channel. The loader's tests hold it to this.
pub(crate) const LAYER_STATE_BYTES: u64 = 640;
/// What a source keeps for a file, from above: its path, its identity, its place among the open
/// ones, why it fell back. Not the path's true length: a plan does not depend on where its
/// checkpoint lies.
const FILE_STATE_BYTES: u64 = 1024;
/// A hash that is kept for a tensor.
const HASH_BYTES: u64 = 32;

/// One named part of the peak.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryTerm {
    /// What it is.
    pub name: &'static str,
    /// Its size in bytes.
    pub bytes: u64,
}

/// How the ring is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RingShape {
    /// Number of slots.
    pub slots: u32,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Reads in flight at most: threads that fill them, unless reads go through queues.
    pub readers: u32,
}

impl RingShape {
    /// Bytes of the ring: its slots, rounded up to huge pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        Alignment::HUGE_PAGE.up(u64::from(self.slots).saturating_mul(self.slot_bytes)).unwrap_or(u64::MAX)
    }
}

/// Every term of the peak host memory of a load. What counts against the budget is summed in
/// [`Self::budgeted_bytes`]; resident layers are the caller's: on the host they stand beside it, on
/// a device they are no host memory at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryTerms {
    budget_bytes: u64,
    smallest_budget_bytes: u64,
    ring: RingShape,
    terms: Vec<MemoryTerm>,
    resident: ResidentMemory,
    resident_kind: ResidentKind,
    device_budget_bytes: Option<u64>,
}

/// Most that was held before a plan is made, beside the description: by grouping, or by opening,
/// which was over by then.
pub(crate) fn grouping_peak_bytes(checkpoint: &Checkpoint, layers: &Layers) -> u64 {
    layers.peak_bytes().max(checkpoint.opening_bytes().saturating_sub(checkpoint.metadata_bytes()))
}

impl MemoryTerms {
    /// What counts against the budget, the ring first.
    #[must_use]
    pub fn terms(&self) -> &[MemoryTerm] {
        &self.terms
    }

    /// Sum of [`Self::terms`]; never above the budget.
    #[must_use]
    pub fn budgeted_bytes(&self) -> u64 {
        self.terms.iter().map(|term| term.bytes).sum()
    }

    /// The budget.
    #[must_use]
    pub fn budget_bytes(&self) -> u64 {
        self.budget_bytes
    }

    /// The smallest budget that these settings accept: a whole number of MiB.
    #[must_use]
    pub fn smallest_budget_bytes(&self) -> u64 {
        self.smallest_budget_bytes
    }

    /// Most bytes of resident layers at once, wherever they live: in one pass the largest sum of
    /// neighbours in the window, in several the whole window and all layers that are kept.
    ///
    /// That is for a caller who drops layers in the order in which they come. One who keeps an
    /// early layer while going on (a tied embedding, say) holds what it holds, up to the
    /// `window` largest layers, and never more than [`Self::device_budget_bytes`].
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        self.resident.bytes
    }

    /// Where resident layers live.
    #[must_use]
    pub fn resident_kind(&self) -> ResidentKind {
        self.resident_kind
    }

    /// What [`Self::resident_bytes`] is made of: the window, and layers that are kept.
    #[must_use]
    pub fn resident_terms(&self) -> &[MemoryTerm] {
        &self.resident.terms
    }

    /// The memory that layers share which come and go, where there is more than one pass.
    #[must_use]
    pub fn window(&self) -> Option<WindowShape> {
        self.resident.window
    }

    /// What of [`Self::resident_bytes`] is host memory: what stands beside the budget there.
    #[must_use]
    pub fn resident_host_bytes(&self) -> u64 {
        match self.resident_kind {
            ResidentKind::Host => self.resident.bytes,
            ResidentKind::Device | ResidentKind::Nowhere => 0,
        }
    }

    /// What resident layers may take at most, whatever the caller keeps; not bounded if `None`.
    #[must_use]
    pub fn device_budget_bytes(&self) -> Option<u64> {
        self.device_budget_bytes
    }

    /// How the ring is cut.
    #[must_use]
    pub fn ring(&self) -> RingShape {
        self.ring
    }

    pub(super) fn settle(
        checkpoint: &Checkpoint,
        grouping_bytes: u64,
        layout: &Layout,
        run_bytes: u64,
        limits: &PlanLimits,
    ) -> Result<Self, PlanError> {
        let resident = ResidentMemory::of(layout, limits)?;
        let metadata_bytes = checkpoint.metadata_bytes();
        let mut fixed = vec![
            MemoryTerm { name: "checkpoint metadata", bytes: metadata_bytes },
            // At its highest, not what is kept: the rest goes back to the allocator, which may not give it
            // back to the system.
            MemoryTerm { name: "layer grouping", bytes: grouping_bytes },
            MemoryTerm { name: "plan", bytes: plan_bytes(layout, run_bytes) },
            MemoryTerm { name: "loader state", bytes: state_bytes(checkpoint, layout, limits) },
        ];
        if limits.options.hash {
            let bytes = to_u64(layout.placements.len()).saturating_mul(HASH_BYTES);
            fixed.push(MemoryTerm { name: "hashes", bytes });
        }
        fixed.extend(limits.beside.iter().cloned());
        let fixed_bytes = fixed.iter().fold(0_u64, |sum, term| sum.saturating_add(term.bytes));
        let row_blocks = row_blocks(&layout.placements, limits.alignment);
        let scratch = if row_blocks > 0 { Scratch::OfScales } else { Scratch::None };
        let needs = |ring: RingShape| Needs::of(ring, limits.options.io, scratch, fixed_bytes);
        // So that a read of one block always fits whatever its phase; that one which begins a block earlier
        // for the sake of an element is not the same read again; and that this holds for a read too
        // that has to fit four times.
        let slot_bytes_min = SLOT_BYTES_MIN.max(limits.alignment.bytes().saturating_mul(SLOT_BLOCKS_MIN));
        // A row is not cut: a read may begin so much earlier, and has one row at least.
        let row_slot_bytes = row_blocks.saturating_mul(2).saturating_add(limits.alignment.bytes());
        let slot_bytes_min = slot_bytes_min.max(row_slot_bytes);
        let smallest = RingShape { slots: SLOTS_MIN, slot_bytes: slot_bytes_min, readers: 1 };
        let smallest_budget_bytes = needs(smallest).total_bytes.div_ceil(MIB).saturating_mul(MIB);
        let budget_bytes = limits.options.host_budget_bytes;
        if budget_bytes < smallest_budget_bytes {
            let mut detail = needs(smallest).describe(smallest);
            if let Some((bytes, tensor)) =
                longest_row(&layout.placements).filter(|_| slot_bytes_min == row_slot_bytes)
            {
                let name = checkpoint.name_of(tensor);
                detail.push_str(&format!(", since a row of {name:?} is {}", HumanBytes(bytes)));
            }
            return Err(PlanError::BudgetTooSmall {
                budget_bytes,
                smallest_bytes: smallest_budget_bytes,
                detail,
            });
        }
        let ring = largest_ring(limits, slot_bytes_min, |ring| needs(ring).total_bytes <= budget_bytes)
            .unwrap_or(smallest);
        let needs = needs(ring);
        let mut terms = vec![MemoryTerm { name: "ring", bytes: ring.bytes() }];
        if needs.window_bytes > 0 {
            terms.push(MemoryTerm { name: "mapped windows", bytes: needs.window_bytes });
        }
        if needs.scratch_bytes > 0 {
            terms.push(MemoryTerm { name: "scales in the making", bytes: needs.scratch_bytes });
        }
        terms.extend(fixed);
        Ok(Self {
            budget_bytes,
            smallest_budget_bytes,
            ring,
            terms,
            resident,
            resident_kind: limits.resident,
            device_budget_bytes: limits.options.device_budget_bytes,
        })
    }
}

/// What a ring of some shape costs, with everything that comes with it.
struct Needs {
    window_bytes: u64,
    scratch_bytes: u64,
    fixed_bytes: u64,
    total_bytes: u64,
}

impl Needs {
    fn of(ring: RingShape, io: IoMode, scratch: Scratch, fixed_bytes: u64) -> Self {
        let window_bytes = request::window_bytes(io, u64::from(ring.readers), ring.slot_bytes);
        let scratch_bytes = scratch.bytes(ring);
        let parts = [ring.bytes(), window_bytes, scratch_bytes, fixed_bytes];
        Self {
            window_bytes,
            scratch_bytes,
            fixed_bytes,
            total_bytes: parts.into_iter().fold(0, u64::saturating_add),
        }
    }

    fn describe(&self, ring: RingShape) -> String {
        let mut text = format!("{} slots of {}", ring.slots, HumanBytes(ring.slot_bytes));
        let others = [
            ("mapped windows", self.window_bytes),
            ("scales in the making", self.scratch_bytes),
            ("metadata and plan", self.fixed_bytes),
        ];
        for (name, bytes) in others {
            if bytes > 0 {
                text.push_str(&format!(", {name} {}", HumanBytes(bytes)));
            }
        }
        text
    }
}

/// What readers need beside their slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scratch {
    None,
    /// Scales of a slot wait there until its values are in their place.
    OfScales,
}

impl Scratch {
    fn bytes(self, ring: RingShape) -> u64 {
        match self {
            Self::None => 0,
            // No more threads than reads in flight, with queues too.
            Self::OfScales => u64::from(ring.readers).saturating_mul(ring.slot_bytes / SCALE_SHARE),
        }
    }
}

/// How large slots may be.
fn slot_bytes_most(limits: &PlanLimits) -> u64 {
    match limits.resident {
        ResidentKind::Device => SLOT_BYTES_MAX,
        ResidentKind::Host if is_mostly_direct(limits.options.io, &limits.decisions) => SLOT_BYTES_MAX_COPIED,
        ResidentKind::Host | ResidentKind::Nowhere => SLOT_BYTES_MAX_UNLINKED,
    }
}

/// The ring for a budget: slots as large as useful while there are enough of them, then as many as
/// fit.
fn largest_ring(
    limits: &PlanLimits,
    slot_bytes_min: u64,
    fits: impl Fn(RingShape) -> bool,
) -> Option<RingShape> {
    let mut slot_bytes = slot_bytes_most(limits).max(slot_bytes_min);
    loop {
        let smallest = slot_bytes == slot_bytes_min;
        let wanted = limits.readers().saturating_add(SLOTS_WANTED_FOR_COPIES);
        let slots_least =
            if smallest { SLOTS_MIN } else { wanted.clamp(*SLOTS_WANTED.start(), *SLOTS_WANTED.end()) };
        // In a small ring, half of the slots are for copies.
        let readers_most = |slots: u32| {
            limits.readers().clamp(1, (slots / 2).max(slots.saturating_sub(SLOTS_WANTED_FOR_COPIES)))
        };
        let best = (slots_least..=SLOTS_MAX)
            .rev()
            .map(|slots| RingShape { slots, slot_bytes, readers: readers_most(slots) })
            .find(|&ring| fits(ring));
        let with_fewer_readers = || {
            let shape = |readers| RingShape { slots: slots_least, slot_bytes, readers };
            (1..=readers_most(slots_least)).rev().map(shape).find(|&ring| fits(ring))
        };
        if best.is_some() || smallest {
            return best.or_else(with_fewer_readers);
        }
        slot_bytes = (slot_bytes / 2).max(slot_bytes_min);
    }
}

/// Host memory of the running load beside the ring: what it keeps for each file, and for each layer
/// that is open (each of those beyond the window holds a slot) or resident.
fn state_bytes(checkpoint: &Checkpoint, layout: &Layout, limits: &PlanLimits) -> u64 {
    let layer_count = layout.layers.len();
    let slots_max = usize::try_from(SLOTS_MAX).unwrap_or(usize::MAX);
    // Kept layers are resident beside the window.
    let beside = slots_max.saturating_add(layout.layers.iter().filter(|layer| layer.is_kept).count());
    let layers = limits.options.window.over(layer_count).saturating_add(beside).min(layer_count);
    to_u64(layers) * LAYER_STATE_BYTES + to_u64(checkpoint.shards().len()) * FILE_STATE_BYTES
}

/// Host memory of the plan itself: a place for each tensor, the runs and their order, the layers.
fn plan_bytes(layout: &Layout, run_bytes: u64) -> u64 {
    [
        (to_u64(layout.placements.capacity()), size_of::<Placement>()),
        (run_bytes, 1),
        (to_u64(layout.layers.capacity()), size_of::<PlannedLayer>()),
        (to_u64(layout.moves.capacity()), size_of::<MoveOp>()),
    ]
    .into_iter()
    .fold(0, |sum, (count, size)| sum.saturating_add(count.saturating_mul(to_u64(size))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_has_enough_slots_before_it_has_large_ones() {
        let shape = |budget_mib: u64, readers: u32| {
            let mut limits = PlanLimits::new(budget_mib * MIB);
            (limits.options.readers, limits.resident) = (Some(readers), ResidentKind::Device);
            let fits = |ring: RingShape| ring.bytes() <= limits.options.host_budget_bytes;
            let ring = largest_ring(&limits, SLOT_BYTES_MIN, fits).unwrap();
            (ring.slots, ring.slot_bytes / MIB, ring.readers)
        };
        assert_eq!(shape(4, 8), (4, 1, 2));
        assert_eq!(shape(8, 2), (8, 1, 2));
        assert_eq!(shape(14, 2), (14, 1, 2), "seven slots of 2 MiB would be too few");
        assert_eq!(shape(16, 2), (8, 2, 2));
        assert_eq!(shape(16, 8), (16, 1, 8), "eight slots would leave readers or copies without one");
        assert_eq!(shape(24, 8), (12, 2, 8));
        assert_eq!(shape(32, 4), (8, 4, 4));
        assert_eq!(shape(48, 8), (12, 4, 8));
        assert_eq!(shape(64, 2), (16, 4, 2));
        assert_eq!(shape(64, 12), (16, 4, 12));
        assert_eq!(shape(4096, 100), (64, 4, 60), "a larger ring gains nothing");
    }

    #[test]
    fn a_ring_that_fits_only_with_fewer_readers_gets_them() {
        let mut limits = PlanLimits::new(6 * MIB);
        (limits.options.io, limits.options.readers) = (IoMode::Mmap, Some(8));
        let fits = |ring: RingShape| {
            Needs::of(ring, limits.options.io, Scratch::None, 0).total_bytes
                <= limits.options.host_budget_bytes
        };
        let ring = largest_ring(&limits, SLOT_BYTES_MIN, fits).unwrap();
        assert_eq!((ring.slots, ring.readers), (4, 2));
        let fits = |ring: RingShape| {
            Needs::of(ring, limits.options.io, Scratch::None, MIB).total_bytes
                <= limits.options.host_budget_bytes
        };
        let ring = largest_ring(&limits, SLOT_BYTES_MIN, fits).unwrap();
        assert_eq!((ring.slots, ring.readers), (4, 1));
    }
}
