//! Parking, restoring and replacing parts of a model, and scopes that unload a part at their end.

use std::collections::HashSet;
use std::ops::{Deref, DerefMut};

use super::{Model, Part, State, unload};
use crate::checkpoint::{Checkpoint, DType};
use crate::layers::LayerId;
use crate::load::{LoadError, Loader, ParkTo, Parking, Receipt};
use crate::plan::{LoadPlan, PlannedLayer};

impl Model {
    /// Copies a part of the model out of its arenas and frees them. [`Self::restore`] brings it
    /// back, bit for bit. The bytes pass through 1 MiB of host memory. A layer stays as it is if it
    /// is parked or unloaded already, if it is on the host and would be parked in host memory, or
    /// if a tensor of it is held; the receipt names such tensors.
    ///
    /// Work that writes to the layers must be over.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] if the model never had such a part, [`LoadError::Park`] if memory,
    /// the folder or the disk refuses, [`LoadError::Device`] if the bytes cannot be read back.
    /// Then the layer that failed and those after it stay resident, those before it are parked, and
    /// their receipt is lost. [`Self::parked_bytes`] and [`Self::layers`] show the state.
    ///
    /// # Example
    /// ```
    /// use onelayer::{Checkpoint, Loader, ParkTo, Part, Target};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/checkpoints/llama");
    /// let mut model = Loader::builder(Target::Host).build()?.load(&Checkpoint::open(path)?)?;
    /// let receipt = model.park(Part::Prefix("model.layers"), ParkTo::Folder(&std::env::temp_dir()))?;
    /// assert_eq!(receipt.parked_bytes, receipt.returned_bytes);
    /// model.restore(Part::All)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn park<'a>(&mut self, part: impl Into<Part<'a>>, to: ParkTo<'_>) -> Result<Receipt, LoadError> {
        let part = part.into();
        let mut receipt = Receipt::default();
        for place in self.places(&part)? {
            let state = self.states[place].take();
            let State::Resident(layer) = state else {
                self.states[place] = state;
                continue;
            };
            let (state, parked) = match layer.park(to) {
                Parking::Parked(layer, receipt) => (State::Parked(layer), Ok(receipt)),
                Parking::Stays(layer, receipt) => (State::Resident(layer), Ok(receipt)),
                Parking::Failed(layer, error) => (State::Resident(layer), Err(error)),
            };
            self.states[place] = state;
            receipt = receipt.and(parked?);
        }
        Ok(receipt)
    }

    /// Copies the parked layers of a part into arenas on the device where they were, and returns
    /// the bytes of these arenas. Resident layers stay. Unloaded layers are not loaded again.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] if the model never had such a part, [`LoadError::Device`] if there
    /// is no room, [`LoadError::Park`] if the file cannot be read. The layer that failed and those
    /// after it stay parked.
    pub fn restore<'a>(&mut self, part: impl Into<Part<'a>>) -> Result<u64, LoadError> {
        let part = part.into();
        let mut restored_bytes = 0;
        for place in self.places(&part)? {
            let state = self.states[place].take();
            let State::Parked(layer) = state else {
                self.states[place] = state;
                continue;
            };
            match layer.restore() {
                Ok(layer) => {
                    restored_bytes += layer.resident_bytes();
                    self.states[place] = State::Resident(layer);
                }
                Err(failed) => {
                    let (layer, error) = *failed;
                    self.states[place] = State::Parked(layer);
                    return Err(error);
                }
            }
        }
        Ok(restored_bytes)
    }

    /// Replaces a layer by the layer of the same name in another checkpoint, with tensors of the
    /// same names, types and shapes. This also loads a layer again that was unloaded. Only its
    /// tensors are read, within the budget of `loader`. The new layer is resident before the old
    /// one is freed; if there is no room for both, unload the old one first.
    ///
    /// The [`index`](crate::LoadedLayer::index) of the new layer is 0: its plan has one layer.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] if one of the two has no such layer, [`LoadError::NotAlike`] with
    /// the first tensor that differs, and the errors of [`Loader::stream`]. Then the model is
    /// unchanged.
    pub fn replace(
        &mut self,
        id: &LayerId,
        loader: &Loader,
        checkpoint: &Checkpoint,
    ) -> Result<Receipt, LoadError> {
        let place = self.places(&Part::Layer(id))?.remove(0);
        let plan = loader.plan(checkpoint)?;
        let found = plan.layers().iter().find(|layer| layer.id == *id);
        let found = found.ok_or_else(|| self.not_found("layer in the other checkpoint", id.as_str()))?;
        let wanted = tensors(&self.checkpoint, &self.plan, &self.plan.layers()[place]);
        let given = tensors(checkpoint, &plan, found);
        if let Some((tensor, expected, found)) = first_difference(&wanted, &given) {
            return Err(LoadError::NotAlike { layer: id.clone(), tensor, expected, found });
        }
        let names: HashSet<String> = given.into_iter().map(|tensor| tensor.name).collect();
        drop(plan);
        let layer = loader.load_one(checkpoint, names)?;
        let old = std::mem::replace(&mut self.states[place], State::Resident(layer));
        Ok(unload([old]))
    }

    /// A scope for a part of the model. Its parked layers are restored now, and the part is
    /// unloaded when the scope ends, in any way.
    ///
    /// # Errors
    /// The errors of [`Self::restore`]. Then the part is unloaded.
    ///
    /// # Example
    /// ```
    /// use onelayer::{Checkpoint, Loader, Part, Target};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/checkpoints/llama");
    /// let mut model = Loader::builder(Target::Host).build()?.load(&Checkpoint::open(path)?)?;
    /// {
    ///     let scope = model.scope(Part::Prefix("model.layers"))?;
    ///     let weight = scope.tensor("model.layers.0.mlp.up_proj.weight")?;
    ///     assert!(weight.as_bytes().is_some());
    /// } // by the end of a block, by `?`, by a panic
    /// assert!(model.tensor("model.layers.0.mlp.up_proj.weight").is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn scope<'a>(&mut self, part: impl Into<Part<'a>>) -> Result<Scope<'_>, LoadError> {
        let part = part.into();
        let places = self.places(&part)?;
        let scope = Scope { model: self, places };
        scope.model.restore(part)?;
        Ok(scope)
    }
}

/// Unloads a part of a model when it is dropped. The model is used through it meanwhile. Tensors
/// that were taken from the part and outlive the scope keep the memory of their layer.
#[derive(Debug)]
#[must_use = "a scope that is dropped has unloaded its part"]
pub struct Scope<'m> {
    model: &'m mut Model,
    places: Vec<usize>,
}

impl Scope<'_> {
    /// Ends the scope and returns the receipt.
    pub fn end(mut self) -> Receipt {
        self.unload()
    }

    fn unload(&mut self) -> Receipt {
        self.model.unload_places(&std::mem::take(&mut self.places))
    }
}

impl Deref for Scope<'_> {
    type Target = Model;

    fn deref(&self) -> &Model {
        self.model
    }
}

impl DerefMut for Scope<'_> {
    fn deref_mut(&mut self) -> &mut Model {
        self.model
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        self.unload();
    }
}

/// The properties of a tensor that must be the same in both checkpoints.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Delivered {
    name: String,
    dtype: DType,
    shape: Vec<u64>,
}

impl Delivered {
    fn words(&self) -> String {
        format!("{} {:?}", self.dtype, self.shape)
    }
}

/// The tensors of a layer as they are delivered, by name.
fn tensors(checkpoint: &Checkpoint, plan: &LoadPlan, layer: &PlannedLayer) -> Vec<Delivered> {
    let delivered = plan.placements(layer).iter().map(|placement| {
        let entry = checkpoint.tensor(placement.tensor);
        let dtype = placement.delivered_dtype(entry.dtype);
        let (name, shape) = plan.delivered(placement, &entry);
        Delivered { name: name.to_owned(), dtype, shape: shape.to_vec() }
    });
    let mut delivered: Vec<Delivered> = delivered.collect();
    delivered.sort();
    delivered
}

/// The first difference of two sorted lists: the name of the tensor, and its properties in each
/// list.
fn first_difference(wanted: &[Delivered], given: &[Delivered]) -> Option<(String, String, String)> {
    let same = wanted.iter().zip(given).take_while(|(wanted, given)| wanted == given).count();
    let absent = || "no such tensor".to_owned();
    match (wanted.get(same), given.get(same)) {
        (None, None) => None,
        (Some(one), Some(other)) if one.name == other.name => {
            Some((one.name.clone(), one.words(), other.words()))
        }
        (Some(one), other) if other.is_none_or(|other| one.name < other.name) => {
            Some((one.name.clone(), one.words(), absent()))
        }
        (_, Some(other)) => Some((other.name.clone(), absent(), other.words())),
        (Some(one), None) => Some((one.name.clone(), one.words(), absent())),
    }
}
