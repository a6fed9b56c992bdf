//! Settings for engines that go through the layers again and again: passes, layers that stay, the
//! order, who is told.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::times::{Hooks, LayerTimes, PassReport};
use super::{LoadError, LoaderBuilder};
use crate::layers::{Layer, LayerId, LayerKind, Layers};
use crate::plan::Passes;

/// Which layers stay on the device from the first pass to the last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Keep {
    /// None.
    #[default]
    Nothing,
    /// Those outside every stack: embedding, head, final norm.
    OutsideStacks,
    /// Those of these names.
    Layers(Vec<LayerId>),
}

/// What an engine may ask for.
#[derive(Clone, Debug, Default)]
pub(super) struct Engine {
    keep: Keep,
    pub(super) call_order: Option<Vec<LayerId>>,
    pub(super) hooks: Hooks,
}

impl Engine {
    /// Whom to tell, and nothing else: for a load that keeps everything.
    pub(super) fn for_one_pass(self) -> Self {
        Self { hooks: self.hooks, ..Self::default() }
    }

    /// The layers that stay.
    pub(super) fn kept(&self, layers: &Layers) -> Result<BTreeSet<LayerId>, LoadError> {
        let ids = |layer: &Layer| layer.id.clone();
        match &self.keep {
            Keep::Nothing => Ok(BTreeSet::new()),
            Keep::OutsideStacks => {
                let outside = layers.as_slice().iter().filter(|layer| layer.kind == LayerKind::Group);
                Ok(outside.map(ids).collect())
            }
            Keep::Layers(wanted) => {
                let known = |id: &LayerId| layers.find(id).map(ids).ok_or_else(|| LoadError::no_layer(id));
                wanted.iter().map(known).collect()
            }
        }
    }
}

/// For engines that hold a window of layers and go through all of them for every token or batch.
impl LoaderBuilder {
    /// How often [`Loader::stream`](super::Loader::stream) goes through all layers. Once by
    /// default. Reading ahead goes on from the last layer to the first, so that the next pass
    /// is on its way while this one is used.
    ///
    /// From two passes on nothing is allocated on the device after the beginning, and on the host
    /// nothing from the heap either once the first few passes are over: layers share one piece
    /// of memory, as long as the [window](Self::window);
    /// [`MemoryTerms::window`](crate::plan::MemoryTerms::window) tells how long. A window of so
    /// many layers has that many places, each as long as the longest layer that is not
    /// [kept](Self::keep). All of it stays until the stream and every layer that lies in it are
    /// dropped.
    ///
    /// # Example
    /// ```
    /// use onelayer::{Checkpoint, Keep, Loader, Passes, Target, Window};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/checkpoints/llama");
    /// let loader = Loader::builder(Target::Host)
    ///     .window(Window::Layers(2))
    ///     .passes(Passes::Times(3))
    ///     .keep(Keep::OutsideStacks) // embedding, norm and head are read once
    ///     .on_pass(|pass| println!("pass {}: {:?}, waited {:?}", pass.pass, pass.elapsed, pass.waits))
    ///     .build()?;
    /// let mut stream = loader.stream(&Checkpoint::open(path)?)?;
    /// for layer in &mut stream {
    ///     let layer = layer?;
    ///     println!("token {}: {} ({} tensors)", layer.pass(), layer.id(), layer.tensors().len());
    /// } // dropped: its place is the next layer's
    /// println!("what binds: {:?}", stream.report().waits.longest());
    /// # Ok(())
    /// # }
    /// ```
    pub fn passes(mut self, passes: Passes) -> Self {
        self.options.passes = passes;
        self
    }

    /// Layers that never leave: they are read in the first pass and handed out in each from where
    /// they are. They come on top of the window, as a term of their own in
    /// [`MemoryTerms::resident_terms`](crate::plan::MemoryTerms::resident_terms).
    /// None by default. Where there is one pass it changes nothing.
    pub fn keep(mut self, keep: Keep) -> Self {
        self.engine.keep = keep;
        self
    }

    /// The order in which [`Loader::stream`](super::Loader::stream) hands the layers out, instead
    /// of that of the grouping: every layer that is selected, once.
    pub fn call_order(mut self, layers: impl IntoIterator<Item = LayerId>) -> Self {
        self.engine.call_order = Some(layers.into_iter().collect());
        self
    }

    /// Tells what each layer took, once it was released, or at the end of the stream if it was not:
    /// on a thread of the loader's, which does nothing else meanwhile. A panic ends the load.
    pub fn on_layer(mut self, told: impl Fn(&LayerTimes<'_>) + Send + Sync + 'static) -> Self {
        self.engine.hooks.on_layer = Some(Arc::new(told));
        self
    }

    /// Tells what each pass took, once its last layer is handed out: on a thread of the loader's,
    /// as [`Self::on_layer`].
    pub fn on_pass(mut self, told: impl Fn(&PassReport) + Send + Sync + 'static) -> Self {
        self.engine.hooks.on_pass = Some(Arc::new(told));
        self
    }
}
