//! The list of free slots. The only part of the ring that threads contend for; it is a file of its
//! own so that loom explores every interleaving (`RUSTFLAGS="--cfg loom" cargo test -p onelayer
//! --lib free_list`).
//!
//! A slot may be claimed before it is taken. A claim promises a slot, but not which one: so a
//! queued read holds no memory, and when its turn comes it gets the slot that was returned last.

#[cfg(loom)]
use loom::sync::Mutex;
#[cfg(not(loom))]
use std::sync::Mutex;

/// The free slots and the claims on them.
#[derive(Debug)]
pub(super) struct FreeList {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Last returned, first taken: that slot is the warmest in the CPU cache.
    free: Vec<u32>,
    /// Open claims; never more than free slots.
    claims: usize,
}

impl FreeList {
    /// A list of `slots` free slots, `0..slots`.
    pub(super) fn new(slots: u32) -> Self {
        Self { state: Mutex::new(State { free: (0..slots).rev().collect(), claims: 0 }) }
    }

    /// Claims a slot, if one is free and not claimed. Like all methods here, blocks no longer than
    /// another thread's push or pop.
    pub(super) fn try_claim(&self) -> bool {
        let mut state = self.lock();
        let is_left = state.claims < state.free.len();
        state.claims += usize::from(is_left);
        is_left
    }

    /// Takes a slot for a claim, which the caller must have and which ends.
    pub(super) fn take_claimed(&self) -> u32 {
        let mut state = self.lock();
        state.claims -= 1;
        state.free.pop().expect("there is a free slot for every claim")
    }

    /// Gives up a claim, which the caller must have.
    pub(super) fn give_up_claim(&self) {
        self.lock().claims -= 1;
    }

    /// Returns a slot. The caller must be its only owner. Never allocates: the list has room for
    /// every index.
    pub(super) fn give(&self, index: u32) {
        self.lock().free.push(index);
    }

    /// Number of free slots that are not claimed.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let state = self.lock();
        state.free.len() - state.claims
    }

    #[cfg(not(loom))]
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // No update can stop halfway, so a panic elsewhere leaves a valid list.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    #[cfg(loom)]
    fn lock(&self) -> loom::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no thread of a loom model panics while it holds the list")
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exhaust_fail_release_succeed() {
        let list = FreeList::new(2);
        let take = || list.try_claim().then(|| list.take_claimed());
        let (first, second) = (take().unwrap(), take().unwrap());
        assert_ne!(first, second);
        assert_eq!((take(), list.len()), (None, 0));
        list.give(first);
        assert_eq!(take(), Some(first));
    }

    #[test]
    fn a_claim_gets_the_slot_that_was_given_last() {
        let list = FreeList::new(3);
        assert!(list.try_claim());
        let taken = list.take_claimed();
        assert!(list.try_claim() && list.try_claim());
        assert!(!list.try_claim(), "two are free and both are claimed");
        list.give(taken);
        assert_eq!(list.len(), 1);
        assert_eq!(list.take_claimed(), taken);
        list.give_up_claim();
        assert_eq!(list.len(), 2);
        assert!(list.try_claim() && list.try_claim() && !list.try_claim());
    }
}

#[cfg(loom)]
#[cfg(test)]
mod models {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU32, Ordering};

    use super::FreeList;

    /// Three threads share two slots: no slot ever has two owners, and none is lost.
    #[test]
    fn free_list_has_one_owner_per_slot() {
        loom::model(|| {
            let list = Arc::new(FreeList::new(2));
            let owners = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let (list, owners) = (Arc::clone(&list), Arc::clone(&owners));
                    loom::thread::spawn(move || use_slots(&list, &owners))
                })
                .collect();
            use_slots(&list, &owners);
            for thread in threads {
                thread.join().expect("the thread does not panic");
            }
            assert_eq!(list.len(), 2);
            assert!(list.try_claim() && list.try_claim());
            assert_ne!(list.take_claimed(), list.take_claimed());
        });
    }

    /// One thread claims for another, as the control loop does for its readers, while a third takes
    /// slots too: every claim finds a slot.
    #[test]
    fn free_list_keeps_its_claims() {
        loom::model(|| {
            let list = Arc::new(FreeList::new(2));
            let owners = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
            let (has_claim, gives_up) = (list.try_claim(), list.try_claim());
            assert!(has_claim && gives_up);
            let reader = {
                let (list, owners) = (Arc::clone(&list), Arc::clone(&owners));
                loom::thread::spawn(move || use_claimed(&list, &owners))
            };
            let other = {
                let (list, owners) = (Arc::clone(&list), Arc::clone(&owners));
                loom::thread::spawn(move || use_slots(&list, &owners))
            };
            list.give_up_claim();
            reader.join().expect("the thread does not panic");
            other.join().expect("the thread does not panic");
            assert_eq!(list.len(), 2);
        });
    }

    fn use_slots(list: &FreeList, owners: &[AtomicU32; 2]) {
        if list.try_claim() {
            use_claimed(list, owners);
        }
    }

    fn use_claimed(list: &FreeList, owners: &[AtomicU32; 2]) {
        let index = list.take_claimed();
        let owner = &owners[usize::try_from(index).expect("an index of two")];
        assert_eq!(owner.fetch_add(1, Ordering::Relaxed), 0, "slot {index} has two owners");
        owner.fetch_sub(1, Ordering::Relaxed);
        list.give(index);
    }
}
