//! The memory peak, term by term, and the ring that fits the budget.

use crate::budget::{BudgetError, MemoryBudget, Reservation};
use crate::checkpoint::{Checkpoint, TensorId};
use crate::layers::Layers;
use crate::units::{Alignment, HumanBytes, MIB, to_u64};

use super::io::{is_mostly_direct, window_bytes};
use super::layout::Layout;
use super::permute::largest_need;
use super::quantise::SCALE_SHARE;
use super::reads::{SLOT_BLOCKS_OF_FLOATS_MIN, longest_row, row_blocks};
use super::resident::{ResidentMemory, WindowShape};
use super::{
    IoMode, MemoryTerm, MoveOp, Placement, PlanError, PlanLimits, PlannedLayer, ResidentKind, TermKind,
};

/// With fewer slots, a reader or a copy would have none.
const SLOTS_MIN: u32 = 4;
/// Smaller slots cost more system calls than they save memory.
const SLOT_BYTES_MIN: u64 = MIB;
/// Aligned blocks that a slot holds at least.
const SLOT_BLOCKS_MIN: u64 = 8;
/// Larger slots are not faster: reads and copies already run at the speed of the link.
const SLOT_BYTES_MAX: u64 = 4 * MIB;
/// The same without a link to a device: with smaller slots less memory is in use at once, so more
/// of it stays in the CPU cache.
const SLOT_BYTES_MAX_UNLINKED: u64 = 2 * MIB;
/// The same where the CPU copies the bytes of direct reads: several slots are in use at a time.
const SLOT_BYTES_MAX_COPIED: u64 = MIB;
/// Slots that the ring should have before its slots are made larger: one per reader and these for
/// copies in flight, within `SLOTS_WANTED`.
const SLOTS_WANTED_FOR_COPIES: u32 = 4;
const SLOTS_WANTED: std::ops::RangeInclusive<u32> = 8..=16;
/// More slots only cost page faults and CPU cache. With 4 MiB slots the ring never exceeds 256 MiB.
const SLOTS_MAX: u32 = 64;

/// No smaller host budget works for any checkpoint: the fewest slots of the smallest size. The
/// checkpoint's description comes on top.
pub const HOST_BUDGET_FLOOR_BYTES: u64 = 4 * SLOT_BYTES_MIN;
const _: () = assert!(SLOTS_MIN == 4, "the floor is that many slots");

/// Upper bound of what the loader keeps for an open or resident layer: its entry, its handle, its
/// window permit, its place in a channel. The loader's tests check it.
pub(crate) const LAYER_STATE_BYTES: u64 = 640;
/// Upper bound of what a source keeps for a file: its path, its identity, its entry among the open
/// files, its fallback. The true length of the path does not count: a plan does not depend on where
/// its checkpoint lies.
const FILE_STATE_BYTES: u64 = 1024;
/// The hash of one tensor.
const HASH_BYTES: u64 = 32;

/// The terms of a plan, reserved from its budget.
pub(crate) struct Reservations {
    /// For the staging ring.
    pub(crate) ring: Reservation,
    /// For everything else.
    pub(crate) others: Vec<Reservation>,
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

/// Every term of the peak host memory of a load. [`Self::budgeted_bytes`] sums what counts against
/// the budget. Resident layers belong to the caller: on the host they are beside the budget, on a
/// device they are no host memory.
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

/// Peak memory before the plan is made, beside the description: of grouping, or of opening, which
/// is over by then.
pub(crate) fn grouping_peak_bytes(checkpoint: &Checkpoint, layers: &Layers) -> u64 {
    layers.peak_bytes().max(checkpoint.opening_bytes().saturating_sub(checkpoint.metadata_bytes()))
}

impl MemoryTerms {
    /// The parts that count against the budget, the ring first.
    #[must_use]
    pub fn terms(&self) -> &[MemoryTerm] {
        &self.terms
    }

    /// Bytes of one kind in [`Self::terms`] and [`Self::resident_terms`]; 0 if it has no part.
    #[must_use]
    pub fn bytes_of(&self, kind: TermKind) -> u64 {
        let all = self.terms.iter().chain(&self.resident.terms);
        all.filter(|term| term.kind == kind).map(|term| term.bytes).sum()
    }

    /// Reserves every term from a budget as large as the plan's.
    ///
    /// # Errors
    /// [`BudgetError`] if they do not fit, which a plan has ruled out.
    pub(crate) fn reserve(&self) -> Result<Reservations, BudgetError> {
        let budget = MemoryBudget::new(self.budget_bytes);
        let ring = budget.reserve(TermKind::Ring.name(), self.ring.bytes())?;
        let others = self.terms.iter().filter(|term| term.kind != TermKind::Ring);
        let others =
            others.map(|term| budget.reserve(term.kind.name(), term.bytes)).collect::<Result<_, _>>()?;
        Ok(Reservations { ring, others })
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

    /// Peak bytes of resident layers, wherever they live. In one pass: the largest sum of
    /// neighbours in the window. In several: the whole window and all kept layers.
    ///
    /// This assumes that the caller drops layers in the order in which they come. A caller that
    /// keeps an early layer (a tied embedding, say) may hold up to the `window` largest layers, but
    /// never more than [`Self::device_budget_bytes`].
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        self.resident.bytes
    }

    /// Where resident layers live.
    #[must_use]
    pub fn resident_kind(&self) -> ResidentKind {
        self.resident_kind
    }

    /// The parts of [`Self::resident_bytes`]: the window and the kept layers.
    #[must_use]
    pub fn resident_terms(&self) -> &[MemoryTerm] {
        &self.resident.terms
    }

    /// The memory that all layers but kept ones share, if there is more than one pass.
    #[must_use]
    pub fn window(&self) -> Option<WindowShape> {
        self.resident.window
    }

    /// The part of [`Self::resident_bytes`] that is host memory beside the budget.
    #[must_use]
    pub fn resident_host_bytes(&self) -> u64 {
        match self.resident_kind {
            ResidentKind::Host => self.resident.bytes,
            ResidentKind::Device | ResidentKind::Nowhere => 0,
        }
    }

    /// Limit of resident bytes, whatever the caller keeps; `None` if there is none.
    #[must_use]
    pub fn device_budget_bytes(&self) -> Option<u64> {
        self.device_budget_bytes
    }

    /// How the ring is cut.
    #[must_use]
    pub fn ring(&self) -> RingShape {
        self.ring
    }

    /// Divides the budget: the fixed terms, and the largest useful ring that fits the rest.
    pub(super) fn divide(
        checkpoint: &Checkpoint,
        grouping_bytes: u64,
        layout: &Layout,
        run_bytes: u64,
        limits: &PlanLimits,
    ) -> Result<Self, PlanError> {
        let resident = ResidentMemory::of(layout, limits)?;
        let metadata_bytes = checkpoint.metadata_bytes();
        let mut fixed = vec![
            MemoryTerm::new(TermKind::Metadata, metadata_bytes),
            // The peak: the allocator may keep what is freed.
            MemoryTerm::new(TermKind::Grouping, grouping_bytes),
            MemoryTerm::new(TermKind::Plan, plan_bytes(layout, run_bytes)),
            MemoryTerm::new(TermKind::LoaderState, state_bytes(checkpoint, layout, limits)),
        ];
        if limits.options.hash {
            let bytes = to_u64(layout.placements.len()).saturating_mul(HASH_BYTES);
            fixed.push(MemoryTerm::new(TermKind::Hashes, bytes));
        }
        fixed.extend(limits.other_terms.iter().copied());
        let fixed_bytes = fixed.iter().fold(0_u64, |sum, term| sum.saturating_add(term.bytes));
        let row_blocks = row_blocks(&layout.placements, limits.alignment);
        let scratch = if row_blocks > 0 { Scratch::OfScales } else { Scratch::None };
        let needs = |ring: RingShape| Needs::of(ring, limits.options.io, scratch, fixed_bytes);
        let (slot_bytes_min, why) = smallest_slot(checkpoint, layout, limits);
        let smallest = RingShape { slots: SLOTS_MIN, slot_bytes: slot_bytes_min, readers: 1 };
        let smallest_budget_bytes = needs(smallest).total_bytes.div_ceil(MIB).saturating_mul(MIB);
        let budget_bytes = limits.options.host_budget_bytes;
        if budget_bytes < smallest_budget_bytes {
            let detail = needs(smallest).describe(smallest) + &why;
            return Err(PlanError::BudgetTooSmall {
                budget_bytes,
                smallest_bytes: smallest_budget_bytes,
                detail,
            });
        }
        let ring = largest_ring(limits, slot_bytes_min, |ring| needs(ring).total_bytes <= budget_bytes)
            .unwrap_or(smallest);
        let needs = needs(ring);
        let mut terms = vec![MemoryTerm::new(TermKind::Ring, ring.bytes())];
        if needs.window_bytes > 0 {
            terms.push(MemoryTerm::new(TermKind::MappedWindows, needs.window_bytes));
        }
        if needs.scratch_bytes > 0 {
            terms.push(MemoryTerm::new(TermKind::Scales, needs.scratch_bytes));
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

/// The smallest slot that works, and why it is larger than usual, as the end of a sentence.
fn smallest_slot(checkpoint: &Checkpoint, layout: &Layout, limits: &PlanLimits) -> (u64, String) {
    let (placements, alignment) = (&layout.placements[..], limits.alignment);
    // So that a read of one block fits whatever its phase, that a read starting one block earlier
    // still makes progress, and that both hold for a widened read.
    let is_decoded = |placement: &Placement| placement.cast.is_some_and(|cast| cast.unit_elements() > 1);
    let blocks = if placements.iter().any(is_decoded) { SLOT_BLOCKS_OF_FLOATS_MIN } else { SLOT_BLOCKS_MIN };
    let usual = SLOT_BYTES_MIN.max(alignment.bytes().saturating_mul(blocks));
    let of = |blocks: u64, count: u64| blocks.saturating_mul(count).saturating_add(alignment.bytes());
    // Rows are not cut: a read may begin up to one earlier, and has at least one.
    let row = of(row_blocks(placements, alignment), 2);
    let need = largest_need(placements, alignment);
    let unit = need.map_or(0, |need| need.slot_bytes);
    let because = |what, (bytes, tensor): (u64, TensorId)| {
        format!(", since {what} of {:?} is {}", checkpoint.name_of(tensor), HumanBytes(bytes))
    };
    let why = match usual.max(row).max(unit) {
        most if most == usual => None,
        most if most == row => longest_row(placements).map(|row| because("a row", row)),
        _ => need.map(|need| because("what has to be put in order", (need.unit_bytes, need.tensor))),
    };
    (usual.max(row).max(unit), why.unwrap_or_default())
}

/// The memory that a ring of some shape needs, with everything that depends on it.
struct Needs {
    window_bytes: u64,
    scratch_bytes: u64,
    fixed_bytes: u64,
    total_bytes: u64,
}

impl Needs {
    fn of(ring: RingShape, io: IoMode, scratch: Scratch, fixed_bytes: u64) -> Self {
        let window_bytes = window_bytes(io, u64::from(ring.readers), ring.slot_bytes);
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
            (TermKind::MappedWindows.name(), self.window_bytes),
            (TermKind::Scales.name(), self.scratch_bytes),
            ("everything else", self.fixed_bytes),
        ];
        for (name, bytes) in others {
            if bytes > 0 {
                text.push_str(&format!(", {name} {}", HumanBytes(bytes)));
            }
        }
        text
    }
}

/// Memory of readers beside their slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scratch {
    None,
    /// The scales of a slot, until its values are in place.
    OfScales,
}

impl Scratch {
    fn bytes(self, ring: RingShape) -> u64 {
        match self {
            Self::None => 0,
            // With queues too, there are no more threads than reads in flight.
            Self::OfScales => u64::from(ring.readers).saturating_mul(ring.slot_bytes / SCALE_SHARE),
        }
    }
}

/// The largest useful slot.
fn slot_bytes_most(limits: &PlanLimits) -> u64 {
    match limits.resident {
        ResidentKind::Device => SLOT_BYTES_MAX,
        ResidentKind::Host if is_mostly_direct(limits.options.io, &limits.decisions) => SLOT_BYTES_MAX_COPIED,
        ResidentKind::Host | ResidentKind::Nowhere => SLOT_BYTES_MAX_UNLINKED,
    }
}

/// The largest ring that fits: slots as large as useful while there are enough of them, then as
/// many as fit.
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

/// Host memory of the running load beside the ring: its entries for files, and for layers that are
/// resident or open (each open layer beyond the window holds a slot).
fn state_bytes(checkpoint: &Checkpoint, layout: &Layout, limits: &PlanLimits) -> u64 {
    let layer_count = layout.layers.len();
    let slots_max = usize::try_from(SLOTS_MAX).unwrap_or(usize::MAX);
    // Kept layers are resident beside the window.
    let beside = slots_max.saturating_add(layout.layers.iter().filter(|layer| layer.is_kept).count());
    let layers = limits.options.window.over(layer_count).saturating_add(beside).min(layer_count);
    to_u64(layers) * LAYER_STATE_BYTES + to_u64(checkpoint.shards().len()) * FILE_STATE_BYTES
}

/// Host memory of the plan: placements, runs and their order, layers, moves.
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
