//! Bytes of a tensor as stored, as narrowed or quantised by a load, or in another precision.
//!
//! The rules of load plans decide what a load does to a tensor. Other precisions use the same
//! rules, and arithmetic on shapes.

use std::fmt;

use onelayer::checkpoint::{Checkpoint, DType, TensorEntry, TensorId};
use onelayer::layers::{LayerKind, Layers};
use onelayer::plan::{FloatType, Quantisation, QuantiseRule, narrowing_of};

/// The form in which weights are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Weights {
    /// As stored in the files.
    #[default]
    AsStored,
    /// Wider floats narrowed, as [`LoaderBuilder::dtype`](onelayer::load::LoaderBuilder::dtype)
    /// does.
    Narrowed(FloatType),
    /// Weights of layers quantised, as
    /// [`LoaderBuilder::quantise`](onelayer::load::LoaderBuilder::quantise) does. The other tensors
    /// are narrowed if `dtype` is set.
    Quantised {
        /// The format of quantised weights.
        to: Quantisation,
        /// The type of the other tensors.
        dtype: Option<FloatType>,
    },
    /// As they would be in a different precision.
    Derived(Precision),
}

/// A precision of weights. Counted bytes:
///
/// | precision | matrices of the layers | all other floats |
/// |---|---|---|
/// | bf16 | 2 bytes an element | 2 bytes, or as stored if narrower |
/// | fp8 | 1 byte, one f32 scale for each row (output channel) | as for bf16 |
/// | int8 | the same | as for bf16 |
/// | int4 | half a byte, one bf16 scale for each group of 128 of a row | as for bf16 |
///
/// *Matrices of the layers* are, for bf16, floats of two or more dimensions in an element of a
/// stack; for the others, what [`LoaderBuilder::quantise`](onelayer::load::LoaderBuilder::quantise)
/// takes for a weight: two or three dimensions, rows of 32 elements or more, no biases, and no
/// routers of experts. Embedding, head and norms keep 16 bits. Integers and floats below 8 bits
/// count as stored: they are quantised already, or not weights. So does fp8 for `fp8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// bfloat16.
    Bf16,
    /// fp8 (e4m3), one scale for an output channel.
    Fp8,
    /// int8, one scale for an output channel.
    Int8,
    /// int4, groups of 128.
    Int4,
}

impl Precision {
    /// All of them, widest first.
    pub const ALL: [Self; 4] = [Self::Bf16, Self::Fp8, Self::Int8, Self::Int4];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// The quantisation that a load would need.
    const fn quantisation(self) -> Option<Quantisation> {
        match self {
            Self::Bf16 => None,
            Self::Fp8 => Some(Quantisation::Fp8),
            Self::Int8 => Some(Quantisation::Int8),
            Self::Int4 => Some(Quantisation::Int4G128),
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Counts the bytes of the tensors of one checkpoint.
pub(super) struct Weighing<'a> {
    weights: Weights,
    checkpoint: &'a Checkpoint,
    layers: &'a Layers,
    rule: Option<QuantiseRule<'a>>,
}

impl<'a> Weighing<'a> {
    pub(super) fn new(weights: Weights, checkpoint: &'a Checkpoint, layers: &'a Layers) -> Self {
        let to = match weights {
            Weights::AsStored | Weights::Narrowed(_) => None,
            Weights::Quantised { to, .. } => Some(to),
            Weights::Derived(precision) => precision.quantisation(),
        };
        let rule = to.map(|to| QuantiseRule::new(checkpoint, layers, to, None));
        Self { weights, checkpoint, layers, rule }
    }

    /// Bytes of a tensor, with its scales.
    pub(super) fn bytes(&self, id: TensorId) -> u64 {
        let tensor = self.checkpoint.tensor(id);
        let stored_bytes = tensor.len_bytes();
        if let Some(form) = self.rule.as_ref().and_then(|rule| rule.of(id)) {
            return form.value_bytes(stored_bytes).saturating_add(form.scale_bytes(stored_bytes));
        }
        let dtype = match self.weights {
            Weights::AsStored => None,
            Weights::Narrowed(dtype) => Some(dtype),
            Weights::Quantised { dtype, .. } => dtype,
            Weights::Derived(precision) => return self.derived(&tensor, precision),
        };
        let cast = dtype.and_then(|dtype| narrowing_of(self.checkpoint, self.layers, id, dtype));
        cast.map_or(stored_bytes, |cast| cast.delivered_bytes(stored_bytes))
    }

    /// Bytes of a tensor that a load would not quantise to this precision.
    fn derived(&self, tensor: &TensorEntry<'_>, precision: Precision) -> u64 {
        let Some(bits) = float_bits(tensor.dtype) else { return tensor.len_bytes() };
        let is_member = || matches!(self.layers.layer_of(tensor.id).kind, LayerKind::Member { .. });
        let is_narrow_weight = |rule: &&QuantiseRule<'_>| bits <= 8 && rule.is_weight(tensor);
        match (precision, self.rule.as_ref().filter(is_narrow_weight)) {
            (Precision::Bf16, _) if tensor.shape.len() >= 2 && is_member() => {
                elements(tensor).saturating_mul(2)
            }
            // It is fp8 already, and its scales are separate tensors.
            (Precision::Fp8, Some(_)) => tensor.len_bytes(),
            (_, Some(rule)) => {
                let row_elements = tensor.shape.last().copied().unwrap_or(1);
                let rows = elements(tensor).checked_div(row_elements).unwrap_or(0);
                rows.saturating_mul(rule.to().row_bytes(row_elements))
            }
            _ => elements(tensor).saturating_mul(bits.min(16)).div_ceil(8),
        }
    }
}

fn elements(tensor: &TensorEntry<'_>) -> u64 {
    tensor.shape.iter().fold(1, |product, length| product.saturating_mul(*length))
}

/// Bits of an element if it is a float type of weights.
const fn float_bits(dtype: DType) -> Option<u64> {
    match dtype {
        DType::F16 | DType::Bf16 | DType::F32 | DType::F64 => dtype.bits(),
        DType::F8E4M3 | DType::F8E5M2 | DType::F8E4M3Fnuz | DType::F8E5M2Fnuz => dtype.bits(),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
