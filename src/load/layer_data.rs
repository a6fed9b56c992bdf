//! The data of a resident layer, shared by everything that holds the layer.
//!
//! ```text
//! LoadedLayer --+
//! LoadedTensor -+--> LayerRef --> LayerData { content: arena and permit }
//! LoadedTensor -+       the last one frees the content
//! ```
//!
//! In a load of several passes, a block without an owner becomes the block of the next layer
//! ([`LayerPool`]), so that later passes allocate nothing.

use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::hash::TensorHash;
use super::permits::Permit;
use crate::checkpoint::Checkpoint;
use crate::device::{Freed, Resident};
use crate::layers::LayerId;
use crate::live::{Describe, LiveTensor};
use crate::plan::{LoadPlan, Placement, PlannedLayer};

/// The data of a layer that all its owners share.
pub(super) struct LayerData {
    pub(super) checkpoint: Checkpoint,
    pub(super) plan: Arc<LoadPlan>,
    pub(super) index: usize,
    /// In the order of the placements; empty unless the load hashes on the way.
    pub(super) hashes: Vec<TensorHash>,
    pub(super) held: HeldTensors,
    /// `None` once the last owner is gone.
    pub(super) content: Option<Content>,
    /// The pool that gets this block back. `None` if it goes to the allocator.
    pub(super) pool: Option<Arc<LayerPool>>,
}

/// The memory of a layer and its place in the window.
pub(super) struct Content {
    // Freed before the permit: the next owner of the permit may allocate at once.
    pub(super) resident: Arc<dyn Resident>,
    /// `None` for a layer that is kept, or that was parked meanwhile.
    pub(super) permit: Option<Permit>,
}

impl Content {
    /// Frees the memory and returns what became of it.
    pub(super) fn free(self) -> Freed {
        let Self { resident, permit } = self;
        let freed = resident.free();
        drop(permit);
        freed
    }

    /// Frees the memory, without a receipt.
    fn release(self) {
        let Self { resident, permit } = self;
        let pool = resident.arena_pool();
        if let (Freed::ToPool, Some(pool)) = (resident.free(), pool) {
            pool.settle();
        }
        drop(permit);
    }
}

/// One owner of a layer.
#[derive(Debug)]
pub(super) struct LayerRef {
    /// `None` while being dropped.
    data: Option<Arc<LayerData>>,
}

impl LayerRef {
    /// An owner of the layer.
    pub(super) fn new(data: Arc<LayerData>) -> Self {
        Self { data: Some(data) }
    }

    /// Gives up this owner. Returns the content if it was the last one.
    pub(super) fn give_up(mut self) -> Option<Content> {
        Self::content_of(self.data.take()?)
    }

    fn content_of(data: Arc<LayerData>) -> Option<Content> {
        match data.pool.clone() {
            Some(pool) => pool.give_back(data),
            None => Arc::into_inner(data)?.content,
        }
    }
}

impl Clone for LayerRef {
    fn clone(&self) -> Self {
        Self { data: self.data.clone() }
    }
}

impl Deref for LayerRef {
    type Target = LayerData;

    fn deref(&self) -> &LayerData {
        self.data.as_deref().expect("an owner has it until it is dropped")
    }
}

impl Drop for LayerRef {
    fn drop(&mut self) {
        if let Some(content) = self.data.take().and_then(Self::content_of) {
            content.release();
        }
    }
}

impl LayerData {
    /// A block without a layer.
    pub(super) fn blank(checkpoint: &Checkpoint, plan: &Arc<LoadPlan>) -> Self {
        Self {
            checkpoint: checkpoint.clone(),
            plan: Arc::clone(plan),
            index: 0,
            hashes: Vec::new(),
            held: HeldTensors::default(),
            content: None,
            pool: None,
        }
    }

    /// Its memory.
    ///
    /// # Panics
    /// Without content: a layer that has an owner has one.
    pub(super) fn resident(&self) -> &Arc<dyn Resident> {
        &self.content.as_ref().expect("a layer with an owner has content").resident
    }

    pub(super) fn planned(&self) -> &PlannedLayer {
        &self.plan.layers()[self.index]
    }

    pub(super) fn placements(&self) -> &[Placement] {
        self.plan.placements(self.planned())
    }

    /// The name and shape of a tensor as it is delivered.
    pub(super) fn delivered(&self, place: usize) -> (&str, &[u64]) {
        let placement = &self.placements()[place];
        self.plan.delivered(placement, &self.checkpoint.tensor(placement.tensor))
    }

    /// The tensors that are held, by name.
    pub(super) fn holders(&self) -> Vec<Holder> {
        let name = |place: usize| self.delivered(place).0.to_owned();
        let held = self.held.list().into_iter();
        held.map(|(place, owners)| Holder { layer: self.planned().id.clone(), tensor: name(place), owners })
            .collect()
    }
}

impl Describe for LayerData {
    fn tensors(&self) -> Vec<LiveTensor> {
        let owners: HashMap<usize, usize> = self.held.list().into_iter().collect();
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

/// A tensor that holds its layer: it was taken from the layer and not dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The layer.
    pub layer: LayerId,
    /// The tensor's full name.
    pub tensor: String,
    /// How many of it there are.
    pub owners: usize,
}

/// Capacity that an empty list may keep: 16 KiB.
const KEPT_ENTRIES_MAX: usize = 1024;

/// The tensors of one layer that are held, and how often.
///
/// Only held tensors have an entry, so a layer of ten thousand tensors costs nothing until they are
/// taken. The list keeps its capacity for the next layer, up to a limit.
#[derive(Debug, Default)]
pub(super) struct HeldTensors {
    /// The tensor's place in its layer, ascending, and its number of owners, at least one.
    held: Mutex<Vec<(usize, usize)>>,
}

impl HeldTensors {
    /// Counts one more owner.
    pub(super) fn add(&self, place: usize) {
        let mut held = self.lock();
        match held.binary_search_by_key(&place, |entry| entry.0) {
            Ok(at) => held[at].1 += 1,
            Err(at) => held.insert(at, (place, 1)),
        }
    }

    /// Counts one owner less.
    pub(super) fn remove(&self, place: usize) {
        let mut held = self.lock();
        let Ok(at) = held.binary_search_by_key(&place, |entry| entry.0) else { return };
        held[at].1 -= 1;
        if held[at].1 == 0 {
            held.remove(at);
        }
        if held.is_empty() && held.capacity() > KEPT_ENTRIES_MAX {
            *held = Vec::new();
        }
    }

    /// Places and numbers of owners, by place.
    pub(super) fn list(&self) -> Vec<(usize, usize)> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(usize, usize)>> {
        // Every update leaves true counts, so poisoning is ignored.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Blocks of layers that have no owner. Each is the only reference to its block.
///
/// ```text
/// reuse --> layer, shared by its owners --(give_back by each of them)--> spare --> reuse ...
/// ```
///
/// All owners give back under one lock, so that the last one is sure to be the last. A reader of
/// the [list of allocations](crate::live) that looks at a layer at that moment is an owner without
/// the lock. Then it frees the block, and the next layer gets a new one.
pub(super) struct LayerPool {
    state: Mutex<PoolState>,
}

struct PoolState {
    /// At most as many as there were layers at once.
    spare: Vec<Arc<LayerData>>,
    is_closed: bool,
}

impl LayerPool {
    /// A pool of this many blocks.
    pub(super) fn new(blocks: usize, checkpoint: &Checkpoint, plan: &Arc<LoadPlan>) -> Self {
        let blank = || Arc::new(LayerData::blank(checkpoint, plan));
        let spare = std::iter::repeat_with(blank).take(blocks).collect();
        Self { state: Mutex::new(PoolState { spare, is_closed: false }) }
    }

    /// Puts a layer into a spare block, or into a new one.
    pub(super) fn reuse(&self, data: LayerData) -> Arc<LayerData> {
        let mut spare = self.lock().spare.pop();
        match spare.as_mut().and_then(Arc::get_mut) {
            Some(place) => {
                // The list of held tensors keeps its capacity.
                let held = std::mem::take(&mut place.held);
                *place = LayerData { held, ..data };
            }
            None => return Arc::new(data),
        }
        spare.expect("just filled")
    }

    /// Takes back one owner of a layer. Returns the content if it was the last.
    fn give_back(&self, data: Arc<LayerData>) -> Option<Content> {
        let mut data = data;
        let mut state = self.lock();
        if Arc::strong_count(&data) == 1 {
            // Otherwise the list of allocations would keep the block.
            if let Some(entry) = data.content.as_ref()?.resident.live() {
                entry.forget_layer(&data);
            }
        }
        let Some(place) = Arc::get_mut(&mut data) else {
            // Under the lock, so that the next owner sees it gone.
            let last = Arc::into_inner(data);
            drop(state);
            return last?.content;
        };
        let content = place.content.take();
        place.hashes = Vec::new();
        let pool = place.pool.take();
        if !state.is_closed {
            // Before the content is freed: the layer that gets its place finds the block here.
            state.spare.push(data);
        }
        drop((state, pool));
        content
    }

    /// Ends the pool: blocks that come back later go to the allocator.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let spare = std::mem::take(&mut state.spare);
        drop(state);
        drop(spare);
    }

    #[cfg(test)]
    pub(super) fn spare_blocks(&self) -> usize {
        self.lock().spare.len()
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        // Each change is one push or pop, so the state is valid after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_held_is_listed() {
        let held = HeldTensors::default();
        [3, 1, 3, 3].into_iter().for_each(|place| held.add(place));
        assert_eq!(held.list(), [(1, 1), (3, 3)]);
        [1, 3, 7].into_iter().for_each(|place| held.remove(place));
        assert_eq!(held.list(), [(3, 2)]);
        [3, 3].into_iter().for_each(|place| held.remove(place));
        assert_eq!(held.list(), []);
        (0..5000).for_each(|place| held.add(place));
        (0..5000).rev().for_each(|place| held.remove(place));
        assert_eq!((held.list(), held.lock().capacity()), (vec![], 0), "a long list is given back");
    }
}
