//! The caller's end of a running load: an iterator of owned layers.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};

use super::control::{Control, Setup, Wires};
use super::reader::{self, ReaderContext};
use super::{LoadError, LoadReport, LoadedLayer, Progress};
use crate::device::Backend;
use crate::layers::LayerId;
use crate::plan::LoadPlan;
use crate::source::Source;
use crate::staging::RingMode;

/// What the caller's side tells the control loop.
pub(super) enum Signal {
    /// A layer was taken from the stream.
    Taken,
    /// A layer was dropped: its place in the window is free.
    Dropped,
    /// The load is not wanted any more.
    Cancel,
}

/// What the control loop hands out.
pub(super) enum Delivery {
    Layer(LoadedLayer),
    Failed(LoadError),
}

/// The places of the window. A layer has one from its arena's allocation until its last owner is gone.
#[derive(Debug)]
pub(super) struct PermitOffice {
    window: usize,
    holders: Mutex<BTreeSet<usize>>,
    signals: Sender<Signal>,
}

impl PermitOffice {
    /// A place for the layer, if one is free.
    pub(super) fn try_issue(self: &Arc<Self>, layer: usize) -> Option<Permit> {
        let mut holders = self.lock();
        if holders.len() >= self.window {
            return None;
        }
        holders.insert(layer);
        Some(Permit { layer, office: Arc::clone(self) })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<usize>> {
        // An insert or remove cannot be left half done.
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The layers below `end` that have a place: with `end` = layers taken, those that the caller holds.
    fn holders_below(&self, end: usize) -> Vec<usize> {
        self.lock().range(..end).copied().collect()
    }
}

/// A place in the window.
#[derive(Debug)]
pub(super) struct Permit {
    layer: usize,
    office: Arc<PermitOffice>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.office.lock().remove(&self.layer);
        // The control loop may have ended; then nobody waits for the place.
        let _ = self.office.signals.send(Signal::Dropped);
    }
}

/// A running load: yields the layers in execution order. Ends after the last layer or the first error.
///
/// Dropping it cancels the load, waits for what is in flight (at most the reads that the system has
/// already begun) and gives ring, files and threads back. Layers that were taken stay valid.
#[must_use = "a stream that is dropped loads nothing"]
pub struct LayerStream {
    plan: Arc<LoadPlan>,
    source: Arc<dyn Source>,
    ring_mode: RingMode,
    deliveries: Receiver<Delivery>,
    signals: Sender<Signal>,
    office: Arc<PermitOffice>,
    progress: Progress,
    control: Option<JoinHandle<()>>,
    stall_timeout: Duration,
    taken: usize,
    started: Instant,
    elapsed: Option<Duration>,
    caller_waited: Duration,
}

/// Starts the threads of a load.
pub(super) fn start<B: Backend>(setup: Setup<B>, stall_timeout: Duration) -> Result<LayerStream, LoadError> {
    let plan = Arc::clone(&setup.plan);
    let source = Arc::clone(&setup.source);
    let ring_mode = setup.ring.mode();
    let progress = Progress::new(plan.tensor_bytes());
    let (job_sender, job_receiver) = unbounded();
    let (result_sender, results) = unbounded();
    let (signals, signal_receiver) = unbounded();
    let (delivery_sender, deliveries) = unbounded();
    let context = Arc::new(ReaderContext {
        plan: Arc::clone(&plan),
        source: Arc::clone(&source),
        backend: Arc::clone(&setup.backend),
        progress: progress.clone(),
    });
    let window = plan.window().over(plan.layers().len());
    let office = Arc::new(PermitOffice { window, holders: Mutex::default(), signals: signals.clone() });
    let readers = reader::spawn(plan.memory().ring().readers, &context, &job_receiver, &result_sender)?;
    drop((job_receiver, result_sender, context));
    let wires = Wires { jobs: job_sender, results, signals: signal_receiver, deliveries: delivery_sender };
    let control = Control::new(setup, wires, Arc::clone(&office), progress.clone());
    let control = thread::Builder::new()
        .name("onelayer-control".to_owned())
        .spawn(move || {
            control.run();
            for reader in readers {
                // A reader catches the panics of its jobs; nothing else in it can panic.
                let _ = reader.join();
            }
        })
        .map_err(|source| LoadError::Thread { source })?;
    Ok(LayerStream {
        plan,
        source,
        ring_mode,
        deliveries,
        signals,
        office,
        progress,
        control: Some(control),
        stall_timeout,
        taken: 0,
        started: Instant::now(),
        elapsed: None,
        caller_waited: Duration::ZERO,
    })
}

impl Iterator for LayerStream {
    type Item = Result<LoadedLayer, LoadError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.control.as_ref()?;
        let waiting = Instant::now();
        let delivery = self.next_delivery();
        self.caller_waited += waiting.elapsed();
        match delivery {
            Some(Delivery::Layer(layer)) => {
                self.taken += 1;
                let _ = self.signals.send(Signal::Taken);
                Some(Ok(layer))
            }
            Some(Delivery::Failed(error)) => {
                self.end();
                Some(Err(error))
            }
            None => self.end().map(Err),
        }
    }
}

impl LayerStream {
    /// The plan that is being carried out.
    #[must_use]
    pub fn plan(&self) -> &Arc<LoadPlan> {
        &self.plan
    }

    /// How far the load is; may be watched from any thread.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }

    /// A handle that cancels the load from any thread.
    #[must_use]
    pub fn cancel_handle(&self) -> CancelHandle {
        CancelHandle { signals: self.signals.clone() }
    }

    /// What the load did so far; final once the stream has ended.
    #[must_use]
    pub fn report(&self) -> LoadReport {
        LoadReport {
            elapsed: self.elapsed.unwrap_or_else(|| self.started.elapsed()),
            layers: self.progress.layers_done(),
            tensor_bytes: self.progress.tensor_bytes_done(),
            read_bytes: self.progress.read_bytes(),
            reading: Duration::from_nanos(self.progress.read_ns()),
            caller_waited: self.caller_waited,
            ring_mode: self.ring_mode,
            fallbacks: self.source.fallbacks(),
        }
    }

    /// The next delivery; `None` after the last one. A caller that holds the whole window is told so instead of waiting
    /// for ever.
    fn next_delivery(&self) -> Option<Delivery> {
        let mut stalled: Option<Instant> = None;
        loop {
            let deadline = stalled.unwrap_or_else(Instant::now) + self.stall_timeout;
            match self.deliveries.recv_deadline(deadline.min(Instant::now() + STALL_CHECK_INTERVAL)) {
                Ok(delivery) => return Some(delivery),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {}
            }
            let held = self.office.holders_below(self.taken);
            if held.len() < self.office.window {
                stalled = None;
                continue;
            }
            let since = *stalled.get_or_insert_with(Instant::now);
            if since.elapsed() >= self.stall_timeout {
                let name = |index: &usize| -> LayerId { self.plan.layers()[*index].id.clone() };
                return Some(Delivery::Failed(LoadError::Stalled {
                    held: held.iter().map(name).collect(),
                    window: self.office.window,
                    waited: since.elapsed(),
                }));
            }
        }
    }

    /// Ends the load and waits for its threads. An error only if the control loop panicked.
    fn end(&mut self) -> Option<LoadError> {
        let _ = self.signals.send(Signal::Cancel);
        let control = self.control.take()?;
        self.elapsed = Some(self.started.elapsed());
        let panicked = control.join().err().map(|panic| reader::panic_message(&*panic));
        // Layers that nobody took go now, not with the stream.
        while let Ok(delivery) = self.deliveries.try_recv() {
            drop(delivery);
        }
        panicked.map(|message| LoadError::Panicked { message })
    }
}

/// How often a waiting caller is checked for holding the whole window.
const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(100);

impl Drop for LayerStream {
    fn drop(&mut self) {
        self.end();
    }
}

/// Cancels a load from any thread: the stream then ends with [`LoadError::Cancelled`].
#[derive(Debug, Clone)]
pub struct CancelHandle {
    signals: Sender<Signal>,
}

impl CancelHandle {
    /// Cancels the load. Harmless once it has ended.
    pub fn cancel(&self) {
        // A load that has ended needs no cancelling.
        let _ = self.signals.send(Signal::Cancel);
    }
}
