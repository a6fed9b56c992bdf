//! Casts the part of a read that has arrived: each piece while it is in the core's cache.
//!
//! ```text
//! slot   |..|narrow|. . .|arrived, not yet cast|to come       |
//!           ^      ^     ^ `done_bytes`        ^ `arrived_bytes`
//! ```
//!
//! If the whole payload is narrowed, all pieces behind the first are read to one place at the end
//! of the payload, until the narrowed bytes reach it:
//!
//! ```text
//! slot   |narrow|narrow|. . . . . . . . . |piece, just read|
//! next   |narrow|narrow|narrow|. . . . . .|piece, just read|
//! ```
//!
//! So both the old and the new bytes of that place are in the core's cache, and little more of the
//! slot is written than is delivered.

use super::{cast_part, cast_step};
use crate::plan::CastOp;
use crate::source::Arrival;
use crate::units::Alignment;

/// The casts of one read, from front to back.
pub(crate) struct Casting<I> {
    rest: I,
    open: Option<CastOp>,
    /// Bytes of `open` that are cast.
    done_bytes: u64,
}

impl<I: Iterator<Item = CastOp>> Casting<I> {
    pub(crate) fn new(mut casts: I) -> Self {
        let open = casts.next();
        Self { rest: casts, open, done_bytes: 0 }
    }

    /// True if something is left to cast.
    pub(crate) fn is_needed(&self) -> bool {
        self.open.is_some()
    }

    /// Casts every whole element that ends at or before `arrived_bytes` of the slot and is not cast
    /// yet. `count` gets the number of elements that became infinite.
    pub(crate) fn advance(
        &mut self,
        slot: &mut [u8],
        arrived_bytes: u64,
        mut count: impl FnMut(&CastOp, u64),
    ) {
        while let Some(step) = self.open {
            let unit_bytes = step.cast.source_unit_bytes();
            let there_bytes = arrived_bytes.saturating_sub(step.slot_offset_bytes).min(step.source_len_bytes);
            let is_last = there_bytes == step.source_len_bytes;
            if step.cast.is_widening() {
                // Cast from the back, so it must be complete.
                if !is_last {
                    return;
                }
                count(&step, cast_step(slot, &step));
            } else {
                let end_bytes = there_bytes - there_bytes % unit_bytes;
                if end_bytes > self.done_bytes {
                    let source = step.slot_offset_bytes + self.done_bytes;
                    count(&step, cast_part(slot, &step, source, self.done_bytes, end_bytes));
                    self.done_bytes = end_bytes;
                }
                if !is_last {
                    return;
                }
            }
            (self.open, self.done_bytes) = (self.rest.next(), 0);
        }
    }
}

/// A read whose whole payload is one stretch to be narrowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Narrowing(CastOp);

impl Narrowing {
    /// The only cast of a read, if it covers the whole payload at `payload_position_bytes` of the
    /// slot and does not widen.
    pub(crate) fn of(
        mut casts: impl Iterator<Item = CastOp>,
        payload_position_bytes: u64,
        payload_len_bytes: u64,
    ) -> Option<Self> {
        let step = casts.next()?;
        let is_all =
            step.slot_offset_bytes == payload_position_bytes && step.source_len_bytes == payload_len_bytes;
        (is_all && !step.cast.is_widening()).then_some(Self(step))
    }

    /// Casts a part of the payload, which lies where the last call said. Returns where the next
    /// part goes, which is not longer. `count` gets the number of elements that became infinite.
    pub(crate) fn advance(&self, slot: &mut [u8], arrival: Arrival, count: impl FnOnce(&CastOp, u64)) -> u64 {
        let (step, end_bytes) = (&self.0, arrival.end_bytes());
        count(step, cast_part(slot, step, arrival.position_bytes, arrival.start_bytes, end_bytes));
        let narrow_end_bytes = step.slot_offset_bytes + step.cast.delivered_bytes(end_bytes);
        let payload_end_bytes = step.slot_offset_bytes + step.source_len_bytes;
        // Loads of vectors that cross a cache line are slower.
        let last_place_bytes =
            Alignment::CACHE_LINE.down(payload_end_bytes.saturating_sub(arrival.len_bytes));
        narrow_end_bytes.max(last_place_bytes)
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::super::reference::{cast_bytes, elements, every_cast, is_overflow, seeded};
    use super::*;
    use crate::checkpoint::TensorId;
    use crate::plan::Cast;
    use crate::units::{to_u64, to_usize};

    fn step(cast: Cast, slot_offset_bytes: u64, elements: u64) -> CastOp {
        let source_len_bytes = elements * cast.source_unit_bytes();
        CastOp { tensor: TensorId(0), slot_offset_bytes, source_len_bytes, cast }
    }

    /// Each piece is read where the previous one said.
    #[test]
    fn pieces_over_one_another_give_what_the_whole_gives() {
        let random: Vec<u8> = seeded(1000).flat_map(u64::to_le_bytes).collect();
        for cast in every_cast() {
            let step = step(cast, 24, 1000);
            let narrowing = |position, len| Narrowing::of([step].into_iter(), position, len);
            let len_bytes = step.source_len_bytes;
            assert!(narrowing(16, len_bytes).is_none() && narrowing(24, len_bytes + 8).is_none());
            let Some(narrowing) = narrowing(24, len_bytes) else {
                assert!(cast.is_widening());
                continue;
            };
            let expected = cast_bytes(&random[..to_usize(len_bytes)], cast);
            for piece in [8, 512, 1000, 100_000] {
                let mut slot = vec![0xA5; to_usize(24 + len_bytes) + 5];
                let (mut position, mut start) = (24, 0);
                while start < len_bytes {
                    let len = piece.min(len_bytes - start);
                    let arrived = &random[to_usize(start)..to_usize(start + len)];
                    slot[to_usize(position)..to_usize(position + len)].copy_from_slice(arrived);
                    let arrival = Arrival { position_bytes: position, start_bytes: start, len_bytes: len };
                    position = narrowing.advance(&mut slot, arrival, |_, _| {});
                    assert!(
                        position + len.min(len_bytes - start - len) <= 24 + len_bytes,
                        "{cast}: room for the next"
                    );
                    start += len;
                }
                let last_len = len_bytes - (len_bytes - 1) / piece * piece;
                let last_place = (24 + len_bytes - last_len) / 64 * 64;
                assert_eq!(
                    position,
                    last_place.max(24 + to_u64(expected.len())),
                    "{cast} in pieces of {piece}"
                );
                assert!(slot[24..][..expected.len()] == expected, "{cast} in pieces of {piece}");
                assert!(slot[..24].iter().chain(&slot[to_usize(24 + len_bytes)..]).all(|&byte| byte == 0xA5));
            }
        }
    }

    /// Two stretches with something between them, arriving in pieces that end anywhere.
    #[test]
    fn pieces_give_what_the_whole_gives() {
        let random: Vec<u8> = seeded(2000).flat_map(u64::to_le_bytes).collect();
        for cast in every_cast() {
            let first = step(cast, 3, 700);
            let second_start = 3 + 700 * cast.source_unit_bytes().max(cast.to().bytes()) + 11;
            let steps = [first, step(cast, second_start, 300)];
            let end = to_usize(second_start + 300 * cast.source_unit_bytes().max(cast.to().bytes()));
            for piece in [1, 7, 100, 513, 1000, 5000, 100_000] {
                let mut slot = vec![0xA5; end + 5];
                let mut casting = Casting::new(steps.into_iter());
                assert!(casting.is_needed());
                let (mut arrived, mut overflowed) = (0, 0);
                while arrived < end {
                    let next = (arrived + piece).min(end);
                    // Only elements arrive: widened tensors have their own reads.
                    for step in steps {
                        let source = step.slot_offset_bytes..step.slot_offset_bytes + step.source_len_bytes;
                        let new = arrived.max(to_usize(source.start))..next.min(to_usize(source.end));
                        if !new.is_empty() {
                            slot[new.clone()].copy_from_slice(&random[new]);
                        }
                    }
                    casting.advance(&mut slot, to_u64(next), |_, count| overflowed += count);
                    arrived = next;
                }
                assert!(!casting.is_needed(), "{cast}");
                let mut expected_overflows = 0;
                for step in steps {
                    let (start, len) = (to_usize(step.slot_offset_bytes), to_usize(step.source_len_bytes));
                    let expected = cast_bytes(&random[start..start + len], cast);
                    assert!(slot[start..start + expected.len()] == expected, "{cast} in pieces of {piece}");
                    let source = elements(&random[start..start + len], to_usize(cast.source_unit_bytes()));
                    expected_overflows +=
                        to_u64(source.filter(|&bits| cast.can_overflow() && is_overflow(bits, cast)).count());
                }
                assert_eq!(overflowed, expected_overflows, "{cast} in pieces of {piece}");
                assert!(slot[end..].iter().all(|&byte| byte == 0xA5));
            }
        }
    }
}
