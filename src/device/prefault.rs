//! A thread that touches the pages of fresh arenas ahead of the readers.
//!
//! The first touch of a page makes the kernel find and clear it. If the readers did that, it would
//! happen between two reads, in bursts of unpredictable length, while the disk is idle. The thread
//! works while the readers wait for the disk, and is hundreds of megabytes ahead when a burst
//! comes.
//!
//! Best effort: if the thread cannot be started, or the kernel does not support it (before Linux
//! 5.14), the readers touch the pages.
#![allow(unsafe_code, reason = "one call that fills page tables, of memory that is kept mapped under a lock")]

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Sender, unbounded};
use rustix::mm::Advice;

use crate::staging::memory::{AnonymousMemory, is_huge};
use crate::units::{Alignment, to_usize};

/// The thread. Dropping this ends it, after the step in progress at the latest.
#[derive(Debug)]
pub(super) struct Prefaulter {
    /// `None` during the drop.
    stretches: Option<Sender<Arc<Stretch>>>,
    thread: Option<JoinHandle<()>>,
}

impl Prefaulter {
    /// `None` if no thread can be started.
    pub(super) fn start() -> Option<Self> {
        let (stretches, to_touch) = unbounded::<Arc<Stretch>>();
        let touch_all = move || to_touch.iter().for_each(|stretch| stretch.touch());
        let thread = thread::Builder::new().name("onelayer-touch".to_owned()).spawn(touch_all).ok()?;
        Some(Self { stretches: Some(stretches), thread: Some(thread) })
    }

    /// Touches the first `len_bytes` of fresh memory, from the front, until the returned value is
    /// dropped.
    pub(super) fn touch(&self, memory: &AnonymousMemory, len_bytes: u64) -> Option<Prefaulting> {
        // Handing over small memory takes as long as touching it.
        if !is_huge(len_bytes) {
            return None;
        }
        let rest = Rest { start: memory.pointer_to(0, len_bytes), len: to_usize(len_bytes) };
        let stretch = Arc::new(Stretch(Mutex::new(Some(rest))));
        self.stretches.as_ref()?.send(Arc::clone(&stretch)).ok()?;
        Some(Prefaulting(stretch))
    }
}

impl Drop for Prefaulter {
    fn drop(&mut self) {
        drop(self.stretches.take());
        if let Some(thread) = self.thread.take() {
            // The thread cannot panic.
            let _ = thread.join();
        }
    }
}

/// Memory that is being touched. Must be dropped before the memory is unmapped; the drop waits for
/// the step in progress.
#[derive(Debug)]
pub(super) struct Prefaulting(Arc<Stretch>);

impl Drop for Prefaulting {
    fn drop(&mut self) {
        *self.0.rest() = None;
    }
}

/// The untouched rest of one arena; `None` if nothing is left or may be touched any more.
#[derive(Debug)]
struct Stretch(Mutex<Option<Rest>>);

#[derive(Debug)]
struct Rest {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address, which is only handed to the kernel, and only under the lock of its stretch.
unsafe impl Send for Rest {}

impl Stretch {
    fn rest(&self) -> MutexGuard<'_, Option<Rest>> {
        // Every update is one assignment, so a panic elsewhere leaves it valid.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn touch(&self) {
        while self.touch_step() {}
    }

    /// Touches one huge page, or as many small ones. False if nothing is left.
    fn touch_step(&self) -> bool {
        let mut guard = self.rest();
        let Some(Rest { start, len }) = *guard else { return false };
        let step = len.min(to_usize(Alignment::HUGE_PAGE.bytes()));
        // SAFETY: pages of a private anonymous mapping, which is unmapped only after this lock was
        // taken once more (see `Prefaulting`). The call keeps their bytes, so concurrent writers
        // are not affected.
        let touched = unsafe { rustix::mm::madvise(start.as_ptr().cast(), step, Advice::LinuxPopulateWrite) };
        *guard = match touched {
            // SAFETY: `step <= len`, so it stays inside the mapping or one past its end.
            Ok(()) if step < len => Some(Rest { start: unsafe { start.add(step) }, len: len - step }),
            _ => None,
        };
        guard.is_some()
    }
}
