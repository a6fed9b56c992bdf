//! Which parts of the window's memory are free: places by first fit, each a whole number of units.
//! Pure.

use crate::plan::WindowShape;

/// The places of one window.
#[derive(Debug)]
pub(super) struct Space {
    shape: WindowShape,
    /// Where each taken place starts and ends, ascending. Never longer than the layers that are
    /// resident at once.
    taken: Vec<(u64, u64)>,
}

impl Space {
    /// Nothing is taken. There is room for so many places before the list grows.
    pub(super) fn new(shape: WindowShape, places: usize) -> Self {
        Self { shape, taken: Vec::with_capacity(places) }
    }

    /// Takes the first place that is long enough, and says where it starts. `None` if there is
    /// none. Nothing takes no place.
    pub(super) fn take(&mut self, len_bytes: u64) -> Option<u64> {
        if len_bytes == 0 {
            return Some(0);
        }
        let len_bytes = len_bytes.checked_next_multiple_of(self.shape.unit_bytes)?;
        let mut start = 0;
        let mut index = 0;
        while let Some(&(next_start, next_end)) = self.taken.get(index) {
            if next_start - start >= len_bytes {
                break;
            }
            (start, index) = (next_end, index + 1);
        }
        let end = start.checked_add(len_bytes).filter(|&end| end <= self.shape.bytes)?;
        self.taken.insert(index, (start, end));
        Some(start)
    }

    /// Gives the place back that starts there, unless it was nothing.
    pub(super) fn give(&mut self, start: u64, len_bytes: u64) {
        if len_bytes > 0 {
            let index = self.taken.binary_search_by_key(&start, |place| place.0);
            self.taken.remove(index.expect("only a place that was taken is given back"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(bytes: u64, unit_bytes: u64) -> Space {
        Space::new(WindowShape { bytes, unit_bytes }, 4)
    }

    #[test]
    fn exhaust_fail_release_succeed() {
        let mut space = space(10, 1);
        assert_eq!((space.take(4), space.take(3), space.take(0)), (Some(0), Some(4), Some(0)));
        assert_eq!(space.take(4), None);
        assert_eq!(space.take(3), Some(7));
        space.give(4, 3);
        space.give(0, 0);
        assert_eq!(space.take(4), None, "three in the middle");
        space.give(0, 4);
        assert_eq!(space.take(7), Some(0));
        assert_eq!(space.take(1), None);
    }

    #[test]
    fn places_of_one_length_never_leave_a_hole() {
        let mut space = space(30, 10);
        let mut held: Vec<u64> = [3, 10, 1].into_iter().map(|len| space.take(len).unwrap()).collect();
        for turn in 0..100 {
            assert_eq!(space.take(1), None);
            let start = held.remove(turn % 3);
            space.give(start, 1);
            held.push(space.take(1 + u64::try_from(turn % 10).unwrap()).unwrap());
        }
    }

    /// As a stream takes and gives: in order, each place at most a third of the window.
    #[test]
    fn places_never_overlap_and_come_back() {
        let mut space = space(300, 1);
        let mut held = std::collections::VecDeque::new();
        let mut seed = 7_u64;
        for _ in 0..10_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let len = 1 + (seed >> 33) % 100;
            let start = loop {
                if let Some(start) = space.take(len) {
                    break start;
                }
                let (start, len): (u64, u64) = held.pop_front().expect("an empty window has room");
                space.give(start, len);
            };
            for &(other, other_len) in &held {
                assert!(start + len <= other || other + other_len <= start);
            }
            assert!(start + len <= 300);
            held.push_back((start, len));
        }
    }
}
