//! Every layer and tensor of a checkpoint, as reports list them: made while they are written, one
//! tensor at a time, and never held all at once. A million of them would take more memory than
//! everything that is known about them.

use std::borrow::Cow;
use std::sync::Arc;

use onelayer::checkpoint::{Checkpoint, TensorEntry, TensorId};
use onelayer::layers::{self, LayerKind, Layers};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// All layers, in execution order. Empty for commands that list none.
#[derive(Clone, Debug, Default)]
pub(crate) struct Listing(Option<Arc<Contents>>);

#[derive(Debug)]
struct Contents {
    checkpoint: Checkpoint,
    layers: Layers,
}

/// One layer.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Layer<'a> {
    /// Full prefix.
    pub(crate) id: &'a str,
    /// Prefix of the stack it is an element of; `null` for groups outside every stack.
    pub(crate) stack: Option<&'a str>,
    /// Bytes of its tensors.
    pub(crate) bytes: u64,
    /// Its tensors, in file order.
    #[cfg_attr(test, schemars(with = "Vec<Tensor>"))]
    pub(crate) tensors: Tensors<'a>,
}

/// One tensor.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Tensor<'a> {
    /// Full name.
    pub(crate) name: &'a str,
    /// As the file spells it.
    pub(crate) dtype: &'a str,
    /// Elements per dimension, outermost first.
    #[cfg_attr(test, schemars(with = "Vec<u64>"))]
    pub(crate) shape: &'a [u64],
    /// Its bytes.
    pub(crate) bytes: u64,
    /// The file that holds it.
    pub(crate) shard: Cow<'a, str>,
    /// Where it starts in that file.
    pub(crate) offset: u64,
    /// Prefix of the part of the layer it belongs to, such as an expert.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(default))]
    pub(crate) sub_unit: Option<&'a str>,
}

/// The tensors of one layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensors<'a> {
    checkpoint: &'a Checkpoint,
    layer: &'a layers::Layer,
}

impl Listing {
    /// The layers of a checkpoint.
    pub(crate) fn new(checkpoint: &Checkpoint, layers: Layers) -> Self {
        Self(Some(Arc::new(Contents { checkpoint: checkpoint.clone(), layers })))
    }

    /// True if there is nothing to list.
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of layers.
    pub(crate) fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |contents| contents.layers.as_slice().len())
    }

    /// The layers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Layer<'_>> {
        self.0
            .iter()
            .flat_map(|contents| contents.layers.as_slice().iter().map(|layer| contents.describe(layer)))
    }

    /// The `count` largest tensors, by name where they are equal.
    pub(crate) fn largest_tensors(&self, count: usize) -> Vec<Tensor<'_>> {
        let mut largest: Vec<TensorEntry<'_>> = Vec::with_capacity(count + 1);
        for tensor in self.0.iter().flat_map(|contents| contents.checkpoint.tensors()) {
            let order = |other: &TensorEntry<'_>| {
                let (bytes, other_bytes) = (tensor.len_bytes(), other.len_bytes());
                other_bytes > bytes || (other_bytes == bytes && other.name < tensor.name)
            };
            let place = largest.partition_point(order);
            if place < count {
                largest.insert(place, tensor);
                largest.truncate(count);
            }
        }
        let contents = self.0.as_ref();
        largest
            .into_iter()
            .filter_map(|tensor| Some(describe(&contents?.checkpoint, &tensor, None)))
            .collect()
    }
}

impl Contents {
    fn describe<'a>(&'a self, layer: &'a layers::Layer) -> Layer<'a> {
        let bytes_of = |tensor: &TensorId| self.checkpoint.tensor(*tensor).len_bytes();
        let stack = match layer.kind {
            LayerKind::Member { stack } => self.layers.stacks().get(stack).map(|stack| &**stack),
            _ => None,
        };
        Layer {
            id: layer.id.as_str(),
            stack,
            bytes: layer.tensors.iter().map(bytes_of).sum(),
            tensors: Tensors { checkpoint: &self.checkpoint, layer },
        }
    }
}

impl<'a> Tensors<'a> {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.layer.tensors.len()
    }

    fn iter(self) -> impl ExactSizeIterator<Item = Tensor<'a>> {
        let units = &self.layer.sub_units;
        // Eight bytes for each tensor that is in a part, sorted: looking one up takes no table of texts.
        let mut parts: Vec<(TensorId, u32)> = (0_u32..)
            .zip(units)
            .flat_map(|(number, unit)| unit.tensors.iter().map(move |tensor| (*tensor, number)))
            .collect();
        parts.sort_unstable();
        self.layer.tensors.iter().map(move |id| {
            let part = parts.binary_search_by_key(id, |(tensor, _)| *tensor).ok();
            let unit = part.and_then(|part| units.get(usize::try_from(parts[part].1).ok()?));
            describe(self.checkpoint, &self.checkpoint.tensor(*id), unit.map(|unit| &*unit.prefix))
        })
    }
}

fn describe<'a>(
    checkpoint: &'a Checkpoint,
    tensor: &TensorEntry<'a>,
    sub_unit: Option<&'a str>,
) -> Tensor<'a> {
    Tensor {
        name: tensor.name,
        dtype: tensor.dtype_name,
        shape: tensor.shape,
        bytes: tensor.len_bytes(),
        shard: checkpoint.shard(tensor.shard).path.to_string_lossy(),
        offset: tensor.extent.start(),
        sub_unit,
    }
}

/// Read back it is empty: layers are told by headers, not by reports.
impl<'de> Deserialize<'de> for Listing {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Self::default())
    }
}

impl Serialize for Listing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl Serialize for Tensors<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}
