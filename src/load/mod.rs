//! The one place that sees source, ring and device together.
//!
//! [`Loader::stream`] starts reader threads and one control loop and hands out layers in execution order:
//!
//! ```text
//!             jobs (read, slot)               results
//!  control  ---------------------> readers ------------> control
//!     |  ^                         read, then start the copy if the layer has its arena
//!     |  +-- signals: the next layer is wanted, a layer was dropped, cancel
//!     +----- deliveries: layers in order, or the error that ended the load ----> LayerStream::next
//! ```
//!
//! The control loop alone decides: which read gets a slot, when a layer gets its arena (the window), when it
//! is complete. Blocking reads run on the reader threads and nowhere else.

use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::budget::MemoryBudget;
use crate::checkpoint::{Checkpoint, TensorEntry};
use crate::device::{Backend, HostBackend, NoneBackend, Target};
use crate::layers::{LayerMap, Layers};
use crate::plan::{IoMode, LoadPlan, PlanLimits, ResidentKind, Window};
use crate::source;
use crate::staging::Ring;
use crate::units::{MIB, to_usize};

pub use self::error::LoadError;
pub use self::hash::TensorHash;
pub use self::layer::{LoadedLayer, LoadedTensor};
pub use self::progress::Progress;
pub use self::report::LoadReport;
pub use self::stream::{CancelHandle, LayerStream};

mod control;
mod error;
mod hash;
mod layer;
mod progress;
mod reader;
mod report;
#[cfg(not(loom))]
#[cfg(test)]
mod simulation;
mod stream;
mod window;

/// Host budget unless the caller says otherwise: enough for every disk and link that was measured.
pub const DEFAULT_HOST_BUDGET_BYTES: u64 = 64 * MIB;
/// Layers read ahead of the one the caller works on, unless the caller says otherwise.
pub const DEFAULT_PREFETCH_LAYERS: u32 = 2;
/// How long a stream waits for a caller that holds the whole window, unless the caller says otherwise.
pub const DEFAULT_STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Decides which tensors are loaded.
type Select = dyn Fn(&TensorEntry<'_>) -> bool + Send + Sync;

/// Settings of a [`Loader`].
#[derive(Clone)]
#[must_use = "a builder does nothing until it is built"]
pub struct LoaderBuilder {
    target: Target,
    host_budget_bytes: u64,
    device_budget_bytes: Option<u64>,
    window: Window,
    prefetch: u32,
    io: IoMode,
    readers: Option<u32>,
    hash: bool,
    stall_timeout: Duration,
    map: LayerMap,
    select: Option<Arc<Select>>,
}

impl LoaderBuilder {
    /// Most host memory that one load may hold beside resident layers, in bytes. 64 MiB by default. Loads that run at the
    /// same time have a budget each.
    pub fn host_budget(mut self, bytes: u64) -> Self {
        self.host_budget_bytes = bytes;
        self
    }

    /// Most memory that resident layers may take on the device, in bytes. Not bounded by default. Checked when the load is
    /// planned, for layers that are dropped in order, and enforced while it runs, for those that are not.
    pub fn device_budget(mut self, bytes: u64) -> Self {
        self.device_budget_bytes = Some(bytes);
        self
    }

    /// Layers resident at once in [`Loader::stream`]: being filled, ready, and held by the caller. Two by default;
    /// [`Loader::load`] keeps all.
    pub fn window(mut self, window: Window) -> Self {
        self.window = window;
        self
    }

    /// Layers read ahead of the one the caller works on or waits for. Two by default; with zero, nothing is read before
    /// it is asked for. What lies beyond the window waits in the ring.
    pub fn prefetch(mut self, layers: u32) -> Self {
        self.prefetch = layers;
        self
    }

    /// How files are read. Buffered by default.
    pub fn io(mut self, mode: IoMode) -> Self {
        self.io = mode;
        self
    }

    /// Reader threads; zero counts as one. By default what the mode can use on this machine: a thread per core for
    /// buffered and mapped reads, at most 8, and 4 to 8 for direct ones. A small budget may get fewer.
    pub fn readers(mut self, threads: u32) -> Self {
        self.readers = Some(threads.max(1));
        self
    }

    /// Hashes every tensor on the way if the target keeps no bytes to hash later; costs 32 bytes of the budget per tensor.
    /// Off by default. Where the bytes are kept, [`LoadedTensor::hash`] needs nothing from the load.
    pub fn hash(mut self, hash: bool) -> Self {
        self.hash = hash;
        self
    }

    /// How long the stream waits for its next layer while the caller itself holds all that may be resident. 30 s by
    /// default; a tenth of a second passes before it is noticed.
    pub fn stall_timeout(mut self, timeout: Duration) -> Self {
        self.stall_timeout = timeout;
        self
    }

    /// Overrides the grouping of tensors into layers.
    pub fn layer_map(mut self, map: LayerMap) -> Self {
        self.map = map;
        self
    }

    /// Loads only tensors for which `select` says yes. It is asked before anything is read.
    pub fn select(mut self, select: impl Fn(&TensorEntry<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.select = Some(Arc::new(select));
        self
    }

    /// A loader with these settings.
    ///
    /// # Errors
    /// [`LoadError`] if the target cannot be used on this machine. Host memory always can.
    pub fn build(self) -> Result<Loader, LoadError> {
        Ok(Loader { settings: self })
    }
}

/// Loads checkpoints with one group of settings. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Loader {
    settings: LoaderBuilder,
}

impl Loader {
    /// Settings for a target.
    pub fn builder(target: Target) -> LoaderBuilder {
        LoaderBuilder {
            target,
            host_budget_bytes: DEFAULT_HOST_BUDGET_BYTES,
            device_budget_bytes: None,
            window: Window::Layers(2),
            prefetch: DEFAULT_PREFETCH_LAYERS,
            io: IoMode::Buffered,
            readers: None,
            hash: false,
            stall_timeout: DEFAULT_STALL_TIMEOUT,
            map: LayerMap::default(),
            select: None,
        }
    }

    /// What [`Self::stream`] would do: every read, every copy, every term of the peak. Reads no tensor bytes. For what
    /// [`Self::load`] would do, plan with [`Window::All`].
    ///
    /// # Errors
    /// [`LoadError::Plan`] if the budget cannot work, [`LoadError::Layers`] if the grouping fails,
    /// [`LoadError::Source`] if a file is gone.
    pub fn plan(&self, checkpoint: &Checkpoint) -> Result<LoadPlan, LoadError> {
        self.plan_window(checkpoint, self.settings.window)
    }

    /// True if the bytes are gone before the caller could hash them.
    fn hashes_on_the_way(&self) -> bool {
        self.settings.hash && self.settings.target == Target::None
    }

    pub(crate) fn plan_window(&self, checkpoint: &Checkpoint, window: Window) -> Result<LoadPlan, LoadError> {
        let settings = &self.settings;
        let layers = Layers::group_with(checkpoint, &settings.map)?;
        let mut limits = PlanLimits::new(settings.host_budget_bytes);
        limits.hash = self.hashes_on_the_way();
        limits.device_budget_bytes = settings.device_budget_bytes;
        limits.window = window;
        limits.io = settings.io;
        limits.readers = settings.readers.unwrap_or_else(|| default_readers(settings.io));
        limits.alignment = source::alignment(checkpoint)?;
        limits.resident = match settings.target {
            Target::Host => ResidentKind::Host,
            Target::None => ResidentKind::Nowhere,
        };
        let select =
            |tensor| settings.select.as_ref().is_none_or(|select| select(&checkpoint.tensor(tensor)));
        Ok(LoadPlan::build(checkpoint, &layers, &limits, select)?)
    }

    /// Streams the layers in execution order, at most a window of them resident. The threads end with the stream.
    ///
    /// # Errors
    /// Whatever [`Self::plan`] refuses, and [`LoadError::Staging`], [`LoadError::Source`], [`LoadError::Thread`] if the
    /// ring, the files or the threads cannot be had.
    pub fn stream(&self, checkpoint: &Checkpoint) -> Result<LayerStream, LoadError> {
        self.start(checkpoint, self.settings.window, self.settings.prefetch)
    }

    pub(crate) fn start(
        &self,
        checkpoint: &Checkpoint,
        window: Window,
        prefetch: u32,
    ) -> Result<LayerStream, LoadError> {
        let started = Instant::now();
        let plan = Arc::new(self.plan_window(checkpoint, window)?);
        match self.settings.target {
            Target::Host => {
                let backend = match window {
                    Window::All => HostBackend::new(),
                    Window::Layers(_) => HostBackend::recycling(plan.memory().resident_bytes()),
                };
                self.start_on(checkpoint, plan, prefetch, backend, started)
            }
            Target::None => self.start_on(checkpoint, plan, prefetch, NoneBackend, started),
        }
    }

    fn start_on<B: Backend>(
        &self,
        checkpoint: &Checkpoint,
        plan: Arc<LoadPlan>,
        prefetch: u32,
        backend: B,
        started: Instant,
    ) -> Result<LayerStream, LoadError> {
        let memory = plan.memory();
        let budget = MemoryBudget::new(memory.budget_bytes());
        let mut reservations = Vec::with_capacity(memory.terms().len());
        for term in memory.terms() {
            reservations.push(budget.reserve(term.name, term.bytes)?);
        }
        let ring = Ring::new(memory.ring(), reservations.remove(0))?;
        let source = Arc::from(source::open(plan.io(), checkpoint)?);
        let setup = control::Setup {
            checkpoint: checkpoint.clone(),
            plan,
            ring,
            source,
            backend: Arc::new(backend),
            prefetch: to_usize(u64::from(prefetch)),
            hash: self.hashes_on_the_way(),
            started,
            reservations,
        };
        stream::start(setup, self.settings.stall_timeout)
    }
}

impl fmt::Debug for LoaderBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoaderBuilder")
            .field("target", &self.target)
            .field("host_budget_bytes", &self.host_budget_bytes)
            .field("device_budget_bytes", &self.device_budget_bytes)
            .field("window", &self.window)
            .field("prefetch", &self.prefetch)
            .field("io", &self.io)
            .field("readers", &self.readers)
            .field("hash", &self.hash)
            .field("stall_timeout", &self.stall_timeout)
            .field("map", &self.map)
            .field("selects", &self.select.is_some())
            .finish()
    }
}

/// Buffered and mapped reads are bound by copying, so a thread per core; direct reads wait for the disk, so a
/// few in flight even on a small machine.
fn default_readers(io: IoMode) -> u32 {
    let cores =
        thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX));
    match io {
        IoMode::Mmap | IoMode::Buffered => cores.clamp(1, 8),
        IoMode::Direct => cores.clamp(4, 8),
    }
}
