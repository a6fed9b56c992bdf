//! The system's allocator, with tallies: blocks while counting, bytes that live, and their peak.

#![allow(unsafe_code, reason = "a global allocator is an unsafe trait; this one counts and passes on")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Whether [`BLOCKS`] counts.
pub(crate) static IS_COUNTING: AtomicBool = AtomicBool::new(false);
/// Blocks taken by all threads while counting.
pub(crate) static BLOCKS: AtomicU64 = AtomicU64::new(0);
/// Bytes that blocks take now, as glibc counts them.
pub(crate) static LIVE: AtomicUsize = AtomicUsize::new(0);
/// The highest value of [`LIVE`].
pub(crate) static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What glibc takes for a block on 64 bits: a header of 8 bytes, multiples of 16, 32 at least,
/// pages for large ones.
fn taken(size: usize) -> usize {
    if size < 128 << 10 {
        (size + 8).next_multiple_of(16).max(32)
    } else {
        (size + 16).next_multiple_of(4096)
    }
}

fn add(size: usize) {
    if IS_COUNTING.load(Ordering::SeqCst) {
        BLOCKS.fetch_add(1, Ordering::SeqCst);
    }
    let live = LIVE.fetch_add(taken(size), Ordering::Relaxed) + taken(size);
    PEAK.fetch_max(live, Ordering::Relaxed);
}

// SAFETY: every call is passed on unchanged to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE.fetch_sub(taken(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // A block that grows may move: then the old and the new one are there for a moment. A block that
        // shrinks stays.
        if new_size > layout.size() {
            add(new_size);
            LIVE.fetch_sub(taken(layout.size()), Ordering::Relaxed);
        } else {
            if IS_COUNTING.load(Ordering::SeqCst) {
                BLOCKS.fetch_add(1, Ordering::SeqCst);
            }
            LIVE.fetch_sub(taken(layout.size()) - taken(new_size), Ordering::Relaxed);
        }
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.realloc(block, layout, new_size) }
    }
}
