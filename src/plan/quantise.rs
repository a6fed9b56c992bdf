//! Which tensors are quantised on their way, how, and what comes of them.
//!
//! A row (the elements of the last dimension) is what a scale belongs to, or what groups with a
//! scale each are cut from. So each row is quantised on its own: reads are cut between rows, and a
//! row has to fit a slot. docs/quantise.md has the definitions, the names and the packing.
//!
//! ```text
//! file    | row 0 | row 1 | row 2 | ..             `X.weight`
//! slot    |v0|v1|v2|..|s0|s1|s2|..|                after quantising: values in front, their scales behind them
//! arena   | values: `X.weight` | scales: `X.weight_scale` |
//! ```
//!
//! Where bytes have to come in the order in which they lie in the target (a file that is hashed
//! while it is written), values and scales cannot come from one read. Both are read on their own
//! there, the same bytes twice.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;

use super::Placement;
use super::cast::is_plain;
use crate::checkpoint::{Checkpoint, DType, TensorEntry, TensorId};
use crate::layers::{LayerKind, Layers};
use crate::units::{ByteRange, to_u64};

/// Behind the name of a weight: the name of its scales. One of those that the grouping of layers
/// knows as a companion's.
pub const SCALE_SUFFIX: &str = "_scale";

/// Shorter rows are not quantised: their scales would take as much as is saved.
const ROW_ELEMENTS_MIN: u64 = 32;
/// What scales take at most of the bytes that they were made of: one in so many.
pub(super) const SCALE_SHARE: u64 = 16;
const _: () =
    assert!(SCALE_SHARE * 4 <= ROW_ELEMENTS_MIN * 2, "a scale of 4 bytes for the shortest row of 16 bits");

/// A form in which weights are kept in fewer bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Quantisation {
    /// Signed bytes from -127 to 127, with an `F32` scale for each row: the row's largest magnitude
    /// / 127.
    Int8,
    /// Four bits, from -7 to 7, kept as 1 to 15, two in a byte, with a `BF16` scale for each group
    /// of 32 elements of a row: the group's largest magnitude / 7.
    Int4G32,
    /// The same in groups of 64.
    Int4G64,
    /// The same in groups of 128.
    Int4G128,
    /// 8-bit floats (E4M3, without infinities), with an `F32` scale for each row: the row's largest
    /// magnitude / 448.
    Fp8,
}

impl Quantisation {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Int8, Self::Int4G32, Self::Int4G64, Self::Int4G128, Self::Fp8];

    /// Its name: `int8`, `int4-g32`, `int4-g64`, `int4-g128`, `fp8`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4G32 => "int4-g32",
            Self::Int4G64 => "int4-g64",
            Self::Int4G128 => "int4-g128",
            Self::Fp8 => "fp8",
        }
    }

    /// Type of the values' bytes.
    #[must_use]
    pub const fn values(self) -> DType {
        match self {
            Self::Int8 => DType::I8,
            Self::Int4G32 | Self::Int4G64 | Self::Int4G128 => DType::U8,
            Self::Fp8 => DType::F8E4M3,
        }
    }

    /// Type of the scales.
    #[must_use]
    pub const fn scales(self) -> DType {
        match self {
            Self::Int8 | Self::Fp8 => DType::F32,
            Self::Int4G32 | Self::Int4G64 | Self::Int4G128 => DType::Bf16,
        }
    }

    /// Elements of a row that share a scale; all of them if `None`.
    #[must_use]
    pub const fn group_elements(self) -> Option<u32> {
        match self {
            Self::Int8 | Self::Fp8 => None,
            Self::Int4G32 => Some(32),
            Self::Int4G64 => Some(64),
            Self::Int4G128 => Some(128),
        }
    }

    /// Bytes that the values of a row take: two elements of 4 bits in one, the last one alone if
    /// their number is odd.
    #[must_use]
    pub const fn value_row_bytes(self, row_elements: u64) -> u64 {
        match self.group_elements() {
            Some(_) => row_elements.div_ceil(2),
            None => row_elements,
        }
    }

    /// Scales of a row. The last group may be shorter than the others.
    #[must_use]
    pub fn scales_in_row(self, row_elements: u64) -> u64 {
        self.group_elements().map_or(1, |group| row_elements.div_ceil(u64::from(group)))
    }

    /// Bytes of one scale.
    const fn scale_bytes(self) -> u64 {
        match self.group_elements() {
            Some(_) => 2,
            None => 4,
        }
    }

    /// Bytes of the values and of the scales of a row.
    #[must_use]
    pub fn row_bytes(self, row_elements: u64) -> u64 {
        let scale_bytes = self.scales_in_row(row_elements).saturating_mul(self.scale_bytes());
        self.value_row_bytes(row_elements).saturating_add(scale_bytes)
    }
}

impl fmt::Display for Quantisation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a text that names no quantisation may be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a form of quantised weights; there are int8, int4-g32, int4-g64, int4-g128 (or int4) and fp8")]
pub struct UnknownQuantisation;

impl FromStr for Quantisation {
    type Err = UnknownQuantisation;

    fn from_str(text: &str) -> Result<Self, UnknownQuantisation> {
        let named = Self::ALL.into_iter().find(|form| form.name() == text);
        named.or((text == "int4").then_some(Self::Int4G128)).ok_or(UnknownQuantisation)
    }
}

/// Which half of a quantised tensor a placement is, and how it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuantisedPart {
    /// Values; their scales come from the same reads, and are the next placement.
    ValuesWithScales,
    /// Those scales: no read is theirs.
    ScalesOfSame,
    /// Values, read on their own.
    Values,
    /// Scales, read on their own.
    Scales,
}

/// How one tensor is quantised, and which half of what comes of it this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantised {
    to: Quantisation,
    source: DType,
    part: QuantisedPart,
    row_elements: NonZeroU32,
}

impl Quantised {
    /// How a tensor would be quantised, if it can be: floats of 16 bits and more in two or three
    /// dimensions, with rows that are not too short.
    pub(crate) fn of(entry: &TensorEntry<'_>, to: Quantisation) -> Option<Self> {
        let is_float = matches!(entry.dtype, DType::Bf16 | DType::F16 | DType::F32 | DType::F64);
        let row_elements = row_elements(entry).filter(|_| is_float)?;
        Some(Self { to, source: entry.dtype, part: QuantisedPart::ValuesWithScales, row_elements })
    }

    /// Values and scales together, of rows of so many elements.
    #[cfg(test)]
    pub(crate) fn for_tests(to: Quantisation, source: DType, row_elements: u32) -> Self {
        let row_elements = NonZeroU32::new(row_elements).expect("a row has elements");
        Self { to, source, part: QuantisedPart::ValuesWithScales, row_elements }
    }

    /// The shapes of the values and of the scales of a tensor of that shape.
    pub(crate) fn shapes(self, shape: &[u64]) -> [Box<[u64]>; 2] {
        let (to, row_elements) = (self.to, self.row_elements());
        [to.value_row_bytes(row_elements), to.scales_in_row(row_elements)].map(|last| {
            let mut shape: Box<[u64]> = shape.into();
            *shape.last_mut().expect("only tensors with rows are quantised") = last;
            shape
        })
    }

    /// Into what.
    #[must_use]
    pub const fn to(self) -> Quantisation {
        self.to
    }

    /// The type in the file: a float of 16, 32 or 64 bits.
    #[must_use]
    pub const fn source(self) -> DType {
        self.source
    }

    /// Which half this is.
    #[must_use]
    pub const fn part(self) -> QuantisedPart {
        self.part
    }

    /// True for scales.
    #[must_use]
    pub const fn is_scales(self) -> bool {
        matches!(self.part, QuantisedPart::Scales | QuantisedPart::ScalesOfSame)
    }

    /// True for what comes from another placement's reads.
    #[must_use]
    pub const fn has_no_reads(self) -> bool {
        matches!(self.part, QuantisedPart::ScalesOfSame)
    }

    /// Elements of a row: of the last dimension.
    #[must_use]
    pub fn row_elements(self) -> u64 {
        u64::from(self.row_elements.get())
    }

    /// Bytes of a row in the file.
    #[must_use]
    pub fn source_row_bytes(self) -> u64 {
        self.row_elements() * self.source_element_bytes()
    }

    /// Bytes of an element in the file.
    #[must_use]
    pub const fn source_element_bytes(self) -> u64 {
        self.source.bits().expect("only floats are quantised") / 8
    }

    /// Bytes of the values of so many bytes in the file, which are whole rows.
    #[must_use]
    pub fn value_bytes(self, source_bytes: u64) -> u64 {
        source_bytes / self.source_row_bytes() * self.to.value_row_bytes(self.row_elements())
    }

    /// Bytes of their scales.
    #[must_use]
    pub fn scale_bytes(self, source_bytes: u64) -> u64 {
        let row_bytes = self.to.scales_in_row(self.row_elements()) * self.to.scale_bytes();
        source_bytes / self.source_row_bytes() * row_bytes
    }

    /// Bytes of this half.
    #[must_use]
    pub fn delivered_bytes(self, source_bytes: u64) -> u64 {
        match self.is_scales() {
            true => self.scale_bytes(source_bytes),
            false => self.value_bytes(source_bytes),
        }
    }

    /// Type of this half.
    #[must_use]
    pub const fn delivered_dtype(self) -> DType {
        match self.is_scales() {
            true => self.to.scales(),
            false => self.to.values(),
        }
    }

    /// The same tensor, the other half or read in another way.
    #[must_use]
    pub(super) const fn as_part(self, part: QuantisedPart) -> Self {
        Self { part, ..self }
    }
}

/// One stretch of a slot that is quantised before it is copied, in place: values begin where the
/// rows began, and scales, if both are wanted, where those end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuantiseOp {
    /// The tensor.
    pub tensor: TensorId,
    /// Where the rows start in the slot; at any byte.
    pub slot_offset_bytes: u64,
    /// How many bytes they take there: whole rows.
    pub source_len_bytes: u64,
    /// The first row's number.
    pub first_row: u64,
    /// How.
    pub form: Quantised,
}

/// Decides which tensors are quantised, in the place of the rule about places and names.
#[derive(Clone)]
pub struct QuantiseChoice(Arc<dyn Fn(&TensorEntry<'_>) -> bool + Send + Sync>);

impl QuantiseChoice {
    /// Those for which `choose` says yes.
    pub fn new(choose: impl Fn(&TensorEntry<'_>) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(choose))
    }
}

impl fmt::Debug for QuantiseChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuantiseChoice").finish_non_exhaustive()
    }
}

impl PartialEq for QuantiseChoice {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for QuantiseChoice {}

/// Says which tensors of a checkpoint are quantised, and how. Made once for a plan, and asked about
/// each tensor.
#[derive(Debug)]
pub struct QuantiseRule<'a> {
    checkpoint: &'a Checkpoint,
    layers: &'a Layers,
    to: Quantisation,
    choice: Option<&'a QuantiseChoice>,
    /// Tensors that have companions. Ascending.
    accompanied: Vec<TensorId>,
}

impl<'a> QuantiseRule<'a> {
    /// `choice` is asked in the place of the rule about places and names; what can be quantised at
    /// all is not its to say.
    #[must_use]
    pub fn new(
        checkpoint: &'a Checkpoint,
        layers: &'a Layers,
        to: Quantisation,
        choice: Option<&'a QuantiseChoice>,
    ) -> Self {
        let mut accompanied: Vec<TensorId> = layers.companions().iter().map(|&(_, weight)| weight).collect();
        accompanied.sort_unstable();
        accompanied.dedup();
        Self { checkpoint, layers, to, choice, accompanied }
    }

    /// Into what.
    #[must_use]
    pub fn to(&self) -> Quantisation {
        self.to
    }

    /// How a tensor is quantised, if it is.
    #[must_use]
    pub fn of(&self, tensor: TensorId) -> Option<Quantised> {
        let entry = self.checkpoint.tensor(tensor);
        let is_plain = || is_plain(self.checkpoint, self.layers, tensor);
        let form = Quantised::of(&entry, self.to).filter(|_| is_plain())?;
        let is_wanted = match self.choice {
            Some(QuantiseChoice(choose)) => choose(&entry),
            None => self.is_weight_of_layer(&entry),
        };
        (is_wanted && !self.is_part_of_quantised(tensor)).then_some(form)
    }

    /// True if any tensor is quantised, of all that the checkpoint has.
    #[must_use]
    pub fn finds_any(&self) -> bool {
        self.checkpoint.tensors().any(|entry| self.of(entry.id).is_some())
    }

    /// True for what the rule about places, names and shapes takes for a weight, whatever its type.
    #[must_use]
    pub fn is_weight(&self, entry: &TensorEntry<'_>) -> bool {
        row_elements(entry).is_some() && self.is_weight_of_layer(entry)
    }

    fn is_weight_of_layer(&self, entry: &TensorEntry<'_>) -> bool {
        is_weight(entry.name) && matches!(self.layers.layer_of(entry.id).kind, LayerKind::Member { .. })
    }

    /// True for a companion, and for what has one: a name of its scales may be taken.
    fn is_part_of_quantised(&self, tensor: TensorId) -> bool {
        let companions = self.layers.companions();
        companions.binary_search_by_key(&tensor, |&(companion, _)| companion).is_ok()
            || self.accompanied.binary_search(&tensor).is_ok()
    }
}

/// Elements of a row, of what has rows that are not too short, in two or three dimensions.
fn row_elements(entry: &TensorEntry<'_>) -> Option<NonZeroU32> {
    let row_elements = NonZeroU32::new(u32::try_from(*entry.shape.last()?).ok()?)?;
    let is_long = u64::from(row_elements.get()) >= ROW_ELEMENTS_MIN;
    (is_long && matches!(entry.shape.len(), 2 | 3) && !entry.extent.is_empty()).then_some(row_elements)
}

/// False for biases of fused experts, which have two dimensions too, and for what decides which
/// expert gets a token: small, and what is lost there is lost for all that follows.
fn is_weight(name: &str) -> bool {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let last = module.rsplit('.').next().unwrap_or(module);
    let is_of_router = module.split('.').any(|component| component.ends_with("router"));
    !last.ends_with("bias") && !matches!(last, "gate" | "shared_expert_gate") && !is_of_router
}

/// What a plan knows of a quantised tensor beside its placements: what they are called, and their
/// shapes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuantisedTensor {
    /// The tensor.
    pub tensor: TensorId,
    /// Into what.
    pub to: Quantisation,
    /// Name of the scales.
    pub scale_name: Box<str>,
    /// Shape of the values: the tensor's own, or with half as many bytes in the last dimension.
    pub value_shape: Box<[u64]>,
    /// Shape of the scales: the tensor's, with the scales of a row in the last dimension.
    pub scale_shape: Box<[u64]>,
}

/// What an error of a quantised tensor takes while it is added up, its entry in a tree included.
const ERROR_BYTES: u64 = 128;

/// The quantised tensors of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct QuantisedTensors {
    /// Ascending.
    list: Vec<QuantisedTensor>,
}

impl QuantisedTensors {
    pub(super) fn of(checkpoint: &Checkpoint, placements: &[Placement]) -> Self {
        let values = placements.iter().filter_map(|placement| {
            let form = placement.quantised.filter(|form| !form.is_scales())?;
            let entry = checkpoint.tensor(placement.tensor);
            let [value_shape, scale_shape] = form.shapes(entry.shape);
            Some(QuantisedTensor {
                tensor: placement.tensor,
                to: form.to,
                scale_name: format!("{}{SCALE_SUFFIX}", entry.name).into(),
                value_shape,
                scale_shape,
            })
        });
        let mut list: Vec<_> = values.collect();
        list.sort_unstable_by_key(|quantised| quantised.tensor);
        list.shrink_to_fit();
        Self { list }
    }

    pub(super) fn as_slice(&self) -> &[QuantisedTensor] {
        &self.list
    }

    pub(super) fn find(&self, tensor: TensorId) -> Option<&QuantisedTensor> {
        let index = self.list.binary_search_by_key(&tensor, |quantised| quantised.tensor).ok()?;
        Some(&self.list[index])
    }

    /// Host memory that the list holds, in bytes as the allocator takes them, and what its tensors'
    /// errors are added up in.
    pub(super) fn held_bytes(&self) -> u64 {
        let item_bytes = |len: usize| to_u64(len.next_multiple_of(16) + 16);
        let texts = |quantised: &QuantisedTensor| {
            item_bytes(quantised.scale_name.len())
                + item_bytes(size_of_val(&*quantised.value_shape))
                + item_bytes(size_of_val(&*quantised.scale_shape))
                + ERROR_BYTES
        };
        let items: u64 = self.list.iter().map(texts).sum();
        to_u64(self.list.capacity() * size_of::<QuantisedTensor>()) + items
    }
}

/// The longest row that is quantised: its bytes in the file, and its tensor.
pub(super) fn longest_row(placements: &[Placement]) -> Option<(u64, TensorId)> {
    let rows = placements.iter().filter_map(|placement| {
        Some((placement.quantised?.source_row_bytes(), std::cmp::Reverse(placement.tensor)))
    });
    rows.max().map(|(bytes, tensor)| (bytes, tensor.0))
}

/// The number of the first row of a piece of a tensor, which is of whole ones.
pub(super) fn first_row(extent: ByteRange, piece: ByteRange, form: Quantised) -> u64 {
    (piece.start() - extent.start()) / form.source_row_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_as_they_are_shown() {
        for form in Quantisation::ALL {
            assert_eq!(form.to_string().parse(), Ok(form));
        }
        assert_eq!("int4".parse(), Ok(Quantisation::Int4G128));
        for text in ["", "int", "INT8", "int4-g16", "int4g32", "fp8 "] {
            assert_eq!(text.parse::<Quantisation>(), Err(UnknownQuantisation), "{text:?}");
        }
    }

    #[test]
    fn values_and_scales_take_no_more_than_the_rows_did() {
        for (to, source) in Quantisation::ALL
            .into_iter()
            .flat_map(|to| [DType::Bf16, DType::F16, DType::F32, DType::F64].map(|source| (to, source)))
        {
            for row_elements in (32..300).chain([4096, 5001]) {
                let row = NonZeroU32::new(row_elements).unwrap();
                let form = Quantised { to, source, part: QuantisedPart::Values, row_elements: row };
                let row_bytes = form.source_row_bytes();
                assert!(form.value_bytes(row_bytes) + form.scale_bytes(row_bytes) <= row_bytes, "{form:?}");
                assert!(form.scale_bytes(row_bytes) * SCALE_SHARE <= row_bytes, "{form:?}");
            }
        }
    }

    #[test]
    fn routers_and_biases_are_no_weights() {
        for name in ["model.layers.0.mlp.gate_proj.weight", "h.0.attn.c_attn.weight", "l.0.experts.down_proj"]
        {
            assert!(is_weight(name), "{name}");
        }
        for name in [
            "l.0.mlp.gate.weight",
            "l.0.mlp.router.weight",
            "l.0.experts.down_proj_bias",
            "l.0.bias",
            // Gemma 4, Granite, GPTSAN, and a gate of its own name.
            "model.language_model.layers.3.router.proj.weight",
            "model.layers.0.block_sparse_moe.router.layer.weight",
            "model.blocks.9.feed_forward.mlp.router.classifier.weight",
            "l.0.mlp.expert_router.weight",
            "l.0.mlp.router",
        ] {
            assert!(!is_weight(name), "{name}");
        }
    }
}
