//! A resident model: its layers and tensors by name, and how to unload them.

use std::collections::HashSet;
use std::sync::Arc;

use crate::checkpoint::Checkpoint;
use crate::layers::LayerId;
use crate::live::{self, Snapshot};
use crate::load::{Holder, LoadError, LoadReport, LoadedLayer, LoadedTensor, Loader, ParkedLayer, Receipt};
use crate::plan::LoadPlan;

pub use self::part::Part;
pub use self::places::Scope;

mod part;
mod places;

impl Loader {
    /// Loads every layer and keeps it.
    ///
    /// # Errors
    /// The errors of [`Loader::stream`], and the error that ended the load. Then nothing stays
    /// resident.
    pub fn load(&self, checkpoint: &Checkpoint) -> Result<Model, LoadError> {
        self.load_observed(checkpoint, |_| {})
    }

    /// Loads every layer and keeps it. `observe` sees each layer as it becomes resident, in any
    /// order, because reads follow the files ([`ReadOrder::Files`](crate::ReadOrder::Files)).
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_observed(
        &self,
        checkpoint: &Checkpoint,
        mut observe: impl FnMut(&LoadedLayer),
    ) -> Result<Model, LoadError> {
        self.load_while(checkpoint, |layer| {
            observe(layer);
            true
        })
    }

    /// Loads every layer and keeps it, for as long as `go_on` returns true. It sees each layer, as
    /// in [`Self::load_observed`].
    ///
    /// # Errors
    /// As [`Self::load`], and [`LoadError::Cancelled`] once `go_on` has returned false.
    pub fn load_while(
        &self,
        checkpoint: &Checkpoint,
        mut go_on: impl FnMut(&LoadedLayer) -> bool,
    ) -> Result<Model, LoadError> {
        let mut stream = self.start_keeping_everything(checkpoint)?;
        let mut layers = Vec::new();
        layers.resize_with(stream.plan().layers().len(), || State::Unloaded);
        for layer in &mut stream {
            let layer = layer?;
            if !go_on(&layer) {
                return Err(LoadError::Cancelled);
            }
            let index = layer.index();
            layers[index] = State::Resident(layer);
        }
        let ids = stream.plan().layers().iter().map(|layer| layer.id.clone()).collect();
        let plan = Arc::clone(stream.plan());
        Ok(Model { checkpoint: checkpoint.clone(), ids, states: layers, plan, report: stream.report() })
    }
}

/// A resident model. Dropping it frees every layer without another owner.
#[derive(Debug)]
pub struct Model {
    checkpoint: Checkpoint,
    /// In execution order, as `states` and as the layers of the plan.
    ids: Vec<LayerId>,
    states: Vec<State>,
    plan: Arc<LoadPlan>,
    report: LoadReport,
}

impl Model {
    /// The report of the load.
    #[must_use]
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// The plan of the load.
    #[must_use]
    pub fn plan(&self) -> &LoadPlan {
        &self.plan
    }

    /// The resident layers, in execution order.
    pub fn layers(&self) -> impl Iterator<Item = &LoadedLayer> {
        self.states.iter().filter_map(State::resident)
    }

    /// A resident layer.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] if the model never had it, or it is parked or unloaded.
    pub fn layer(&self, id: &LayerId) -> Result<&LoadedLayer, LoadError> {
        let layer = self.position(id).and_then(|position| self.states[position].resident());
        layer.ok_or_else(|| self.not_found("layer", id.as_str()))
    }

    /// A tensor of a resident layer.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] if there is no such tensor, or its layer is parked or unloaded.
    pub fn tensor(&self, name: &str) -> Result<LoadedTensor, LoadError> {
        let found = self.checkpoint.find(name).map(|tensor| tensor.id);
        let loaded = self.layers().find_map(|layer| match found {
            Some(id) if layer.is_of(&self.checkpoint) => layer.tensor_of_id(id),
            // A layer that replaced another one has the ids of its own checkpoint, and scales have
            // none.
            _ => layer.tensor(name),
        });
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

    /// The allocations of the resident layers, with their tensors and the number of their owners.
    /// See [`crate::live`].
    #[must_use]
    pub fn live(&self) -> Snapshot {
        let numbers: HashSet<u64> = self.layers().filter_map(LoadedLayer::allocation_number).collect();
        live::snapshot_of(|number| numbers.contains(&number))
    }

    /// Bytes of parked layers, in host memory and in files.
    #[must_use]
    pub fn parked_bytes(&self) -> u64 {
        let bytes = |state: &State| match state {
            State::Parked(layer) => layer.len_bytes(),
            State::Resident(_) | State::Unloaded => 0,
        };
        self.states.iter().map(bytes).sum()
    }

    /// Frees a part of the model, resident or parked: a layer, the layers below a prefix, a
    /// component, or all. Tensors that were taken keep the memory of their layer until they are
    /// dropped; the receipt names them. Unloading an unloaded part is harmless and returns an empty
    /// receipt.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] if the model never had such a part.
    ///
    /// # Example
    /// ```
    /// use onelayer::{Checkpoint, Loader, Part, Target};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/checkpoints/llama");
    /// let mut model = Loader::builder(Target::Host).build()?.load(&Checkpoint::open(path)?)?;
    /// let receipt = model.unload(Part::Prefix("model.layers"))?;
    /// assert!(receipt.is_complete(), "{receipt}"); // bytes that the system has taken back, and said so
    /// # Ok(())
    /// # }
    /// ```
    pub fn unload<'a>(&mut self, part: impl Into<Part<'a>>) -> Result<Receipt, LoadError> {
        let part = part.into();
        let places = self.places(&part)?;
        Ok(self.unload_places(&places))
    }

    /// Frees every layer, resident or parked.
    pub fn unload_all(&mut self) -> Receipt {
        let places: Vec<usize> = (0..self.states.len()).collect();
        self.unload_places(&places)
    }

    /// The tensors that were taken from resident layers and not dropped, in execution order. They
    /// would keep their layers if all were unloaded.
    #[must_use]
    pub fn holders(&self) -> Vec<Holder> {
        self.layers().flat_map(LoadedLayer::holders).collect()
    }

    fn unload_places(&mut self, places: &[usize]) -> Receipt {
        unload(places.iter().map(|&place| self.states[place].take()))
    }

    /// The indices of the layers of a part. An error if there are none, except for [`Part::All`].
    fn places(&self, part: &Part<'_>) -> Result<Vec<usize>, LoadError> {
        let places: Vec<usize> =
            (0..self.ids.len()).filter(|&place| part.contains(&self.ids[place])).collect();
        if places.is_empty() && *part != Part::All {
            let (kind, name) = part.words();
            return Err(self.not_found(kind, name));
        }
        Ok(places)
    }

    /// True if the model has or had a layer of the part.
    #[must_use]
    pub fn had(&self, part: &Part<'_>) -> bool {
        self.ids.iter().any(|id| part.contains(id))
    }

    fn position(&self, id: &LayerId) -> Option<usize> {
        self.ids.iter().position(|known| known == id)
    }

    fn not_found(&self, kind: &'static str, name: &str) -> LoadError {
        let nearest = nearest(name, self.ids.iter().map(LayerId::as_str));
        LoadError::NotFound { kind, name: name.to_owned(), nearest }
    }
}

/// The state of a layer.
#[derive(Debug, Default)]
enum State {
    Resident(LoadedLayer),
    Parked(ParkedLayer),
    #[default]
    Unloaded,
}

impl State {
    fn resident(&self) -> Option<&LoadedLayer> {
        match self {
            Self::Resident(layer) => Some(layer),
            Self::Parked(_) | Self::Unloaded => None,
        }
    }

    fn take(&mut self) -> Self {
        std::mem::take(self)
    }
}

/// Frees resident and parked layers.
fn unload(states: impl IntoIterator<Item = State>) -> Receipt {
    let mut layers = Vec::new();
    let mut receipt = Receipt::default();
    for state in states {
        match state {
            State::Resident(layer) => layers.push(layer),
            State::Parked(layer) => receipt = receipt.and(layer.unload()),
            State::Unloaded => {}
        }
    }
    // Together, so that the pool of a device is trimmed once.
    receipt.and(Receipt::of(layers))
}

/// The known name with the longest common beginning and end. `None` if less than half is common.
#[must_use]
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<String> {
    let shared = |other: &str| {
        let front = name.bytes().zip(other.bytes()).take_while(|(left, right)| left == right).count();
        let back =
            name.bytes().rev().zip(other.bytes().rev()).take_while(|(left, right)| left == right).count();
        front + back
    };
    let best = known.map(|other| (shared(other), other)).max_by_key(|&(score, _)| score)?;
    (best.0 * 2 >= name.len()).then(|| best.1.to_owned())
}
