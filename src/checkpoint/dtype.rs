//! Element types, with their sizes in bits.
//!
//! The list is that of safetensors 0.8, and the block types of GGUF. Nothing here reads or converts
//! elements.

use std::fmt;
use std::str::FromStr;

use onelayer_system::FloatType;

use super::BlockType;

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// Boolean, one byte each.
    Bool,
    /// 4-bit float E2M1 of the OCP microscaling formats, two in a byte.
    F4,
    /// 6-bit float E2M3 of the OCP microscaling formats.
    F6E2M3,
    /// 6-bit float E3M2 of the OCP microscaling formats.
    F6E3M2,
    /// Unsigned byte.
    U8,
    /// Signed byte.
    I8,
    /// 8-bit float, 5 bits of exponent.
    F8E5M2,
    /// 8-bit float, 4 bits of exponent.
    F8E4M3,
    /// 8-bit power of two: the scale of the OCP microscaling formats.
    F8E8M0,
    /// 8-bit float, 4 bits of exponent, finite, one zero, its own bias.
    F8E4M3Fnuz,
    /// 8-bit float, 5 bits of exponent, finite, one zero, its own bias.
    F8E5M2Fnuz,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 16-bit integer.
    U16,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 32-bit integer.
    U32,
    /// IEEE single precision.
    F32,
    /// Complex number of two single-precision floats.
    C64,
    /// IEEE double precision.
    F64,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 64-bit integer.
    U64,
    /// Blocks of elements that share scales, in GGUF files.
    Block(BlockType),
    /// A type that this version does not know. Its bytes pass through unchanged.
    Opaque,
}

impl DType {
    /// Every type of safetensors. Block types ([`BlockType::ALL`]) and [`DType::Opaque`] are not
    /// among them.
    pub const ALL: [Self; 22] = [
        Self::Bool,
        Self::F4,
        Self::F6E2M3,
        Self::F6E3M2,
        Self::U8,
        Self::I8,
        Self::F8E5M2,
        Self::F8E4M3,
        Self::F8E8M0,
        Self::F8E4M3Fnuz,
        Self::F8E5M2Fnuz,
        Self::I16,
        Self::U16,
        Self::F16,
        Self::Bf16,
        Self::I32,
        Self::U32,
        Self::F32,
        Self::C64,
        Self::F64,
        Self::I64,
        Self::U64,
    ];

    /// Bits of one element; `None` for blocks, whose elements have no bytes of their own, and for
    /// [`DType::Opaque`], whose size is not known.
    #[must_use]
    pub const fn bits(self) -> Option<u64> {
        Some(match self {
            Self::F4 => 4,
            Self::F6E2M3 | Self::F6E3M2 => 6,
            Self::Bool
            | Self::U8
            | Self::I8
            | Self::F8E5M2
            | Self::F8E4M3
            | Self::F8E8M0
            | Self::F8E4M3Fnuz
            | Self::F8E5M2Fnuz => 8,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 16,
            Self::I32 | Self::U32 | Self::F32 => 32,
            Self::C64 | Self::F64 | Self::I64 | Self::U64 => 64,
            Self::Block(_) | Self::Opaque => return None,
        })
    }

    /// Bytes of a row-major tensor of this shape; `None` if the size of its elements is not known,
    /// if they do not fill the last byte or their last block, or on overflow.
    pub(crate) fn tensor_bytes(self, shape: &[u64]) -> Option<u64> {
        if let Self::Block(block) = self {
            return block.tensor_bytes(shape);
        }
        let bits = total_bits(shape, self.bits()?)?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }

    /// The name in headers, of blocks that in ggml; `opaque` for [`DType::Opaque`].
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::F4 => "F4",
            Self::F6E2M3 => "F6_E2M3",
            Self::F6E3M2 => "F6_E3M2",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E8M0 => "F8_E8M0",
            Self::F8E4M3Fnuz => "F8_E4M3FNUZ",
            Self::F8E5M2Fnuz => "F8_E5M2FNUZ",
            Self::I16 => "I16",
            Self::U16 => "U16",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::F32 => "F32",
            Self::C64 => "C64",
            Self::F64 => "F64",
            Self::I64 => "I64",
            Self::U64 => "U64",
            Self::Block(block) => block.name(),
            Self::Opaque => "opaque",
        }
    }
}

/// Bits of a tensor; `None` if the product of its non-zero dimensions, in bits, exceeds 64 bits.
/// Independent of the order of the dimensions. No framework can create a refused tensor.
pub(super) fn total_bits(shape: &[u64], element_bits: u64) -> Option<u64> {
    let mut nonzero = shape.iter().filter(|&&dim| dim != 0);
    let bits = nonzero.try_fold(element_bits, |product, &dim| product.checked_mul(dim))?;
    Some(if shape.contains(&0) { 0 } else { bits })
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

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The format has no dtype of this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown dtype `{found}`")]
#[non_exhaustive]
pub struct UnknownDType {
    /// The name, as given.
    pub found: String,
}

impl FromStr for DType {
    type Err = UnknownDType;

    /// The type of that name, blocks included. Names are case-sensitive, as in the formats.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let blocks = BlockType::ALL.into_iter().map(Self::Block);
        let known = Self::ALL.into_iter().chain(blocks).find(|dtype| dtype.name() == name);
        known.ok_or_else(|| UnknownDType { found: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes_are_those_of_the_reference() {
        for dtype in DType::ALL {
            let reference: safetensors::Dtype =
                serde_json::from_value(serde_json::Value::from(dtype.name())).unwrap();
            assert_eq!(u64::try_from(reference.bitsize()).ok(), dtype.bits(), "{dtype}");
            assert_eq!(dtype.name().parse(), Ok(dtype));
        }
    }

    #[test]
    fn other_spellings_are_unknown() {
        for name in ["", "f32", "F32 ", "opaque", "OPAQUE", "F8", "BFLOAT16"] {
            assert_eq!(name.parse::<DType>(), Err(UnknownDType { found: name.to_owned() }));
        }
        assert_eq!(DType::Opaque.bits(), None);
        let block = DType::Block(BlockType::Q4_K);
        assert_eq!((block.bits(), "Q4_K".parse()), (None, Ok(block)));
    }
}
