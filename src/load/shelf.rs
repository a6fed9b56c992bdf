//! What layers are made of that come again and again: the block of a layer that nobody has any more
//! is that of the next one, so that pass after pass nothing is taken from the allocator.
//!
//! ```text
//! fill --> layer, shared by whoever holds it or its tensors --(take_back by each of them)--> spare --> fill ...
//! ```
//!
//! Who is the last to let go of a layer has to be sure of it, or the block would go to the
//! allocator: so all give back under one lock. A reader of the [list of what is
//! allocated](crate::live) that looks at a layer just then is an owner too, and needs no lock: then
//! the block goes with it, and the next layer gets a new one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::layer::{Content, LayerData};
use crate::checkpoint::Checkpoint;
use crate::plan::LoadPlan;

/// Blocks of layers that nobody has. Each is the only reference to its own.
pub(super) struct Shelf {
    state: Mutex<State>,
}

struct State {
    /// Never more than there were layers at once.
    spare: Vec<Arc<LayerData>>,
    is_closed: bool,
}

impl Shelf {
    /// A shelf with so many blocks.
    pub(super) fn new(blocks: usize, checkpoint: &Checkpoint, plan: &Arc<LoadPlan>) -> Self {
        let blank = || Arc::new(LayerData::blank(checkpoint, plan));
        let spare = std::iter::repeat_with(blank).take(blocks).collect();
        Self { state: Mutex::new(State { spare, is_closed: false }) }
    }

    /// A layer in a spare block, or in a new one.
    pub(super) fn fill(&self, data: LayerData) -> Arc<LayerData> {
        let mut spare = self.lock().spare.pop();
        match spare.as_mut().and_then(Arc::get_mut) {
            Some(place) => {
                // The list of owners keeps its memory too.
                let owners = std::mem::take(&mut place.owners);
                *place = LayerData { owners, ..data };
            }
            None => return Arc::new(data),
        }
        spare.expect("just filled")
    }

    /// Takes back what one owner had of a layer. The content, if it was the last.
    pub(super) fn take_back(&self, data: Arc<LayerData>) -> Option<Content> {
        let mut data = data;
        let mut state = self.lock();
        if Arc::strong_count(&data) == 1 {
            // Else the list would keep the block.
            if let Some(entry) = data.content.as_ref()?.resident.live() {
                entry.forget_layer(&data);
            }
        }
        let Some(place) = Arc::get_mut(&mut data) else {
            // Under the lock: the next one that asks has to see it gone.
            let last = Arc::into_inner(data);
            drop(state);
            return last?.content;
        };
        let content = place.content.take();
        place.hashes = Vec::new();
        let shelf = place.shelf.take();
        if !state.is_closed {
            // Before the content goes: whoever gets its place finds the block here.
            state.spare.push(data);
        }
        drop((state, shelf));
        content
    }

    /// The load has ended: nothing more is kept.
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

    fn lock(&self) -> MutexGuard<'_, State> {
        // One block comes or goes at a time.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
