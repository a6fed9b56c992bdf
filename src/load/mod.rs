//! The one place that sees source, ring and device together.
//!
//! [`Loader::stream`] starts reader threads and one control loop and hands out layers in execution
//! order:
//!
//! ```text
//!             jobs (read, slot)               results
//!  control  ---------------------> readers ------------> control
//!     |  ^                         read, then start the copy if the layer has its arena
//!     |  +-- signals: the next layer is wanted, a layer was dropped, cancel
//!     +----- deliveries: layers in order, or the error that ended the load ----> LayerStream::next
//! ```
//!
//! On a device that copies by itself two more threads wait for it: one for arenas, one for copies
//! and layers.
//!
//! The control loop alone decides: which read gets a slot, when a layer gets its arena (the
//! window), when it is complete. Blocking reads run on the reader threads and nowhere else.
//!
//! Whoever wants a tensor, or a part of one, and nothing more asks a [`TensorReader`], which needs
//! none of this.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use crate::checkpoint::Checkpoint;
#[cfg(feature = "cuda")]
use crate::device::DeviceError;
#[cfg(feature = "cuda")]
use crate::device::cuda::{CudaBackend, Registrar};
use crate::device::{ArenaPlace, Backend, Device, DeviceKind, HostBackend, NoneBackend, Target};
use crate::plan::{LoadOptions, LoadPlan, ReadOp, Window, is_mostly_direct};
use crate::source;
use crate::staging::{Filled, Pinner, Ring, Slot};
use crate::units::to_usize;

use self::attend::Attendants;
use self::window::layers_at_once;

pub use self::builder::LoaderBuilder;
#[cfg(feature = "convert")]
pub(crate) use self::builder::decide_io;
pub use self::engine::Keep;
pub use self::error::LoadError;
#[cfg(feature = "convert")]
pub(crate) use self::hash::PARALLEL_BYTES_MIN;
pub use self::hash::TensorHash;
#[cfg(feature = "convert")]
pub(crate) use self::hash::update_hash;
pub use self::layer::{LoadedLayer, LoadedTensor};
pub use self::park::ParkTo;
pub(crate) use self::park::{ParkedLayer, Parking};
pub use self::progress::{Progress, QuantisationError};
pub use self::receipt::{Holder, Receipt};
pub use self::report::LoadReport;
pub use self::stream::{Awaited, CancelHandle, LayerStream};
pub use self::tensors::TensorReader;
pub(crate) use self::times::Hooks;
pub use self::times::{Binding, LayerTimes, PassReport, Waits};

mod attend;
mod borrowed;
mod builder;
mod channels;
mod control;
mod depth;
mod engine;
mod error;
mod gate;
mod hash;
mod jobs;
mod layer;
mod meter;
mod on_device;
mod open;
mod owners;
mod park;
mod progress;
mod queued;
mod reader;
mod receipt;
mod report;
mod setup;
mod shelf;
mod signals;
#[cfg(not(loom))]
#[cfg(test)]
mod simulation;
mod space;
mod stream;
mod tensors;
mod times;
mod turns;
mod window;

/// Loads checkpoints with one group of settings, onto a device that is open. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Loader {
    settings: LoaderBuilder,
    device: Device,
}

impl Loader {
    /// Settings for a target.
    pub fn builder(target: Target) -> LoaderBuilder {
        LoaderBuilder::new(target)
    }

    /// The device that layers go to.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What [`Self::stream`] would do: every read, every copy, every term of the peak. Reads no
    /// tensor bytes. For what [`Self::load`] would do, plan with [`Window::All`] and
    /// [`crate::ReadOrder::Files`].
    ///
    /// # Errors
    /// [`LoadError::Plan`] if the budget cannot work, [`LoadError::Layers`] if the grouping fails,
    /// [`LoadError::Source`] if a file is gone.
    pub fn plan(&self, checkpoint: &Checkpoint) -> Result<LoadPlan, LoadError> {
        self.settings.plan(checkpoint)
    }

    /// Streams the layers in execution order (unless [another one](LoaderBuilder::read_order) was
    /// asked for), at most a window of them resident. The threads end with the stream.
    ///
    /// # Errors
    /// Whatever [`Self::plan`] refuses; [`LoadError::Device`] if the layers do not fit what is free
    /// on the device, or if it fails; [`LoadError::Staging`], [`LoadError::Source`],
    /// [`LoadError::Thread`] if the ring, the files or the threads cannot be had.
    pub fn stream(&self, checkpoint: &Checkpoint) -> Result<LayerStream, LoadError> {
        self.start(checkpoint, self.settings.options.clone())
    }

    /// Loads one layer: the tensors of these names, which must be one.
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
        let (adapts, queues) = (self.settings.adapts(&plan), self.settings.queues(&plan));
        let launch = Launch {
            checkpoint,
            plan,
            options,
            adapts,
            queues,
            witness: None,
            hooks: self.settings.engine.hooks.clone(),
            started,
        };
        match self.device.kind() {
            DeviceKind::Host => {
                let backend = match (shared, window) {
                    (Some(shape), _) => HostBackend::with_window(shape.bytes, layers_at_once(&launch.plan))?,
                    (None, Window::All) => HostBackend::new(),
                    (None, Window::Layers(_) | Window::Bytes(_)) => HostBackend::recycling(resident_bytes),
                };
                let backend = if waits_for_disk { backend.prefaulting() } else { backend };
                launch.start_on(backend, None)
            }
            DeviceKind::None => launch.start_on(NoneBackend, None),
            #[cfg(feature = "cuda")]
            DeviceKind::Cuda { context, .. } => {
                if self.settings.borrowed.destinations.is_none() {
                    self.check_room(resident_bytes)?;
                }
                let recycles = shared.is_none() && window != Window::All;
                let session = self.session(context, recycles.then_some(resident_bytes))?;
                let slots = launch.plan.memory().ring().slots;
                let backend = CudaBackend::new(session, slots)?;
                let backend = match shared.filter(|_| self.settings.borrowed.destinations.is_none()) {
                    Some(shape) => backend.with_window(shape.bytes)?,
                    None => backend,
                };
                launch.start_on(backend, Some(&Registrar(Arc::clone(context))))
            }
        }
    }

    /// Refuses what does not fit before anything is allocated.
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

/// Sees the bytes of every read in the order of the plan, where the target keeps none: narrowed, as
/// they would be copied. An error ends the load.
pub(crate) type Witness = Box<dyn FnMut(&ReadOp, &Slot<Filled>) -> Result<(), LoadError> + Send>;

/// What a load starts from, whatever the device.
pub(crate) struct Launch<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) plan: Arc<LoadPlan>,
    /// The options of the load, with [`LoadOptions::hash`] only if the bytes are hashed on the way.
    pub(crate) options: LoadOptions,
    /// Find out how many reads in flight are best, up to the readers there are.
    pub(crate) adapts: bool,
    /// Threads with a queue of reads each, if reads are to go through queues.
    pub(crate) queues: Option<u32>,
    /// Sees every byte on the way. For targets that keep none.
    pub(crate) witness: Option<Witness>,
    /// Whom the caller wants told.
    pub(crate) hooks: Hooks,
    /// When the load began.
    pub(crate) started: Instant,
}

impl Launch<'_> {
    /// Starts the load. `pinner` pins the ring, if somebody has to.
    pub(crate) fn start_on<B: Backend>(
        self,
        backend: B,
        pinner: Option<&dyn Pinner>,
    ) -> Result<LayerStream, LoadError> {
        let Self { checkpoint, plan, options, .. } = self;
        let backend = Arc::new(backend);
        let mut attendants = Attendants::start(&backend, &plan)?;
        // The first arena is allocated while the ring is pinned; there is room for it in every
        // window.
        if let Some(attendants) =
            attendants.as_mut().filter(|_| options.prefetch_layers > 0 && !plan.layers().is_empty())
        {
            let first = plan.first_layer();
            let is_shared = plan.memory().window().is_some() && !plan.layers()[first].is_kept;
            // Nothing else has a place in the window by then.
            let place = if is_shared { ArenaPlace::InWindow { offset_bytes: 0 } } else { ArenaPlace::Own };
            attendants.allocate_ahead(first, place);
        }
        let memory = plan.memory();
        let reservations = memory.reserve()?;
        let ring = Ring::new(memory.ring(), reservations.ring, pinner)?;
        let source = Arc::from(source::open_planned(&plan, checkpoint)?);
        let setup = setup::Setup {
            checkpoint: checkpoint.clone(),
            plan,
            ring,
            source,
            backend,
            prefetch: to_usize(u64::from(options.prefetch_layers)),
            hand_out: options.hand_out,
            adapts: self.adapts,
            queues: self.queues,
            hash: options.hash,
            witness: self.witness,
            hooks: self.hooks,
            started: self.started,
            reservations: reservations.others,
        };
        stream::start(setup, attendants, options.stall_timeout)
    }
}
