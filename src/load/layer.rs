//! A layer that was handed out, and its tensors: owned, `Send`, freed by the last owner.

use std::sync::{Arc, Weak};

use super::error::LoadError;
use super::hash::{self, TensorHash};
use super::layer_data::{Content, Holder, LayerData, LayerPool, LayerRef};
use super::permits::Permit;
use crate::checkpoint::{Checkpoint, DType, TensorEntry, TensorId};
use crate::device::{ArenaPool, Freed, Resident};
use crate::layers::LayerId;
use crate::live::Entry;
use crate::plan::{LoadPlan, Placement, Quantised, SCALE_SUFFIX};
use crate::ranks::RankPart;
use crate::units::{to_u64, to_usize};

/// A resident layer. Dropping it, and every [`LoadedTensor`] taken from it, frees its memory and
/// its place in the window.
#[derive(Debug)]
pub struct LoadedLayer {
    pub(super) data: LayerRef,
    /// The pass it was handed out in.
    pub(super) pass: u64,
}

impl LoadedLayer {
    /// A layer whose bytes are in its arena, or on their way.
    pub(super) fn new(data: LayerData) -> Self {
        Self::of(Arc::new(data))
    }

    /// The same in a block of the pool, which gets it back.
    pub(super) fn pooled(pool: &Arc<LayerPool>, data: LayerData) -> Self {
        Self::of(pool.reuse(LayerData { pool: Some(Arc::clone(pool)), ..data }))
    }

    fn of(data: Arc<LayerData>) -> Self {
        if let Some(entry) = data.resident().live() {
            let contents: Weak<LayerData> = Arc::downgrade(&data);
            entry.note_layer(&data.planned().id, contents);
        }
        Self { data: LayerRef::new(data), pass: 0 }
    }

    /// The pass in which it was handed out, from 0. See
    /// [`LoaderBuilder::passes`](crate::LoaderBuilder::passes).
    #[must_use]
    pub fn pass(&self) -> u64 {
        self.pass
    }

    /// One more owner of the layer.
    pub(super) fn share(&self) -> Self {
        Self { data: self.data.clone(), pass: self.pass }
    }

    /// The number of its allocation in the [list of allocations](crate::live). `None` if the memory
    /// is the caller's.
    #[must_use]
    pub fn allocation_number(&self) -> Option<u64> {
        self.data.resident().live().map(Entry::number)
    }

    /// The layer's name.
    #[must_use]
    pub fn id(&self) -> &LayerId {
        &self.data.planned().id
    }

    /// Its place in execution order, from 0: that of its entry in [`LoadPlan::layers`].
    #[must_use]
    pub fn index(&self) -> usize {
        self.data.index
    }

    /// Bytes of its tensors.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.data.planned().tensor_bytes
    }

    /// Bytes it takes on the device: the tensors, their alignment, the rounding of the arena.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        self.data.resident().len_bytes()
    }

    /// Its tensors, in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = LoadedTensor> {
        (0..self.data.placements().len()).map(|place| LoadedTensor::new(&self.data, place))
    }

    /// Further names of its tensors: those of tied weights, which are read once. [`Self::tensor`]
    /// knows them.
    pub fn aliases(&self) -> impl Iterator<Item = &str> {
        let placements = self.data.placements();
        let is_here = |id: TensorId| placements.binary_search_by_key(&id, |found| found.tensor).is_ok();
        self.data.checkpoint.aliases().filter(move |&(_, id)| is_here(id)).map(|(name, _)| name)
    }

    /// The tensor of that name, if it is in this layer.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<LoadedTensor> {
        if let Some(entry) = self.data.checkpoint.find(name) {
            return self.tensor_of_id(entry.id);
        }
        let weight = self.data.checkpoint.find(name.strip_suffix(SCALE_SUFFIX)?)?.id;
        self.place_of(weight, |placement| placement.quantised.is_some_and(Quantised::is_scales))
    }

    /// The tensor with that id; of a quantised one, its values.
    pub(crate) fn tensor_of_id(&self, id: TensorId) -> Option<LoadedTensor> {
        self.place_of(id, |_| true)
    }

    /// The first of the placements of a tensor that is the one wanted.
    fn place_of(&self, id: TensorId, is_wanted: impl Fn(&Placement) -> bool) -> Option<LoadedTensor> {
        // Placements ascend by id: they are in file order, and so are ids.
        let placements = self.data.placements();
        let first = placements.partition_point(|placement| placement.tensor < id);
        let own = placements[first..].iter().take_while(|placement| placement.tensor == id);
        let (place, _) = (first..).zip(own).find(|(_, placement)| is_wanted(placement))?;
        Some(LoadedTensor::new(&self.data, place))
    }

    /// True if it was loaded from that checkpoint.
    pub(crate) fn is_of(&self, checkpoint: &Checkpoint) -> bool {
        self.data.checkpoint.is_same(checkpoint)
    }

    /// The tensors that were taken from this layer and not dropped.
    #[must_use]
    pub fn holders(&self) -> Vec<Holder> {
        self.data.holders()
    }

    /// The pool that its memory came from, if there is one.
    pub(super) fn arena_pool(&self) -> Option<Arc<dyn ArenaPool>> {
        self.data.resident().arena_pool()
    }

    /// Frees the layer if it has no other owner. Otherwise returns the tensors that hold it.
    pub(super) fn give_up(self) -> Result<Freed, Vec<Holder>> {
        let holders = self.data.holders();
        self.data.give_up().map(Content::free).ok_or(holders)
    }
}

/// Makes layers of filled arenas.
pub(super) struct LayerMaker {
    checkpoint: Checkpoint,
    plan: Arc<LoadPlan>,
    /// Kept layers by index, once they are made. Empty if none are kept.
    kept: Vec<Option<LoadedLayer>>,
    /// Blocks for the layers of later passes. `None` in one pass.
    pool: Option<Arc<LayerPool>>,
}

impl LayerMaker {
    /// For a load with at most this many resident layers.
    pub(super) fn new(checkpoint: &Checkpoint, plan: &Arc<LoadPlan>, layers_at_once: usize) -> Self {
        let keeps = plan.layers().iter().any(|layer| layer.is_kept);
        let mut kept = Vec::new();
        kept.resize_with(if keeps { plan.layers().len() } else { 0 }, || None);
        let new_pool = || Arc::new(LayerPool::new(layers_at_once, checkpoint, plan));
        let pool = (!plan.passes().is_one()).then(new_pool);
        Self { checkpoint: checkpoint.clone(), plan: Arc::clone(plan), kept, pool }
    }

    /// A kept layer that was made in an earlier pass.
    pub(super) fn kept(&self, index: usize) -> Option<LoadedLayer> {
        self.kept.get(index).and_then(Option::as_ref).map(LoadedLayer::share)
    }

    /// Makes a layer. A kept layer is shared from now on.
    pub(super) fn make(
        &mut self,
        index: usize,
        resident: Arc<dyn Resident>,
        permit: Option<Permit>,
        hashes: Vec<TensorHash>,
    ) -> LoadedLayer {
        let content = Some(Content { resident, permit });
        let data = LayerData { index, hashes, content, ..LayerData::blank(&self.checkpoint, &self.plan) };
        if self.plan.layers()[index].is_kept {
            let layer = LoadedLayer::new(data);
            self.kept[index] = Some(layer.share());
            return layer;
        }
        match &self.pool {
            Some(pool) => LoadedLayer::pooled(pool, data),
            None => LoadedLayer::new(data),
        }
    }

    /// Drops its share of kept layers, and ends the pool.
    pub(super) fn close(self) {
        drop(self.kept);
        self.pool.as_deref().inspect(|pool| pool.close());
    }
}

/// A tensor of a resident layer. Keeps the whole layer's memory alive.
#[derive(Debug)]
pub struct LoadedTensor {
    pub(super) data: LayerRef,
    place: usize,
}

impl Clone for LoadedTensor {
    fn clone(&self) -> Self {
        Self::new(&self.data, self.place)
    }
}

impl Drop for LoadedTensor {
    fn drop(&mut self) {
        self.data.held.remove(self.place);
    }
}

/// Bytes that are read back at a time to be hashed.
const HASHED_BYTES_MAX: usize = 1 << 20;

impl LoadedTensor {
    fn new(data: &LayerRef, place: usize) -> Self {
        data.held.add(place);
        Self { data: data.clone(), place }
    }

    pub(super) fn placement(&self) -> &Placement {
        &self.data.placements()[self.place]
    }

    /// Its description in the checkpoint: whole and not narrowed. For scales that were made on the
    /// way, the description of their weight.
    #[must_use]
    pub fn entry(&self) -> TensorEntry<'_> {
        self.data.checkpoint.tensor(self.placement().tensor)
    }

    /// Its full name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.data.delivered(self.place).0
    }

    /// How it was quantised on the way, and whether this is its values or its scales.
    #[must_use]
    pub fn quantised(&self) -> Option<Quantised> {
        self.placement().quantised
    }

    /// Type of the delivered elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.placement().delivered_dtype(self.entry().dtype)
    }

    /// Bytes that are delivered.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.placement().len_bytes()
    }

    /// Elements per dimension as they are delivered, outermost first; empty for a scalar.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        self.data.delivered(self.place).1
    }

    /// Which part of the tensor this is, if the load is that of [one of several
    /// ranks](crate::LoaderBuilder::shard) and the tensor is divided among them.
    #[must_use]
    pub fn part(&self) -> Option<&RankPart> {
        self.data.plan.part(self.placement().tensor)
    }

    /// Its bytes in the checkpoint's own layout (little-endian, row-major), as elements of
    /// [`Self::dtype`], if the host can read them: always on
    /// [`Target::Host`](crate::device::Target::Host), never on
    /// [`Target::Cuda`](crate::device::Target::Cuda), where [`Self::read`] copies them, nor on
    /// [`Target::None`](crate::device::Target::None). On the host they start at a multiple of 256
    /// bytes.
    #[must_use]
    pub fn as_bytes(&self) -> Option<&[u8]> {
        let (start, len) = (self.placement().arena_offset_bytes, self.len_bytes());
        if len == 0 {
            return self.data.resident().host_bytes().map(|_| &[][..]);
        }
        self.data.resident().host_bytes().map(|bytes| &bytes[to_usize(start)..to_usize(start + len)])
    }

    /// BLAKE3 of its bytes: of the staged bytes if the load hashed on the way, otherwise of the
    /// delivered bytes. From a device these are read back in pieces of at most 1 MiB. `None` on a
    /// target that keeps no bytes.
    ///
    /// # Errors
    /// [`LoadError::Device`] if they cannot be read back.
    pub fn hash(&self) -> Result<Option<TensorHash>, LoadError> {
        if let Some(hash) = self.data.hashes.get(self.place) {
            return Ok(Some(*hash));
        }
        if let Some(bytes) = self.as_bytes() {
            return Ok(Some(TensorHash::of(bytes)));
        }
        let len_bytes = self.placement().len_bytes();
        let mut piece = vec![0; HASHED_BYTES_MAX.min(to_usize(len_bytes))];
        let mut hasher = hash::PieceHasher::default();
        let mut offset_bytes = 0;
        while offset_bytes < len_bytes {
            let len = piece.len().min(to_usize(len_bytes - offset_bytes));
            if !self.read(offset_bytes, &mut piece[..len])? {
                return Ok(None);
            }
            hasher.update(&piece[..len]);
            offset_bytes += to_u64(len);
        }
        Ok(self.data.resident().is_somewhere().then(|| hasher.finish()))
    }
}
