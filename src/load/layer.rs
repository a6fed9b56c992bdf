//! A layer that was handed out, and its tensors: owned, `Send`, freed by the last owner.
//!
//! ```text
//! LoadedLayer --+
//! LoadedTensor -+--> Shared --> LayerData { content: arena, permit }
//! LoadedTensor -+       the last one gives the content up, and what is left goes to the shelf, if there is one
//! ```

use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Weak};

use super::hash::{self, TensorHash};
use super::owners::Owners;
use super::shelf::Shelf;
use super::window::Permit;
use super::{Holder, LoadError, Receipt};
use crate::checkpoint::{Checkpoint, DType, TensorEntry, TensorId};
use crate::device::{ArenaPool, Freed, Resident};
use crate::layers::LayerId;
use crate::live::{Describe, Entry, LiveTensor};
use crate::plan::{LoadPlan, Placement, PlannedLayer, Quantised, SCALE_SUFFIX};
use crate::ranks::RankPart;
use crate::units::{to_u64, to_usize};

/// A resident layer. Dropping it, and every [`LoadedTensor`] taken from it, frees its memory and
/// its place in the window.
#[derive(Debug)]
pub struct LoadedLayer {
    pub(super) data: Shared,
    /// The pass it was handed out in.
    pub(super) pass: u64,
}

pub(super) struct LayerData {
    pub(super) checkpoint: Checkpoint,
    pub(super) plan: Arc<LoadPlan>,
    pub(super) index: usize,
    /// In the order of the placements; empty unless hashed on the way.
    pub(super) hashes: Vec<TensorHash>,
    pub(super) owners: Owners,
    /// `None` once nobody has the layer.
    pub(super) content: Option<Content>,
    /// Where this goes then, to be another layer's. `None` if it goes to the allocator.
    pub(super) shelf: Option<Arc<Shelf>>,
}

/// What a layer takes.
pub(super) struct Content {
    // The memory goes before the permit: whoever gets the permit may allocate at once.
    pub(super) resident: Arc<dyn Resident>,
    /// `None` for a layer that is kept, or was parked meanwhile.
    pub(super) permit: Option<Permit>,
}

impl Content {
    /// Gives it up, and says what became of the memory.
    fn free(self) -> Freed {
        let Self { resident, permit } = self;
        let freed = resident.free();
        // Now, and not before.
        drop(permit);
        freed
    }

    /// Gives it up, with nobody to hear what became of it.
    fn let_go(self) {
        let Self { resident, permit } = self;
        let home = resident.arena_pool();
        if let (Freed::ToPool, Some(home)) = (resident.free(), home) {
            home.settle();
        }
        drop(permit);
    }
}

/// One owner of a layer.
#[derive(Debug)]
pub(super) struct Shared {
    /// `None` while being dropped.
    data: Option<Arc<LayerData>>,
}

impl Shared {
    /// The content, if this is the last owner.
    fn give_up(mut self) -> Option<Content> {
        Self::content_of(self.data.take()?)
    }

    fn content_of(data: Arc<LayerData>) -> Option<Content> {
        match data.shelf.clone() {
            Some(shelf) => shelf.take_back(data),
            None => Arc::into_inner(data)?.content,
        }
    }
}

impl Clone for Shared {
    fn clone(&self) -> Self {
        Self { data: self.data.clone() }
    }
}

impl Deref for Shared {
    type Target = LayerData;

    fn deref(&self) -> &LayerData {
        self.data.as_deref().expect("an owner has it until it is dropped")
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(content) = self.data.take().and_then(Self::content_of) {
            content.let_go();
        }
    }
}

impl LayerData {
    /// One that is no layer's yet.
    pub(super) fn blank(checkpoint: &Checkpoint, plan: &Arc<LoadPlan>) -> Self {
        Self {
            checkpoint: checkpoint.clone(),
            plan: Arc::clone(plan),
            index: 0,
            hashes: Vec::new(),
            owners: Owners::default(),
            content: None,
            shelf: None,
        }
    }

    /// Its memory.
    pub(super) fn resident(&self) -> &Arc<dyn Resident> {
        &self.content.as_ref().expect("a layer that somebody has").resident
    }

    fn planned(&self) -> &PlannedLayer {
        &self.plan.layers()[self.index]
    }

    fn placements(&self) -> &[Placement] {
        self.plan.placements(self.planned())
    }

    /// The name and shape of a tensor as it is delivered.
    fn delivered(&self, place: usize) -> (&str, &[u64]) {
        let placement = &self.placements()[place];
        self.plan.delivered(placement, &self.checkpoint.tensor(placement.tensor))
    }

    fn holders(&self) -> Vec<Holder> {
        let name = |place: usize| self.delivered(place).0.to_owned();
        let held = self.owners.list().into_iter();
        held.map(|(place, owners)| Holder { layer: self.planned().id.clone(), tensor: name(place), owners })
            .collect()
    }
}

impl Describe for LayerData {
    fn tensors(&self) -> Vec<LiveTensor> {
        let owners: HashMap<usize, usize> = self.owners.list().into_iter().collect();
        let tensor = |(place, placement): (usize, &Placement)| {
            let entry = self.checkpoint.tensor(placement.tensor);
            let (name, shape) = self.plan.delivered(placement, &entry);
            LiveTensor {
                name: name.to_owned(),
                dtype: placement.delivered_dtype(entry.dtype),
                shape: shape.into(),
                bytes: placement.len_bytes(),
                owners: owners.get(&place).copied().unwrap_or(0),
            }
        };
        self.placements().iter().enumerate().map(tensor).collect()
    }
}

impl fmt::Debug for LayerData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerData")
            .field("id", &self.planned().id)
            .field("resident_bytes", &self.content.as_ref().map(|content| content.resident.len_bytes()))
            .finish()
    }
}

impl LoadedLayer {
    /// A layer that is in its arena from now on.
    pub(super) fn new(data: LayerData) -> Self {
        Self::of(Arc::new(data))
    }

    /// The same, made of what lies on the shelf, where it goes again.
    pub(super) fn on(shelf: &Arc<Shelf>, data: LayerData) -> Self {
        Self::of(shelf.fill(LayerData { shelf: Some(Arc::clone(shelf)), ..data }))
    }

    fn of(data: Arc<LayerData>) -> Self {
        if let Some(entry) = data.resident().live() {
            let contents: Weak<LayerData> = Arc::downgrade(&data);
            entry.note_layer(&data.planned().id, contents);
        }
        Self { data: Shared { data: Some(data) }, pass: 0 }
    }

    /// The pass in which it was handed out, from 0. See
    /// [`LoaderBuilder::passes`](super::LoaderBuilder::passes).
    #[must_use]
    pub fn pass(&self) -> u64 {
        self.pass
    }

    /// The same layer for one more owner.
    pub(super) fn share(&self) -> Self {
        Self { data: self.data.clone(), pass: self.pass }
    }

    /// The number of its allocation in the [list of what is allocated](crate::live), if the memory
    /// is ours.
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

    /// Frees the layer, as dropping does, and says what came of it. Tensors that were taken keep
    /// its memory until they are dropped; the receipt names them.
    pub fn unload(self) -> Receipt {
        Receipt::of_one(self)
    }

    /// True if it was loaded from that checkpoint.
    pub(crate) fn is_of(&self, checkpoint: &Checkpoint) -> bool {
        self.data.checkpoint.is_same(checkpoint)
    }

    /// The tensors that somebody holds.
    #[must_use]
    pub fn holders(&self) -> Vec<Holder> {
        self.data.holders()
    }

    /// Where its memory came from, if that wants to be settled.
    pub(super) fn home(&self) -> Option<Arc<dyn ArenaPool>> {
        self.data.resident().arena_pool()
    }

    /// Frees the layer if nobody else holds it; else says which tensors do.
    pub(super) fn give_up(self) -> Result<Freed, Vec<Holder>> {
        let holders = self.data.holders();
        self.data.give_up().map(Content::free).ok_or(holders)
    }
}

/// A tensor of a resident layer. Keeps the whole layer's memory alive.
#[derive(Debug)]
pub struct LoadedTensor {
    pub(super) data: Shared,
    place: usize,
}

impl Clone for LoadedTensor {
    fn clone(&self) -> Self {
        Self::new(&self.data, self.place)
    }
}

impl Drop for LoadedTensor {
    fn drop(&mut self) {
        self.data.owners.remove(self.place);
    }
}

/// Bytes that are read back at once to be hashed.
const HASHED_BYTES_MAX: usize = 1 << 20;

impl LoadedTensor {
    fn new(data: &Shared, place: usize) -> Self {
        data.owners.add(place);
        Self { data: data.clone(), place }
    }

    pub(super) fn placement(&self) -> &Placement {
        &self.data.placements()[self.place]
    }

    /// Its description in the checkpoint: as it is there, whole and not narrowed. Of scales that
    /// were made on the way, that of the weight they are of.
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
    /// ranks](super::LoaderBuilder::shard) and the tensor is divided among them.
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

    /// BLAKE3 of its bytes: of those that were staged if hashing on the way was asked for, else of
    /// the delivered ones, which are read back from a device in pieces of at most 1 MiB. `None`
    /// where there are none.
    ///
    /// # Errors
    /// [`LoadError::Device`] if they cannot be read back.
    pub fn hash(&self) -> Result<Option<TensorHash>, LoadError> {
        if let Some(hash) = self.data.hashes.get(self.place) {
            return Ok(Some(*hash));
        }
        if let Some(bytes) = self.as_bytes() {
            return Ok(Some(hash::of_bytes(bytes)));
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
