//! The caller's end of a running load: an iterator of owned layers.

use std::fmt;
use std::iter::FusedIterator;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::attend::Attendants;
use super::channels::{Sizes, channel};
use super::control::Control;
use super::depth::{Depth, READS_LEAST};
use super::gate::GateKeeper;
use super::jobs;
use super::meter::{SharedTotals, read_totals};
use super::reader::{self, ReaderContext, Ways};
use super::setup::{Setup, Wires};
use super::signals::Signals;
use super::space::Space;
use super::turns::turns_total;
use super::window::{Bounds, Full, PermitOffice};
use super::{LoadError, LoadReport, LoadedLayer, Progress};
use crate::device::Backend;
use crate::plan::{LoadPlan, ResidentKind, Window};
use crate::source::{QueueingCell, ReadQueue, Source};
use crate::staging::{Pinning, RingMode};
use crate::units::to_u64;

/// What the control loop hands out.
pub(super) enum Delivery {
    Layer(LoadedLayer),
    /// Apart, so that the channel has small places.
    Failed(Box<LoadError>),
}

/// A running load: yields the layers in execution order, or as they are complete in that
/// [of files](crate::plan::ReadOrder::Files). Ends after the last layer of the last pass or the
/// first error.
///
/// Each layer is owned, may go to another thread, and frees its memory and its place in the window
/// when it and the tensors taken from it are dropped. A caller that holds so many that the next one
/// cannot become resident gets [`LoadError::Stalled`] after the [stall
/// timeout](super::LoaderBuilder::stall_timeout) instead of waiting for ever.
///
/// Dropping the stream cancels the load, waits for what is in flight (at most the reads that the
/// system has already begun) and gives ring, files and threads back. Layers that were taken stay
/// valid. On a device it also waits for what [`release_after`](LoadedLayer::release_after) named
/// for layers that are gone: that must not wait for this thread.
#[must_use = "a stream that is dropped loads nothing"]
pub struct LayerStream {
    plan: Arc<LoadPlan>,
    source: Arc<dyn Source>,
    ring_mode: RingMode,
    pinning: Pinning,
    pinned_bytes: u64,
    queueing: QueueingCell,
    deliveries: Receiver<Delivery>,
    signals: Arc<Signals>,
    office: Arc<PermitOffice>,
    progress: Progress,
    totals: SharedTotals,
    control: Option<JoinHandle<()>>,
    stall_timeout: Duration,
    /// The control loop knows that the caller waits for the layer behind those taken.
    has_asked: bool,
    /// How long the caller has waited so far for what it itself holds back, if it does.
    stall: Option<Stall>,
    /// Layers handed to the caller, and how many there will be.
    taken: usize,
    turns_total: usize,
    started: Instant,
    preparing: Duration,
    elapsed: Option<Duration>,
    caller_waited: Duration,
}

/// Starts the other threads of a load.
pub(super) fn start<B: Backend>(
    setup: Setup<B>,
    attendants: Option<Attendants<B>>,
    stall_timeout: Duration,
) -> Result<LayerStream, LoadError> {
    let plan = Arc::clone(&setup.plan);
    let source = Arc::clone(&setup.source);
    let ring_mode = setup.ring.mode();
    let (pinning, pinned_bytes) = (setup.ring.pinning().clone(), setup.ring.pinned_bytes());
    let progress = Progress::new(tensor_bytes_total(&plan));
    let started = setup.started;
    let sizes = Sizes::of(&plan);
    let (job_sender, job_receiver) = jobs::queue(sizes.jobs);
    let (result_sender, results) = channel(sizes.jobs);
    let (delivery_sender, deliveries) = channel(sizes.layers);
    let (signals, bell) = Signals::new();
    let readers_most = plan.memory().ring().readers;
    // Readers that copy into an arena leave the disk alone meanwhile, and copies come in bursts:
    // more take turns.
    let reads_at_first = match plan.memory().resident_kind() {
        ResidentKind::Host => 8 * READS_LEAST,
        ResidentKind::Device | ResidentKind::Nowhere => READS_LEAST,
    };
    let depth = match setup.adapts {
        true => Depth::adaptive(reads_at_first, readers_most),
        false => Depth::fixed(readers_most),
    };
    let keeper = GateKeeper::new(depth.limit());
    let queueing = QueueingCell::default();
    let context = Arc::new(ReaderContext {
        checkpoint: setup.checkpoint.clone(),
        plan: Arc::clone(&plan),
        source: Arc::clone(&source),
        backend: Arc::clone(&setup.backend),
        progress: progress.clone(),
        gate: keeper.gate(),
    });
    let bounds = Bounds::of(&plan);
    let space = plan.memory().window().map(|shape| Space::new(shape, bounds.layers_max));
    let office = PermitOffice::new(bounds, space, Arc::clone(&signals));
    let totals = SharedTotals::default();
    // If one cannot be started, those that run see the open gate and the closed channel of jobs and
    // end.
    let ways = ways(&setup, &queueing);
    let readers = reader::spawn(ways, &context, &job_receiver, &result_sender)?;
    drop((result_sender, context));
    let wires = Wires {
        jobs: job_sender,
        jobs_not_begun: job_receiver,
        results,
        bell,
        signals: Arc::clone(&signals),
        deliveries: delivery_sender,
        attendants,
        depth,
        keeper,
    };
    let control = Control::new(setup, wires, Arc::clone(&office), progress.clone(), Arc::clone(&totals));
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
        turns_total: turns_total(&plan),
        plan,
        source,
        ring_mode,
        pinning,
        pinned_bytes,
        queueing,
        deliveries,
        signals,
        office,
        progress,
        totals,
        control: Some(control),
        stall_timeout,
        has_asked: false,
        stall: None,
        taken: 0,
        started,
        preparing: started.elapsed(),
        elapsed: None,
        caller_waited: Duration::ZERO,
    })
}

/// Queues if reads go through them and the kernel grants all that are wanted, else a thread for
/// each read in flight.
fn ways<B: Backend>(setup: &Setup<B>, queueing: &QueueingCell) -> Ways {
    let ring = setup.plan.memory().ring();
    let Some(queues) = setup.queues else { return Ways::OneByOne { readers: ring.readers } };
    let count = queues.clamp(1, ring.readers);
    let queue = |_| ReadQueue::new(&setup.source, ring.readers.div_ceil(count), ring.slots, queueing);
    let queues: Option<Vec<_>> = (0..count).map(queue).collect();
    queues.map_or(Ways::OneByOne { readers: ring.readers }, Ways::Queued)
}

/// What came of a wait that has an end: see [`LayerStream::next_within`].
#[derive(Debug)]
pub enum Awaited {
    /// The next layer.
    Layer(LoadedLayer),
    /// Nothing yet: ask again.
    NotYet,
    /// The last layer was handed out, or the stream has ended with an error before.
    Ended,
}

impl Iterator for LayerStream {
    type Item = Result<LoadedLayer, LoadError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.next_within(Duration::MAX) {
                Ok(Awaited::Layer(layer)) => return Some(Ok(layer)),
                Ok(Awaited::NotYet) => {}
                Ok(Awaited::Ended) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

impl FusedIterator for LayerStream {}

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
        CancelHandle { signals: Arc::clone(&self.signals) }
    }

    /// What the load did so far; final once the stream has ended.
    #[must_use]
    pub fn report(&self) -> LoadReport {
        let totals = read_totals(&self.totals);
        LoadReport {
            passes: totals.passes,
            waits: totals.waits,
            elapsed: self.elapsed.unwrap_or_else(|| self.started.elapsed()),
            preparing: self.preparing,
            layers: to_u64(self.taken),
            tensor_bytes: self.progress.tensor_bytes_done(),
            read_bytes: self.progress.read_bytes(),
            ways: self.source.ways(),
            reading: Duration::from_nanos(self.progress.read_ns()),
            caller_waited: self.caller_waited,
            ring_mode: self.ring_mode,
            pinning: self.pinning.clone(),
            pinned_bytes: self.pinned_bytes,
            queueing: self.queueing.get(),
            fallbacks: self.source.fallbacks(),
        }
    }

    /// The next layer, as [`Iterator::next`] gives it, if it comes within `timeout`: for callers
    /// that have to look at something else now and then, such as a signal. One that gets
    /// [`Awaited::NotYet`] has asked for its layer all the same, which is read meanwhile.
    ///
    /// The [stall timeout](super::LoaderBuilder::stall_timeout) goes on from one call to the next.
    /// Of the time between two calls a tenth of a second counts at most: whoever works
    /// meanwhile does not wait.
    ///
    /// # Errors
    /// What ended the load; afterwards the stream is at its [end](Awaited::Ended).
    ///
    /// # Example
    /// ```
    /// use std::time::Duration;
    ///
    /// use onelayer::{Awaited, Checkpoint, Loader, Target};
    ///
    /// # fn is_interrupted() -> bool { false }
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/checkpoints/llama");
    /// let mut stream = Loader::builder(Target::Host).build()?.stream(&Checkpoint::open(path)?)?;
    /// loop {
    ///     match stream.next_within(Duration::from_millis(100))? {
    ///         Awaited::Layer(layer) => println!("{}", layer.id()),
    ///         Awaited::NotYet if is_interrupted() => break, // dropping the stream ends the load
    ///         Awaited::NotYet => {}
    ///         Awaited::Ended => break,
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn next_within(&mut self, timeout: Duration) -> Result<Awaited, LoadError> {
        if self.control.is_none() {
            return Ok(Awaited::Ended);
        }
        if !self.has_asked {
            self.signals.want();
            self.has_asked = true;
        }
        let waiting = Instant::now();
        // A time that no clock reaches is no end.
        let delivery = self.next_delivery(waiting.checked_add(timeout));
        if !matches!(delivery, Err(RecvTimeoutError::Disconnected)) {
            self.caller_waited += waiting.elapsed();
        }
        match delivery {
            // A layer that was ready by then is not handed out any more: a caller that cancels
            // wants an end.
            Ok(Delivery::Layer(_)) if self.signals.is_cancelled() => {
                self.end();
                Err(LoadError::Cancelled)
            }
            Ok(Delivery::Layer(layer)) => {
                self.taken += 1;
                (self.has_asked, self.stall) = (false, None);
                if self.taken == self.turns_total {
                    self.elapsed = Some(self.started.elapsed());
                }
                Ok(Awaited::Layer(layer))
            }
            Ok(Delivery::Failed(error)) => {
                self.end();
                Err(*error)
            }
            Err(RecvTimeoutError::Timeout) => Ok(Awaited::NotYet),
            Err(RecvTimeoutError::Disconnected) => self.end().map_or(Ok(Awaited::Ended), Err),
        }
    }

    /// The next delivery until then, if there is an end to the wait; disconnected after the last
    /// one. A caller that holds the whole window is told so instead of waiting for ever.
    fn next_delivery(&mut self, until: Option<Instant>) -> Result<Delivery, RecvTimeoutError> {
        loop {
            let left = until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
            // Who is not known to be stalled is looked after at the interval, however short the
            // timeout.
            let patience = self.stall.as_ref().map(|stall| self.stall_timeout.saturating_sub(stall.waited));
            let pause = STALL_CHECK_INTERVAL.min(patience.unwrap_or(Duration::MAX)).min(left);
            match self.deliveries.recv_timeout(pause) {
                Err(RecvTimeoutError::Timeout) => {}
                delivery => return delivery,
            }
            if self.office.is_stopped_by_turns_below(self.taken) {
                let waited = self.stall.get_or_insert_with(Stall::begin).go_on();
                let is_over = waited >= self.stall_timeout;
                let stop = is_over.then(|| self.office.stopped_by_turns_below(self.taken)).flatten();
                if let Some((full, held)) = stop {
                    return Ok(Delivery::Failed(Box::new(self.stalled(full, &held, waited))));
                }
            } else {
                self.stall = None;
            }
            if pause == left {
                return Err(RecvTimeoutError::Timeout);
            }
        }
    }

    fn stalled(&self, full: Full, held: &[usize], waited: Duration) -> LoadError {
        let layers = self.plan.layers();
        let held = held.iter().map(|&turn| layers[turn % layers.len()].id.clone()).collect();
        match full {
            Full::Layers { layers_max } => LoadError::Stalled { held, window: layers_max, waited },
            Full::Bytes { bytes_max } => match self.plan.window() {
                Window::Bytes(window_bytes) => LoadError::WindowFull { held, window_bytes, waited },
                Window::All | Window::Layers(_) => {
                    LoadError::DeviceBudgetFull { held, device_budget_bytes: bytes_max, waited }
                }
            },
        }
    }

    /// Ends the load and waits for its threads. An error only if the control loop panicked.
    fn end(&mut self) -> Option<LoadError> {
        self.signals.cancel();
        let control = self.control.take()?;
        self.elapsed.get_or_insert_with(|| self.started.elapsed());
        let panicked = control.join().err().map(|panic| reader::panic_message(&*panic));
        // Layers that nobody took go now, not with the stream.
        while let Ok(delivery) = self.deliveries.try_recv() {
            drop(delivery);
        }
        panicked.map(|message| LoadError::Panicked { message })
    }
}

/// Bytes of tensors that arrive in all passes; in one of them if there is no end. What is kept
/// arrives once.
fn tensor_bytes_total(plan: &LoadPlan) -> u64 {
    let others = plan.layers().iter().filter(|layer| !layer.is_kept);
    let again_bytes: u64 = others.map(|layer| layer.tensor_bytes).sum();
    let more_passes = plan.passes().count().map_or(0, |count| count - 1);
    plan.tensor_bytes().saturating_add(again_bytes.saturating_mul(more_passes))
}

/// How often a waiting caller is checked for holding the whole window.
const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A caller that waits for what only it can set free.
struct Stall {
    waited: Duration,
    checked: Instant,
}

impl Stall {
    fn begin() -> Self {
        Self { waited: Duration::ZERO, checked: Instant::now() }
    }

    /// How long the caller has waited by now. Between two checks it may have been elsewhere.
    fn go_on(&mut self) -> Duration {
        let now = Instant::now();
        let since = now.duration_since(self.checked).min(STALL_CHECK_INTERVAL);
        (self.waited, self.checked) = (self.waited.saturating_add(since), now);
        self.waited
    }
}

impl fmt::Debug for LayerStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerStream")
            .field("layers", &self.plan.layers().len())
            .field("taken", &self.taken)
            .field("has_ended", &self.control.is_none())
            .finish_non_exhaustive()
    }
}

impl Drop for LayerStream {
    fn drop(&mut self) {
        self.end();
    }
}

/// Cancels a load from any thread.
#[derive(Debug, Clone)]
pub struct CancelHandle {
    signals: Arc<Signals>,
}

impl CancelHandle {
    /// Cancels the load: the next layer that the caller asks for, or waits for already, is
    /// [`LoadError::Cancelled`]. Returns at once. Harmless once the last layer was handed out.
    pub fn cancel(&self) {
        // A load that has ended needs no cancelling.
        self.signals.cancel();
    }
}
