//! Which tensors a load delivers as a narrower float, and what that does to their size.
//!
//! Only plain floats that are wider than what is wanted: between `bf16` and `f16` neither is narrower, and integers,
//! 8-bit floats, packed types and whatever belongs to a quantized weight keep their bytes. The bytes themselves
//! are narrowed in the ring, right after they have been read.

use std::fmt;

use crate::checkpoint::{Checkpoint, DType, TensorId};
use crate::layers::Layers;

/// A float type that tensors can be narrowed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FloatType {
    /// bfloat16: 8 bits of exponent, 7 of mantissa.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl FloatType {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

impl From<FloatType> for DType {
    fn from(float: FloatType) -> Self {
        match float {
            FloatType::Bf16 => Self::Bf16,
            FloatType::F16 => Self::F16,
            FloatType::F32 => Self::F32,
        }
    }
}

impl fmt::Display for FloatType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        DType::from(*self).fmt(f)
    }
}

/// From which type to which. Exactly those pairs exist whose second type is narrower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Narrowing {
    /// Single precision to bfloat16.
    F32ToBf16,
    /// Single to half precision.
    F32ToF16,
    /// Double precision to bfloat16.
    F64ToBf16,
    /// Double to half precision.
    F64ToF16,
    /// Double to single precision.
    F64ToF32,
}

impl Narrowing {
    /// What makes a tensor of type `dtype` as narrow as `wanted`; `None` if it is as narrow already, or no plain float.
    #[must_use]
    pub const fn between(dtype: DType, wanted: FloatType) -> Option<Self> {
        match (dtype, wanted) {
            (DType::F32, FloatType::Bf16) => Some(Self::F32ToBf16),
            (DType::F32, FloatType::F16) => Some(Self::F32ToF16),
            (DType::F64, FloatType::Bf16) => Some(Self::F64ToBf16),
            (DType::F64, FloatType::F16) => Some(Self::F64ToF16),
            (DType::F64, FloatType::F32) => Some(Self::F64ToF32),
            _ => None,
        }
    }

    /// Bytes of one element in the file.
    #[must_use]
    pub const fn source_element_bytes(self) -> u64 {
        match self {
            Self::F32ToBf16 | Self::F32ToF16 => 4,
            Self::F64ToBf16 | Self::F64ToF16 | Self::F64ToF32 => 8,
        }
    }

    /// The type that is delivered.
    #[must_use]
    pub const fn to(self) -> FloatType {
        match self {
            Self::F32ToBf16 | Self::F64ToBf16 => FloatType::Bf16,
            Self::F32ToF16 | Self::F64ToF16 => FloatType::F16,
            Self::F64ToF32 => FloatType::F32,
        }
    }

    /// What whole elements of so many bytes are narrowed to, in bytes.
    #[must_use]
    pub const fn narrowed_bytes(self, source_bytes: u64) -> u64 {
        source_bytes / self.source_element_bytes() * self.to().bytes()
    }
}

/// How a tensor is narrowed, if it is. The scale of a quantized weight is not a plain float: what it is multiplied with has
/// lost its precision already.
pub(super) fn of(
    checkpoint: &Checkpoint,
    layers: &Layers,
    tensor: TensorId,
    wanted: FloatType,
) -> Option<Narrowing> {
    let narrowing = Narrowing::between(checkpoint.tensor(tensor).dtype, wanted)?;
    let companions = layers.companions();
    let weight = companions.binary_search_by_key(&tensor, |&(companion, _)| companion);
    let weight = weight.ok().map(|index| checkpoint.tensor(companions[index].1).dtype);
    weight.is_none_or(is_plain_float).then_some(narrowing)
}

const fn is_plain_float(dtype: DType) -> bool {
    matches!(dtype, DType::Bf16 | DType::F16 | DType::F32 | DType::F64)
}
