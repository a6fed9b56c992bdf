//! The loader, and the start of a load: its ring, its source, its threads.

use std::collections::HashSet;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use super::builder::LoaderBuilder;
use super::channels::{ReaderLimitSetter, Signals, Sizes, channel, job_queue};
use super::completion::CompletionThreads;
use super::control::Control;
use super::depth::{Depth, READS_LEAST};
use super::error::LoadError;
use super::io_choice;
use super::layer::LoadedLayer;
use super::permits::{WindowPermits, layers_at_once};
use super::progress::Progress;
use super::reader::{self, ReaderContext, ReaderKind};
use super::setup::{Channels, LoadSetup, Resources};
use super::stream::{LayerStream, StreamParts};
use super::times::SharedTotals;
use crate::checkpoint::Checkpoint;
#[cfg(feature = "cuda")]
use crate::device::DeviceError;
#[cfg(feature = "cuda")]
use crate::device::cuda::{CudaBackend, Registrar};
use crate::device::{ArenaPlace, Backend, Device, DeviceKind, HostBackend, NoneBackend, Target};
use crate::plan::{LoadOptions, LoadPlan, ResidentKind, Window, is_mostly_direct};
use crate::source::{self, QueueingCell, ReadQueue};
use crate::staging::{Pinner, Ring};

/// Loads checkpoints onto an open device, with fixed settings. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Loader {
    settings: LoaderBuilder,
    device: Device,
}

impl Loader {
    /// The default settings for a target.
    pub fn builder(target: Target) -> LoaderBuilder {
        LoaderBuilder::new(target)
    }

    /// The device that layers go to.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The plan of [`Self::stream`]: every read, every copy, every term of the peak. Reads no
    /// tensor bytes. For the plan of [`Self::load`], set [`Window::All`] and
    /// [`crate::ReadOrder::Files`].
    ///
    /// # Errors
    /// [`LoadError::Plan`] if the budget cannot work, [`LoadError::Layers`] if the grouping fails,
    /// [`LoadError::Source`] if a file is gone.
    pub fn plan(&self, checkpoint: &Checkpoint) -> Result<LoadPlan, LoadError> {
        self.settings.plan(checkpoint)
    }

    /// Streams the layers in execution order (unless [another order](LoaderBuilder::read_order) is
    /// set), at most a window of them resident. The threads end with the stream.
    ///
    /// # Errors
    /// The errors of [`Self::plan`]; [`LoadError::Device`] if the layers do not fit the free memory
    /// of the device, or if it fails; [`LoadError::Staging`], [`LoadError::Source`],
    /// [`LoadError::Thread`] if the ring, the files or the threads are not available.
    pub fn stream(&self, checkpoint: &Checkpoint) -> Result<LayerStream, LoadError> {
        self.start(checkpoint, self.settings.options.clone())
    }

    /// Loads one layer: the tensors of these names, which must form one layer.
    pub(crate) fn load_one(
        &self,
        checkpoint: &Checkpoint,
        names: HashSet<String>,
    ) -> Result<LoadedLayer, LoadError> {
        let settings = self.settings.clone().select(move |tensor| names.contains(tensor.name));
        let loader = Self { settings, device: self.device.clone() };
        let mut stream = loader.start_keeping_everything(checkpoint)?;
        let layer = stream.next().expect("a plan that selects something has a layer")?;
        Ok(layer)
    }

    /// Streams every layer once, for a caller that keeps all of them.
    pub(crate) fn start_keeping_everything(&self, checkpoint: &Checkpoint) -> Result<LayerStream, LoadError> {
        let mut options = self.settings.options.clone().keeping_everything();
        options.prefetch_layers = u32::MAX;
        self.start(checkpoint, options)
    }

    fn start(&self, checkpoint: &Checkpoint, mut options: LoadOptions) -> Result<LayerStream, LoadError> {
        let started = Instant::now();
        let plan = Arc::new(self.settings.plan_with(checkpoint, &options)?);
        let window = options.window;
        options.hash = self.settings.hashes_on_the_way();
        let resident_bytes = plan.memory().resident_bytes();
        let shared = plan.memory().window();
        let waits_for_disk = is_mostly_direct(plan.io(), plan.decisions());
        let adapts = io_choice::adapts(&options, &plan);
        let queues = io_choice::queues(&options, self.settings.target, &plan);
        let setup = LoadSetup {
            checkpoint: checkpoint.clone(),
            plan,
            options,
            adapts,
            queues,
            observer: None,
            hooks: self.settings.engine.hooks.clone(),
            started,
        };
        match self.device.kind() {
            DeviceKind::Host => {
                let spare = self.settings.spare.as_ref();
                let backend = match (shared, window) {
                    (Some(shape), _) => HostBackend::with_window(shape.bytes, layers_at_once(&setup.plan))?,
                    (None, Window::All) => spare.map_or_else(HostBackend::new, HostBackend::sharing),
                    (None, Window::Layers(_) | Window::Bytes(_)) => HostBackend::recycling(resident_bytes),
                };
                let backend = if waits_for_disk { backend.prefaulting() } else { backend };
                setup.start_on(backend, None)
            }
            DeviceKind::None => setup.start_on(NoneBackend, None),
            #[cfg(feature = "cuda")]
            DeviceKind::Cuda { context, .. } => {
                if self.settings.cuda.destinations.is_none() {
                    self.check_room(resident_bytes)?;
                }
                let recycles = shared.is_none() && window != Window::All;
                let session = self.settings.cuda.session(context, recycles.then_some(resident_bytes))?;
                let slots = setup.plan.memory().ring().slots;
                let backend = CudaBackend::new(session, slots)?;
                let backend = match shared.filter(|_| self.settings.cuda.destinations.is_none()) {
                    Some(shape) => backend.with_window(shape.bytes)?,
                    None => backend,
                };
                setup.start_on(backend, Some(&Registrar(Arc::clone(context))))
            }
        }
    }

    /// Refuses layers that do not fit, before anything is allocated.
    #[cfg(feature = "cuda")]
    fn check_room(&self, needed_bytes: u64) -> Result<(), DeviceError> {
        let reserve_bytes = self.settings.options.device_reserve_bytes;
        match self.device.memory()? {
            Some(memory) if needed_bytes.saturating_add(reserve_bytes) > memory.free_bytes => {
                Err(DeviceError::OutOfDeviceMemory {
                    needed_bytes,
                    free_bytes: memory.free_bytes,
                    reserve_bytes,
                })
            }
            _ => Ok(()),
        }
    }
}

impl LoaderBuilder {
    /// A loader with these settings. Opens the device.
    ///
    /// # Errors
    /// [`LoadError::Device`] if the target cannot be used on this machine, or not with the stream
    /// that was handed in. Host memory always can.
    pub fn build(self) -> Result<Loader, LoadError> {
        let device = match self.cuda.device(self.target)? {
            Some(device) => device,
            None => Device::open(self.target)?,
        };
        Ok(Loader { settings: self, device })
    }
}

impl LoadSetup {
    /// Starts the load on a device. `pinner` pins the ring for it, if it needs that.
    pub(crate) fn start_on<B: Backend>(
        self,
        backend: B,
        pinner: Option<&dyn Pinner>,
    ) -> Result<LayerStream, LoadError> {
        let Self { checkpoint, plan, options, .. } = &self;
        let backend = Arc::new(backend);
        let mut completion = CompletionThreads::start(&backend, plan)?;
        // The first arena is allocated while the ring is pinned. Every window has room for it.
        if let Some(completion) =
            completion.as_mut().filter(|_| options.prefetch_layers > 0 && !plan.layers().is_empty())
        {
            let first = plan.first_layer();
            let is_shared = plan.memory().window().is_some() && !plan.layers()[first].is_kept;
            let place = if is_shared { ArenaPlace::InWindow { offset_bytes: 0 } } else { ArenaPlace::Own };
            completion.allocate_ahead(first, place);
        }
        let reservations = plan.memory().reserve()?;
        let ring = Ring::new(plan.memory().ring(), reservations.ring, pinner)?;
        let source = Arc::from(source::open_planned(plan, checkpoint)?);
        let resources = Resources { ring, source, backend, reservations: reservations.others };
        start_threads(self, resources, completion)
    }
}

/// Starts the readers and the control loop of a load.
pub(super) fn start_threads<B: Backend>(
    setup: LoadSetup,
    resources: Resources<B>,
    completion: Option<CompletionThreads<B>>,
) -> Result<LayerStream, LoadError> {
    let plan = &setup.plan;
    let progress = Progress::new(tensor_bytes_total(plan));
    let sizes = Sizes::of(plan);
    let (job_sender, job_receiver) = job_queue(sizes.jobs);
    let (result_sender, results) = channel(sizes.jobs);
    let (delivery_sender, deliveries) = channel(sizes.layers);
    let (signals, woken) = Signals::new();
    let depth = depth(&setup);
    let reader_limit = ReaderLimitSetter::new(depth.limit());
    let queueing = QueueingCell::default();
    let context = Arc::new(ReaderContext {
        checkpoint: setup.checkpoint.clone(),
        plan: Arc::clone(plan),
        source: Arc::clone(&resources.source),
        backend: Arc::clone(&resources.backend),
        progress: progress.clone(),
        limit: reader_limit.limit(),
    });
    // If a thread does not start, those that run find the limit lifted and the job queue closed,
    // and end.
    let kind = reader_kind(&setup, &resources, &queueing);
    let readers = reader::spawn(kind, &context, &job_receiver, &result_sender)?;
    drop((result_sender, context));
    let permits = WindowPermits::of(plan, Arc::clone(&signals));
    let totals = SharedTotals::default();
    let parts = StreamParts {
        plan: Arc::clone(plan),
        source: Arc::clone(&resources.source),
        ring_mode: resources.ring.mode(),
        pinning: resources.ring.pinning().clone(),
        pinned_bytes: resources.ring.pinned_bytes(),
        queueing,
        deliveries,
        signals: Arc::clone(&signals),
        permits: Arc::clone(&permits),
        progress: progress.clone(),
        totals: Arc::clone(&totals),
        stall_timeout: setup.options.stall_timeout,
        started: setup.started,
    };
    let channels = Channels {
        jobs: job_sender,
        jobs_not_begun: job_receiver,
        results,
        woken,
        signals,
        deliveries: delivery_sender,
        completion,
        depth,
        reader_limit,
    };
    let control = Control::new(setup, resources, channels, permits, progress, totals);
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
    Ok(LayerStream::new(parts, control))
}

/// How many reads may be in flight at first, and whether the load may change that.
fn depth(setup: &LoadSetup) -> Depth {
    let readers_most = setup.plan.memory().ring().readers;
    // Readers that copy into an arena leave the disk idle meanwhile, and copies come in bursts, so
    // the host starts with more readers.
    let reads_at_first = match setup.plan.memory().resident_kind() {
        ResidentKind::Host => 8 * READS_LEAST,
        ResidentKind::Device | ResidentKind::Nowhere => READS_LEAST,
    };
    match setup.adapts {
        true => Depth::adaptive(reads_at_first, readers_most),
        false => Depth::fixed(readers_most),
    }
}

/// Queues if reads go through them and the kernel grants them all, otherwise a thread for each read
/// in flight.
fn reader_kind<B: Backend>(
    setup: &LoadSetup,
    resources: &Resources<B>,
    queueing: &QueueingCell,
) -> ReaderKind {
    let ring = setup.plan.memory().ring();
    let Some(queues) = setup.queues else { return ReaderKind::OneByOne { readers: ring.readers } };
    let count = queues.clamp(1, ring.readers);
    let queue = |_| ReadQueue::new(&resources.source, ring.readers.div_ceil(count), ring.slots, queueing);
    let queues: Option<Vec<_>> = (0..count).map(queue).collect();
    queues.map_or(ReaderKind::OneByOne { readers: ring.readers }, ReaderKind::Queued)
}

/// Bytes of tensors that arrive in all passes, or in one pass if there is no end. Kept layers
/// arrive once.
fn tensor_bytes_total(plan: &LoadPlan) -> u64 {
    let others = plan.layers().iter().filter(|layer| !layer.is_kept);
    let again_bytes: u64 = others.map(|layer| layer.tensor_bytes).sum();
    let more_passes = plan.passes().count().map_or(0, |count| count - 1);
    plan.tensor_bytes().saturating_add(again_bytes.saturating_mul(more_passes))
}
