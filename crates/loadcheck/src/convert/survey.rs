//! A description of the source before it is converted: its part of the report, the context of
//! relative sizes, the ids of its layers, and its files. Only headers are read.
//!
//! The conversion reads the headers again; only this description is kept in memory.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use onelayer::checkpoint::Checkpoint;
use onelayer::layers::{LayerKind, LayerMap, Layers};

use crate::config::Opening;
use crate::inputs::{context_of, describe, open_checkpoint};
use crate::library_errors;
use crate::problem::Problem;
use crate::report::Source;
use crate::sizes::SizeContext;

/// A description of a source.
#[derive(Debug)]
pub(crate) struct Survey {
    /// For the report, without the name from the command line.
    pub(crate) source: Source,
    /// The context of relative sizes.
    pub(crate) context: SizeContext,
    /// The files of tensors.
    pub(crate) shards: Vec<PathBuf>,
    /// Each layer's id, and its stack if it belongs to one.
    layers: HashMap<String, Option<String>>,
}

impl Survey {
    /// Opens the source. Returns the checkpoint too.
    ///
    /// # Errors
    /// Everything that is wrong with it; `map_path` is where the layer rules are from.
    pub(crate) fn open(
        path: &Path,
        opening: &Opening,
        map: &LayerMap,
        map_path: Option<&Path>,
    ) -> Result<(Self, Checkpoint), Vec<Problem>> {
        let checkpoint = open_checkpoint(path, opening)?;
        let layers = Layers::group_with(&checkpoint, map)
            .map_err(|error| vec![library_errors::layers(&error, map_path)])?;
        let stack_of = |kind: &LayerKind| match kind {
            LayerKind::Member { stack } => layers.stacks().get(*stack).map(|stack| (**stack).to_owned()),
            _ => None,
        };
        let ids = layers.as_slice().iter().map(|layer| (layer.id.as_str().to_owned(), stack_of(&layer.kind)));
        let survey = Self {
            source: describe(&checkpoint, &layers),
            context: context_of(&checkpoint, &layers),
            shards: checkpoint.shards().iter().map(|shard| shard.path.clone()).collect(),
            layers: ids.collect(),
        };
        Ok((survey, checkpoint))
    }

    /// True if a layer has this id.
    pub(crate) fn is_layer(&self, id: &str) -> bool {
        self.layers.contains_key(id)
    }

    /// The stack of the layer with this id.
    pub(crate) fn stack_of(&self, id: &str) -> Option<String> {
        self.layers.get(id).cloned().flatten()
    }
}
