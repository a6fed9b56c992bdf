//! Settings of a loader.

use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::borrowed::Borrowed;
use super::engine::Engine;
use super::{LoadError, Loader};
use crate::checkpoint::{Checkpoint, TensorEntry};
use crate::device::{Device, Target};
use crate::layers::{LayerMap, Layers};
use crate::plan::{
    FloatType, HandOut, IoDecision, IoMode, IoReason, Landing, LoadOptions, LoadPlan, PlanLimits,
    Quantisation, QuantiseChoice, ReadOrder, ResidentKind, Window, is_most, is_mostly_direct,
};
use crate::ranks::{Rank, Share, SplitRules};
use crate::source::{self, SourceError};

/// Most direct reads in flight unless the caller says otherwise: what arrays of flash disks want,
/// at 1 or 2 MiB each.
const DIRECT_READS_MAX: u32 = 16;
/// Most threads that have a queue of reads each.
const QUEUES_MAX: u32 = 8;
/// Reads that a network has under way at once.
const NETWORK_READERS: u32 = 8;

/// Decides which tensors are loaded.
type Select = dyn Fn(&TensorEntry<'_>) -> bool + Send + Sync;

/// Settings of a [`Loader`].
#[derive(Clone)]
#[must_use = "a builder does nothing until it is built"]
pub struct LoaderBuilder {
    pub(super) target: Target,
    pub(super) options: LoadOptions,
    pub(super) engine: Engine,
    pub(super) borrowed: Borrowed,
    map: LayerMap,
    select: Option<Arc<Select>>,
    shard: Option<(Rank, SplitRules)>,
    share: Option<Rank>,
}

impl LoaderBuilder {
    pub(super) fn new(target: Target) -> Self {
        Self {
            target,
            options: LoadOptions::default(),
            engine: Engine::default(),
            borrowed: Borrowed::default(),
            map: LayerMap::default(),
            select: None,
            shard: None,
            share: None,
        }
    }

    /// Sets all options that are plain values at once. The other settings stay.
    pub fn options(mut self, options: LoadOptions) -> Self {
        self.options = options;
        self
    }

    /// Most host memory that one load may hold beside resident layers, in bytes. 64 MiB by default.
    /// Loads that run at the same time have a budget each.
    pub fn host_budget(mut self, bytes: u64) -> Self {
        self.options.host_budget_bytes = bytes;
        self
    }

    /// Most memory that resident layers may take on the device, in bytes. Not bounded by default.
    /// Checked when the load is planned, for layers that are dropped in order, and enforced
    /// while it runs, for those that are not.
    pub fn device_budget(mut self, bytes: u64) -> Self {
        self.options.device_budget_bytes = Some(bytes);
        self
    }

    /// Bytes of the device's memory that shall stay free. 64 MiB by default. A load whose resident
    /// layers would leave less is refused before it begins. Host memory is not checked: what is
    /// free there is not known until it is used.
    pub fn device_reserve(mut self, bytes: u64) -> Self {
        self.options.device_reserve_bytes = bytes;
        self
    }

    /// Layers resident at once in [`Loader::stream`]: being filled, ready, and held by the caller.
    /// Two by default; [`Loader::load`] keeps all.
    pub fn window(mut self, window: Window) -> Self {
        self.options.window = window;
        self
    }

    /// Layers read ahead of the one the caller works on or waits for. Two by default; with zero,
    /// nothing is read before it is asked for. What lies beyond the window waits in the ring.
    pub fn prefetch(mut self, layers: u32) -> Self {
        self.options.prefetch_layers = layers;
        self
    }

    /// In which order reads are issued. One layer after the other by default; [`Loader::load`],
    /// which keeps everything, always reads as the files have it. [`Loader::stream`] does so on
    /// demand, with a window of [`Window::All`]: every layer is begun then
    /// whatever [`Self::prefetch`] says, and they come as they are complete, not in execution
    /// order. Hashing on the way needs the order of layers.
    pub fn read_order(mut self, order: ReadOrder) -> Self {
        self.options.order = order;
        self
    }

    /// How files are read. By default ([`IoMode::Auto`]) as the page cache, the file system and the
    /// size of each file suggest.
    pub fn io(mut self, mode: IoMode) -> Self {
        self.options.io = mode;
        self
    }

    /// Reads in flight; zero counts as one. By default what the mode can use on this machine: one
    /// for each core for buffered and mapped reads, at most 8, or 12 for a CUDA device; 8 for a
    /// network; direct reads find out while they run, up to 16; with [`IoMode::Auto`], what
    /// most of the bytes need. Cores are those that affinity and the CPU quota of the control
    /// group leave. A small budget may get fewer. Each is a thread, unless reads go through queues
    /// ([`LoadReport::queueing`](super::LoadReport::queueing)).
    pub fn readers(mut self, threads: u32) -> Self {
        self.options.readers = Some(threads.max(1));
        self
    }

    /// Hashes every tensor on the way if the target keeps no bytes to hash later; costs 32 bytes of
    /// the budget per tensor. Off by default. Where the bytes are kept,
    /// [`LoadedTensor::hash`](super::LoadedTensor::hash) needs nothing from the load.
    pub fn hash(mut self, hash: bool) -> Self {
        self.options.hash = hash;
        self
    }

    /// When the caller gets a layer. When it is complete, by default. Matters only for devices that
    /// copy by themselves.
    pub fn hand_out(mut self, hand_out: HandOut) -> Self {
        self.options.hand_out = hand_out;
        self
    }

    /// Narrows wider floats on the way: F32 and F64 tensors arrive as this type, rounded to nearest
    /// even. Others, those of 16 bits and quantised ones too, arrive as they are. Nothing is
    /// narrowed by default.
    pub fn dtype(mut self, dtype: FloatType) -> Self {
        self.options.dtype = Some(dtype);
        self
    }

    /// Quantises weights on the way, row by row: those of two or three dimensions in the layers of
    /// stacks, but not routers of experts. Embeddings, heads, norms, biases and what is
    /// quantised already arrive as they are, or as [`Self::dtype`] says. The values of `X`
    /// arrive under its name; [their scales](crate::plan::SCALE_SUFFIX) are a tensor of their own,
    /// `X_scale`, in the same layer.
    /// [`Progress::quantisation_errors`](super::Progress::quantisation_errors) tells what was lost.
    /// Nothing is quantised by default.
    pub fn quantise(mut self, form: Quantisation) -> Self {
        self.options.quantise = Some(form);
        self
    }

    /// Says which tensors [`Self::quantise`] is about, in the place of the rule about layers and
    /// names. Only floats of 16 bits and more, with two or three dimensions and rows of 32
    /// elements or more, which are no part of a quantised weight, are asked about.
    pub fn quantise_only(
        mut self,
        choose: impl Fn(&TensorEntry<'_>) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.options.quantise_choice = Some(QuantiseChoice::new(choose));
        self
    }

    /// How long the stream waits for its next layer while the caller itself holds all that may be
    /// resident. 30 s by default; a tenth of a second passes before it is noticed.
    pub fn stall_timeout(mut self, timeout: Duration) -> Self {
        self.options.stall_timeout = timeout;
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

    /// Loads what one of several ranks has of each tensor: for tensor parallelism. Only that is
    /// read, as far as it lies together: ranges of the outermost dimension are read as they
    /// are; of an inner one, short holes between what is wanted are read
    /// through ([`Self::read_through`]). [`LoadPlan::over_read_bytes`] tells what that costs.
    /// [`LoadedTensor::shape`](super::LoadedTensor::shape) is that of the part.
    pub fn shard(mut self, rank: Rank, rules: SplitRules) -> Self {
        self.shard = Some((rank, rules));
        self
    }

    /// Reads through holes of up to so many bytes, 64 KiB by default: between two wanted tensors,
    /// and inside the part of a rank ([`Self::shard`]). A disk moves that much in the time of
    /// one more request. With zero, nothing is read but what is wanted and what alignment adds,
    /// in more and smaller requests: for storage that is paid or limited by the byte.
    ///
    /// With [`Self::share`] no hole is ever read.
    pub fn read_through(mut self, hole_bytes_max: u64) -> Self {
        self.options.hole_bytes_max = hole_bytes_max;
        self
    }

    /// Loads whole tensors, those that are one rank's of several to read, so that each byte is read
    /// once in all: see [`Share`], which tells every rank which tensors those are. With
    /// [`Self::select`], the selected ones are divided.
    pub fn share(mut self, rank: Rank) -> Self {
        self.share = Some(rank);
        self
    }

    /// The same settings for one of several devices that share a checkpoint: one pass over the
    /// tensors that `is_here` picks, to stay. The bytes between them belong to other devices, so
    /// they are not read through.
    pub fn for_place(
        mut self,
        target: Target,
        is_here: impl Fn(&TensorEntry<'_>) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.target = target;
        self.options = self.options.keeping_everything();
        self.engine = self.engine.for_one_pass();
        if self.shard.is_none() {
            self.options.hole_bytes_max = 0;
        }
        let asked = self.select.take();
        self.select(move |tensor| is_here(tensor) && asked.as_ref().is_none_or(|asked| asked(tensor)))
    }

    /// The layers of a checkpoint, as these settings group them.
    ///
    /// # Errors
    /// [`LoadError::Layers`] if the grouping fails.
    pub fn layers(&self, checkpoint: &Checkpoint) -> Result<Layers, LoadError> {
        Ok(Layers::group_whole(checkpoint, &self.map)?)
    }

    /// True if [`Self::select`] takes the tensor; without it, every tensor is taken.
    #[must_use]
    pub fn wants(&self, tensor: &TensorEntry<'_>) -> bool {
        self.select.as_ref().is_none_or(|select| select(tensor))
    }

    /// The host budget, in bytes.
    #[must_use]
    pub fn host_budget_bytes(&self) -> u64 {
        self.options.host_budget_bytes
    }

    /// Device memory that has to stay free, in bytes.
    #[must_use]
    pub fn device_reserve_bytes(&self) -> u64 {
        self.options.device_reserve_bytes
    }

    /// What a load with these settings would do, as [`Loader::plan`]; the device need not be there.
    ///
    /// # Errors
    /// As [`Loader::plan`].
    pub fn plan(&self, checkpoint: &Checkpoint) -> Result<LoadPlan, LoadError> {
        self.plan_with(checkpoint, &self.options)
    }

    /// A loader with these settings. Opens the device.
    ///
    /// # Errors
    /// [`LoadError::Device`] if the target cannot be used on this machine, or not with the stream
    /// that was handed in. Host memory always can.
    pub fn build(self) -> Result<Loader, LoadError> {
        let device = match self.borrowed.device(self.target)? {
            Some(device) => device,
            None => Device::open(self.target)?,
        };
        Ok(Loader { settings: self, device })
    }

    /// True if the bytes are gone before the caller could hash them.
    pub(super) fn hashes_on_the_way(&self) -> bool {
        self.options.hash && self.target == Target::None
    }

    /// True if the load finds out by itself how many reads in flight are best.
    pub(super) fn adapts(&self, plan: &LoadPlan) -> bool {
        self.options.readers.is_none() && is_mostly_direct(plan.io(), plan.decisions())
    }

    /// Threads with a queue of reads each, if reads are to go through queues. One keeps any disk
    /// busy; where bytes are cast or copied on the way, that is a thread's work too, and every
    /// core shall take part. Then they are worth it without being asked for, unless some
    /// reads would hold up the others: those that go through no queue and answer late.
    pub(super) fn queues(&self, plan: &LoadPlan) -> Option<u32> {
        let works =
            self.target == Target::Host || self.options.dtype.is_some() || self.options.quantise.is_some();
        let for_work = cores().clamp(1, QUEUES_MAX);
        let answers_late =
            |decision: &IoDecision| matches!(decision.reason, IoReason::Network | IoReason::Program);
        match self.options.io {
            IoMode::Uring => Some(if works { for_work } else { 1 }),
            IoMode::Auto if !cfg!(feature = "uring") => None,
            IoMode::Auto if plan.decisions().iter().any(answers_late) => None,
            IoMode::Auto if works && is_mostly_direct(plan.io(), plan.decisions()) => Some(for_work),
            IoMode::Auto | IoMode::Direct | IoMode::Buffered | IoMode::Mmap => None,
        }
    }

    /// Plans a load with other options than those that were set.
    pub(super) fn plan_with(
        &self,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
    ) -> Result<LoadPlan, LoadError> {
        let mut layers = Layers::group_whole(checkpoint, &self.map)?;
        let mut limits = PlanLimits::of(options.clone());
        limits.options.hash = self.hashes_on_the_way();
        if self.share.is_some() {
            // Other ranks read what lies between.
            limits.options.hole_bytes_max = 0;
        }
        limits.kept = self.engine.kept(&layers)?;
        decide_io(&mut limits, checkpoint, self.target)?;
        (limits.resident, limits.landing) = match self.target {
            Target::Host => (ResidentKind::Host, Landing::Exact),
            Target::Cuda(_) => (ResidentKind::Device, Landing::InPhase),
            Target::None => (ResidentKind::Nowhere, Landing::Exact),
        };
        let is_selected =
            |tensor| self.select.as_ref().is_none_or(|select| select(&checkpoint.tensor(tensor)));
        let share =
            self.share.map(|rank| (rank, Share::divide(checkpoint, &layers, rank.world(), is_selected)));
        if let Some(order) = &self.engine.call_order {
            layers.reorder(order, is_selected)?;
        }
        let select = |tensor| match &share {
            Some((rank, share)) => share.is_of(*rank, tensor),
            None => is_selected(tensor),
        };
        Ok(match &self.shard {
            Some((rank, rules)) => LoadPlan::build_shard(checkpoint, &layers, &limits, *rank, rules, select)?,
            None => LoadPlan::build(checkpoint, &layers, &limits, select)?,
        })
    }
}

impl fmt::Debug for LoaderBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoaderBuilder")
            .field("target", &self.target)
            .field("options", &self.options)
            .field("engine", &self.engine)
            .field("borrowed", &self.borrowed)
            .field("map", &self.map)
            .field("selects", &self.select.is_some())
            .field("shard", &self.shard)
            .field("share", &self.share)
            .finish()
    }
}

/// Looks at each file and puts into the limits of a plan how it is read.
pub(crate) fn decide_io(
    limits: &mut PlanLimits,
    checkpoint: &Checkpoint,
    target: Target,
) -> Result<(), SourceError> {
    let io = limits.options.io;
    if io == IoMode::Auto {
        let survey = source::survey(checkpoint)?;
        (limits.alignment, limits.decisions) = (survey.alignment, survey.decisions);
    } else {
        limits.alignment = source::alignment(checkpoint)?;
    }
    limits.default_readers = default_readers(io, &limits.decisions, target);
    Ok(())
}

/// How many threads read, unless the caller says otherwise.
///
/// Buffered and mapped reads are bound by copying, so a thread per core. Direct reads wait for the
/// disk: as many as any disk wants, of which the load finds out how many it uses. A network answers
/// late whatever the number of cores. A link to a device takes what more cores than eight can copy.
/// Where each file has a decision of its own, most of the bytes decide.
///
/// Cores are those that this process may use: [`thread::available_parallelism`] counts its
/// affinity, and the CPU quotas of its control group and of those above, versions 1 and 2.
pub(super) fn default_readers(io: IoMode, decisions: &[IoDecision], target: Target) -> u32 {
    let most = if matches!(target, Target::Cuda(_)) { 12 } else { 8 };
    let copying = cores().clamp(1, most);
    match io {
        IoMode::Mmap | IoMode::Buffered => copying,
        IoMode::Direct | IoMode::Uring => DIRECT_READS_MAX,
        IoMode::Auto if is_most(decisions, |decision| decision.reason == IoReason::Network) => {
            NETWORK_READERS
        }
        IoMode::Auto if is_mostly_direct(io, decisions) => DIRECT_READS_MAX,
        IoMode::Auto => copying,
    }
}

fn cores() -> u32 {
    thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX))
}
