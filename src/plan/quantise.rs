//! Which tensors are quantised, how, and the sizes of the result.
//!
//! Each row (the elements of the last dimension) has its own scale, or is cut into groups with a
//! scale each. So reads are cut between rows, and a row has to fit a slot. docs/quantise.md has the
//! definitions, the names and the packing.
//!
//! ```text
//! file    | row 0 | row 1 | row 2 | ..             `X.weight`
//! slot    |v0|v1|v2|..|s0|s1|s2|..|                after quantising: values in front, their scales behind them
//! arena   | values: `X.weight` | scales: `X.weight_scale` |
//! ```
//!
//! A file that is hashed while it is written needs its bytes in order, so values and scales cannot
//! share a read: there the same bytes are read twice.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;

use super::cast::is_plain;
use crate::checkpoint::{Checkpoint, DType, TensorEntry, TensorId};
use crate::layers::{LayerKind, Layers};
use crate::units::ByteRange;

/// The name of a weight with this suffix is the name of its scales. The grouping of layers knows
/// such names as companions.
pub const SCALE_SUFFIX: &str = "_scale";

/// Shorter rows are not quantised: their scales would take what is saved.
const ROW_ELEMENTS_MIN: u64 = 32;
/// Scales take at most one byte per 16 bytes of their source.
pub(super) const SCALE_SHARE: u64 = 16;
const _: () =
    assert!(SCALE_SHARE * 4 <= ROW_ELEMENTS_MIN * 2, "a scale of 4 bytes for the shortest row of 16 bits");

/// A form of weights with fewer bits.
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

    /// Elements of a row that share a scale; the whole row if `None`.
    #[must_use]
    pub const fn group_elements(self) -> Option<u32> {
        match self {
            Self::Int8 | Self::Fp8 => None,
            Self::Int4G32 => Some(32),
            Self::Int4G64 => Some(64),
            Self::Int4G128 => Some(128),
        }
    }

    /// Bytes of the values of a row. Two 4-bit elements share a byte; the last one is alone if
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

/// The text names no quantisation.
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
    /// Values. Their scales come from the same reads, and are the next placement.
    ValuesWithScales,
    /// Scales from the reads of the values.
    ScalesOfSame,
    /// Values, read on their own.
    Values,
    /// Scales, read on their own.
    Scales,
}

/// How one tensor is quantised, and which half of the result this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantised {
    to: Quantisation,
    source: DType,
    part: QuantisedPart,
    row_elements: NonZeroU32,
}

impl Quantised {
    /// How a tensor would be quantised; `None` if it cannot be. It needs floats of 16 bits or more
    /// in two or three dimensions, with rows of 32 elements or more.
    pub(crate) fn of(entry: &TensorEntry<'_>, to: Quantisation) -> Option<Self> {
        let is_float = matches!(entry.dtype, DType::Bf16 | DType::F16 | DType::F32 | DType::F64);
        let row_elements = row_elements(entry).filter(|_| is_float)?;
        Some(Self { to, source: entry.dtype, part: QuantisedPart::ValuesWithScales, row_elements })
    }

    /// Values with scales, in rows of `row_elements`.
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

    /// The target form.
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

    /// True if its bytes come from the reads of another placement.
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

    /// Bytes of the values of `source_bytes`, which are whole rows.
    #[must_use]
    pub fn value_bytes(self, source_bytes: u64) -> u64 {
        source_bytes / self.source_row_bytes() * self.to.value_row_bytes(self.row_elements())
    }

    /// Bytes of the scales of `source_bytes`, which are whole rows.
    #[must_use]
    pub fn scale_bytes(self, source_bytes: u64) -> u64 {
        let row_bytes = self.to.scales_in_row(self.row_elements()) * self.to.scale_bytes();
        source_bytes / self.source_row_bytes() * row_bytes
    }

    /// Bytes of this half for `source_bytes`, which are whole rows.
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

    /// The same tensor with another part.
    #[must_use]
    pub(super) const fn as_part(self, part: QuantisedPart) -> Self {
        Self { part, ..self }
    }
}

/// One stretch of a slot that is quantised in place before it is copied. Values begin where the
/// rows began; scales, if wanted too, begin where the values end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuantiseOp {
    /// The tensor.
    pub tensor: TensorId,
    /// Where the rows start in the slot; at any byte.
    pub slot_offset_bytes: u64,
    /// Their length in the slot: whole rows.
    pub source_len_bytes: u64,
    /// Number of the first row.
    pub first_row: u64,
    /// The form.
    pub form: Quantised,
}

/// Chooses the tensors to quantise, instead of the rule about layers and names.
#[derive(Clone)]
pub struct QuantiseChoice(Arc<dyn Fn(&TensorEntry<'_>) -> bool + Send + Sync>);

impl QuantiseChoice {
    /// Quantises the tensors for which `choose` returns true.
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

/// Decides which tensors of a checkpoint are quantised, and how. Made once per plan.
#[derive(Debug)]
pub struct QuantiseRule<'a> {
    checkpoint: &'a Checkpoint,
    layers: &'a Layers,
    to: Quantisation,
    choice: Option<&'a QuantiseChoice>,
    /// Tensors that have companions, ascending.
    accompanied: Vec<TensorId>,
}

impl<'a> QuantiseRule<'a> {
    /// `choice` replaces the rule about layers and names. It cannot add tensors that cannot be
    /// quantised.
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

    /// The target form.
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

    /// True if any tensor of the checkpoint is quantised.
    #[must_use]
    pub fn finds_any(&self) -> bool {
        self.checkpoint.tensors().any(|entry| self.of(entry.id).is_some())
    }

    /// True for weights by layer, name and shape, whatever the type.
    #[must_use]
    pub fn is_weight(&self, entry: &TensorEntry<'_>) -> bool {
        row_elements(entry).is_some() && self.is_weight_of_layer(entry)
    }

    fn is_weight_of_layer(&self, entry: &TensorEntry<'_>) -> bool {
        is_weight(entry.name) && matches!(self.layers.layer_of(entry.id).kind, LayerKind::Member { .. })
    }

    /// True for companions and for tensors that have one: the name of the scales may be taken.
    fn is_part_of_quantised(&self, tensor: TensorId) -> bool {
        let companions = self.layers.companions();
        companions.binary_search_by_key(&tensor, |&(companion, _)| companion).is_ok()
            || self.accompanied.binary_search(&tensor).is_ok()
    }
}

/// Elements of a row; `None` unless the tensor has two or three dimensions and long enough rows.
fn row_elements(entry: &TensorEntry<'_>) -> Option<NonZeroU32> {
    let row_elements = NonZeroU32::new(u32::try_from(*entry.shape.last()?).ok()?)?;
    let is_long = u64::from(row_elements.get()) >= ROW_ELEMENTS_MIN;
    (is_long && matches!(entry.shape.len(), 2 | 3) && !entry.extent.is_empty()).then_some(row_elements)
}

/// False for biases of fused experts, which have two dimensions too, and for routers of experts:
/// they are small, and an error in a routing decision spreads to everything behind it.
fn is_weight(name: &str) -> bool {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let last = module.rsplit('.').next().unwrap_or(module);
    let is_of_router = module.split('.').any(|component| component.ends_with("router"));
    !last.ends_with("bias") && !matches!(last, "gate" | "shared_expert_gate") && !is_of_router
}

/// Number of the first row of a piece of whole rows.
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
