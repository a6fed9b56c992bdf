//! Which slots are free. The only part of the ring that threads contend for, kept alone so that every
//! interleaving of it can be explored (`RUSTFLAGS="--cfg loom" cargo test --lib free_list`).

#[cfg(loom)]
use loom::sync::Mutex;
#[cfg(not(loom))]
use std::sync::Mutex;

/// The indices of the free slots. Last given, first taken: that slot is the warmest in the cache.
#[derive(Debug)]
pub(super) struct FreeList {
    free: Mutex<Vec<u32>>,
}

impl FreeList {
    /// A list of `slots` free slots, `0..slots`.
    pub(super) fn new(slots: u32) -> Self {
        Self { free: Mutex::new((0..slots).rev().collect()) }
    }

    /// Takes a free slot, if there is one. Never blocks for longer than another thread's push or pop.
    pub(super) fn try_take(&self) -> Option<u32> {
        self.lock().pop()
    }

    /// Gives a slot back. The caller must be its only owner. Never allocates: the list holds every index.
    pub(super) fn give(&self, index: u32) {
        self.lock().push(index);
    }

    /// How many slots are free.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    #[cfg(not(loom))]
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<u32>> {
        // A push or pop cannot be left half done, so a panic in another owner does not spoil the list.
        self.free.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    #[cfg(loom)]
    fn lock(&self) -> loom::sync::MutexGuard<'_, Vec<u32>> {
        self.free.lock().expect("no thread of a loom model panics while it holds the list")
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exhaust_fail_release_succeed() {
        let list = FreeList::new(2);
        let (first, second) = (list.try_take().unwrap(), list.try_take().unwrap());
        assert_ne!(first, second);
        assert_eq!((list.try_take(), list.len()), (None, 0));
        list.give(first);
        assert_eq!(list.try_take(), Some(first));
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
            assert_ne!(list.try_take(), list.try_take());
        });
    }

    fn use_slots(list: &FreeList, owners: &[AtomicU32; 2]) {
        if let Some(index) = list.try_take() {
            let owner = &owners[usize::try_from(index).expect("an index of two")];
            assert_eq!(owner.fetch_add(1, Ordering::Relaxed), 0, "slot {index} has two owners");
            owner.fetch_sub(1, Ordering::Relaxed);
            list.give(index);
        }
    }
}
