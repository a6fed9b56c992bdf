//! Where the tensors of a layer land in its arena.
//!
//! [`packed`] leaves no gaps, as in a file. [`exact`] puts each tensor on a multiple of 256 bytes
//! and copies it there. [`in_phase`] keeps the file's spacing between neighbours, so that a segment
//! of them is one copy:
//!
//! ```text
//! file    ..|  weight (large)  |a|b|   weight (large)   |..     a, b: small, of odd lengths
//! arena   |  weight (large)  |a|b| .. |   weight (large)   | .. |a   |b   |
//!          segment, aligned               segment, aligned       the appendix: a and b are moved here
//! ```
//!
//! In a segment, all large tensors must have the same phase (offset modulo 256); a large tensor
//! with another phase starts the next segment. A small tensor with another phase is moved to the
//! appendix of the arena after all copies. A segment begins only where [`exact`] would need a new
//! copy too, so there are never more copies. The arena grows by less than
//!
//! ```text
//! 256 * (segments + 1) + max(64 KiB, tensor_bytes / 64)
//! ```
//!
//! before rounding up.

use super::{MoveOp, Placement};
use crate::checkpoint::Checkpoint;
use crate::units::{Alignment, KIB, to_usize};

/// Larger tensors are never moved: they would take their bytes twice.
const MOVED_BYTES_MAX: u64 = 64 * KIB;
/// The appendix of a layer may always be this large.
const APPENDIX_BYTES_MIN: u64 = 64 * KIB;
/// Or this share of its layer: one part in 64.
const APPENDIX_SHARE: u64 = 64;

/// Puts each tensor of a layer on the next multiple of 256 bytes. Returns the end of the last one;
/// `None` on overflow.
pub(super) fn exact(placements: &mut [Placement]) -> Option<u64> {
    let mut end = 0_u64;
    for placement in placements {
        placement.arena_offset_bytes = Alignment::TENSOR.up(end)?;
        end = placement.arena_offset_bytes.checked_add(placement.len_bytes())?;
    }
    Some(end)
}

/// Puts each tensor directly behind the one before it. Returns the end of the last one; `None` on
/// overflow.
pub(super) fn packed(placements: &mut [Placement]) -> Option<u64> {
    let mut end = 0_u64;
    for placement in placements {
        placement.arena_offset_bytes = end;
        end = end.checked_add(placement.len_bytes())?;
    }
    Some(end)
}

/// Puts the tensors of a layer in segments. Returns the end of the last one; `None` on overflow.
///
/// Tensors that are not on a multiple of 256 bytes then have to be moved: see [`append`].
pub(super) fn in_phase(checkpoint: &Checkpoint, placements: &mut [Placement]) -> Option<u64> {
    // An upper bound of the arena with padding and appendix: no sum below overflows.
    let reserve = 2 * (MOVED_BYTES_MAX + Alignment::TENSOR.bytes());
    let grown =
        |sum: u64, placement: &Placement| sum.checked_add(placement.len_bytes())?.checked_add(reserve);
    placements.iter().try_fold(reserve, grown)?;
    let tensor_bytes: u64 = placements.iter().map(Placement::len_bytes).sum();
    let appendix_bytes_max = APPENDIX_BYTES_MIN.max(tensor_bytes / APPENDIX_SHARE);
    let mut phases = Phases { checkpoint, moved_bytes_max: MOVED_BYTES_MAX };
    loop {
        let end = phases.land(placements);
        if moved(placements).map(appended_bytes).sum::<u64>() <= appendix_bytes_max {
            return Some(end);
        }
        // Ends at the latest when no tensor may be moved: the appendix is empty then.
        phases.moved_bytes_max /= 2;
    }
}

/// The tensors that have to be moved.
pub(super) fn moved(placements: &[Placement]) -> impl Iterator<Item = &Placement> {
    placements.iter().filter(|placement| !is_in_place(placement))
}

fn is_in_place(placement: &Placement) -> bool {
    Alignment::TENSOR.divides(placement.arena_offset_bytes)
}

/// Bytes of a tensor in the appendix.
fn appended_bytes(placement: &Placement) -> u64 {
    placement.len_bytes().next_multiple_of(Alignment::TENSOR.bytes())
}

/// Gives each tensor that has to be moved a place behind `end`, and adds its move, in ascending
/// order. Returns the end of the last one.
pub(super) fn append(placements: &mut [Placement], end: u64, moves: &mut Vec<MoveOp>) -> u64 {
    let mut end = end;
    for placement in placements.iter_mut().filter(|placement| !is_in_place(placement)) {
        let to = end.next_multiple_of(Alignment::TENSOR.bytes());
        moves.push(MoveOp {
            source_arena_offset_bytes: placement.arena_offset_bytes,
            target_arena_offset_bytes: to,
            len_bytes: placement.len_bytes(),
        });
        placement.arena_offset_bytes = to;
        end = to + placement.len_bytes();
    }
    end
}

/// Where the first byte of a tensor is copied to. `moves` are those of its layer.
pub(super) fn landing_of(placement: &Placement, moves: &[MoveOp]) -> u64 {
    let place = placement.arena_offset_bytes;
    match moves.first() {
        Some(first) if first.target_arena_offset_bytes <= place => {
            let found = moves.binary_search_by_key(&place, |step| step.target_arena_offset_bytes);
            found.map_or(place, |index| moves[index].source_arena_offset_bytes)
        }
        _ => place,
    }
}

/// Cuts a layer into segments.
struct Phases<'a> {
    checkpoint: &'a Checkpoint,
    /// Larger tensors must not be moved.
    moved_bytes_max: u64,
}

/// Tensors that keep the spacing of the file.
struct Segment {
    /// Number of tensors, the next ones of the layer.
    len: usize,
    /// Tensors of this phase in the file need no move.
    phase: u64,
}

/// A tensor's offset in its file, modulo 256.
fn phase(placement: &Placement) -> u64 {
    placement.extent.start() % Alignment::TENSOR.bytes()
}

impl Phases<'_> {
    /// Places all segments, one behind the other. Returns the end of the last one.
    fn land(&self, placements: &mut [Placement]) -> u64 {
        let mut end = 0_u64;
        let mut rest = placements;
        while !rest.is_empty() {
            let Segment { len, phase } = self.first_segment(rest);
            let (segment, behind) = rest.split_at_mut(len);
            let origin = segment.iter().find(|placement| !placement.extent.is_empty());
            let origin = origin.map_or(0, |placement| placement.extent.start());
            // Up to the next byte of the arena with the phase of the segment's first byte.
            let padding = origin.wrapping_sub(phase).wrapping_sub(end) % Alignment::TENSOR.bytes();
            let base = end + padding;
            for placement in segment {
                if placement.extent.is_empty() {
                    placement.arena_offset_bytes = end.next_multiple_of(Alignment::TENSOR.bytes());
                } else {
                    placement.arena_offset_bytes = base + (placement.extent.start() - origin);
                    end = placement.arena_offset_bytes + placement.len_bytes();
                }
            }
            rest = behind;
        }
        end
    }

    fn has_to_land_in_place(&self, placement: &Placement) -> bool {
        placement.len_bytes() > self.moved_bytes_max
    }

    /// True if `next` can be in one copy with the tensor before it. A gathered, cast or quantised
    /// tensor leaves a hole behind it.
    fn continues(&self, before: &Placement, next: &Placement) -> bool {
        let shard = |placement: &Placement| self.checkpoint.shard_of(placement.tensor);
        let keeps_its_size = before.cast.is_none() && before.gather.is_none() && before.quantised.is_none();
        keeps_its_size && before.extent.end() == next.extent.start() && shard(before) == shard(next)
    }

    /// The first segment of `rest`.
    fn first_segment(&self, rest: &[Placement]) -> Segment {
        let mut before: Option<&Placement> = None;
        // Index and phase of the last tensor that must not be moved.
        let mut fixed: Option<(usize, u64)> = None;
        for (index, placement) in with_bytes(rest) {
            if before.is_some_and(|before| !self.continues(before, placement)) {
                return Segment { len: index, phase: settled_phase(&rest[..index], fixed) };
            }
            before = Some(placement);
            if !self.has_to_land_in_place(placement) {
                continue;
            }
            match fixed {
                Some((last, settled)) if settled != phase(placement) => {
                    return Segment { len: split(rest, last, index), phase: settled };
                }
                _ => fixed = Some((index, phase(placement))),
            }
        }
        Segment { len: rest.len(), phase: settled_phase(rest, fixed) }
    }
}

/// The tensors that have bytes, with their indices.
fn with_bytes(placements: &[Placement]) -> impl Iterator<Item = (usize, &Placement)> {
    placements.iter().enumerate().filter(|(_, placement)| !placement.extent.is_empty())
}

/// The phase of a segment: that of a tensor that must not be moved, else the most common one.
fn settled_phase(segment: &[Placement], fixed: Option<(usize, u64)>) -> u64 {
    if let Some((_, phase)) = fixed {
        return phase;
    }
    let mut counts = [(0_u32, 0_u64); 256];
    for (_, placement) in with_bytes(segment) {
        let count = &mut counts[to_usize(phase(placement))];
        *count = (count.0 + 1, phase(placement));
    }
    counts.iter().max().map_or(0, |&(_, phase)| phase)
}

/// Where to end a segment whose last unmovable tensor is `last` if `next` has to start another one:
/// at the first place where the fewest tensors between them have to be moved.
///
/// The phase changes there: between neighbours of one phase the count is constant, or falls towards
/// one end. So [`exact`] begins a copy there too.
fn split(rest: &[Placement], last: usize, next: usize) -> usize {
    let (left, right) = (phase(&rest[last]), phase(&rest[next]));
    let between = || with_bytes(&rest[..=next]).filter(|&(index, _)| index > last);
    // The number of moves if the segment ends directly behind `last`; then one tensor further, and
    // so on.
    let mut moved_count = between().filter(|(_, placement)| phase(placement) != right).count();
    let mut best = (usize::MAX, next);
    for (index, placement) in between() {
        best = best.min((moved_count, index));
        moved_count += usize::from(phase(placement) != left);
        moved_count -= usize::from(phase(placement) != right);
    }
    best.1
}
