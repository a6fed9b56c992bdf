//! Window permits: how many layers, and how many bytes of them, may be resident at once.
//!
//! A layer holds a [`Permit`] from the allocation of its arena until its last owner is gone. The
//! control loop asks for permits. The stream asks whether the caller itself holds the layers that
//! the control loop waits for.
//!
//! Layers are counted by turn: from 0, and on from one pass to the next.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::channels::Signals;
use crate::device::ArenaPlace;
use crate::plan::{LoadPlan, Window, WindowShape};

/// The limits of a window.
#[derive(Debug)]
struct Bounds {
    /// Layers at once.
    layers_max: usize,
    /// Bytes of their arenas at once.
    bytes_max: Option<u64>,
}

impl Bounds {
    /// The bounds of a plan. Kept layers do not count; their bytes are taken off the device budget.
    fn of(plan: &LoadPlan) -> Self {
        let others = plan.layers().iter().filter(|layer| !layer.is_kept).count();
        let kept_bytes: u64 =
            plan.layers().iter().filter(|layer| layer.is_kept).map(|layer| layer.arena_bytes).sum();
        let budget_bytes = plan.memory().device_budget_bytes().map(|bytes| bytes.saturating_sub(kept_bytes));
        let bytes_max = match plan.window() {
            Window::Bytes(bytes) => Some(budget_bytes.map_or(bytes, |budget| budget.min(bytes))),
            Window::All | Window::Layers(_) => budget_bytes,
        };
        Self { layers_max: plan.window().over(others), bytes_max }
    }
}

/// Most layers that lists have room for from the start. Larger windows hold whole models, where a
/// list that grows does not matter.
const LAYERS_AT_FIRST: usize = 64;

/// How many layers are resident at once, at most [`LAYERS_AT_FIRST`]: for lists that are allocated
/// at the start.
pub(super) fn layers_at_once(plan: &LoadPlan) -> usize {
    Bounds::of(plan).layers_max.min(LAYERS_AT_FIRST)
}

/// Gives out the permits of one window.
#[derive(Debug)]
pub(super) struct WindowPermits {
    bounds: Bounds,
    state: Mutex<State>,
    signals: Arc<Signals>,
}

#[derive(Debug, Default)]
struct State {
    /// The layers that have a permit.
    layers: Vec<Placed>,
    /// Bytes of their arenas.
    bytes: u64,
    /// Where they lie, if the window is one allocation.
    space: Option<WindowSpace>,
    /// Turns that have ended and when, if a hook wants them.
    ended: Option<Vec<(usize, Instant)>>,
    /// Why the last request was refused, if no permit has been returned since.
    refusal: Option<Full>,
}

/// A layer that has a permit.
#[derive(Clone, Copy, Debug)]
struct Placed {
    turn: usize,
    /// Clones of its [`Permit`]. They are counted here and not in an `Arc`, so that a permit
    /// allocates nothing.
    permits: usize,
}

impl State {
    /// Why the last request was refused, if all permits belong to turns below `end`.
    fn stopped_below(&self, end: usize) -> Option<Full> {
        self.refusal.filter(|_| self.layers.iter().all(|placed| placed.turn < end))
    }

    /// The index of a layer in the list.
    fn index_of(&self, turn: usize) -> usize {
        self.layers.iter().position(|placed| placed.turn == turn).expect("a permit is listed")
    }
}

/// The limit that a refused layer would have exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// The layers of the window.
    Layers { layers_max: usize },
    /// The bytes of the window, or of the device budget.
    Bytes { bytes_max: u64 },
}

impl WindowPermits {
    /// The permits of a plan.
    pub(super) fn of(plan: &LoadPlan, signals: Arc<Signals>) -> Arc<Self> {
        let bounds = Bounds::of(plan);
        let space = plan.memory().window().map(|shape| WindowSpace::new(shape, bounds.layers_max));
        Self::new(bounds, space, signals)
    }

    /// The permits of a window. With a `space` the window is one allocation.
    fn new(bounds: Bounds, space: Option<WindowSpace>, signals: Arc<Signals>) -> Arc<Self> {
        let layers = Vec::with_capacity(bounds.layers_max.min(LAYERS_AT_FIRST));
        let state = State { layers, space, ..State::default() };
        Arc::new(Self { bounds, state: Mutex::new(state), signals })
    }

    /// From now on, records when each turn ends.
    pub(super) fn record_ends(&self) {
        self.lock().ended = Some(Vec::with_capacity(LAYERS_AT_FIRST));
    }

    /// Moves the turns that have ended since the last call into a list.
    pub(super) fn take_ended(&self, into: &mut Vec<(usize, Instant)>) {
        if let Some(ended) = &mut self.lock().ended {
            into.append(ended);
        }
    }

    /// A permit for the layer, if the window has room for it.
    pub(super) fn try_issue(self: &Arc<Self>, turn: usize, arena_bytes: u64) -> Option<Permit> {
        let mut state = self.lock();
        let bytes = state.bytes.saturating_add(arena_bytes);
        let Bounds { layers_max, bytes_max } = self.bounds;
        state.refusal = match bytes_max {
            _ if state.layers.len() >= layers_max => Some(Full::Layers { layers_max }),
            Some(bytes_max) if bytes > bytes_max => Some(Full::Bytes { bytes_max }),
            _ => None,
        };
        if state.refusal.is_some() {
            return None;
        }
        let place = match &mut state.space {
            None => ArenaPlace::Own,
            Some(space) => match space.take(arena_bytes) {
                Some(offset_bytes) => ArenaPlace::InWindow { offset_bytes },
                None => {
                    // Enough bytes are free, but not in one piece.
                    state.refusal = Some(Full::Bytes { bytes_max: bytes_max.unwrap_or(bytes) });
                    return None;
                }
            },
        };
        state.layers.push(Placed { turn, permits: 1 });
        state.bytes = bytes;
        drop(state);
        Some(Permit { turn, arena_bytes, place, permits: Arc::clone(self) })
    }

    /// True if the load is stopped and all permits belong to turns below `end`. With `end` set to
    /// the number of layers taken, the caller holds all of them, and only the caller can let the
    /// load go on.
    pub(super) fn is_stopped_by_turns_below(&self, end: usize) -> bool {
        self.lock().stopped_below(end).is_some()
    }

    /// The limit that stops the load in that case, and the turns whose layers are held.
    pub(super) fn stopped_by_turns_below(&self, end: usize) -> Option<(Full, Vec<usize>)> {
        let state = self.lock();
        state.stopped_below(end).map(|full| {
            let mut turns: Vec<usize> = state.layers.iter().map(|placed| placed.turn).collect();
            turns.sort_unstable();
            (full, turns)
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No update can panic halfway.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right of one layer to be resident, until the last clone is dropped.
#[derive(Debug)]
pub(super) struct Permit {
    turn: usize,
    arena_bytes: u64,
    place: ArenaPlace,
    permits: Arc<WindowPermits>,
}

impl Permit {
    /// Where the arena of the layer lies.
    pub(super) fn place(&self) -> ArenaPlace {
        self.place
    }
}

impl Clone for Permit {
    fn clone(&self) -> Self {
        let mut state = self.permits.lock();
        let index = state.index_of(self.turn);
        state.layers[index].permits += 1;
        drop(state);
        let Self { turn, arena_bytes, place, permits } = self;
        Self { turn: *turn, arena_bytes: *arena_bytes, place: *place, permits: Arc::clone(permits) }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.permits.lock();
        let index = state.index_of(self.turn);
        state.layers[index].permits -= 1;
        if state.layers[index].permits > 0 {
            return;
        }
        state.layers.swap_remove(index);
        state.bytes -= self.arena_bytes;
        if let (Some(space), ArenaPlace::InWindow { offset_bytes }) = (&mut state.space, self.place) {
            space.give(offset_bytes, self.arena_bytes);
        }
        if let Some(ended) = &mut state.ended {
            ended.push((self.turn, Instant::now()));
        }
        state.refusal = None;
        drop(state);
        self.permits.signals.wake();
    }
}

/// The places in the memory of one window, found by first fit. Each is a whole number of units.
#[derive(Debug)]
struct WindowSpace {
    shape: WindowShape,
    /// Where each taken place starts and ends, ascending: one for each resident layer.
    taken: Vec<(u64, u64)>,
}

impl WindowSpace {
    /// An empty window. The list has room for this many places before it grows.
    fn new(shape: WindowShape, places: usize) -> Self {
        Self { shape, taken: Vec::with_capacity(places) }
    }

    /// Takes the first free place that is long enough and returns its start, or `None`. A length of
    /// zero takes no place.
    fn take(&mut self, len_bytes: u64) -> Option<u64> {
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

    /// Gives back the place that starts there. A length of zero took none.
    fn give(&mut self, start: u64, len_bytes: u64) {
        if len_bytes > 0 {
            let index = self.taken.binary_search_by_key(&start, |place| place.0);
            self.taken.remove(index.expect("only a place that was taken is given back"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permits(layers_max: usize, bytes_max: Option<u64>, space: Option<WindowSpace>) -> Arc<WindowPermits> {
        WindowPermits::new(Bounds { layers_max, bytes_max }, space, Signals::new().0)
    }

    #[test]
    fn exhaust_fail_release_succeed() {
        let (signals, woken) = Signals::new();
        let permits = WindowPermits::new(Bounds { layers_max: 2, bytes_max: Some(100) }, None, signals);
        let first = permits.try_issue(0, 60).unwrap();
        assert_eq!(permits.stopped_by_turns_below(1), None, "nothing was refused");

        assert!(permits.try_issue(1, 41).is_none());
        let full = Full::Bytes { bytes_max: 100 };
        assert_eq!(permits.stopped_by_turns_below(1), Some((full, vec![0])));
        assert_eq!(permits.stopped_by_turns_below(0), None, "the layer is still on its way to the caller");

        let second = permits.try_issue(1, 40).unwrap();
        assert_eq!(permits.stopped_by_turns_below(2), None);
        assert!(permits.try_issue(2, 0).is_none());
        let full = Full::Layers { layers_max: 2 };
        assert_eq!(permits.stopped_by_turns_below(2), Some((full, vec![0, 1])));

        assert!(woken.try_recv().is_err());
        drop(first);
        assert!(woken.try_recv().is_ok());
        assert_eq!(permits.stopped_by_turns_below(2), None, "the load has not asked again");
        let third = permits.try_issue(2, 60).unwrap();
        assert!(permits.try_issue(3, 0).is_none());
        drop((second, third));
        assert!(permits.try_issue(3, 100).is_some());
    }

    #[test]
    fn a_layer_waits_for_room_in_one_piece() {
        let space = || Some(WindowSpace::new(WindowShape { bytes: 100, unit_bytes: 1 }, 4));
        let permits = permits(10, Some(100), space());
        let [first, second, third] =
            [(0, 40), (1, 20), (2, 40)].map(|(t, len)| permits.try_issue(t, len).unwrap());
        assert_eq!(second.place(), ArenaPlace::InWindow { offset_bytes: 40 });
        drop((first, third));
        assert!(permits.try_issue(3, 60).is_none(), "80 are free, in two pieces");
        assert_eq!(permits.stopped_by_turns_below(3), Some((Full::Bytes { bytes_max: 100 }, vec![1])));
        drop(second);
        assert!(permits.try_issue(3, 60).is_some());
    }

    #[test]
    fn a_place_is_taken_until_its_last_permit_is_dropped() {
        let permits = permits(1, None, None);
        let first = permits.try_issue(0, 10).unwrap();
        let (second, third) = (first.clone(), first.clone());
        drop((first, third));
        assert!(permits.try_issue(1, 10).is_none(), "one is left");
        drop(second);
        assert!(permits.try_issue(1, 10).is_some());
    }

    #[test]
    fn ends_are_recorded_once_asked_for() {
        let permits = permits(2, None, None);
        drop(permits.try_issue(0, 1));
        permits.record_ends();
        drop((permits.try_issue(5, 1), permits.try_issue(6, 1)));
        let mut ended = Vec::new();
        permits.take_ended(&mut ended);
        permits.take_ended(&mut ended);
        assert_eq!(ended.iter().map(|end| end.0).collect::<Vec<_>>(), [5, 6]);
    }

    fn space_of(bytes: u64, unit_bytes: u64) -> WindowSpace {
        WindowSpace::new(WindowShape { bytes, unit_bytes }, 4)
    }

    #[test]
    fn space_is_taken_given_back_and_taken_again() {
        let mut space = space_of(10, 1);
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
        let mut space = space_of(30, 10);
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
        let mut space = space_of(300, 1);
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
