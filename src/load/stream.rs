//! The caller's end of a running load: an iterator of owned layers.

use std::fmt;
use std::iter::FusedIterator;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::channels::Signals;
use super::error::{LoadError, panic_message};
use super::layer::LoadedLayer;
use super::open_layers::turns_total;
use super::permits::{Full, WindowPermits};
use super::progress::{LoadReport, Progress};
use super::setup::Delivery;
use super::times::{SharedTotals, read_totals};
use crate::plan::{LoadPlan, Window};
use crate::source::{QueueingCell, Source};
use crate::staging::{Pinning, RingMode};
use crate::units::to_u64;

/// A running load: yields the layers in execution order, or as they are complete in that
/// [of files](crate::plan::ReadOrder::Files). Ends after the last layer of the last pass or the
/// first error.
///
/// Each layer is owned, may go to another thread, and frees its memory and its place in the window
/// when it and the tensors taken from it are dropped. A caller that holds so many that the next one
/// cannot become resident gets [`LoadError::Stalled`] after the [stall
/// timeout](crate::LoaderBuilder::stall_timeout) instead of waiting for ever.
///
/// Dropping the stream cancels the load, waits for what is in flight (at most the reads that the
/// system has already begun) and gives ring, files and threads back. Layers that were taken stay
/// valid. On a device it also waits for what [`release_after`](LoadedLayer::release_after) named
/// for layers that are gone: that must not wait for this thread.
#[must_use = "a stream that is dropped loads nothing"]
pub struct LayerStream {
    parts: StreamParts,
    turns_total: usize,
    control: Option<JoinHandle<()>>,
    /// True if the control loop knows that the caller wants the next layer.
    has_asked: bool,
    /// How long the caller has waited for what only it can drop, if it does.
    stall: Option<Stall>,
    /// Layers handed to the caller.
    taken: usize,
    preparing: Duration,
    elapsed: Option<Duration>,
    caller_waited: Duration,
}

/// The stream's share of a running load.
pub(super) struct StreamParts {
    pub(super) plan: Arc<LoadPlan>,
    pub(super) source: Arc<dyn Source>,
    pub(super) ring_mode: RingMode,
    pub(super) pinning: Pinning,
    pub(super) pinned_bytes: u64,
    pub(super) queueing: QueueingCell,
    pub(super) deliveries: Receiver<Delivery>,
    pub(super) signals: Arc<Signals>,
    pub(super) permits: Arc<WindowPermits>,
    pub(super) progress: Progress,
    pub(super) totals: SharedTotals,
    pub(super) stall_timeout: Duration,
    pub(super) started: Instant,
}

/// The result of [`LayerStream::next_within`].
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
    /// The stream of a load whose control loop runs in this thread.
    pub(super) fn new(parts: StreamParts, control: JoinHandle<()>) -> Self {
        Self {
            turns_total: turns_total(&parts.plan),
            preparing: parts.started.elapsed(),
            parts,
            control: Some(control),
            has_asked: false,
            stall: None,
            taken: 0,
            elapsed: None,
            caller_waited: Duration::ZERO,
        }
    }

    /// The plan that is being carried out.
    #[must_use]
    pub fn plan(&self) -> &Arc<LoadPlan> {
        &self.parts.plan
    }

    /// The progress of the load, for any thread.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.parts.progress.clone()
    }

    /// A handle that cancels the load from any thread.
    #[must_use]
    pub fn cancel_handle(&self) -> CancelHandle {
        CancelHandle { signals: Arc::clone(&self.parts.signals) }
    }

    /// The report of the load so far. Final once the stream has ended.
    #[must_use]
    pub fn report(&self) -> LoadReport {
        let totals = read_totals(&self.parts.totals);
        LoadReport {
            passes: totals.passes,
            waits: totals.waits,
            elapsed: self.elapsed.unwrap_or_else(|| self.parts.started.elapsed()),
            preparing: self.preparing,
            layers: to_u64(self.taken),
            tensor_bytes: self.parts.progress.tensor_bytes_done(),
            read_bytes: self.parts.progress.read_bytes(),
            ways: self.parts.source.ways(),
            reading: Duration::from_nanos(self.parts.progress.read_ns()),
            caller_waited: self.caller_waited,
            ring_mode: self.parts.ring_mode,
            pinning: self.parts.pinning.clone(),
            pinned_bytes: self.parts.pinned_bytes,
            queueing: self.parts.queueing.get(),
            fallbacks: self.parts.source.fallbacks(),
        }
    }

    /// The next layer, as [`Iterator::next`] returns it, if it comes within `timeout`. For callers
    /// that must look at something else now and then, such as a signal. After [`Awaited::NotYet`]
    /// the layer is still being read.
    ///
    /// The [stall timeout](crate::LoaderBuilder::stall_timeout) continues from one call to the
    /// next. Of the time between two calls, at most a tenth of a second counts.
    ///
    /// # Errors
    /// The error that ended the load. Afterwards the stream is at its [end](Awaited::Ended).
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
            self.parts.signals.want();
            self.has_asked = true;
        }
        let waiting = Instant::now();
        // A timeout beyond the range of the clock never ends.
        let delivery = self.next_delivery(waiting.checked_add(timeout));
        if !matches!(delivery, Err(RecvTimeoutError::Disconnected)) {
            self.caller_waited += waiting.elapsed();
        }
        match delivery {
            // After a cancel, a layer that was ready is not handed out any more.
            Ok(Delivery::Layer(_)) if self.parts.signals.is_cancelled() => {
                self.end();
                Err(LoadError::Cancelled)
            }
            Ok(Delivery::Layer(layer)) => {
                self.taken += 1;
                (self.has_asked, self.stall) = (false, None);
                if self.taken == self.turns_total {
                    self.elapsed = Some(self.parts.started.elapsed());
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

    /// The next delivery, or a timeout at `until`. Disconnected after the last delivery. A caller
    /// that holds the whole window gets an error instead of waiting for ever.
    fn next_delivery(&mut self, until: Option<Instant>) -> Result<Delivery, RecvTimeoutError> {
        loop {
            let left = until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
            // Without a known stall, it looks once in an interval, however short the timeout.
            let patience =
                self.stall.as_ref().map(|stall| self.parts.stall_timeout.saturating_sub(stall.waited));
            let pause = STALL_CHECK_INTERVAL.min(patience.unwrap_or(Duration::MAX)).min(left);
            match self.parts.deliveries.recv_timeout(pause) {
                Err(RecvTimeoutError::Timeout) => {}
                delivery => return delivery,
            }
            if self.parts.permits.is_stopped_by_turns_below(self.taken) {
                let waited = self.stall.get_or_insert_with(Stall::begin).go_on();
                let is_over = waited >= self.parts.stall_timeout;
                let stop = is_over.then(|| self.parts.permits.stopped_by_turns_below(self.taken)).flatten();
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
        let layers = self.parts.plan.layers();
        let held = held.iter().map(|&turn| layers[turn % layers.len()].id.clone()).collect();
        match full {
            Full::Layers { layers_max } => LoadError::Stalled { held, window: layers_max, waited },
            Full::Bytes { bytes_max } => match self.parts.plan.window() {
                Window::Bytes(window_bytes) => LoadError::WindowFull { held, window_bytes, waited },
                Window::All | Window::Layers(_) => {
                    LoadError::DeviceBudgetFull { held, device_budget_bytes: bytes_max, waited }
                }
            },
        }
    }

    /// Ends the load and waits for its threads. An error only if the control loop panicked.
    fn end(&mut self) -> Option<LoadError> {
        self.parts.signals.cancel();
        let control = self.control.take()?;
        self.elapsed.get_or_insert_with(|| self.parts.started.elapsed());
        let panicked = control.join().err().map(|panic| panic_message(&*panic));
        // Layers that were not taken are freed now, not with the stream.
        while let Ok(delivery) = self.parts.deliveries.try_recv() {
            drop(delivery);
        }
        panicked.map(|message| LoadError::Panicked { message })
    }
}

/// How often the stream checks whether a waiting caller holds the whole window.
const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A caller that waits for a permit that only it can return.
struct Stall {
    waited: Duration,
    checked: Instant,
}

impl Stall {
    fn begin() -> Self {
        Self { waited: Duration::ZERO, checked: Instant::now() }
    }

    /// The time that the caller has waited by now. Time between two calls counts only in part.
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
            .field("layers", &self.parts.plan.layers().len())
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
        self.signals.cancel();
    }
}
