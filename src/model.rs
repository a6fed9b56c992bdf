//! What is resident: layers by name, tensors by name, and the way out.

use std::fmt;

use crate::checkpoint::Checkpoint;
use crate::layers::LayerId;
use crate::load::{LoadError, LoadReport, LoadedLayer, LoadedTensor, Loader};
use crate::plan::{ReadOrder, Window};

impl Loader {
    /// Loads every layer and keeps it.
    ///
    /// # Errors
    /// Whatever [`Loader::stream`] refuses, and the error that ended the load. Nothing stays resident then.
    pub fn load(&self, checkpoint: &Checkpoint) -> Result<Model, LoadError> {
        self.load_observed(checkpoint, |_| {})
    }

    /// Loads every layer and keeps it; `observe` sees each one as it becomes resident: in whatever order they do, since the files
    /// are read as they lie ([`ReadOrder::Files`]).
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_observed(
        &self,
        checkpoint: &Checkpoint,
        mut observe: impl FnMut(&LoadedLayer),
    ) -> Result<Model, LoadError> {
        let mut stream = self.start(checkpoint, Window::All, u32::MAX, ReadOrder::Files)?;
        let mut layers = Vec::new();
        layers.resize_with(stream.plan().layers().len(), || None);
        for layer in &mut stream {
            let layer = layer?;
            observe(&layer);
            let index = layer.index();
            layers[index] = Some(layer);
        }
        let ids = stream.plan().layers().iter().map(|layer| layer.id.clone()).collect();
        Ok(Model { checkpoint: checkpoint.clone(), ids, layers, report: stream.report() })
    }
}

/// A resident model. Dropping it frees every layer that nobody else holds.
#[derive(Debug)]
pub struct Model {
    checkpoint: Checkpoint,
    /// In execution order, as `layers`.
    ids: Vec<LayerId>,
    /// `None` once unloaded.
    layers: Vec<Option<LoadedLayer>>,
    report: LoadReport,
}

/// What an unload gave back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Receipt {
    /// Bytes that the layers took on the device.
    pub asked_bytes: u64,
    /// Bytes of them that went back: to the system, or to the device. After
    /// [`release_after`](LoadedLayer::release_after) that is on its way, and done when what was named is over.
    pub returned_bytes: u64,
    /// Owners that still hold the rest: tensors that were taken from the layers and not dropped.
    pub holders: usize,
}

impl Model {
    /// What the load did.
    #[must_use]
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// The resident layers, in execution order.
    pub fn layers(&self) -> impl Iterator<Item = &LoadedLayer> {
        self.layers.iter().flatten()
    }

    /// A resident layer.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] if the model never had it or it is unloaded.
    pub fn layer(&self, id: &LayerId) -> Result<&LoadedLayer, LoadError> {
        let layer = self.position(id).and_then(|position| self.layers[position].as_ref());
        layer.ok_or_else(|| self.layer_not_found(id))
    }

    /// A tensor of a resident layer.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] if there is no such tensor or its layer is unloaded.
    pub fn tensor(&self, name: &str) -> Result<LoadedTensor, LoadError> {
        let found = self.checkpoint.find(name).map(|tensor| tensor.id);
        let loaded = found.and_then(|id| self.layers().find_map(|layer| layer.tensor_of_id(id)));
        loaded.ok_or_else(|| LoadError::NotFound {
            kind: "tensor",
            name: name.to_owned(),
            nearest: nearest(name, self.checkpoint.tensors().map(|tensor| tensor.name)),
        })
    }

    /// Bytes that the resident layers take on the device.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        self.layers().map(LoadedLayer::resident_bytes).sum()
    }

    /// Frees one layer. Tensors that were taken from it keep its memory until they are dropped; the receipt says
    /// so. Unloading a layer again is harmless and gives an empty receipt.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] if the model never had such a layer.
    pub fn unload(&mut self, id: &LayerId) -> Result<Receipt, LoadError> {
        let position = self.position(id).ok_or_else(|| self.layer_not_found(id))?;
        Ok(self.layers[position].take().map_or(Receipt::default(), free))
    }

    /// Frees every layer.
    pub fn unload_all(&mut self) -> Receipt {
        self.layers.iter_mut().filter_map(Option::take).map(free).fold(Receipt::default(), Receipt::and)
    }

    fn position(&self, id: &LayerId) -> Option<usize> {
        self.ids.iter().position(|known| known == id)
    }

    fn layer_not_found(&self, id: &LayerId) -> LoadError {
        let nearest = nearest(id.as_str(), self.ids.iter().map(LayerId::as_str));
        LoadError::NotFound { kind: "layer", name: id.as_str().to_owned(), nearest }
    }
}

impl Receipt {
    fn and(self, other: Self) -> Self {
        Self {
            asked_bytes: self.asked_bytes + other.asked_bytes,
            returned_bytes: self.returned_bytes + other.returned_bytes,
            holders: self.holders + other.holders,
        }
    }
}

impl fmt::Display for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use crate::units::HumanBytes;
        write!(f, "{} asked, {} returned", HumanBytes(self.asked_bytes), HumanBytes(self.returned_bytes))?;
        match self.holders {
            0 => Ok(()),
            holders => write!(f, ", the rest is held by {holders} tensors"),
        }
    }
}

fn free(layer: LoadedLayer) -> Receipt {
    let asked_bytes = layer.resident_bytes();
    match layer.into_sole_owner() {
        Ok(()) => Receipt { asked_bytes, returned_bytes: asked_bytes, holders: 0 },
        Err(holders) => Receipt { asked_bytes, returned_bytes: 0, holders },
    }
}

/// The known name that shares the longest beginning and end with the one that was asked for.
fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<String> {
    let shared = |other: &str| {
        let front = name.bytes().zip(other.bytes()).take_while(|(left, right)| left == right).count();
        let back =
            name.bytes().rev().zip(other.bytes().rev()).take_while(|(left, right)| left == right).count();
        front + back
    };
    let best = known.map(|other| (shared(other), other)).max_by_key(|&(score, _)| score)?;
    (best.0 * 2 >= name.len()).then(|| best.1.to_owned())
}
