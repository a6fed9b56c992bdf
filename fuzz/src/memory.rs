//! Peak heap memory of a call, counted by the allocator for each thread.

#![allow(unsafe_code, reason = "a global allocator is an unsafe trait; this one only counts and passes on")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    /// Bytes allocated less bytes freed, by this thread. What another one allocated may make it
    /// negative.
    static LIVE: Cell<i64> = const { Cell::new(0) };
    static PEAK: Cell<i64> = const { Cell::new(0) };
}

/// Both cells have no destructor, so they live as long as the thread.
fn count(bytes: usize, sign: i64) {
    let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
    let live = LIVE.get().saturating_add(bytes.saturating_mul(sign));
    LIVE.set(live);
    PEAK.set(PEAK.get().max(live));
}

// SAFETY: passes every call unchanged to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(layout.size(), -1);
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both blocks may exist at once.
        count(new_size, 1);
        count(layout.size(), -1);
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.realloc(block, layout, new_size) }
    }
}

/// Runs `work` and returns its result and peak heap bytes.
pub(crate) fn peak_of<T>(run: impl FnOnce() -> T) -> (T, u64) {
    let before = LIVE.get();
    PEAK.set(before);
    let outcome = run();
    (outcome, u64::try_from(PEAK.get() - before).unwrap_or(0))
}
