//! The list of a model's tensors, and the two orders in which transformers saves them.

use super::config::ModelConfig;
use super::error::SynthError;

/// The most tensors: twice those of the largest published mixtures of experts. It bounds memory for
/// hostile configurations.
const TENSOR_COUNT_MAX: usize = 200_000;

/// One tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    /// Its name in the files.
    pub(super) name: String,
    /// Its dimensions.
    pub(super) shape: Vec<u64>,
    /// Tensors of one unit are never separated by sharding (see [`TensorList::unit`]).
    pub(super) unit: u64,
}

/// The tensors of a model, and its class.
#[derive(Debug)]
pub(super) struct ModelLayout {
    /// All tensors, in the order of the saved state dict.
    pub(super) tensors: Vec<Tensor>,
    /// The class that owns these tensors, as `architectures` names it.
    pub(super) class_name: &'static str,
}

/// A growing list of the tensors of a model.
pub(super) struct TensorList<'a> {
    config: &'a ModelConfig,
    /// Tensors, each with its name in memory if that differs from its name in the file.
    entries: Vec<(Option<String>, Tensor)>,
    unit_count: u64,
}

impl<'a> TensorList<'a> {
    /// An empty list. Errors name the configuration.
    pub(super) fn new(config: &'a ModelConfig) -> Self {
        Self { config, entries: Vec::new(), unit_count: 0 }
    }

    /// Adds a single tensor.
    pub(super) fn push(&mut self, name: String, shape: &[u64]) -> Result<(), SynthError> {
        let unit = self.unit();
        self.push_part(None, name, shape, unit)
    }

    /// Adds a tensor with a different name in memory, which decides the order: see
    /// [`TensorList::into_saved_order`].
    pub(super) fn push_renamed(
        &mut self,
        memory_name: String,
        name: String,
        shape: &[u64],
    ) -> Result<(), SynthError> {
        let unit = self.unit();
        self.push_part(Some(memory_name), name, shape, unit)
    }

    /// Adds one of several tensors that are parts of one tensor in memory.
    pub(super) fn push_part(
        &mut self,
        memory_name: Option<String>,
        name: String,
        shape: &[u64],
        unit: u64,
    ) -> Result<(), SynthError> {
        if self.entries.len() == TENSOR_COUNT_MAX {
            return Err(SynthError::TooLarge {
                origin: self.config.origin().to_owned(),
                what: "the number of tensors".to_owned(),
                limit: u64::try_from(TENSOR_COUNT_MAX).expect("a small constant"),
            });
        }
        self.entries.push((memory_name, Tensor { name, shape: shape.to_vec(), unit }));
        Ok(())
    }

    /// Adds the weight of a linear layer (`[outputs, inputs]`, as PyTorch stores it) and its bias
    /// if it has one.
    pub(super) fn push_linear(
        &mut self,
        name: &str,
        outputs: u64,
        inputs: u64,
        has_bias: bool,
    ) -> Result<(), SynthError> {
        self.push(format!("{name}.weight"), &[outputs, inputs])?;
        if has_bias {
            self.push(format!("{name}.bias"), &[outputs])?;
        }
        Ok(())
    }

    /// A new unit of sharding. `save_pretrained` keeps views of one storage in one file. Experts
    /// are such views: transformers 5 holds them as one tensor in memory and writes them one by
    /// one.
    pub(super) fn unit(&mut self) -> u64 {
        self.unit_count += 1;
        self.unit_count
    }

    /// The list in the order of the modules: the saved order of models whose weights are not
    /// converted.
    pub(super) fn into_module_order(self) -> Vec<Tensor> {
        self.entries.into_iter().map(|(_, tensor)| tensor).collect()
    }

    /// The list sorted by names in memory, with numbers by value: the saved order of models whose
    /// weights transformers 5 converts while saving. Parts of one tensor keep the order in which
    /// they were added.
    pub(super) fn into_saved_order(mut self) -> Vec<Tensor> {
        self.entries.sort_by_cached_key(|(memory_name, tensor)| {
            natural_key(memory_name.as_deref().unwrap_or(&tensor.name))
        });
        self.into_module_order()
    }
}

/// A part of a name between dots. Numbers come first, by value.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum NamePart {
    Number(u64),
    Text(String),
}

/// The parts of a name as a key to sort by.
fn natural_key(name: &str) -> Vec<NamePart> {
    name.split('.')
        .map(|part| part.parse().map_or_else(|_| NamePart::Text(part.to_owned()), NamePart::Number))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_by_the_value_of_their_numbers() {
        let mut names = ["model.layers.10.a", "model.layers.9.b", "lm_head.weight", "model.layers.9.a"];
        names.sort_by_cached_key(|name| natural_key(name));
        assert_eq!(names, ["lm_head.weight", "model.layers.9.a", "model.layers.9.b", "model.layers.10.a"]);
    }
}
