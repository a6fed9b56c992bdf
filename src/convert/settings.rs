//! What a conversion is asked for.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use super::reading::direct;
use super::{ConvertError, ConvertEvent, PreparedConversion};
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
    /// One file, or with [`Conversion::max_shard_bytes`] files that are filled tensor by tensor.
    Merged,
}

/// Where the experts of a layer go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Experts {
    /// Into the file of their layer.
    #[default]
    Together,
    /// Each into a file of its own, behind that of the rest of its layer.
    PerFile,
}

/// What a rule says about the type of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Casting {
    /// It keeps its type.
    Keep,
    /// It becomes this type, whatever number type it has: integers, 8-bit floats and parts of
    /// quantized weights too.
    To(FloatType),
}

/// Whether ranges that stay as they are may be copied by the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KernelCopy {
    /// Where it serves: blocks are shared where the file system can, and a server copies what it
    /// holds itself.
    #[default]
    Auto,
    /// Every byte is written.
    Never,
    /// Wherever the kernel does it, even if writing would be faster.
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

    /// Which one, from 1.
    #[must_use]
    pub fn number(self) -> u32 {
        self.number
    }

    /// How many there are.
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

/// What a text that names no part may be told.
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
            options: direct(),
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

    /// Most host memory that the conversion may hold, in bytes. 64 MiB by default.
    pub fn host_budget(mut self, bytes: u64) -> Self {
        self.options.host_budget_bytes = bytes;
        self
    }

    /// Threads that read, at most 64, and as many that write, at most 4; zero counts as one. By
    /// default what the disk and the machine can use. What is written does not depend on it.
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

    /// Most bytes of tensors in a file; a single tensor may have more. Layers that do not fit are
    /// cut between tensors.
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
    /// even. Integers, 8-bit floats and whatever belongs to a quantized weight keep their type
    /// unless [`Self::dtype_rule`] names them.
    pub fn dtype(mut self, dtype: FloatType) -> Self {
        self.options.dtype = Some(dtype);
        self
    }

    /// Quantises weights, row by row, as
    /// [`LoaderBuilder::quantise`](crate::LoaderBuilder::quantise) does on the way to a device.
    /// Values keep the name of their weight; their scales are written under it and
    /// [`SCALE_SUFFIX`](crate::plan::SCALE_SUFFIX), into the same file. Whatever
    /// is not quantised follows [`Self::dtype`], and what [`Self::dtype_rule`] decides about is not
    /// quantised. Such weights are read twice, for their scales and for their values.
    pub fn quantise(mut self, form: Quantisation) -> Self {
        self.options.quantise = Some(form);
        self
    }

    /// Says which tensors [`Self::quantise`] is about, in the place of the rule about layers and
    /// names.
    pub fn quantise_only(
        mut self,
        choose: impl Fn(&TensorEntry<'_>) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.options.quantise_choice = Some(QuantiseChoice::new(choose));
        self
    }

    /// Says for single tensors what becomes of their type; where it says `None`, [`Self::dtype`]
    /// decides.
    pub fn dtype_rule(
        mut self,
        rule: impl Fn(&TensorEntry<'_>) -> Option<Casting> + Send + Sync + 'static,
    ) -> Self {
        self.rule = Some(Arc::new(rule));
        self
    }

    /// Converts only tensors for which `select` says yes. It gets the tensor and the layer that
    /// holds it.
    pub fn select(
        mut self,
        select: impl Fn(&TensorEntry<'_>, &LayerId) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.select = Some(Arc::new(select));
        self
    }

    /// Leaves out tied weights: see [`PreparedConversion::duplicates`].
    pub fn drop_duplicates(mut self, drop: bool) -> Self {
        self.drop_duplicates = drop;
        self
    }

    /// Writes SHA-256 into the manifest, beside BLAKE3.
    pub fn sha256(mut self, sha256: bool) -> Self {
        self.sha256 = sha256;
        self
    }

    /// Reads source and target again when all is written, and compares them tensor by tensor.
    pub fn verify(mut self, verify: bool) -> Self {
        self.verify = verify;
        self
    }

    /// Replaces files in the target that another conversion, or somebody else, has put there.
    /// Whatever another conversion has made goes; other files go only if their names are
    /// needed. A target that is complete is left as it is.
    pub fn overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// Converts one part only. The index and the manifest are for [`PreparedConversion::finish`].
    pub fn part(mut self, part: Part) -> Self {
        self.part = Some(part);
        self
    }

    /// Whether the kernel may copy what stays as it is.
    pub fn kernel_copy(mut self, kernel_copy: KernelCopy) -> Self {
        self.kernel_copy = kernel_copy;
        self
    }

    /// The options as a person gave them, for the manifest. They are not interpreted.
    pub fn describe_options(mut self, options: impl IntoIterator<Item = String>) -> Self {
        self.options_text = options.into_iter().collect();
        self
    }

    /// Is told what happens, from the thread that runs the conversion. [`ConvertEvent::Progress`]
    /// comes from a thread of its own, maybe at the same time as another event. What the
    /// observer holds up, the conversion waits for.
    pub fn observe(mut self, observer: impl Fn(&ConvertEvent<'_>) + Send + Sync + 'static) -> Self {
        self.observer = Some(Arc::new(observer));
        self
    }

    /// Opens the source, decides what goes where, and checks the target. Writes nothing.
    ///
    /// # Errors
    /// [`ConvertError`], all of them before a tensor byte is read, unless [`Self::drop_duplicates`]
    /// has to compare some.
    pub fn prepare(
        self,
        source: impl AsRef<Path>,
        target: impl AsRef<Path>,
    ) -> Result<PreparedConversion, ConvertError> {
        PreparedConversion::new(self, source.as_ref(), target.as_ref())
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
