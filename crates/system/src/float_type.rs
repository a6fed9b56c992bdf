//! The float types that weights are generated in and cast to.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A float type of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FloatType {
    /// bfloat16: 8 bits of exponent, 7 of mantissa.
    Bf16,
    /// IEEE half precision: 5 bits of exponent, 10 of mantissa.
    F16,
    /// IEEE single precision.
    F32,
}

impl FloatType {
    /// Every float type.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::F32];

    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// The name used on the command line: `bf16`, `f16` or `f32`.
    #[must_use]
    pub const fn short_name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
        }
    }

    /// The name used in a model's `config.json`: `bfloat16`, `float16` or `float32`.
    #[must_use]
    pub const fn config_name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
            Self::F32 => "float32",
        }
    }

    /// The type with that short name or `config.json` name, in any case, with or without `torch.`
    /// in front.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let name = name.strip_prefix("torch.").unwrap_or(name).to_ascii_lowercase();
        Self::ALL.into_iter().find(|float| name == float.short_name() || name == float.config_name())
    }
}

/// The name that safetensors headers use: `BF16`, `F16` or `F32`.
impl fmt::Display for FloatType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_in_both_spellings() {
        for float in FloatType::ALL {
            assert_eq!(FloatType::parse(float.short_name()), Some(float));
            assert_eq!(FloatType::parse(&format!("torch.{}", float.config_name())), Some(float));
        }
        assert_eq!(FloatType::parse("BF16"), Some(FloatType::Bf16));
        assert_eq!(FloatType::parse("float64"), None);
    }
}
