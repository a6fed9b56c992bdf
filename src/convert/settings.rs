//! The settings of a conversion.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::ConvertEvent;
use crate::checkpoint::{OpenOptions, TensorEntry};
use crate::layers::{LayerId, LayerMap};
use crate::plan::{FloatType, IoMode, LoadOptions, Quantisation, QuantiseChoice};

/// Which tensors share a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Grouping {
    /// A file for each layer. With [`Conversion::max_shard_bytes`], as many neighbouring layers as
    /// fit share one.
    #[default]
    PerLayer,
    /// One file. With [`Conversion::max_shard_bytes`], files are filled tensor by tensor.
    Merged,
}

/// Where the experts of a layer go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Experts {
    /// Into the file of their layer.
    #[default]
    Together,
    /// Each into its own file, after the file with the rest of its layer.
    PerFile,
}

/// The type that a rule gives to one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Casting {
    /// It keeps its type.
    Keep,
    /// It is cast to this type from any number type: integers, 8-bit floats and parts of quantized
    /// weights too.
    To(FloatType),
}

/// Whether the kernel may copy bytes that do not change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KernelCopy {
    /// Where it is faster: if the file system can share blocks, or if source and target are on one
    /// server, which copies the bytes itself.
    #[default]
    Auto,
    /// Every byte is written.
    Never,
    /// Wherever the kernel can, even if writing would be faster.
    Always,
}

/// One of several processes that convert one checkpoint together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    number: u32,
    of: u32,
}

impl Part {
    /// Part `number` of `of`, counted from 1. `None` if there is no such part.
    #[must_use]
    pub fn new(number: u32, of: u32) -> Option<Self> {
        (1..=of).contains(&number).then_some(Self { number, of })
    }

    /// Its number, from 1.
    #[must_use]
    pub fn number(self) -> u32 {
        self.number
    }

    /// The number of all parts.
    #[must_use]
    pub fn of(self) -> u32 {
        self.of
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.of)
    }
}

/// A text that is not a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a part; write 1/8 for the first of eight")]
pub struct UnknownPart;

impl FromStr for Part {
    type Err = UnknownPart;

    fn from_str(text: &str) -> Result<Self, UnknownPart> {
        let number = |text: &str| {
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse().ok().filter(|_| is_number).ok_or(UnknownPart)
        };
        let (part, of) = text.split_once('/').ok_or(UnknownPart)?;
        Self::new(number(part)?, number(of)?).ok_or(UnknownPart)
    }
}

/// The default options of a load, but past the page cache.
pub(super) fn default_options() -> LoadOptions {
    LoadOptions { io: IoMode::Direct, ..LoadOptions::default() }
}

type Observer = dyn Fn(&ConvertEvent<'_>) + Send + Sync;
type Select = dyn Fn(&TensorEntry<'_>, &LayerId) -> bool + Send + Sync;
type Rule = dyn Fn(&TensorEntry<'_>) -> Option<Casting> + Send + Sync;

/// Settings of a conversion.
#[derive(Clone)]
#[must_use = "settings do nothing until they are used"]
pub struct Conversion {
    pub(super) open_options: OpenOptions,
    /// Budget, I/O mode, readers, dtype and quantisation. A conversion ignores the rest.
    pub(super) options: LoadOptions,
    pub(super) grouping: Grouping,
    pub(super) experts: Experts,
    pub(super) max_shard_bytes: Option<u64>,
    pub(super) map: LayerMap,
    pub(super) rule: Option<Arc<Rule>>,
    pub(super) select: Option<Arc<Select>>,
    pub(super) drop_duplicates: bool,
    pub(super) sha256: bool,
    pub(super) verify: bool,
    pub(super) overwrite: bool,
    pub(super) part: Option<Part>,
    pub(super) kernel_copy: KernelCopy,
    pub(super) options_text: Vec<String>,
    pub(super) observer: Option<Arc<Observer>>,
}

impl Default for Conversion {
    fn default() -> Self {
        Self::new()
    }
}

impl Conversion {
    /// A file for each layer, every tensor as it is, within 64 MiB of host memory.
    pub fn new() -> Self {
        Self {
            open_options: OpenOptions::new(),
            options: default_options(),
            grouping: Grouping::default(),
            experts: Experts::default(),
            max_shard_bytes: None,
            map: LayerMap::default(),
            rule: None,
            select: None,
            drop_duplicates: false,
            sha256: false,
            verify: false,
            overwrite: false,
            part: None,
            kernel_copy: KernelCopy::default(),
            options_text: Vec::new(),
            observer: None,
        }
    }

    /// How the source is opened.
    pub fn open_options(mut self, options: OpenOptions) -> Self {
        self.open_options = options;
        self
    }

    /// The most host memory that the conversion may hold, in bytes. 64 MiB by default.
    pub fn host_budget(mut self, bytes: u64) -> Self {
        self.options.host_budget_bytes = bytes;
        self
    }

    /// Threads that read (at most 64), and as many that write (at most 4); zero counts as one. By
    /// default as many as the disk and the machine can use. The files do not depend on it.
    pub fn jobs(mut self, threads: u32) -> Self {
        self.options.readers = Some(threads.max(1));
        self
    }

    /// How the source is read. Past the page cache by default.
    pub fn io(mut self, mode: IoMode) -> Self {
        self.options.io = mode;
        self
    }

    /// Which tensors share a file.
    pub fn grouping(mut self, grouping: Grouping) -> Self {
        self.grouping = grouping;
        self
    }

    /// Where the experts of a layer go. Matters for [`Grouping::PerLayer`].
    pub fn experts(mut self, experts: Experts) -> Self {
        self.experts = experts;
        self
    }

    /// The most bytes of tensors in a file; a single tensor may have more. Layers that do not fit
    /// are cut between tensors.
    pub fn max_shard_bytes(mut self, bytes: u64) -> Self {
        self.max_shard_bytes = Some(bytes);
        self
    }

    /// Overrides the grouping of tensors into layers.
    pub fn layer_map(mut self, map: LayerMap) -> Self {
        self.map = map;
        self
    }

    /// Casts plain floats (`F64`, `F32`, `F16`, `BF16`) to this type, rounded once, to nearest
    /// even. Integers, 8-bit floats and parts of quantized weights keep their type, unless
    /// [`Self::dtype_rule`] names them.
    pub fn dtype(mut self, dtype: FloatType) -> Self {
        self.options.dtype = Some(dtype);
        self
    }

    /// Quantises weights, row by row, as
    /// [`LoaderBuilder::quantise`](crate::LoaderBuilder::quantise) does on the way to a device.
    /// Values keep the name of their weight. Scales have that name and
    /// [`SCALE_SUFFIX`](crate::plan::SCALE_SUFFIX), in the same file. Other tensors follow
    /// [`Self::dtype`]; tensors that [`Self::dtype_rule`] names are not quantised. Quantised
    /// weights are read twice: for their scales and for their values.
    pub fn quantise(mut self, form: Quantisation) -> Self {
        self.options.quantise = Some(form);
        self
    }

    /// Chooses the tensors that [`Self::quantise`] quantises. By default their layers and names
    /// decide.
    pub fn quantise_only(
        mut self,
        choose: impl Fn(&TensorEntry<'_>) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.options.quantise_choice = Some(QuantiseChoice::new(choose));
        self
    }

    /// Decides about the type of single tensors. Where it returns `None`, [`Self::dtype`] decides.
    pub fn dtype_rule(
        mut self,
        rule: impl Fn(&TensorEntry<'_>) -> Option<Casting> + Send + Sync + 'static,
    ) -> Self {
        self.rule = Some(Arc::new(rule));
        self
    }

    /// Converts only tensors for which `select` returns true. It gets the tensor and the layer of
    /// the tensor.
    pub fn select(
        mut self,
        select: impl Fn(&TensorEntry<'_>, &LayerId) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.select = Some(Arc::new(select));
        self
    }

    /// Leaves out tied weights: see
    /// [`PreparedConversion::duplicates`](super::PreparedConversion::duplicates).
    pub fn drop_duplicates(mut self, drop: bool) -> Self {
        self.drop_duplicates = drop;
        self
    }

    /// Adds SHA-256 to the manifest, beside BLAKE3.
    pub fn sha256(mut self, sha256: bool) -> Self {
        self.sha256 = sha256;
        self
    }

    /// Reads source and target again once all is written, and compares them tensor by tensor.
    pub fn verify(mut self, verify: bool) -> Self {
        self.verify = verify;
        self
    }

    /// Replaces files in the target. All files that another conversion made are removed; other
    /// files are replaced only if this conversion needs their names. A complete target is left as
    /// it is.
    pub fn overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// Converts one part only.
    /// [`PreparedConversion::finish`](super::PreparedConversion::finish) writes index and manifest.
    pub fn part(mut self, part: Part) -> Self {
        self.part = Some(part);
        self
    }

    /// Whether the kernel may copy bytes that do not change.
    pub fn kernel_copy(mut self, kernel_copy: KernelCopy) -> Self {
        self.kernel_copy = kernel_copy;
        self
    }

    /// The options as a person gave them, for the manifest. They are not interpreted.
    pub fn describe_options(mut self, options: impl IntoIterator<Item = String>) -> Self {
        self.options_text = options.into_iter().collect();
        self
    }

    /// Gets every event, on the thread that runs the conversion. [`ConvertEvent::Progress`] comes
    /// from another thread, maybe at the same time as another event. The conversion waits for the
    /// observer.
    pub fn observe(mut self, observer: impl Fn(&ConvertEvent<'_>) + Send + Sync + 'static) -> Self {
        self.observer = Some(Arc::new(observer));
        self
    }

    /// Calls the observer, if there is one.
    pub(super) fn report(&self, event: &ConvertEvent<'_>) {
        if let Some(observer) = &self.observer {
            observer(event);
        }
    }
}

impl fmt::Debug for Conversion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conversion")
            .field("host_budget_bytes", &self.options.host_budget_bytes)
            .field("grouping", &self.grouping)
            .field("experts", &self.experts)
            .field("max_shard_bytes", &self.max_shard_bytes)
            .field("dtype", &self.options.dtype)
            .field("quantise", &self.options.quantise)
            .field("part", &self.part)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_reads_as_it_is_shown() {
        for (number, of) in [(1, 1), (1, 8), (8, 8)] {
            let part = Part::new(number, of).unwrap();
            assert_eq!(part.to_string().parse(), Ok(part));
        }
        for text in ["", "1", "0/8", "9/8", "1/0", "+1/8", "1/8 ", "-1/8", "1/8/9", "a/b"] {
            assert_eq!(text.parse::<Part>(), Err(UnknownPart), "{text:?}");
        }
    }
}
