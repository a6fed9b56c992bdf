//! Bytes of a tensor as it is stored, as it is narrowed on loading, or as it would be in another precision.
//!
//! Other precisions are arithmetic on shapes: what nobody has quantized yet has no bytes to measure.

use std::fmt;

use crate::checkpoint::{DType, TensorEntry};
use crate::plan::{Cast, FloatType};

/// Elements that share a scale in int4.
const INT4_GROUP: u64 = 128;

/// In which form the weights are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Weights {
    /// As the files have them.
    #[default]
    AsStored,
    /// Wider floats narrowed, as [`LoaderBuilder::dtype`](crate::load::LoaderBuilder::dtype) does.
    Narrowed(FloatType),
    /// As they would be in another precision.
    Derived(Precision),
}

/// A precision that weights could have. What is counted:
///
/// | precision | matrices of the layers | all other floats |
/// |---|---|---|
/// | bf16 | 2 bytes an element | 2 bytes, or as stored if narrower |
/// | fp8 | 1 byte, one f32 scale for a tensor | as for bf16 |
/// | int8 | 1 byte, one f32 scale for each row (output channel) | as for bf16 |
/// | int4 | half a byte, one f16 scale for each group of 128 of a row | as for bf16 |
///
/// *Matrices of the layers* are floats of two or more dimensions in an element of a stack. Embedding, head and norms keep 16
/// bits. Integers are as stored: they are quantized already, or no weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// bfloat16.
    Bf16,
    /// fp8 (e4m3), one scale for a tensor.
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
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Weights {
    /// Bytes of a tensor. `in_stack` tells whether it belongs to an element of a stack.
    pub(super) fn bytes(self, tensor: &TensorEntry<'_>, in_stack: bool) -> u64 {
        let stored_bytes = tensor.extent.len_bytes();
        match self {
            Self::AsStored => stored_bytes,
            Self::Narrowed(float) => narrowed(tensor, float),
            Self::Derived(precision) => match float_bits(tensor.dtype) {
                None => stored_bytes,
                Some(bits) if in_stack && tensor.shape.len() >= 2 => quantized(tensor, bits, precision),
                Some(bits) => elements(tensor).saturating_mul(bits.min(16)).div_ceil(8),
            },
        }
    }
}

/// What arrives if wider floats are narrowed.
fn narrowed(tensor: &TensorEntry<'_>, float: FloatType) -> u64 {
    let is_wider = matches!(tensor.dtype, DType::F32 | DType::F64)
        && tensor.dtype.bits().is_some_and(|bits| bits > float.bytes() * 8);
    match Cast::between(tensor.dtype, float) {
        Some(_) if is_wider => elements(tensor).saturating_mul(float.bytes()),
        _ => tensor.extent.len_bytes(),
    }
}

fn quantized(tensor: &TensorEntry<'_>, bits: u64, precision: Precision) -> u64 {
    let count = elements(tensor);
    let columns = tensor.shape.last().copied().unwrap_or(1);
    let rows = count.checked_div(columns).unwrap_or(0);
    match precision {
        Precision::Bf16 => count.saturating_mul(2),
        // It is that already; its scales are tensors of their own.
        Precision::Fp8 if bits <= 8 => tensor.extent.len_bytes(),
        Precision::Fp8 => count.saturating_add(4),
        Precision::Int8 => count.saturating_add(rows.saturating_mul(4)),
        Precision::Int4 => {
            let of_row = columns.div_ceil(2).saturating_add(columns.div_ceil(INT4_GROUP).saturating_mul(2));
            rows.saturating_mul(of_row)
        }
    }
}

fn elements(tensor: &TensorEntry<'_>) -> u64 {
    tensor.shape.iter().fold(1, |product, length| product.saturating_mul(*length))
}

/// Bits of an element if it is a float that a weight may have.
const fn float_bits(dtype: DType) -> Option<u64> {
    match dtype {
        DType::F16 | DType::Bf16 | DType::F32 | DType::F64 => dtype.bits(),
        DType::F8E4M3 | DType::F8E5M2 | DType::F8E4M3Fnuz | DType::F8E5M2Fnuz => dtype.bits(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{ShardId, TensorId};
    use crate::units::ByteRange;

    fn bytes(dtype: DType, shape: &[u64], in_stack: bool, weights: Weights) -> u64 {
        let stored = shape.iter().product::<u64>() * dtype.bits().unwrap() / 8;
        let extent = ByteRange::with_len(0, stored).unwrap();
        let (id, shard) = (TensorId(0), ShardId(0));
        let tensor = TensorEntry { id, name: "t", dtype, dtype_name: dtype.name(), shape, shard, extent };
        weights.bytes(&tensor, in_stack)
    }

    #[test]
    fn precisions_are_counted_as_they_are_told() {
        let of = |precision, in_stack| bytes(DType::F32, &[3, 256], in_stack, Weights::Derived(precision));
        assert_eq!(of(Precision::Bf16, true), 1536);
        assert_eq!(of(Precision::Fp8, true), 768 + 4);
        assert_eq!(of(Precision::Int8, true), 768 + 3 * 4);
        assert_eq!(of(Precision::Int4, true), 384 + 3 * 2 * 2);
        // Outside the stacks, and vectors: 16 bits.
        assert!(Precision::ALL.into_iter().all(|precision| of(precision, false) == 1536));
        assert_eq!(bytes(DType::Bf16, &[100], true, Weights::Derived(Precision::Int4)), 200);
        // Odd rows take a whole byte more, a part of a group a whole scale.
        assert_eq!(bytes(DType::Bf16, &[2, 129], true, Weights::Derived(Precision::Int4)), 2 * (65 + 4));
        let fp8 = |precision| bytes(DType::F8E4M3, &[8, 8], true, Weights::Derived(precision));
        assert_eq!((fp8(Precision::Bf16), fp8(Precision::Fp8), fp8(Precision::Int8)), (128, 64, 64 + 32));
        assert_eq!(bytes(DType::I32, &[8, 8], true, Weights::Derived(Precision::Bf16)), 256);
        assert_eq!(bytes(DType::F16, &[0, 8], true, Weights::Derived(Precision::Int8)), 0);
        assert_eq!(bytes(DType::F16, &[8, 0], true, Weights::Derived(Precision::Int4)), 0);
    }

    #[test]
    fn narrowing_leaves_what_is_narrow() {
        let of = |dtype, float| bytes(dtype, &[10, 10], true, Weights::Narrowed(float));
        assert_eq!(of(DType::F32, FloatType::Bf16), 200);
        assert_eq!(of(DType::F32, FloatType::F32), 400);
        assert_eq!(of(DType::F64, FloatType::F32), 400);
        assert_eq!(of(DType::F16, FloatType::Bf16), 200);
        assert_eq!(of(DType::I32, FloatType::Bf16), 400);
    }
}
