//! Arenas of dropped layers that a stream will reuse.
//!
//! Recycling saves the page faults of a fresh mapping, but must not cost memory: idle arenas and
//! layers in use together hold at most the plan's resident bytes. Anything beyond goes to the
//! system first.

use std::cmp::Reverse;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::staging::memory::{AnonymousMemory, is_huge};

/// Memory of an arena that may be reused.
pub(super) trait IdleMemory {
    /// Its length.
    fn len_bytes(&self) -> u64;

    /// True if a layer of `len_bytes` may use it.
    fn fits(&self, len_bytes: u64) -> bool;

    /// True if new memory for a layer of `len_bytes` makes this useless.
    fn is_outgrown_by(&self, len_bytes: u64) -> bool;
}

/// Host memory is only resident where its last layer touched it; a longer mapping costs nothing.
impl IdleMemory for AnonymousMemory {
    fn len_bytes(&self) -> u64 {
        self.len_bytes()
    }

    fn fits(&self, len_bytes: u64) -> bool {
        // With huge pages a small layer would be as resident as a large one, so the two kinds are
        // not mixed.
        is_huge(self.len_bytes()) == is_huge(len_bytes) && self.len_bytes() >= len_bytes
    }

    fn is_outgrown_by(&self, len_bytes: u64) -> bool {
        // Memory that is too small for this layer is too small for later ones.
        is_huge(self.len_bytes()) == is_huge(len_bytes) && self.len_bytes() < len_bytes
    }
}

/// The idle arenas of one backend, and the count of all bytes.
#[derive(Debug)]
pub(super) struct IdleArenas<M> {
    state: Mutex<State<M>>,
}

/// The pool's answer to a new arena.
#[derive(Debug)]
pub(super) struct Taken<M> {
    /// Idle memory that fits, if any.
    pub(super) memory: Option<M>,
    /// True if other idle memory was dropped.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "the host's memory is gone when it is dropped")
    )]
    pub(super) has_dropped: bool,
}

#[derive(Debug)]
struct State<M> {
    is_open: bool,
    /// True if several loads use it: none of them closes it, and the limit holds for all of them.
    is_shared: bool,
    /// Limit of the bytes of used and idle arenas together.
    resident_bytes_max: u64,
    /// Bytes of arenas in use.
    used_bytes: u64,
    idle: Vec<Idle<M>>,
}

#[derive(Debug)]
struct Idle<M> {
    memory: M,
    /// Bytes that its last layer may have touched, which are resident. The mapping may be longer.
    touched_bytes: u64,
}

impl<M: IdleMemory> IdleArenas<M> {
    /// A pool that keeps arenas.
    pub(super) fn open(resident_bytes_max: u64) -> Self {
        Self::with(State {
            is_open: true,
            is_shared: false,
            resident_bytes_max,
            used_bytes: 0,
            idle: Vec::new(),
        })
    }

    /// A pool that outlives its loads.
    pub(super) fn shared(resident_bytes_max: u64) -> Self {
        Self::with(State {
            is_open: true,
            is_shared: true,
            resident_bytes_max,
            used_bytes: 0,
            idle: Vec::new(),
        })
    }

    /// A pool that keeps nothing.
    pub(super) fn closed() -> Self {
        let (is_open, is_shared, resident_bytes_max) = (false, false, 0);
        Self::with(State { is_open, is_shared, resident_bytes_max, used_bytes: 0, idle: Vec::new() })
    }

    fn with(state: State<M>) -> Self {
        Self { state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State<M>> {
        // A panic elsewhere leaves valid lists and counts, so poison is ignored.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an arena of `len_bytes` as used, and returns the smallest idle memory that is large
    /// enough, if any. Pages beyond `len_bytes` may hold old bytes. Idle memory above the limit has
    /// been dropped by then.
    pub(super) fn take(&self, len_bytes: u64) -> Taken<M> {
        let mut state = self.lock();
        let fitting = state.idle.iter().enumerate().filter(|(_, idle)| idle.memory.fits(len_bytes));
        // Among equal lengths, the one with the most resident bytes: the rest has to be faulted in.
        let order = |idle: &Idle<M>| (idle.memory.len_bytes(), Reverse(idle.touched_bytes));
        let best = fitting.min_by_key(|(_, idle)| order(idle)).map(|(index, _)| index);
        let taken = best.map(|index| state.idle.swap_remove(index).memory);
        state.used_bytes = state.used_bytes.saturating_add(len_bytes);
        let mut freed = match &taken {
            Some(_) => Vec::new(),
            None => state.idle.extract_if(.., |idle| idle.memory.is_outgrown_by(len_bytes)).collect(),
        };
        state.idle.sort_unstable_by_key(|idle| idle.touched_bytes);
        while state.is_over() {
            freed.extend(state.idle.pop());
        }
        // Unmapping is slow and needs no lock.
        drop(state);
        let has_dropped = !freed.is_empty();
        drop(freed);
        Taken { memory: taken, has_dropped }
    }

    /// True until it is closed.
    #[cfg(feature = "cuda")]
    pub(super) fn is_open(&self) -> bool {
        self.lock().is_open
    }

    /// Takes back the memory of an arena of `len_bytes`. Memory that the pool does not keep is
    /// returned, to be freed by the caller.
    pub(super) fn give(&self, memory: Option<M>, len_bytes: u64) -> Option<M> {
        let mut state = self.lock();
        state.used_bytes = state.used_bytes.saturating_sub(len_bytes);
        let held_bytes = state.used_bytes.saturating_add(state.idle_bytes()).saturating_add(len_bytes);
        if !state.is_open || (state.is_shared && held_bytes > state.resident_bytes_max) {
            return memory;
        }
        state.idle.extend(memory.map(|memory| Idle { memory, touched_bytes: len_bytes }));
        None
    }

    /// Returns all idle memory to the system, and from now on everything that comes back. A shared
    /// pool stays as it is.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        if state.is_shared {
            return;
        }
        state.is_open = false;
        drop(state);
        self.free();
    }

    /// Returns all idle memory to the system.
    pub(super) fn free(&self) {
        let idle = std::mem::take(&mut self.lock().idle);
        // Unmapping is slow and needs no lock.
        drop(idle);
    }

    #[cfg(test)]
    pub(super) fn used_bytes(&self) -> u64 {
        self.lock().used_bytes
    }

    /// Bytes of idle arenas.
    pub(super) fn idle_bytes(&self) -> u64 {
        self.lock().idle_bytes()
    }
}

impl<M> State<M> {
    fn idle_bytes(&self) -> u64 {
        self.idle.iter().map(|idle| idle.touched_bytes).sum()
    }

    /// True if idle memory has to be dropped.
    fn is_over(&self) -> bool {
        !self.idle.is_empty() && self.used_bytes.saturating_add(self.idle_bytes()) > self.resident_bytes_max
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{KIB, MIB};

    /// A pool, and what each step of a stream does with it.
    struct Steps {
        pool: IdleArenas<AnonymousMemory>,
        used: Vec<(u64, Option<AnonymousMemory>)>,
    }

    impl Steps {
        fn new(resident_bytes_max: u64) -> Self {
            Self { pool: IdleArenas::open(resident_bytes_max), used: Vec::new() }
        }

        fn take(&mut self, len_bytes: u64) {
            let memory = self.pool.take(len_bytes).memory;
            let memory = memory.unwrap_or_else(|| AnonymousMemory::new(len_bytes).unwrap());
            assert!(memory.len_bytes() >= len_bytes);
            self.used.push((len_bytes, Some(memory)));
            assert_eq!(self.pool.used_bytes(), self.used.iter().map(|(len, _)| len).sum::<u64>());
        }

        /// Drops the layer that was handed out `age` layers ago.
        fn give(&mut self, age: usize) {
            let (len_bytes, memory) = self.used.remove(self.used.len() - 1 - age);
            self.pool.give(memory, len_bytes);
        }
    }

    #[test]
    fn an_arena_that_is_too_small_is_given_back_first() {
        let mut steps = Steps::new(u64::MAX);
        steps.take(2 * MIB);
        steps.give(0);
        assert_eq!(steps.pool.idle_bytes(), 2 * MIB);
        steps.take(4 * MIB);
        assert_eq!(steps.pool.idle_bytes(), 0);
    }

    #[test]
    fn the_smallest_arena_that_fits_is_taken() {
        let mut steps = Steps::new(u64::MAX);
        [8, 4, 16].into_iter().for_each(|mib| steps.take(mib * MIB));
        (0..3).for_each(|_| steps.give(0));
        steps.take(3 * MIB);
        assert_eq!(steps.used[0].1.as_ref().unwrap().len_bytes(), 4 * MIB);
        assert_eq!(steps.pool.idle_bytes(), 24 * MIB);
    }

    #[test]
    fn small_layers_never_get_huge_pages() {
        let mut steps = Steps::new(u64::MAX);
        steps.take(4 * MIB);
        steps.give(0);
        steps.take(64 * KIB);
        assert_eq!(steps.used[0].1.as_ref().unwrap().len_bytes(), 64 * KIB);
        assert_eq!(steps.pool.idle_bytes(), 4 * MIB, "the large one waits for a large layer");
    }

    /// An arena that was large once and holds a small layer by now may become large again, while
    /// another large one is idle: both together must not be more than the window ever was.
    #[test]
    fn idle_arenas_never_come_on_top_of_the_window() {
        // The largest two neighbours of this stream.
        let resident_bytes_max = 42 * MIB;
        let mut steps = Steps::new(resident_bytes_max);
        steps.take(20 * MIB);
        steps.take(2 * MIB);
        (0..2).for_each(|_| steps.give(0));
        (0..2).for_each(|_| steps.take(2 * MIB));
        steps.give(1);
        steps.take(40 * MIB);
        steps.give(1);
        steps.take(2 * MIB);
        (0..2).for_each(|_| steps.give(0));
        let idle: Vec<(u64, u64)> = {
            let state = steps.pool.lock();
            state.idle.iter().map(|idle| (idle.memory.len_bytes() / MIB, idle.touched_bytes / MIB)).collect()
        };
        assert_eq!(idle, [(20, 2), (40, 40)], "the case that is meant");
        steps.take(20 * MIB);
        assert!(steps.pool.used_bytes() + steps.pool.idle_bytes() <= resident_bytes_max);
    }

    #[test]
    fn of_two_alike_the_one_that_holds_more_is_taken() {
        let mut steps = Steps::new(u64::MAX);
        (0..2).for_each(|_| steps.take(20 * MIB));
        (0..2).for_each(|_| steps.give(0));
        (0..2).for_each(|_| steps.take(2 * MIB));
        steps.give(0);
        steps.take(20 * MIB);
        // Both are idle now: one holds 2 MiB, one 20.
        (0..2).for_each(|_| steps.give(0));
        steps.take(20 * MIB);
        assert_eq!(steps.pool.idle_bytes(), 2 * MIB, "no page of the other was touched for nothing");
    }

    #[test]
    fn a_closed_pool_hands_back_what_it_does_not_keep() {
        let pool = IdleArenas::<AnonymousMemory>::open(u64::MAX);
        let [first, second] = [(); 2].map(|()| {
            assert!(pool.take(MIB).memory.is_none());
            AnonymousMemory::new(MIB).unwrap()
        });
        assert!(pool.give(Some(first), MIB).is_none());
        pool.close();
        assert!(pool.give(Some(second), MIB).is_some(), "whoever frees it may have more to give back");
        assert_eq!((pool.used_bytes(), pool.idle_bytes()), (0, 0));
    }
}
