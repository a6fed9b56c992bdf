//! A model on several tiers: tensors by name, and unloading.

use std::fmt;

use super::PlacedLoader;
use super::plan::DiskPlan;
use crate::Tier;
use onelayer::checkpoint::{DType, TensorEntry, TensorId};
use onelayer::layers::LayerId;
use onelayer::load::{Holder, LoadError, LoadReport, LoadedLayer, LoadedTensor, Receipt, TensorReader};
use onelayer::model::{Model, Part, nearest};
use onelayer::slices::SliceError;
use onelayer::units::to_u64;

/// A model loaded by a device map. Dropping it frees every layer that nothing else holds.
#[derive(Debug)]
pub struct PlacedModel {
    loader: PlacedLoader,
    /// In the order of loading.
    models: Vec<(Tier, Model)>,
    disk: DiskPlan,
    /// Present if a tensor is on the disk.
    reader: Option<TensorReader>,
}

/// Results of the load of one tier.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TierReport {
    /// A GPU or the host.
    pub tier: Tier,
    /// Bytes that its layers take now.
    pub resident_bytes: u64,
    /// Its load: time, bytes, ring.
    pub load: LoadReport,
}

impl PlacedModel {
    pub(super) fn new(
        loader: &PlacedLoader,
        models: Vec<(Tier, Model)>,
        disk: DiskPlan,
        reader: Option<TensorReader>,
    ) -> Self {
        Self { loader: loader.clone(), models, disk, reader }
    }

    /// Results of the load, in the order of loading.
    #[must_use]
    pub fn report(&self) -> Vec<TierReport> {
        let report = |(tier, model): &(Tier, Model)| TierReport {
            tier: *tier,
            resident_bytes: model.resident_bytes(),
            load: model.report().clone(),
        };
        self.models.iter().map(report).collect()
    }

    /// The tensors that stay in the files and are read on demand.
    #[must_use]
    pub fn disk(&self) -> &DiskPlan {
        &self.disk
    }

    /// The part of the model on one tier, if anything was loaded there.
    #[must_use]
    pub fn model(&self, tier: Tier) -> Option<&Model> {
        self.models.iter().find(|(other, _)| *other == tier).map(|(_, model)| model)
    }

    /// The part of the model on one tier, to park, restore or replace its layers.
    pub fn model_mut(&mut self, tier: Tier) -> Option<&mut Model> {
        self.models.iter_mut().find(|(other, _)| *other == tier).map(|(_, model)| model)
    }

    /// The resident layers, tier by tier, each in execution order.
    pub fn layers(&self) -> impl Iterator<Item = (Tier, &LoadedLayer)> {
        self.models.iter().flat_map(|(tier, model)| model.layers().map(|layer| (*tier, layer)))
    }

    /// A tensor on any tier, by name. Also the scales of a tensor that the load quantised.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] if there is no such tensor, it was not selected, or its layer is
    /// parked or unloaded.
    pub fn tensor(&self, name: &str) -> Result<PlacedTensor, LoadError> {
        let checkpoint = &self.loader.checkpoint;
        let found = checkpoint.find(name).map(|tensor| (self.loader.tier_of(&tensor), tensor));
        let tensor = match &found {
            Some((Tier::Disk, tensor)) if self.loader.is_on_disk(tensor) => {
                let reader = self.reader.clone();
                reader.map(|reader| PlacedTensor::OnDisk(DiskTensor { reader, id: tensor.id }))
            }
            Some((tier, _)) => {
                let model = self.model(*tier);
                let loaded = model.map(|model| model.tensor(name)).transpose()?;
                loaded.map(|tensor| PlacedTensor::Resident(*tier, tensor))
            }
            // Scales are not in a file. They are on the tier of their weight.
            None => self.models.iter().find_map(|(tier, model)| {
                let scales = model.tensor(name).ok()?;
                Some(PlacedTensor::Resident(*tier, scales))
            }),
        };
        tensor.ok_or_else(|| LoadError::NotFound {
            kind: "tensor",
            name: name.to_owned(),
            nearest: nearest(name, checkpoint.tensors().map(|tensor| tensor.name)),
        })
    }

    /// Bytes of the resident layers on all tiers.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        self.models.iter().map(|(_, model)| model.resident_bytes()).sum()
    }

    /// The tensors of resident layers that are still held.
    #[must_use]
    pub fn holders(&self) -> Vec<Holder> {
        self.models.iter().flat_map(|(_, model)| model.holders()).collect()
    }

    /// Frees a part of the model on every tier, as [`Model::unload`]. Tensors on the disk take no
    /// memory and can still be read.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] if no tier ever had such a part.
    pub fn unload<'a>(&mut self, part: impl Into<Part<'a>>) -> Result<Receipt, LoadError> {
        let part = part.into();
        let is_on_disk = self.disk.layers.iter().any(|id| part.contains(id));
        let is_known = is_on_disk || self.models.iter().any(|(_, model)| model.had(&part));
        if !is_known && part != Part::All {
            let (kind, name) = part.words();
            let ids = self.loader.layers.as_slice().iter().map(|layer| layer.id.as_str());
            return Err(LoadError::NotFound { kind, name: name.to_owned(), nearest: nearest(name, ids) });
        }
        let mut receipt = Receipt::default();
        for (_, model) in self.models.iter_mut().filter(|(_, model)| model.had(&part)) {
            receipt = receipt.and(model.unload(part)?);
        }
        Ok(receipt)
    }

    /// Frees every layer on every tier.
    pub fn unload_all(&mut self) -> Receipt {
        let receipts = self.models.iter_mut().map(|(_, model)| model.unload_all());
        receipts.fold(Receipt::default(), Receipt::and)
    }

    /// The tier of a layer, resident or not; `None` if the checkpoint has no such layer.
    #[must_use]
    pub fn tier_of(&self, layer: &LayerId) -> Option<Tier> {
        let first = *self.loader.layers.find(layer)?.tensors.first()?;
        Some(self.loader.tiers[first.index()])
    }
}

/// A tensor on any tier.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum PlacedTensor {
    /// On a GPU or on the host.
    Resident(Tier, LoadedTensor),
    /// In its file, read on demand.
    OnDisk(DiskTensor),
}

impl PlacedTensor {
    /// Its tier.
    #[must_use]
    pub fn tier(&self) -> Tier {
        match self {
            Self::Resident(tier, _) => *tier,
            Self::OnDisk(_) => Tier::Disk,
        }
    }

    /// Its full name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Resident(_, tensor) => tensor.name(),
            Self::OnDisk(tensor) => tensor.entry().name,
        }
    }

    /// Its element type. A load may narrow it; on the disk it is as stored.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match self {
            Self::Resident(_, tensor) => tensor.dtype(),
            Self::OnDisk(tensor) => tensor.entry().dtype,
        }
    }

    /// Elements per dimension, outermost first. On the disk it is the whole tensor, for any rank.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        match self {
            Self::Resident(_, tensor) => tensor.shape(),
            Self::OnDisk(tensor) => tensor.entry().shape,
        }
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        match self {
            Self::Resident(_, tensor) => tensor.len_bytes(),
            Self::OnDisk(tensor) => tensor.entry().len_bytes(),
        }
    }

    /// The tensor, if it is resident.
    #[must_use]
    pub fn resident(&self) -> Option<&LoadedTensor> {
        match self {
            Self::Resident(_, tensor) => Some(tensor),
            Self::OnDisk(_) => None,
        }
    }

    /// Fills `target` with its bytes from `offset_bytes` on: copied from the host or a device, or
    /// read from its file with all checks of a load.
    ///
    /// # Errors
    /// [`LoadError::Slice`] if it has no such bytes, [`LoadError::Device`] or [`LoadError::Source`]
    /// if they cannot be read.
    pub fn read(&self, offset_bytes: u64, target: &mut [u8]) -> Result<(), LoadError> {
        let (len_bytes, tensor_bytes) = (to_u64(target.len()), self.len_bytes());
        if offset_bytes.checked_add(len_bytes).is_none_or(|end| end > tensor_bytes) {
            let tensor = self.name().to_owned();
            return Err(SliceError::BeyondEnd { tensor, offset_bytes, len_bytes, tensor_bytes }.into());
        }
        match self {
            Self::Resident(_, tensor) => {
                let is_there = tensor.read(offset_bytes, target)?;
                debug_assert!(is_there, "hosts and devices keep what is loaded onto them");
                Ok(())
            }
            Self::OnDisk(tensor) => tensor.reader.read(tensor.id, offset_bytes, target),
        }
    }
}

/// A tensor that stays in its file.
#[derive(Clone)]
pub struct DiskTensor {
    reader: TensorReader,
    id: TensorId,
}

impl DiskTensor {
    /// Its description.
    #[must_use]
    pub fn entry(&self) -> TensorEntry<'_> {
        self.reader.checkpoint().tensor(self.id)
    }

    /// Its reader, which also reads slices.
    #[must_use]
    pub fn reader(&self) -> &TensorReader {
        &self.reader
    }
}

impl fmt::Debug for DiskTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskTensor").field("name", &self.entry().name).finish_non_exhaustive()
    }
}
