//! Threads that wait for an asynchronous device, so that neither the control loop nor a reader ever
//! does.
//!
//! ```text
//!             allocate (layer)                    arena
//!  control ----------------------> onelayer-arena -------+
//!     |       copy, layer                                +--> notices --> control
//!     +--------------------------> onelayer-wait --------+
//!                                  copied (its slot is free again), ready
//! ```
//!
//! Arenas are allocated ahead of the copying; copies and layers are waited for in the order in
//! which they were queued. Synchronous devices have no such threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender};

use super::channels::{Sizes, channel};
use super::reader::panic_message;
use super::window::Permit;
use super::{LoadError, LoadedLayer};
use crate::device::{ArenaPlace, Backend, PendingCopy};
use crate::plan::LoadPlan;

/// What somebody waits for.
pub(super) enum Wait<B: Backend> {
    /// Until a copy is over and its slot is free. The layer keeps its place in the window for as
    /// long: the copy keeps the arena, even if the layer was handed out at once and has been
    /// dropped.
    Copy { read: u32, copy: B::Pending, permit: Option<Permit> },
    /// Until every byte of a layer is in its place.
    Ready(LoadedLayer),
}

/// What has happened meanwhile.
pub(super) enum Notice<B: Backend> {
    Allocated { turn: usize, arena: Result<Arc<B::Arena>, LoadError> },
    Copied { read: u32, outcome: Result<(), LoadError> },
    Ready(Result<LoadedLayer, LoadError>),
}

/// The threads that wait for a device. Dropping this waits for all that is in flight and ends them.
pub(super) struct Attendants<B: Backend> {
    /// `None` while being dropped.
    requests: Option<Requests<B>>,
    /// The thread's end of the allocations: to take back what it has not begun.
    allocations_not_begun: Receiver<Allocation>,
    notices: Receiver<Notice<B>>,
    threads: Vec<JoinHandle<()>>,
    /// The turn whose arena was asked for ahead.
    ahead: Option<usize>,
}

/// An arena that is wanted.
struct Allocation {
    turn: usize,
    place: ArenaPlace,
}

/// What the threads are asked for.
struct Requests<B: Backend> {
    allocations: Sender<Allocation>,
    waits: Sender<Wait<B>>,
}

impl<B: Backend> Attendants<B> {
    /// Starts them, if the device is one to wait for.
    pub(super) fn start(backend: &Arc<B>, plan: &Arc<LoadPlan>) -> Result<Option<Self>, LoadError> {
        if !B::IS_ASYNCHRONOUS {
            return Ok(None);
        }
        let sizes = Sizes::of(plan);
        let (allocations, allocation_receiver) = channel(sizes.layers);
        let (waits, wait_receiver) = channel(sizes.waits);
        let (notice_sender, notices) = channel(sizes.notices);
        let mut attendants = Self {
            requests: Some(Requests { allocations, waits }),
            allocations_not_begun: allocation_receiver.clone(),
            notices,
            threads: Vec::with_capacity(2),
            ahead: None,
        };
        let (backend, plan, sender) = (Arc::clone(backend), Arc::clone(plan), notice_sender.clone());
        // If one cannot be started, the other sees its channel closed and ends.
        attendants.spawn("onelayer-arena", move || {
            allocate_all(&*backend, &plan, &allocation_receiver, &sender);
        })?;
        attendants.spawn("onelayer-wait", move || wait_for_all(&wait_receiver, &notice_sender))?;
        Ok(Some(attendants))
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), LoadError> {
        let thread = thread::Builder::new().name(name.to_owned()).spawn(work);
        self.threads.push(thread.map_err(|source| LoadError::Thread { source })?);
        Ok(())
    }

    /// What has happened, in the order in which it was asked for.
    pub(super) fn notices(&self) -> Receiver<Notice<B>> {
        self.notices.clone()
    }

    /// Asks for the arena of the layer that will be the first to need one.
    pub(super) fn allocate_ahead(&mut self, turn: usize, place: ArenaPlace) {
        self.allocate(turn, place);
        self.ahead = Some(turn);
    }

    /// Asks for the arena of a layer, unless that was done ahead. Each turn is asked for once, in
    /// the order in which they need theirs.
    pub(super) fn allocate(&mut self, turn: usize, place: ArenaPlace) {
        if self.ahead.take_if(|ahead| *ahead == turn).is_none() {
            let allocation = Allocation { turn, place };
            self.requests().allocations.send(allocation).expect("a receiver of the allocations is kept here");
        }
    }

    /// Asks to be told when something is over.
    pub(super) fn wait(&self, wait: Wait<B>) {
        self.requests().waits.send(wait).expect("the thread ends after its channel is closed");
    }

    fn requests(&self) -> &Requests<B> {
        self.requests.as_ref().expect("only dropping takes it")
    }
}

impl<B: Backend> Drop for Attendants<B> {
    fn drop(&mut self) {
        drop(self.requests.take());
        // What has not been begun is not wanted any more.
        self.allocations_not_begun.iter().for_each(drop);
        self.notices.iter().for_each(drop);
        for thread in self.threads.drain(..) {
            // It catches the panics of what it does; nothing else in it can panic.
            let _ = thread.join();
        }
    }
}

fn allocate_all<B: Backend>(
    backend: &B,
    plan: &LoadPlan,
    allocations: &Receiver<Allocation>,
    notices: &Sender<Notice<B>>,
) {
    for Allocation { turn, place } in allocations {
        let layer = &plan.layers()[turn % plan.layers().len()];
        let arena = guard(|| Ok(backend.allocate(layer, place)?));
        if notices.send(Notice::Allocated { turn, arena }).is_err() {
            return;
        }
    }
}

fn wait_for_all<B: Backend>(waits: &Receiver<Wait<B>>, notices: &Sender<Notice<B>>) {
    for wait in waits {
        let notice = match wait {
            Wait::Copy { read, copy, permit } => {
                // The slot goes back to the ring here.
                let outcome = guard(|| Ok(copy.wait()?)).map(drop);
                drop(permit);
                Notice::Copied { read, outcome }
            }
            Wait::Ready(layer) => Notice::Ready(guard(|| {
                layer.data.resident().wait_ready()?;
                Ok(layer)
            })),
        };
        // Whoever is not there any more still wants everything waited for.
        let _ = notices.send(notice);
    }
}

/// A panic must become an error of the load: without it the control loop would wait for ever.
fn guard<T>(work: impl FnOnce() -> Result<T, LoadError>) -> Result<T, LoadError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(LoadError::Panicked { message: panic_message(&*panic) }))
}
