//! Loads a checkpoint onto several devices, host and disk, by a device map.
//!
//! ```text
//! DeviceMap + checkpoint ──> PlacedLoader ── plan ──> PlacedPlan: a LoadPlan a place, and totals
//!                                 │
//!                                load: every device opened and its room checked, then
//!                                 ├── GPU 0 ── GPU 1 ── ... ── host      one after the other, one budget
//!                                 └── disk: nothing is read; a TensorReader reads on demand
//!                                        └──> PlacedModel
//! ```
//! Tiers are loaded one after the other with the same budget, so the host's peak is one budget and
//! the layers that stay on the host. Every tensor belongs to one tier, and bytes between wanted
//! tensors are not read. So each byte of a file is read once, except blocks at the borders of
//! direct reads.

use std::sync::Arc;

use crate::{Demand, DeviceMap, ModelConfig, Tier, Weights, unknown_keys};
use onelayer::checkpoint::{Checkpoint, TensorEntry};
use onelayer::device::Target;
use onelayer::layers::Layers;
use onelayer::load::{LoadError, LoadedLayer, Loader, LoaderBuilder, TensorReader};
use onelayer::plan::{LoadPlan, PlanError, TermKind};

pub use self::error::PlacedError;
pub use self::model::{DiskTensor, PlacedModel, PlacedTensor, TierReport};
pub use self::plan::{DiskPlan, PlacedPlan, TierPlan};

mod error;
mod model;
mod plan;

/// Loads a checkpoint by a device map. See [`PlacedLoader::new`].
#[derive(Clone, Debug)]
pub struct PlacedLoader {
    checkpoint: Checkpoint,
    settings: LoaderBuilder,
    /// The tier of each tensor, by id.
    tiers: Arc<[Tier]>,
    layers: Arc<Layers>,
}

/// The loader of one tier, with its device open. It loads or streams the tensors of that tier.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TierLoader {
    /// A GPU or the host.
    pub tier: Tier,
    /// The loader. Its settings are those of the whole load; the plans of earlier tiers are
    /// subtracted from its budget.
    pub loader: Loader,
}

impl PlacedLoader {
    /// Finds the tier of every tensor. The target, window, passes and order of `settings` are
    /// ignored: everything is read once and stays. The budget is for the whole load; device budget
    /// and reserve are for each device. `settings` must not have a context, stream or memory of the
    /// caller.
    ///
    /// The longest entry that is a tensor's name or a module around it decides; `""` is around
    /// everything. Layers must not be split. With the model's configuration, tied embeddings must
    /// be on one tier, and the map may name a head without a tensor in the files.
    ///
    /// # Errors
    /// [`PlacedError::Map`] with all mistakes: entries that name nothing, tensors without a tier,
    /// split layers, separated ties; [`PlacedError::Borrowed`]; [`PlacedError::Checkpoint`] if the
    /// grouping fails.
    ///
    /// # Example
    /// ```
    /// use onelayer_fit::DeviceMap;
    /// use onelayer::{Checkpoint, Loader, Part, Target};
    /// use onelayer_fit::PlacedLoader;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/checkpoints/llama");
    /// let checkpoint = Checkpoint::open(path)?;
    /// // With GPUs: {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "": "cpu"}
    /// let map = DeviceMap::parse(br#"{"model.layers": "cpu", "": "disk"}"#)?;
    /// let settings = Loader::builder(Target::Host).host_budget(8 << 20);
    /// let loader = PlacedLoader::new(settings, &map, &checkpoint, None)?;
    /// println!("{}", loader.plan()?); // before a byte is read
    ///
    /// let mut model = loader.load()?;
    /// let resident = model.tensor("model.layers.0.mlp.up_proj.weight")?;
    /// let on_disk = model.tensor("model.embed_tokens.weight")?; // read when it is wanted
    /// let mut bytes = vec![0; usize::try_from(on_disk.len_bytes())?];
    /// on_disk.read(0, &mut bytes)?;
    /// # drop(resident);
    ///
    /// let receipt = model.unload(Part::All)?; // all places, one receipt
    /// assert!(receipt.is_complete(), "{receipt}");
    /// # Ok(())
    /// # }
    /// ```
    pub fn new(
        settings: LoaderBuilder,
        map: &DeviceMap,
        checkpoint: &Checkpoint,
        config: Option<&ModelConfig>,
    ) -> Result<Self, PlacedError> {
        if settings.is_tied_to_a_device() {
            return Err(PlacedError::Borrowed);
        }
        let layers = settings.layers(checkpoint)?;
        let demand = Demand::of(checkpoint, &layers, config, Weights::AsStored);
        let mut faults: Vec<_> = unknown_keys(map, &demand, checkpoint).into_iter().collect();
        let of_layers = demand.tiers_of(map, checkpoint, &layers, &mut faults);
        let Some(of_layers) = of_layers.filter(|_| faults.is_empty()) else {
            return Err(PlacedError::Map { faults });
        };
        let tiers = checkpoint.tensors().map(|tensor| of_layers[layers.position_of(tensor.id)]).collect();
        Ok(Self { checkpoint: checkpoint.clone(), settings, tiers, layers: Arc::new(layers) })
    }

    /// The tier of a tensor.
    #[must_use]
    pub fn tier_of(&self, tensor: &TensorEntry<'_>) -> Tier {
        self.tiers[tensor.id.index()]
    }

    /// The plan of [`Self::load`], tier by tier. No device is needed.
    ///
    /// # Errors
    /// [`PlacedError::Load`] if the budget cannot work, [`PlacedError::Checkpoint`] if nothing is
    /// selected or a file is gone.
    pub fn plan(&self) -> Result<PlacedPlan, PlacedError> {
        let steps = self.steps(|tier, _, plan| Ok(TierPlan { tier, plan }))?;
        Ok(PlacedPlan { steps, disk: self.on_disk() })
    }

    /// Opens every device, checks that its layers fit, and returns the loaders in the order of
    /// loading: for callers that use the streams directly, to cancel or observe. End each load
    /// before the next, or the peak is several budgets.
    ///
    /// # Errors
    /// [`PlacedError::NoDevice`] and [`PlacedError::DeviceTooSmall`] name the device; otherwise as
    /// [`Self::plan`].
    pub fn open(&self) -> Result<Vec<TierLoader>, PlacedError> {
        let needs = self.steps(|tier, settings, plan| {
            let needed_bytes = plan.memory().resident_bytes();
            Ok((TierLoader { tier, loader: open(tier, settings)? }, needed_bytes))
        })?;
        // Free memory is asked for after all contexts exist.
        let reserve_bytes = self.settings.device_reserve_bytes();
        for (TierLoader { tier, loader }, needed_bytes) in &needs {
            let (Tier::Device(device), needed_bytes) = (*tier, *needed_bytes) else { continue };
            let memory = loader.device().memory().map_err(|error| failed(*tier, error.into()))?;
            let Some(memory) = memory else { continue };
            let free_bytes = memory.free_bytes;
            if needed_bytes.saturating_add(reserve_bytes) > free_bytes {
                return Err(PlacedError::DeviceTooSmall { device, needed_bytes, free_bytes, reserve_bytes });
            }
        }
        Ok(needs.into_iter().map(|(loader, _)| loader).collect())
    }

    /// Loads every tier, one after the other: GPUs by number, then the host. Nothing is read for
    /// the disk.
    ///
    /// # Errors
    /// As [`Self::open`], before the first byte is read; or the error that ended the load, with its
    /// tier. Nothing stays resident.
    pub fn load(&self) -> Result<PlacedModel, PlacedError> {
        self.load_while(|_, _| true)
    }

    /// Loads as [`Self::load`], for as long as `go_on` returns true. It sees each layer as it
    /// becomes resident.
    ///
    /// # Errors
    /// As [`Self::load`], and [`LoadError::Cancelled`] of a tier once `go_on` has returned false.
    pub fn load_while(
        &self,
        mut go_on: impl FnMut(Tier, &LoadedLayer) -> bool,
    ) -> Result<PlacedModel, PlacedError> {
        let loaders = self.open()?;
        let disk = self.on_disk();
        let reader = (disk.tensors > 0).then(|| TensorReader::open(&self.checkpoint)).transpose()?;
        let mut models = Vec::with_capacity(loaders.len());
        for TierLoader { tier, loader } in loaders {
            let model = loader.load_while(&self.checkpoint, |layer| go_on(tier, layer));
            models.push((tier, model.map_err(|error| failed(tier, error))?));
        }
        Ok(PlacedModel::new(self, models, disk, reader))
    }

    /// Plans tier after tier and calls `each`. Tiers without selected tensors are skipped.
    fn steps<T>(
        &self,
        mut each: impl FnMut(Tier, LoaderBuilder, LoadPlan) -> Result<T, PlacedError>,
    ) -> Result<Vec<T>, PlacedError> {
        let mut steps = Vec::new();
        let mut nothing = None;
        // Plans stay in memory with their models, so later tiers have less budget.
        let mut budget_bytes = self.settings.host_budget_bytes();
        for tier in self.resident_tiers() {
            let tiers = Arc::clone(&self.tiers);
            let is_here = move |tensor: &TensorEntry<'_>| tiers[tensor.id.index()] == tier;
            let settings =
                self.settings.clone().host_budget(budget_bytes).for_place(target_of(tier), is_here);
            let plan = match settings.plan(&self.checkpoint) {
                Err(error @ LoadError::Plan(PlanError::NothingSelected { .. })) => {
                    nothing = Some(error);
                    continue;
                }
                planned => planned.map_err(|error| failed(tier, error))?,
            };
            budget_bytes = budget_bytes.saturating_sub(plan.memory().bytes_of(TermKind::Plan));
            steps.push(each(tier, settings, plan)?);
        }
        match nothing {
            Some(error) if steps.is_empty() && self.on_disk().tensors == 0 => Err(error.into()),
            _ => Ok(steps),
        }
    }

    /// The tiers with tensors: GPUs by number, then the host.
    fn resident_tiers(&self) -> Vec<Tier> {
        let mut tiers: Vec<Tier> = self.tiers.iter().copied().filter(|tier| *tier != Tier::Disk).collect();
        tiers.sort_unstable();
        tiers.dedup();
        tiers
    }

    /// The tensors that stay in the files.
    fn on_disk(&self) -> DiskPlan {
        let mut disk = DiskPlan::default();
        for layer in self.layers.as_slice() {
            let wanted = layer.tensors.iter().map(|tensor| self.checkpoint.tensor(*tensor));
            let wanted = wanted.filter(|tensor| self.is_on_disk(tensor));
            let (tensors, tensor_bytes) =
                wanted.fold((0, 0), |(count, bytes), tensor| (count + 1, bytes + tensor.len_bytes()));
            if tensors > 0 {
                disk.layers.push(layer.id.clone());
                disk.tensors += tensors;
                disk.tensor_bytes += tensor_bytes;
            }
        }
        disk
    }

    fn is_on_disk(&self, tensor: &TensorEntry<'_>) -> bool {
        self.tier_of(tensor) == Tier::Disk && self.settings.wants(tensor)
    }
}

fn target_of(tier: Tier) -> Target {
    match tier {
        Tier::Device(device) => Target::Cuda(device),
        Tier::Host | Tier::Disk => Target::Host,
    }
}

fn open(tier: Tier, settings: LoaderBuilder) -> Result<Loader, PlacedError> {
    settings.build().map_err(|error| match (tier, error) {
        (Tier::Device(device), LoadError::Device(source)) if source.is_unavailable() => {
            PlacedError::NoDevice { device, source }
        }
        (_, error) => failed(tier, error),
    })
}

fn failed(tier: Tier, source: LoadError) -> PlacedError {
    PlacedError::Load { tier, source }
}
