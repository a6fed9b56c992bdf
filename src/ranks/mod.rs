//! The tensors of one of several ranks: a part of each tensor, or whole tensors.
//!
//! ```text
//! tensor parallelism   rank 0 |q[0..h/2] |k[0..h/2] |norm|       each tensor is split, or every rank has it whole
//!                      rank 1 |q[h/2..h] |k[h/2..h] |norm|       -> SplitRules, Split, RankPart
//! one read in all      rank 0 |q         |           norm|       each tensor is read by one rank, which gives it to the others
//!                      rank 1 |           k          |           -> Share
//! ```
//!
//! A part is a range of one dimension, in one or several blocks of it. In the file it is one run of
//! bytes, or runs of equal length at equal distances: what a plan can express.
//!
//! `table` knows the common architectures; `share` divides whole tensors.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::{Checkpoint, TensorEntry, TensorId};
use crate::layers::Layers;
use crate::slices::{Runs, SliceError, Strided};

use self::table::Table;

pub use self::share::Share;

mod share;
mod table;

/// One of several ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    rank: u32,
    world: u32,
}

impl Rank {
    /// Rank `rank`, from 0, of `world`; `None` if there is no such rank.
    #[must_use]
    pub const fn new(rank: u32, world: u32) -> Option<Self> {
        if rank < world { Some(Self { rank, world }) } else { None }
    }

    /// Its number, from 0.
    #[must_use]
    pub const fn rank(self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    #[must_use]
    pub const fn world(self) -> u32 {
        self.world
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.rank, self.world)
    }
}

/// How a tensor is divided among the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Split {
    /// Every rank has the whole tensor.
    Whole,
    /// Equal parts, in the order of the ranks. It is an error if the number of ranks does not
    /// divide the dimension.
    Even {
        /// The dimension, from 0, the outermost.
        axis: usize,
        /// Number of fused tensors of the same shape, one behind the other in that dimension. Each
        /// is divided on its own, and a rank gets its part of each. 1 for a tensor that is not
        /// fused.
        blocks: u64,
    },
    /// As [`Even`](Self::Even) with the dimension padded to a multiple: the last ranks have less,
    /// maybe nothing. Used for vocabularies.
    Padded {
        /// The dimension.
        axis: usize,
        /// The multiple, in elements.
        multiple: u64,
    },
    /// The range of this rank, chosen by the caller.
    Range {
        /// The dimension.
        axis: usize,
        /// Its elements.
        range: Range<u64>,
    },
}

/// Why a rule cannot divide a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SplitError {
    /// The tensor has no such dimension.
    #[error("{tensor:?} has {dimensions} dimensions, a rule divides dimension {axis}")]
    NoSuchAxis {
        /// The tensor.
        tensor: String,
        /// The dimension.
        axis: usize,
        /// Dimensions of the tensor.
        dimensions: usize,
    },
    /// The number of ranks does not divide the dimension.
    #[error(
        "dimension {axis} of {tensor:?} has {len} elements{}, which {world} ranks cannot divide evenly; give a rule for it",
        if *blocks == 1 { String::new() } else { format!(" in {blocks} blocks") }
    )]
    Uneven {
        /// The tensor.
        tensor: String,
        /// The dimension.
        axis: usize,
        /// Its elements, padding included.
        len: u64,
        /// Number of fused blocks.
        blocks: u64,
        /// Number of ranks.
        world: u32,
    },
    /// The range is not inside the tensor.
    #[error(transparent)]
    Slice(#[from] SliceError),
}

/// The part of a tensor that a rank has: the same range of every block of one dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankPart {
    /// The divided dimension, from 0, the outermost.
    pub axis: usize,
    /// Number of fused blocks of equal length; mostly 1.
    pub blocks: u64,
    /// The elements of each block.
    pub range: Range<u64>,
    /// Elements of the part, per dimension, outermost first.
    pub shape: Box<[u64]>,
}

/// Decides how one tensor is divided; `None` leaves it to other rules.
type Rule = dyn Fn(&TensorEntry<'_>) -> Option<Split> + Send + Sync;

/// How tensors are divided. Cheap to clone.
///
/// # Example
/// ```
/// use onelayer::{Checkpoint, Loader, Rank, Split, SplitRules, Target};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/checkpoints/llama");
/// let checkpoint = Checkpoint::open(path)?;
/// let rank = Rank::new(1, 2).expect("one of two");
/// // As engines divide common architectures, but with every rank having the whole embedding.
/// let rules = SplitRules::common()
///     .with(|tensor| tensor.name.contains("embed_tokens").then_some(Split::Whole));
/// let loader = Loader::builder(Target::Host).shard(rank, rules).build()?;
/// for layer in loader.stream(&checkpoint)? {
///     for tensor in layer?.tensors() {
///         println!("{} {:?} of {:?}", tensor.name(), tensor.shape(), tensor.entry().shape);
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
pub struct SplitRules {
    /// The last rule is asked first.
    given: Vec<Arc<Rule>>,
    has_table: bool,
}

impl SplitRules {
    /// A small table of common architectures: Llama, Mistral, Qwen, Gemma, Phi-1 and 2, OPT,
    /// DeepSeek's attention, Mixtral and other models whose experts are separate tensors, GPT-2,
    /// GPT-NeoX.
    ///
    /// - Queries, keys, values, `gate` and `up`, with their biases: by their outputs.
    /// - Attention's output and `down`: by their inputs; their biases whole.
    /// - Embedding and head: by the vocabulary, padded to a multiple of 64.
    /// - GPT-2's layers, which have inputs first, and GPTQ's and AWQ's `qweight`: by the other
    ///   dimension.
    /// - Fused `gate` and `up`, and GPT-2's fused queries, keys and values: each block on its own.
    /// - Scales, zero points and other companions of a quantized weight: as their weight if their
    ///   shape allows it, else whole.
    /// - Everything else is whole: norms, routers, positions, and what the table does not know,
    ///   such as queries, keys and values fused in other ways, and experts fused into one tensor.
    ///
    /// Names and shapes do not tell the number of heads. An engine with more ranks than key heads
    /// repeats heads, and needs its own rule for them.
    #[must_use]
    pub fn common() -> Self {
        Self { given: Vec::new(), has_table: true }
    }

    /// Every tensor is whole unless a [rule](Self::with) divides it.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Adds a rule that is asked before the others. It may decide by a list, a pattern of names, or
    /// anything else.
    #[must_use]
    pub fn with(mut self, rule: impl Fn(&TensorEntry<'_>) -> Option<Split> + Send + Sync + 'static) -> Self {
        self.given.push(Arc::new(rule));
        self
    }
}

impl fmt::Debug for SplitRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SplitRules")
            .field("given", &self.given.len())
            .field("has_table", &self.has_table)
            .finish()
    }
}

/// Cuts the tensors of one checkpoint for one rank.
pub(crate) struct Splitter<'a> {
    checkpoint: &'a Checkpoint,
    layers: &'a Layers,
    rank: Rank,
    rules: &'a SplitRules,
}

/// A part and its bytes in the tensor.
pub(crate) struct Cut {
    pub(crate) part: RankPart,
    pub(crate) bytes: Strided,
}

impl<'a> Splitter<'a> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        layers: &'a Layers,
        rank: Rank,
        rules: &'a SplitRules,
    ) -> Self {
        Self { checkpoint, layers, rank, rules }
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    /// The part of this rank; `None` for the whole tensor.
    pub(crate) fn cut(&self, tensor: TensorId) -> Result<Option<Cut>, SplitError> {
        let entry = self.checkpoint.tensor(tensor);
        let Some(part) = part_of(&entry, &self.split_of(&entry), self.rank)? else { return Ok(None) };
        // The divided dimension becomes two: blocks, and what is in each.
        let block = entry.shape[part.axis] / part.blocks;
        let (outside, inside) = (&entry.shape[..part.axis], &entry.shape[part.axis + 1..]);
        let refined: Vec<u64> = [outside, &[part.blocks, block], inside].concat();
        let around = outside.iter().chain([&part.blocks]).map(|&len| 0..len);
        let ranges: Vec<Range<u64>> = around.chain([part.range.clone()]).collect();
        let runs = Runs::of_slice(&TensorEntry { shape: &refined, strides: &[], ..entry }, &ranges)?;
        let bytes = runs.strided().expect("the blocks of all rows are equally far apart");
        Ok(Some(Cut { part, bytes }))
    }

    fn split_of(&self, entry: &TensorEntry<'_>) -> Split {
        self.given(entry).unwrap_or_else(|| {
            let companions = self.layers.companions();
            match companions.binary_search_by_key(&entry.id, |&(companion, _)| companion) {
                Ok(index) => {
                    let weight = self.checkpoint.tensor(companions[index].1);
                    let split = self.given(&weight).unwrap_or_else(|| self.by_table(&weight));
                    follow(entry, &weight, &split, self.rank)
                }
                Err(_) => self.by_table(entry),
            }
        })
    }

    /// The answer of the last rule that decides about a tensor.
    fn given(&self, entry: &TensorEntry<'_>) -> Option<Split> {
        self.rules.given.iter().rev().find_map(|rule| rule(entry))
    }

    fn by_table(&self, entry: &TensorEntry<'_>) -> Split {
        if self.rules.has_table { Table::new(self.checkpoint).split_of(entry) } else { Split::Whole }
    }
}

/// How the companion of a divided weight is divided: like the weight, if it has the same dimension
/// in the same or coarser steps and every part begins on such a step; else whole.
fn follow(companion: &TensorEntry<'_>, weight: &TensorEntry<'_>, split: &Split, rank: Rank) -> Split {
    let (Split::Even { axis, .. } | Split::Padded { axis, .. } | Split::Range { axis, .. }) = *split else {
        return Split::Whole;
    };
    // Lookup tables, and shapes stored as numbers.
    let is_table = ["quant_map", ".quant_state.", "nested_"].iter().any(|word| companion.name.contains(word))
        || companion.name.ends_with("_shape");
    // A list has one step per output or per several outputs: it follows the outermost dimension.
    let is_list = companion.shape.len() == 1 && axis == 0;
    let is_alike = companion.shape.len() == weight.shape.len() || is_list;
    let (Some(&steps), Some(&len)) = (companion.shape.get(axis), weight.shape.get(axis)) else {
        return Split::Whole;
    };
    if is_table || !is_alike || steps <= 1 {
        return Split::Whole;
    }
    // Blocks have 2^n elements. If the last block is not full, the quotient tells nothing: 448 rows
    // in blocks of 128 are 4 steps.
    let is_step = |many: u64, few: u64| many.is_multiple_of(few) && (many / few).is_power_of_two();
    let is_packed = steps != len && (is_step(len, steps) || is_step(steps, len));
    match split {
        Split::Even { blocks, .. } if steps == len || is_packed => {
            let parts = blocks.checked_mul(u64::from(rank.world));
            let is_even = parts.is_some_and(|parts| steps.is_multiple_of(parts));
            if is_even || steps == len { split.clone() } else { Split::Whole }
        }
        Split::Padded { .. } | Split::Range { .. } if steps == len => split.clone(),
        _ => Split::Whole,
    }
}

/// The part of a rank; `None` for the whole tensor.
fn part_of(entry: &TensorEntry<'_>, split: &Split, rank: Rank) -> Result<Option<RankPart>, SplitError> {
    let (axis, blocks) = match *split {
        Split::Whole => return Ok(None),
        Split::Even { axis, blocks } => (axis, blocks.max(1)),
        Split::Padded { axis, .. } | Split::Range { axis, .. } => (axis, 1),
    };
    let tensor = || entry.name.to_owned();
    let dimensions = entry.shape.len();
    let Some(&len) = entry.shape.get(axis) else {
        return Err(SplitError::NoSuchAxis { tensor: tensor(), axis, dimensions });
    };
    let world = u64::from(rank.world);
    let uneven = |len| SplitError::Uneven { tensor: tensor(), axis, len, blocks, world: rank.world };
    let even = |len: u64| match blocks.checked_mul(world) {
        Some(parts) if len.is_multiple_of(parts) => Ok(len / parts),
        _ => Err(uneven(len)),
    };
    let number = u64::from(rank.rank);
    let range = match split {
        Split::Range { range, .. } => range.clone(),
        Split::Padded { multiple, .. } => {
            let padded = len.checked_next_multiple_of((*multiple).max(1)).ok_or_else(|| uneven(len))?;
            let each = even(padded)?;
            (number * each).min(len)..((number + 1) * each).min(len)
        }
        _ => {
            let each = even(len)?;
            number * each..(number + 1) * each
        }
    };
    if range.start > range.end || range.end > len {
        let (start, end) = (range.start, range.end);
        return Err(SliceError::OutOfRange { tensor: tensor(), dimension: axis, start, end, len }.into());
    }
    if range == (0..len) {
        return Ok(None);
    }
    let mut shape: Box<[u64]> = entry.shape.into();
    shape[axis] = blocks * (range.end - range.start);
    Ok(Some(RankPart { axis, blocks, range, shape }))
}
