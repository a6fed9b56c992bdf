//! The numbers of tensor types in the format.

use crate::checkpoint::{BlockType, DType};

/// A type of tensors, by its number.
pub(super) enum TensorType {
    Known(DType),
    /// Its name, and what to do instead.
    Refused(&'static str, &'static str),
    Unknown,
}

/// The type of that number.
pub(super) fn tensor_type(number: u32) -> TensorType {
    const REQUANTISE: &str = "ggml removed this type: quantise the original again";
    const TWO_LAYOUTS: &str = "programs disagree about the length of its blocks: quantise to another type";
    let block = match number {
        0 => return TensorType::Known(DType::F32),
        1 => return TensorType::Known(DType::F16),
        24 => return TensorType::Known(DType::I8),
        25 => return TensorType::Known(DType::I16),
        26 => return TensorType::Known(DType::I32),
        27 => return TensorType::Known(DType::I64),
        28 => return TensorType::Known(DType::F64),
        30 => return TensorType::Known(DType::Bf16),
        2 => BlockType::Q4_0,
        3 => BlockType::Q4_1,
        4 => return TensorType::Refused("Q4_2", REQUANTISE),
        5 => return TensorType::Refused("Q4_3", REQUANTISE),
        6 => BlockType::Q5_0,
        7 => BlockType::Q5_1,
        8 => BlockType::Q8_0,
        9 => BlockType::Q8_1,
        10 => BlockType::Q2_K,
        11 => BlockType::Q3_K,
        12 => BlockType::Q4_K,
        13 => BlockType::Q5_K,
        14 => BlockType::Q6_K,
        15 => BlockType::Q8_K,
        16 => BlockType::IQ2_XXS,
        17 => BlockType::IQ2_XS,
        18 => BlockType::IQ3_XXS,
        19 => BlockType::IQ1_S,
        20 => BlockType::IQ4_NL,
        21 => BlockType::IQ3_S,
        22 => BlockType::IQ2_S,
        23 => BlockType::IQ4_XS,
        29 => BlockType::IQ1_M,
        31 => return TensorType::Refused("Q4_0_4_4", REQUANTISE),
        32 => return TensorType::Refused("Q4_0_4_8", REQUANTISE),
        33 => return TensorType::Refused("Q4_0_8_8", REQUANTISE),
        34 => BlockType::TQ1_0,
        35 => BlockType::TQ2_0,
        36 => return TensorType::Refused("IQ4_NL_4_4", REQUANTISE),
        37 => return TensorType::Refused("IQ4_NL_4_8", REQUANTISE),
        38 => return TensorType::Refused("IQ4_NL_8_8", REQUANTISE),
        39 => BlockType::MXFP4,
        40 => BlockType::NVFP4,
        41 => BlockType::Q1_0,
        42 => return TensorType::Refused("Q2_0", TWO_LAYOUTS),
        _ => return TensorType::Unknown,
    };
    TensorType::Known(DType::Block(block))
}
