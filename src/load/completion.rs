//! Completion threads: they wait for an asynchronous device, so that the control loop and the
//! readers never do.
//!
//! ```text
//!             allocate (layer)                    arena
//!  control ----------------------> onelayer-arena -------+
//!     |       copy, layer                                +--> DeviceEvent --> control
//!     +--------------------------> onelayer-wait --------+
//!                                  copied (its slot is free again), ready
//! ```
//!
//! Arenas are allocated before the first copy needs them. Copies and layers complete in the order
//! in which they were queued. Synchronous devices need no such threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender};

use super::channels::{Sizes, channel};
use super::error::{LoadError, panic_message};
use super::layer::LoadedLayer;
use super::permits::Permit;
use crate::device::{ArenaPlace, Backend, PendingCopy};
use crate::plan::LoadPlan;

/// Work on the device to wait for.
pub(super) enum DeviceWait<B: Backend> {
    /// A copy, until it is over and its slot is free. The layer keeps its permit until then, even
    /// if it was handed out at once and is already dropped: the copy keeps the arena.
    Copy { read: u32, copy: B::Pending, permit: Option<Permit> },
    /// A layer, until every byte of it is in its place.
    Ready(LoadedLayer),
}

/// A message from a completion thread.
pub(super) enum DeviceEvent<B: Backend> {
    Allocated { turn: usize, arena: Result<Arc<B::Arena>, LoadError> },
    Copied { read: u32, outcome: Result<(), LoadError> },
    Ready(Result<LoadedLayer, LoadError>),
}

/// The completion threads of a load. Dropping this waits for all work in flight and ends them.
pub(super) struct CompletionThreads<B: Backend> {
    /// `None` while being dropped.
    requests: Option<Requests<B>>,
    /// The thread's end of the allocations, to take back those it has not begun.
    allocations_not_begun: Receiver<Allocation>,
    events: Receiver<DeviceEvent<B>>,
    threads: Vec<JoinHandle<()>>,
    /// The turn whose arena was requested before the control loop ran.
    ahead: Option<usize>,
}

/// An arena that is wanted.
struct Allocation {
    turn: usize,
    place: ArenaPlace,
}

/// The channels to the threads.
struct Requests<B: Backend> {
    allocations: Sender<Allocation>,
    waits: Sender<DeviceWait<B>>,
}

impl<B: Backend> CompletionThreads<B> {
    /// Starts the threads if the device is asynchronous.
    pub(super) fn start(backend: &Arc<B>, plan: &Arc<LoadPlan>) -> Result<Option<Self>, LoadError> {
        if !B::IS_ASYNCHRONOUS {
            return Ok(None);
        }
        let sizes = Sizes::of(plan);
        let (allocations, allocation_receiver) = channel(sizes.layers);
        let (waits, wait_receiver) = channel(sizes.waits);
        let (event_sender, events) = channel(sizes.events);
        let mut started = Self {
            requests: Some(Requests { allocations, waits }),
            allocations_not_begun: allocation_receiver.clone(),
            events,
            threads: Vec::with_capacity(2),
            ahead: None,
        };
        let (backend, plan, sender) = (Arc::clone(backend), Arc::clone(plan), event_sender.clone());
        // If one of them does not start, the other finds its channel closed and ends.
        started.spawn("onelayer-arena", move || {
            allocate_all(&*backend, &plan, &allocation_receiver, &sender);
        })?;
        started.spawn("onelayer-wait", move || wait_for_all(&wait_receiver, &event_sender))?;
        Ok(Some(started))
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), LoadError> {
        let thread = thread::Builder::new().name(name.to_owned()).spawn(work);
        self.threads.push(thread.map_err(|source| LoadError::Thread { source })?);
        Ok(())
    }

    /// The events, in the order of the requests.
    pub(super) fn events(&self) -> Receiver<DeviceEvent<B>> {
        self.events.clone()
    }

    /// Requests the arena of the layer that will need one first.
    pub(super) fn allocate_ahead(&mut self, turn: usize, place: ArenaPlace) {
        self.allocate(turn, place);
        self.ahead = Some(turn);
    }

    /// Requests the arena of a layer, unless [`Self::allocate_ahead`] did. Each turn is requested
    /// once, in the order in which arenas are needed.
    pub(super) fn allocate(&mut self, turn: usize, place: ArenaPlace) {
        if self.ahead.take_if(|ahead| *ahead == turn).is_none() {
            let allocation = Allocation { turn, place };
            self.requests().allocations.send(allocation).expect("a receiver of the allocations is kept here");
        }
    }

    /// Requests an event when this work is over.
    pub(super) fn wait(&self, wait: DeviceWait<B>) {
        self.requests().waits.send(wait).expect("the thread ends after its channel is closed");
    }

    fn requests(&self) -> &Requests<B> {
        self.requests.as_ref().expect("only dropping takes it")
    }
}

impl<B: Backend> Drop for CompletionThreads<B> {
    fn drop(&mut self) {
        drop(self.requests.take());
        // Allocations that have not begun are not needed any more.
        self.allocations_not_begun.iter().for_each(drop);
        self.events.iter().for_each(drop);
        for thread in self.threads.drain(..) {
            // The thread catches the panics of its work; nothing else in it can panic.
            let _ = thread.join();
        }
    }
}

fn allocate_all<B: Backend>(
    backend: &B,
    plan: &LoadPlan,
    allocations: &Receiver<Allocation>,
    events: &Sender<DeviceEvent<B>>,
) {
    for Allocation { turn, place } in allocations {
        let layer = &plan.layers()[turn % plan.layers().len()];
        let arena = guard(|| Ok(backend.allocate(layer, place)?));
        if events.send(DeviceEvent::Allocated { turn, arena }).is_err() {
            return;
        }
    }
}

fn wait_for_all<B: Backend>(waits: &Receiver<DeviceWait<B>>, events: &Sender<DeviceEvent<B>>) {
    for wait in waits {
        let event = match wait {
            DeviceWait::Copy { read, copy, permit } => {
                // The slot goes back to the ring here.
                let outcome = guard(|| Ok(copy.wait()?)).map(drop);
                drop(permit);
                DeviceEvent::Copied { read, outcome }
            }
            DeviceWait::Ready(layer) => DeviceEvent::Ready(guard(|| {
                layer.data.resident().wait_ready()?;
                Ok(layer)
            })),
        };
        // If the receiver is gone, the rest is still waited for.
        let _ = events.send(event);
    }
}

/// Turns a panic into an error of the load. Without an event the control loop would wait for ever.
fn guard<T>(work: impl FnOnce() -> Result<T, LoadError>) -> Result<T, LoadError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(LoadError::Panicked { message: panic_message(&*panic) }))
}
