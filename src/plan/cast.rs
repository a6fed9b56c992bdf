//! Casts of tensors: source type, target type, and the sizes.
//!
//! The bytes are cast in the ring, right after they were read. A *load* narrows plain floats that
//! are wider than the wanted type, and turns blocks of GGUF files into floats. Between `bf16` and
//! `f16` neither is narrower, and integers, 8-bit floats, packed types and the tensors of a
//! quantised weight keep their bytes. A conversion chooses any [`Cast`] for each tensor.
//!
//! A cast works on *units*: an element, or a block of elements.

use std::fmt;

use onelayer_system::FloatType;

use crate::checkpoint::{Checkpoint, DType, TensorId};
use crate::layers::Layers;

/// A source type and a different target type. Elements or blocks of the source take whole bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cast {
    source: DType,
    to: FloatType,
}

impl Cast {
    /// The cast from `source` to `to`. `None` if the types are equal, or if `source` has no agreed
    /// meaning as real numbers of whole bytes: booleans, complex numbers, packed floats, 8-bit
    /// floats ending on `FNUZ`, and blocks without an agreed layout (`Q8_1`) are not cast.
    #[must_use]
    pub const fn between(source: DType, to: FloatType) -> Option<Self> {
        let is_castable = match source {
            DType::Bf16 => !matches!(to, FloatType::Bf16),
            DType::F16 => !matches!(to, FloatType::F16),
            DType::F32 => !matches!(to, FloatType::F32),
            DType::F64 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => true,
            DType::I8 | DType::I16 | DType::I32 | DType::I64 => true,
            DType::U8 | DType::U16 | DType::U32 | DType::U64 => true,
            DType::Block(block) => block.is_decoded(),
            DType::Bool | DType::C64 | DType::F4 | DType::F6E2M3 | DType::F6E3M2 => false,
            DType::F8E4M3Fnuz | DType::F8E5M2Fnuz | DType::Opaque => false,
        };
        if is_castable { Some(Self { source, to }) } else { None }
    }

    /// The type in the file.
    #[must_use]
    pub const fn source(self) -> DType {
        self.source
    }

    /// The type that is delivered.
    #[must_use]
    pub const fn to(self) -> FloatType {
        self.to
    }

    /// Elements of a unit: more than one in a block.
    #[must_use]
    pub const fn unit_elements(self) -> u64 {
        match self.source {
            DType::Block(block) => block.elements(),
            _ => 1,
        }
    }

    /// Bytes of a unit in the file.
    #[must_use]
    pub const fn source_unit_bytes(self) -> u64 {
        match self.source {
            DType::Block(block) => block.bytes(),
            element => element.bits().expect("types of unknown size are not cast") / 8,
        }
    }

    /// Bytes of a unit after the cast.
    #[must_use]
    pub const fn target_unit_bytes(self) -> u64 {
        self.unit_elements() * self.to.bytes()
    }

    /// True if a unit takes fewer bytes afterwards.
    #[must_use]
    pub const fn is_narrowing(self) -> bool {
        self.target_unit_bytes() < self.source_unit_bytes()
    }

    /// True if a unit takes more bytes afterwards.
    #[must_use]
    pub const fn is_widening(self) -> bool {
        self.target_unit_bytes() > self.source_unit_bytes()
    }

    /// True if a finite number may become infinite: the range of `to` is smaller.
    #[must_use]
    pub const fn can_overflow(self) -> bool {
        match self.to {
            FloatType::F32 => matches!(self.source, DType::F64),
            FloatType::Bf16 => matches!(self.source, DType::F64 | DType::F32 | DType::Block(_)),
            FloatType::F16 => {
                !matches!(self.source, DType::F8E4M3 | DType::F8E5M2 | DType::I8 | DType::U8 | DType::I16)
            }
        }
    }

    /// Bytes of whole units after the cast.
    #[must_use]
    pub const fn delivered_bytes(self, source_bytes: u64) -> u64 {
        source_bytes / self.source_unit_bytes() * self.target_unit_bytes()
    }

    /// The same; `None` on overflow.
    pub(super) const fn checked_delivered_bytes(self, source_bytes: u64) -> Option<u64> {
        (source_bytes / self.source_unit_bytes()).checked_mul(self.target_unit_bytes())
    }
}

impl fmt::Display for Cast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.source, self.to)
    }
}

/// The cast of a tensor in a load with this `dtype`, if any: wider floats are narrowed, and blocks
/// become floats. Scales of quantised weights keep their type: their weights have lost precision
/// already.
#[must_use]
pub fn narrowing_of(
    checkpoint: &Checkpoint,
    layers: &Layers,
    tensor: TensorId,
    wanted: FloatType,
) -> Option<Cast> {
    let cast = Cast::between(checkpoint.tensor(tensor).dtype, wanted)?;
    let is_block = matches!(cast.source(), DType::Block(_));
    (is_block || cast.is_narrowing() && is_plain(checkpoint, layers, tensor)).then_some(cast)
}

/// True for floats of 16 bits and more that are not part of a quantised weight.
pub(crate) fn is_plain(checkpoint: &Checkpoint, layers: &Layers, tensor: TensorId) -> bool {
    let is_float = |id: TensorId| {
        matches!(checkpoint.tensor(id).dtype, DType::Bf16 | DType::F16 | DType::F32 | DType::F64)
    };
    let companions = layers.companions();
    let weight = companions.binary_search_by_key(&tensor, |&(companion, _)| companion);
    is_float(tensor) && weight.ok().is_none_or(|index| is_float(companions[index].1))
}
