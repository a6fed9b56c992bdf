//! The block types of GGUF files: elements per block, and bytes per block.
//!
//! A block is a run of elements of one row that share their scales. Sizes are those of gguf-py 0.19
//! (`GGML_QUANT_SIZES`). docs/gguf.md says how each type is turned into floats.

use std::fmt;

/// A block type, named as ggml names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
#[allow(non_camel_case_types, missing_docs, reason = "the names of the format; each says its bits")]
pub enum BlockType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    IQ1_M,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
}

/// What is known of a type.
struct Facts {
    name: &'static str,
    elements: u64,
    bytes: u64,
}

impl BlockType {
    /// Every block type.
    pub const ALL: [Self; 26] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q8_1,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::Q8_K,
        Self::IQ2_XXS,
        Self::IQ2_XS,
        Self::IQ3_XXS,
        Self::IQ1_S,
        Self::IQ4_NL,
        Self::IQ3_S,
        Self::IQ2_S,
        Self::IQ4_XS,
        Self::IQ1_M,
        Self::TQ1_0,
        Self::TQ2_0,
        Self::MXFP4,
        Self::NVFP4,
        Self::Q1_0,
    ];

    /// The longest block, in bytes.
    pub(crate) const BYTES_MAX: usize = 292;

    const fn facts(self) -> Facts {
        let (name, elements, bytes) = match self {
            Self::Q4_0 => ("Q4_0", 32, 18),
            Self::Q4_1 => ("Q4_1", 32, 20),
            Self::Q5_0 => ("Q5_0", 32, 22),
            Self::Q5_1 => ("Q5_1", 32, 24),
            Self::Q8_0 => ("Q8_0", 32, 34),
            Self::Q8_1 => ("Q8_1", 32, 40),
            Self::Q2_K => ("Q2_K", 256, 84),
            Self::Q3_K => ("Q3_K", 256, 110),
            Self::Q4_K => ("Q4_K", 256, 144),
            Self::Q5_K => ("Q5_K", 256, 176),
            Self::Q6_K => ("Q6_K", 256, 210),
            Self::Q8_K => ("Q8_K", 256, 292),
            Self::IQ2_XXS => ("IQ2_XXS", 256, 66),
            Self::IQ2_XS => ("IQ2_XS", 256, 74),
            Self::IQ3_XXS => ("IQ3_XXS", 256, 98),
            Self::IQ1_S => ("IQ1_S", 256, 50),
            Self::IQ4_NL => ("IQ4_NL", 32, 18),
            Self::IQ3_S => ("IQ3_S", 256, 110),
            Self::IQ2_S => ("IQ2_S", 256, 82),
            Self::IQ4_XS => ("IQ4_XS", 256, 136),
            Self::IQ1_M => ("IQ1_M", 256, 56),
            Self::TQ1_0 => ("TQ1_0", 256, 54),
            Self::TQ2_0 => ("TQ2_0", 256, 66),
            Self::MXFP4 => ("MXFP4", 32, 17),
            Self::NVFP4 => ("NVFP4", 64, 36),
            Self::Q1_0 => ("Q1_0", 128, 18),
        };
        Facts { name, elements, bytes }
    }

    /// Its name, as ggml spells it: `Q4_K`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// Elements of a block. Blocks lie along the last dimension.
    #[must_use]
    pub const fn elements(self) -> u64 {
        self.facts().elements
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.facts().bytes
    }

    /// True if the type can be turned into floats. Programs disagree about `Q8_1`: ggml stores its
    /// scale and sum in 16 bits each, gguf-py counts 32. It is not found in files.
    #[must_use]
    pub const fn is_decoded(self) -> bool {
        !matches!(self, Self::Q8_1)
    }

    /// The shape of a tensor as bytes: the last dimension counts bytes instead of elements.
    #[must_use]
    pub fn byte_shape(self, shape: &[u64]) -> Vec<u64> {
        let mut bytes = shape.to_vec();
        if let Some(columns) = bytes.last_mut() {
            *columns = *columns / self.elements() * self.bytes();
        }
        bytes
    }

    /// Bytes of a tensor of this shape; `None` if its last dimension is not whole blocks, or on
    /// overflow.
    pub(crate) fn tensor_bytes(self, shape: &[u64]) -> Option<u64> {
        let (&columns, rows) = shape.split_last()?;
        if !columns.is_multiple_of(self.elements()) {
            return None;
        }
        // Bits, as for other types, so that no size overflows later.
        let blocks = columns / self.elements();
        let mut nonzero = rows.iter().chain([&blocks]).filter(|&&dim| dim != 0);
        let bits = nonzero.try_fold(self.bytes() * 8, |product, &dim| product.checked_mul(dim))?;
        Some(if shape.contains(&0) { 0 } else { bits / 8 })
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_tensors_count_blocks() {
        assert_eq!(BlockType::Q4_K.tensor_bytes(&[3, 512]), Some(3 * 2 * 144));
        assert_eq!(BlockType::Q4_K.tensor_bytes(&[3, 511]), None);
        assert_eq!(BlockType::Q4_K.byte_shape(&[3, 512]), [3, 288]);
        assert_eq!(BlockType::Q4_0.tensor_bytes(&[]), None);
        assert_eq!(BlockType::Q4_0.tensor_bytes(&[0, 32]), Some(0));
        assert_eq!(BlockType::Q4_0.tensor_bytes(&[32, 0]), Some(0));
        assert_eq!(BlockType::Q8_0.tensor_bytes(&[1 << 40, 1 << 40]), None);
        let longest = BlockType::ALL.into_iter().map(BlockType::bytes).max();
        assert_eq!(longest, u64::try_from(BlockType::BYTES_MAX).ok());
    }
}
