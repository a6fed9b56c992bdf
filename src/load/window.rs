//! The window: how many layers, and how many bytes of them, may be resident at once.
//!
//! A layer has a [`Permit`] from its arena's allocation until its last owner is gone, wherever that
//! is. The control loop asks for permits; the stream asks whether the caller itself holds what the
//! loop waits for.
//!
//! Layers are counted by their turn: from 0, and on from one pass to the next.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::signals::Signals;
use super::space::Space;
use crate::device::ArenaPlace;
use crate::plan::{LoadPlan, Window};

/// What a window may hold.
#[derive(Debug)]
pub(super) struct Bounds {
    /// Layers at once.
    pub(super) layers_max: usize,
    /// Bytes of their arenas at once.
    pub(super) bytes_max: Option<u64>,
}

impl Bounds {
    /// Those of a plan. Kept layers have their bytes beside it.
    pub(super) fn of(plan: &LoadPlan) -> Self {
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

/// Layers of a window that are provided for at the beginning: larger windows are of layers that are
/// resident as a whole.
const LAYERS_AT_FIRST: usize = 64;

/// How many layers have a place at once, as far as they are provided for at the beginning.
pub(super) fn layers_at_once(plan: &LoadPlan) -> usize {
    Bounds::of(plan).layers_max.min(LAYERS_AT_FIRST)
}

/// Gives out the places of the window.
#[derive(Debug)]
pub(super) struct PermitOffice {
    bounds: Bounds,
    holders: Mutex<Holders>,
    signals: Arc<Signals>,
}

#[derive(Debug, Default)]
struct Holders {
    /// The layers that have a place.
    layers: Vec<Holder>,
    /// Bytes of their arenas.
    bytes: u64,
    /// Where they lie, if it is one piece of memory.
    space: Option<Space>,
    /// Turns that have ended and when, if somebody wants to know.
    ended: Option<Vec<(usize, Instant)>>,
    /// Why the last request was refused, if nothing has been given back since.
    refusal: Option<Full>,
}

/// A layer that has a place.
#[derive(Clone, Copy, Debug)]
struct Holder {
    turn: usize,
    /// How many [`Permit`]s there are of it. Counted here, so that none of them takes anything from
    /// the allocator.
    permits: usize,
}

impl Holders {
    /// Why the last request was refused, if all places are those of turns below `end`.
    fn stopped_below(&self, end: usize) -> Option<Full> {
        self.refusal.filter(|_| self.layers.iter().all(|holder| holder.turn < end))
    }

    /// Where a layer is listed.
    fn index_of(&self, turn: usize) -> usize {
        self.layers.iter().position(|holder| holder.turn == turn).expect("a permit is listed")
    }
}

/// What a refused layer would have gone beyond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// The layers of the window.
    Layers { layers_max: usize },
    /// The bytes of the window, or of the device budget.
    Bytes { bytes_max: u64 },
}

impl PermitOffice {
    /// An office for a window, in one piece of memory if there is a space.
    pub(super) fn new(bounds: Bounds, space: Option<Space>, signals: Arc<Signals>) -> Arc<Self> {
        let layers = Vec::with_capacity(bounds.layers_max.min(LAYERS_AT_FIRST));
        let holders = Holders { layers, space, ..Holders::default() };
        Arc::new(Self { bounds, holders: Mutex::new(holders), signals })
    }

    /// From now on, notes when a turn has ended.
    pub(super) fn note_ends(&self) {
        self.lock().ended = Some(Vec::with_capacity(LAYERS_AT_FIRST));
    }

    /// Takes the turns that have ended since it was last asked.
    pub(super) fn take_ended(&self, into: &mut Vec<(usize, Instant)>) {
        if let Some(ended) = &mut self.lock().ended {
            into.append(ended);
        }
    }

    /// A place for the layer, if there is one and its bytes fit.
    pub(super) fn try_issue(self: &Arc<Self>, turn: usize, arena_bytes: u64) -> Option<Permit> {
        let mut holders = self.lock();
        let bytes = holders.bytes.saturating_add(arena_bytes);
        let Bounds { layers_max, bytes_max } = self.bounds;
        holders.refusal = match bytes_max {
            _ if holders.layers.len() >= layers_max => Some(Full::Layers { layers_max }),
            Some(bytes_max) if bytes > bytes_max => Some(Full::Bytes { bytes_max }),
            _ => None,
        };
        if holders.refusal.is_some() {
            return None;
        }
        let place = match &mut holders.space {
            None => ArenaPlace::Own,
            Some(space) => match space.take(arena_bytes) {
                Some(offset_bytes) => ArenaPlace::InWindow { offset_bytes },
                None => {
                    // The bytes are free, and not in one piece.
                    holders.refusal = Some(Full::Bytes { bytes_max: bytes_max.unwrap_or(bytes) });
                    return None;
                }
            },
        };
        holders.layers.push(Holder { turn, permits: 1 });
        holders.bytes = bytes;
        drop(holders);
        Some(Permit { turn, arena_bytes, place, office: Arc::clone(self) })
    }

    /// True if the load is stopped and all layers that have a place are those of turns below `end`:
    /// with `end` = layers taken, the caller holds them, and nothing but the caller can let the
    /// load go on.
    pub(super) fn is_stopped_by_turns_below(&self, end: usize) -> bool {
        self.lock().stopped_below(end).is_some()
    }

    /// What stops the load then, and the turns that would have to go.
    pub(super) fn stopped_by_turns_below(&self, end: usize) -> Option<(Full, Vec<usize>)> {
        let holders = self.lock();
        holders.stopped_below(end).map(|full| {
            let mut turns: Vec<usize> = holders.layers.iter().map(|holder| holder.turn).collect();
            turns.sort_unstable();
            (full, turns)
        })
    }

    fn lock(&self) -> MutexGuard<'_, Holders> {
        // No update can be left half done.
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the window: its layer's until the last clone is gone.
#[derive(Debug)]
pub(super) struct Permit {
    turn: usize,
    arena_bytes: u64,
    place: ArenaPlace,
    office: Arc<PermitOffice>,
}

impl Permit {
    /// Where the arena of its layer lies.
    pub(super) fn place(&self) -> ArenaPlace {
        self.place
    }
}

impl Clone for Permit {
    fn clone(&self) -> Self {
        let mut holders = self.office.lock();
        let index = holders.index_of(self.turn);
        holders.layers[index].permits += 1;
        drop(holders);
        let Self { turn, arena_bytes, place, office } = self;
        Self { turn: *turn, arena_bytes: *arena_bytes, place: *place, office: Arc::clone(office) }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut holders = self.office.lock();
        let index = holders.index_of(self.turn);
        holders.layers[index].permits -= 1;
        if holders.layers[index].permits > 0 {
            return;
        }
        holders.layers.swap_remove(index);
        holders.bytes -= self.arena_bytes;
        if let (Some(space), ArenaPlace::InWindow { offset_bytes }) = (&mut holders.space, self.place) {
            space.give(offset_bytes, self.arena_bytes);
        }
        if let Some(ended) = &mut holders.ended {
            ended.push((self.turn, Instant::now()));
        }
        holders.refusal = None;
        drop(holders);
        self.office.signals.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::WindowShape;

    fn office(layers_max: usize, bytes_max: Option<u64>, space: Option<Space>) -> Arc<PermitOffice> {
        PermitOffice::new(Bounds { layers_max, bytes_max }, space, Signals::new().0)
    }

    #[test]
    fn exhaust_fail_release_succeed() {
        let (signals, ear) = Signals::new();
        let office = PermitOffice::new(Bounds { layers_max: 2, bytes_max: Some(100) }, None, signals);
        let first = office.try_issue(0, 60).unwrap();
        assert_eq!(office.stopped_by_turns_below(1), None, "nothing was refused");

        assert!(office.try_issue(1, 41).is_none());
        let full = Full::Bytes { bytes_max: 100 };
        assert_eq!(office.stopped_by_turns_below(1), Some((full, vec![0])));
        assert_eq!(office.stopped_by_turns_below(0), None, "the layer is still on its way to the caller");

        let second = office.try_issue(1, 40).unwrap();
        assert_eq!(office.stopped_by_turns_below(2), None);
        assert!(office.try_issue(2, 0).is_none());
        let full = Full::Layers { layers_max: 2 };
        assert_eq!(office.stopped_by_turns_below(2), Some((full, vec![0, 1])));

        assert!(ear.try_recv().is_err());
        drop(first);
        assert!(ear.try_recv().is_ok());
        assert_eq!(office.stopped_by_turns_below(2), None, "the load has not asked again");
        let third = office.try_issue(2, 60).unwrap();
        assert!(office.try_issue(3, 0).is_none());
        drop((second, third));
        assert!(office.try_issue(3, 100).is_some());
    }

    #[test]
    fn a_layer_waits_for_room_in_one_piece() {
        let space = || Some(Space::new(WindowShape { bytes: 100, unit_bytes: 1 }, 4));
        let office = office(10, Some(100), space());
        let [first, second, third] =
            [(0, 40), (1, 20), (2, 40)].map(|(t, len)| office.try_issue(t, len).unwrap());
        assert_eq!(second.place(), ArenaPlace::InWindow { offset_bytes: 40 });
        drop((first, third));
        assert!(office.try_issue(3, 60).is_none(), "80 are free, in two pieces");
        assert_eq!(office.stopped_by_turns_below(3), Some((Full::Bytes { bytes_max: 100 }, vec![1])));
        drop(second);
        assert!(office.try_issue(3, 60).is_some());
    }

    #[test]
    fn a_place_is_taken_until_its_last_permit_is_gone() {
        let office = office(1, None, None);
        let first = office.try_issue(0, 10).unwrap();
        let (second, third) = (first.clone(), first.clone());
        drop((first, third));
        assert!(office.try_issue(1, 10).is_none(), "one is left");
        drop(second);
        assert!(office.try_issue(1, 10).is_some());
    }

    #[test]
    fn ends_are_noted_for_whoever_asks() {
        let office = office(2, None, None);
        drop(office.try_issue(0, 1));
        office.note_ends();
        drop((office.try_issue(5, 1), office.try_issue(6, 1)));
        let mut ended = Vec::new();
        office.take_ended(&mut ended);
        office.take_ended(&mut ended);
        assert_eq!(ended.iter().map(|end| end.0).collect::<Vec<_>>(), [5, 6]);
    }
}
