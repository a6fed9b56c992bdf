//! The settings of a loader.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::error::LoadError;
use super::io_choice::decide_io;
use super::times::{Hooks, LayerTimes, PassReport};
use crate::checkpoint::{Checkpoint, TensorEntry};
use crate::device::{Destinations, SpareMemory, Target};
use crate::layers::{Layer, LayerId, LayerKind, LayerMap, Layers};
use crate::plan::{
    FloatType, HandOut, IoMode, Landing, LoadOptions, LoadPlan, Passes, PlanLimits, Quantisation,
    QuantiseChoice, ReadOrder, ResidentKind, Window,
};
use crate::ranks::{Rank, Share, SplitRules};

/// Decides which tensors are loaded.
type Select = dyn Fn(&TensorEntry<'_>) -> bool + Send + Sync;

/// The layers that stay resident from the first pass to the last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Keep {
    /// None.
    #[default]
    Nothing,
    /// Those outside every stack: embedding, head, final norm.
    OutsideStacks,
    /// The layers of these names.
    Layers(Vec<LayerId>),
}

/// Settings for inference engines.
#[derive(Clone, Debug, Default)]
pub(super) struct Engine {
    keep: Keep,
    pub(super) call_order: Option<Vec<LayerId>>,
    pub(super) hooks: Hooks,
}

impl Engine {
    /// The hooks alone, for a load that keeps everything.
    pub(super) fn for_one_pass(self) -> Self {
        Self { hooks: self.hooks, ..Self::default() }
    }

    /// The layers that stay resident.
    pub(super) fn kept(&self, layers: &Layers) -> Result<BTreeSet<LayerId>, LoadError> {
        let ids = |layer: &Layer| layer.id.clone();
        match &self.keep {
            Keep::Nothing => Ok(BTreeSet::new()),
            Keep::OutsideStacks => {
                let outside = layers.as_slice().iter().filter(|layer| layer.kind == LayerKind::Group);
                Ok(outside.map(ids).collect())
            }
            Keep::Layers(wanted) => {
                let known = |id: &LayerId| layers.find(id).map(ids).ok_or_else(|| LoadError::no_layer(id));
                wanted.iter().map(known).collect()
            }
        }
    }
}

/// CUDA handles and memory that the caller provides.
#[derive(Clone, Default)]
pub(super) struct CudaHandles {
    pub(super) context: Option<u64>,
    pub(super) stream: Option<u64>,
    pub(super) destinations: Option<Arc<Destinations>>,
}

impl fmt::Debug for CudaHandles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaHandles")
            .field("context", &self.context)
            .field("stream", &self.stream)
            .field("destinations", &self.destinations.is_some())
            .finish()
    }
}

/// The settings of a [`Loader`](crate::Loader).
#[derive(Clone)]
#[must_use = "a builder does nothing until it is built"]
pub struct LoaderBuilder {
    pub(super) target: Target,
    pub(super) options: LoadOptions,
    pub(super) engine: Engine,
    pub(super) cuda: CudaHandles,
    map: LayerMap,
    select: Option<Arc<Select>>,
    shard: Option<(Rank, SplitRules)>,
    share: Option<Rank>,
    pub(super) spare: Option<SpareMemory>,
}

impl LoaderBuilder {
    /// The default settings for a target.
    pub(super) fn new(target: Target) -> Self {
        Self {
            target,
            options: LoadOptions::default(),
            engine: Engine::default(),
            cuda: CudaHandles::default(),
            map: LayerMap::default(),
            select: None,
            shard: None,
            share: None,
            spare: None,
        }
    }

    /// Sets all options that are plain values at once. The other settings stay.
    pub fn options(mut self, options: LoadOptions) -> Self {
        self.options = options;
        self
    }

    /// Most host memory that one load may hold beside resident layers, in bytes. 64 MiB by default.
    /// Each of several loads at the same time has its own budget.
    pub fn host_budget(mut self, bytes: u64) -> Self {
        self.options.host_budget_bytes = bytes;
        self
    }

    /// Most memory that resident layers may take on the device, in bytes. No limit by default. The
    /// plan checks it for layers that are dropped in order. The running load enforces it for all.
    pub fn device_budget(mut self, bytes: u64) -> Self {
        self.options.device_budget_bytes = Some(bytes);
        self
    }

    /// Device memory that must stay free, in bytes. 64 MiB by default. A load whose resident layers
    /// would leave less is refused before it begins. Host memory is not checked, because the amount
    /// that is free there is not known until it is used.
    pub fn device_reserve(mut self, bytes: u64) -> Self {
        self.options.device_reserve_bytes = bytes;
        self
    }

    /// Layers resident at once in [`Loader::stream`](crate::Loader::stream): being filled, ready,
    /// and held by the caller. Two by default; [`Loader::load`](crate::Loader::load) keeps all.
    pub fn window(mut self, window: Window) -> Self {
        self.options.window = window;
        self
    }

    /// Layers read ahead of the one the caller works on or waits for. Two by default; with zero,
    /// nothing is read before the caller asks for it. Layers beyond the window wait in the ring.
    pub fn prefetch(mut self, layers: u32) -> Self {
        self.options.prefetch_layers = layers;
        self
    }

    /// The order in which reads are issued. One layer after the other by default.
    /// [`Loader::load`](crate::Loader::load), which keeps everything, always reads in file order.
    /// [`Loader::stream`](crate::Loader::stream) can do so with a window of [`Window::All`]: then
    /// reading begins for every layer, whatever [`Self::prefetch`] says, and layers come as they
    /// complete, not in execution order. Hashing on the way needs the order of layers.
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

    /// Reads in flight; zero counts as one. The default depends on the mode. Buffered and mapped
    /// reads: one for each core, at most 8, or 12 for a CUDA device. Network: 8. Direct reads:
    /// found out while loading, up to 16. [`IoMode::Auto`]: what most of the bytes need. Cores are
    /// those that affinity and the CPU quota of the control group leave. A small budget may get
    /// fewer. Each is a thread, unless reads go through queues
    /// ([`LoadReport::queueing`](crate::LoadReport::queueing)).
    pub fn readers(mut self, threads: u32) -> Self {
        self.options.readers = Some(threads.max(1));
        self
    }

    /// Hashes every tensor on the way if the target keeps no bytes to hash later. Takes 32 bytes of
    /// the budget for each tensor. Off by default. Where the bytes are kept,
    /// [`LoadedTensor::hash`](crate::LoadedTensor::hash) needs nothing from the load.
    pub fn hash(mut self, hash: bool) -> Self {
        self.options.hash = hash;
        self
    }

    /// When the caller gets a layer: when it is complete, by default. Matters only for asynchronous
    /// devices.
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
    /// [`Progress::quantisation_errors`](crate::Progress::quantisation_errors) has the errors.
    /// Nothing is quantised by default.
    pub fn quantise(mut self, form: Quantisation) -> Self {
        self.options.quantise = Some(form);
        self
    }

    /// Chooses the tensors that [`Self::quantise`] quantises, instead of the rule about layers and
    /// names. The closure is asked only about floats of 16 bits and more that have two or three
    /// dimensions and rows of 32 elements or more, and that are no part of a quantised weight.
    pub fn quantise_only(
        mut self,
        choose: impl Fn(&TensorEntry<'_>) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.options.quantise_choice = Some(QuantiseChoice::new(choose));
        self
    }

    /// How long the stream waits for its next layer while the caller itself holds the whole window.
    /// 30 s by default. A stall is noticed after a tenth of a second.
    pub fn stall_timeout(mut self, timeout: Duration) -> Self {
        self.options.stall_timeout = timeout;
        self
    }

    /// Overrides the grouping of tensors into layers.
    pub fn layer_map(mut self, map: LayerMap) -> Self {
        self.map = map;
        self
    }

    /// Loads only tensors for which `select` returns true. It is called before anything is read.
    pub fn select(mut self, select: impl Fn(&TensorEntry<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.select = Some(Arc::new(select));
        self
    }

    /// Loads one rank's part of each tensor, for tensor parallelism. Ranges of the outermost
    /// dimension are read without anything else. For ranges of an inner dimension, short holes are
    /// read through ([`Self::read_through`]); [`LoadPlan::over_read_bytes`] counts them.
    /// [`LoadedTensor::shape`](crate::LoadedTensor::shape) is the shape of the part.
    pub fn shard(mut self, rank: Rank, rules: SplitRules) -> Self {
        self.shard = Some((rank, rules));
        self
    }

    /// Reads through holes of up to this many bytes, 64 KiB by default: between two wanted tensors,
    /// and inside the part of a rank ([`Self::shard`]). A disk moves that much in the time of one
    /// more request. With zero, only wanted bytes and alignment are read, in more and smaller
    /// requests: for storage that is paid or limited by the byte.
    ///
    /// With [`Self::share`] no hole is ever read.
    pub fn read_through(mut self, hole_bytes_max: u64) -> Self {
        self.options.hole_bytes_max = hole_bytes_max;
        self
    }

    /// Loads one rank's share of whole tensors, so that all ranks together read each byte once.
    /// [`Share`] tells which tensors each rank reads. With [`Self::select`], the selected tensors
    /// are divided.
    pub fn share(mut self, rank: Rank) -> Self {
        self.share = Some(rank);
        self
    }

    /// Takes memory for layers on the host from `spare`, and gives it back there. For loads that keep
    /// everything: streams reuse memory on their own.
    pub fn spare_memory(mut self, spare: &SpareMemory) -> Self {
        self.spare = Some(spare.clone());
        self
    }

    /// The same settings for one of several devices that share a checkpoint: one pass over the
    /// tensors that `is_here` chooses, which all stay resident. The bytes between them belong to
    /// other devices and are not read through.
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

    /// Device memory that must stay free, in bytes.
    #[must_use]
    pub fn device_reserve_bytes(&self) -> u64 {
        self.options.device_reserve_bytes
    }

    /// The plan of a load with these settings, as from [`Loader::plan`](crate::Loader::plan). The
    /// device need not exist.
    ///
    /// # Errors
    /// As [`Loader::plan`](crate::Loader::plan).
    pub fn plan(&self, checkpoint: &Checkpoint) -> Result<LoadPlan, LoadError> {
        self.plan_with(checkpoint, &self.options)
    }

    /// True if tensors are hashed on the way, because the target keeps no bytes to hash later.
    pub(super) fn hashes_on_the_way(&self) -> bool {
        self.options.hash && self.target == Target::None
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
            // Other ranks read the tensors in between.
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
            .field("cuda", &self.cuda)
            .field("map", &self.map)
            .field("selects", &self.select.is_some())
            .field("shard", &self.shard)
            .field("share", &self.share)
            .finish()
    }
}

/// Settings for engines that hold a window of layers and pass over all of them for every token or
/// batch.
impl LoaderBuilder {
    /// How often [`Loader::stream`](crate::Loader::stream) passes over all layers. Once by default.
    /// Reading ahead continues from the last layer to the first, so the next pass is on its way
    /// while this one is used.
    ///
    /// With two or more passes, layers share one allocation, as long as the [window](Self::window);
    /// [`MemoryTerms::window`](crate::plan::MemoryTerms::window) has its length. Nothing is
    /// allocated on the device after the start, nor on the host's heap after the first few passes.
    /// A window of N layers has N places, each as long as the longest layer that is not
    /// [kept](Self::keep). The allocation stays until the stream and every layer in it are dropped.
    ///
    /// # Example
    /// ```
    /// use onelayer::{Checkpoint, Keep, Loader, Passes, Target, Window};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/checkpoints/llama");
    /// let loader = Loader::builder(Target::Host)
    ///     .window(Window::Layers(2))
    ///     .passes(Passes::Times(3))
    ///     .keep(Keep::OutsideStacks) // embedding, norm and head are read once
    ///     .on_pass(|pass| println!("pass {}: {:?}, waited {:?}", pass.pass, pass.elapsed, pass.waits))
    ///     .build()?;
    /// let mut stream = loader.stream(&Checkpoint::open(path)?)?;
    /// for layer in &mut stream {
    ///     let layer = layer?;
    ///     println!("token {}: {} ({} tensors)", layer.pass(), layer.id(), layer.tensors().len());
    /// } // dropped: its place is the next layer's
    /// println!("what binds: {:?}", stream.report().waits.longest());
    /// # Ok(())
    /// # }
    /// ```
    pub fn passes(mut self, passes: Passes) -> Self {
        self.options.passes = passes;
        self
    }

    /// Layers that stay resident: they are read in the first pass and handed out in every pass.
    /// They come on top of the window, as a separate term in
    /// [`MemoryTerms::resident_terms`](crate::plan::MemoryTerms::resident_terms). None by default.
    /// Ignored with one pass.
    pub fn keep(mut self, keep: Keep) -> Self {
        self.engine.keep = keep;
        self
    }

    /// The order in which [`Loader::stream`](crate::Loader::stream) hands out the layers, instead
    /// of the order of the grouping. It must have every selected layer once.
    pub fn call_order(mut self, layers: impl IntoIterator<Item = LayerId>) -> Self {
        self.engine.call_order = Some(layers.into_iter().collect());
        self
    }

    /// Calls `told` with the times of each layer once it was released, or at the end of the stream.
    /// It runs on the thread of the control loop, which does nothing else meanwhile. A panic ends
    /// the load.
    pub fn on_layer(mut self, told: impl Fn(&LayerTimes<'_>) + Send + Sync + 'static) -> Self {
        self.engine.hooks.on_layer = Some(Arc::new(told));
        self
    }

    /// Calls `told` with the times of each pass once its last layer is handed out, on the same
    /// thread as [`Self::on_layer`].
    pub fn on_pass(mut self, told: impl Fn(&PassReport) + Send + Sync + 'static) -> Self {
        self.engine.hooks.on_pass = Some(Arc::new(told));
        self
    }
}
