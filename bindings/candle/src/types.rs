//! Maps element types of checkpoints to types of candle.

use candle_core::DType;

/// How candle stores elements of a file type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// Unchanged.
    AsIs(DType),
    /// Unsigned 16-bit integers, which candle lacks, as 32-bit ones.
    WidenedU16,
    /// Unchanged, but only as whole tensors: types without arithmetic.
    Opaque(DType),
}

impl Taken {
    /// How candle stores that type; `None` if unsupported. Same as its loader, see
    /// `candle_core::safetensors`.
    pub(crate) fn of(stored: onelayer::DType) -> Option<Self> {
        use onelayer::DType as Stored;
        Some(match stored {
            Stored::U8 => Self::AsIs(DType::U8),
            Stored::U16 => Self::WidenedU16,
            Stored::U32 => Self::AsIs(DType::U32),
            Stored::I16 => Self::AsIs(DType::I16),
            Stored::I32 => Self::AsIs(DType::I32),
            Stored::I64 => Self::AsIs(DType::I64),
            Stored::Bf16 => Self::AsIs(DType::BF16),
            Stored::F16 => Self::AsIs(DType::F16),
            Stored::F32 => Self::AsIs(DType::F32),
            Stored::F64 => Self::AsIs(DType::F64),
            Stored::F8E4M3 => Self::AsIs(DType::F8E4M3),
            Stored::F6E2M3 => Self::Opaque(DType::F6E2M3),
            Stored::F6E3M2 => Self::Opaque(DType::F6E3M2),
            Stored::F4 => Self::Opaque(DType::F4),
            Stored::F8E8M0 => Self::Opaque(DType::F8E8M0),
            _ => return None,
        })
    }

    /// The element type in candle.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::AsIs(dtype) | Self::Opaque(dtype) => dtype,
            Self::WidenedU16 => DType::U32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Candle's reader is the oracle: exactly the same types are accepted, as the same candle
    /// types.
    #[test]
    fn candle_reads_the_same_types() {
        for stored in onelayer::DType::ALL {
            let bits = usize::try_from(stored.bits().unwrap()).unwrap();
            let count = 8;
            let header = format!(
                r#"{{"t":{{"dtype":"{stored}","shape":[{count}],"data_offsets":[0,{}]}}}}"#,
                count * bits / 8
            );
            let mut file = u64::try_from(header.len()).unwrap().to_le_bytes().to_vec();
            file.extend(header.as_bytes());
            file.resize(file.len() + count * bits / 8, 0);
            let loaded = candle_core::safetensors::load_buffer(&file, &candle_core::Device::Cpu);
            let expected = loaded.ok().map(|tensors| tensors["t"].dtype());
            assert_eq!(Taken::of(stored).map(Taken::dtype), expected, "{stored}");
        }
        assert_eq!(Taken::of(onelayer::DType::Opaque), None);
    }
}
