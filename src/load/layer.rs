//! A layer that was handed out, and its tensors: owned, `Send`, freed by the last owner.

use std::fmt;
use std::sync::Arc;

use super::LoadError;
use super::hash::{self, TensorHash};
use super::window::Permit;
use crate::checkpoint::{Checkpoint, DType, TensorEntry, TensorId};
use crate::device::Resident;
use crate::layers::LayerId;
use crate::plan::{LoadPlan, Placement, PlannedLayer};
use crate::units::{to_u64, to_usize};

/// A resident layer. Dropping it, and every [`LoadedTensor`] taken from it, frees its memory and its place in the
/// window.
#[derive(Debug)]
pub struct LoadedLayer {
    pub(super) data: Arc<LayerData>,
}

pub(super) struct LayerData {
    pub(super) checkpoint: Checkpoint,
    pub(super) plan: Arc<LoadPlan>,
    pub(super) index: usize,
    /// In the order of the placements; empty unless hashed on the way.
    pub(super) hashes: Vec<TensorHash>,
    // The memory goes before the permit: whoever gets the permit may allocate at once.
    pub(super) resident: Box<dyn Resident>,
    pub(super) _permit: Arc<Permit>,
}

impl LayerData {
    fn planned(&self) -> &PlannedLayer {
        &self.plan.layers()[self.index]
    }

    fn placements(&self) -> &[Placement] {
        self.plan.placements(self.planned())
    }
}

impl fmt::Debug for LayerData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerData")
            .field("id", &self.planned().id)
            .field("resident_bytes", &self.resident.len_bytes())
            .finish()
    }
}

impl LoadedLayer {
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
        self.data.resident.len_bytes()
    }

    /// Its tensors, in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = LoadedTensor> {
        (0..self.data.placements().len()).map(|place| LoadedTensor { data: Arc::clone(&self.data), place })
    }

    /// The tensor of that name, if it is in this layer.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<LoadedTensor> {
        self.tensor_of_id(self.data.checkpoint.find(name)?.id)
    }

    pub(crate) fn tensor_of_id(&self, id: TensorId) -> Option<LoadedTensor> {
        // Placements ascend by id: they are in file order, and so are ids.
        let place = self.data.placements().binary_search_by_key(&id, |placement| placement.tensor).ok()?;
        Some(LoadedTensor { data: Arc::clone(&self.data), place })
    }

    /// Frees the layer if nobody else holds it; else says how many tensors still do.
    pub(crate) fn into_sole_owner(self) -> Result<(), usize> {
        let holders = Arc::strong_count(&self.data) - 1;
        match Arc::into_inner(self.data) {
            Some(data) => {
                drop(data);
                Ok(())
            }
            None => Err(holders),
        }
    }
}

/// A tensor of a resident layer. Keeps the whole layer's memory alive.
#[derive(Debug, Clone)]
pub struct LoadedTensor {
    pub(super) data: Arc<LayerData>,
    place: usize,
}

/// Bytes that are read back at once to be hashed.
const HASHED_BYTES_MAX: usize = 1 << 20;

impl LoadedTensor {
    pub(super) fn placement(&self) -> &Placement {
        &self.data.placements()[self.place]
    }

    /// Its description in the checkpoint: as it is there, not narrowed.
    #[must_use]
    pub fn entry(&self) -> TensorEntry<'_> {
        self.data.checkpoint.tensor(self.placement().tensor)
    }

    /// Its full name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.entry().name
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

    /// Elements per dimension, outermost first; empty for a scalar.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        self.entry().shape
    }

    /// Its bytes in the checkpoint's own layout (little-endian, row-major), as elements of [`Self::dtype`], if the host can
    /// read them: always on [`Target::Host`](crate::device::Target::Host), never on
    /// [`Target::Cuda`](crate::device::Target::Cuda), where [`Self::read`] copies them, nor on
    /// [`Target::None`](crate::device::Target::None). On the host they start at a multiple of 256 bytes.
    #[must_use]
    pub fn as_bytes(&self) -> Option<&[u8]> {
        let (start, len) = (self.placement().arena_offset_bytes, self.len_bytes());
        if len == 0 {
            return self.data.resident.host_bytes().map(|_| &[][..]);
        }
        self.data.resident.host_bytes().map(|bytes| &bytes[to_usize(start)..to_usize(start + len)])
    }

    /// BLAKE3 of its bytes: of those that were staged if hashing on the way was asked for, else of the delivered ones,
    /// which are read back from a device in pieces of at most 1 MiB. `None` where there are none.
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
        Ok(self.data.resident.is_somewhere().then(|| hasher.finish()))
    }
}
