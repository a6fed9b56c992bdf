//! Converts element types, shapes and devices to DLPack. Nothing here accesses tensor memory.

use onelayer::{DType, Target};

use crate::abi::{DEVICE_CPU, DEVICE_CUDA, DLDataType, DLDevice};
use crate::error::ExportError;

/// Values of `DLDataTypeCode`.
mod code {
    pub(super) const INT: u8 = 0;
    pub(super) const UINT: u8 = 1;
    pub(super) const FLOAT: u8 = 2;
    pub(super) const BFLOAT: u8 = 4;
    pub(super) const COMPLEX: u8 = 5;
    pub(super) const BOOL: u8 = 6;
    pub(super) const FLOAT8_E4M3FN: u8 = 10;
    pub(super) const FLOAT8_E4M3FNUZ: u8 = 11;
    pub(super) const FLOAT8_E5M2: u8 = 12;
    pub(super) const FLOAT8_E5M2FNUZ: u8 = 13;
    pub(super) const FLOAT8_E8M0FNU: u8 = 14;
    pub(super) const FLOAT6_E2M3FN: u8 = 15;
    pub(super) const FLOAT6_E3M2FN: u8 = 16;
    pub(super) const FLOAT4_E2M1FN: u8 = 17;
}

/// The element type; `None` for types unknown to this version. Two 4-bit floats are one element of
/// two lanes, as in PyTorch (`float4_e2m1fn_x2`); 6-bit floats are packed; blocks of GGUF files are
/// bytes.
#[must_use]
pub fn data_type(dtype: DType) -> Option<DLDataType> {
    let (code, bits, lanes) = match dtype {
        DType::Bool => (code::BOOL, 8, 1),
        DType::F4 => (code::FLOAT4_E2M1FN, 4, 2),
        DType::F6E2M3 => (code::FLOAT6_E2M3FN, 6, 1),
        DType::F6E3M2 => (code::FLOAT6_E3M2FN, 6, 1),
        DType::U8 | DType::Block(_) => (code::UINT, 8, 1),
        DType::I8 => (code::INT, 8, 1),
        DType::F8E5M2 => (code::FLOAT8_E5M2, 8, 1),
        DType::F8E4M3 => (code::FLOAT8_E4M3FN, 8, 1),
        DType::F8E8M0 => (code::FLOAT8_E8M0FNU, 8, 1),
        DType::F8E4M3Fnuz => (code::FLOAT8_E4M3FNUZ, 8, 1),
        DType::F8E5M2Fnuz => (code::FLOAT8_E5M2FNUZ, 8, 1),
        DType::I16 => (code::INT, 16, 1),
        DType::U16 => (code::UINT, 16, 1),
        DType::F16 => (code::FLOAT, 16, 1),
        DType::Bf16 => (code::BFLOAT, 16, 1),
        DType::I32 => (code::INT, 32, 1),
        DType::U32 => (code::UINT, 32, 1),
        DType::F32 => (code::FLOAT, 32, 1),
        DType::C64 => (code::COMPLEX, 64, 1),
        DType::F64 => (code::FLOAT, 64, 1),
        DType::I64 => (code::INT, 64, 1),
        DType::U64 => (code::UINT, 64, 1),
        // Opaque types, and types of later versions of the library.
        _ => return None,
    };
    Some(DLDataType { code, bits, lanes })
}

/// The device; `None` for [`Target::None`], which keeps nothing, and for unknown targets.
#[must_use]
pub fn device(target: Target) -> Option<DLDevice> {
    match target {
        Target::Host => Some(DLDevice { device_type: DEVICE_CPU, device_id: 0 }),
        Target::Cuda(ordinal) => {
            let device_id = i32::try_from(ordinal).ok()?;
            Some(DLDevice { device_type: DEVICE_CUDA, device_id })
        }
        _ => None,
    }
}

/// The shape in elements of [`data_type`]: the shape in the checkpoint, with the innermost
/// dimension halved for 4-bit floats and in bytes for blocks. `name` is for messages.
///
/// # Errors
/// [`ExportError::HalfElement`] if the innermost dimension has an odd number of 4-bit floats, or if
/// there is no dimension; [`ExportError::TooLarge`] if a length exceeds `i64`.
pub fn shape(name: &str, dtype: DType, shape: &[u64]) -> Result<Vec<i64>, ExportError> {
    let bytes;
    let shape = match dtype {
        DType::Block(block) => {
            bytes = block.byte_shape(shape);
            &bytes[..]
        }
        _ => shape,
    };
    let too_large = || ExportError::TooLarge { tensor: name.to_owned(), shape: shape.to_vec() };
    let mut dimensions = shape
        .iter()
        .map(|&dimension| i64::try_from(dimension).map_err(|_| too_large()))
        .collect::<Result<Vec<i64>, ExportError>>()?;
    if dtype == DType::F4 {
        let innermost = dimensions.last_mut().filter(|innermost| **innermost % 2 == 0);
        let Some(innermost) = innermost else {
            return Err(ExportError::HalfElement { tensor: name.to_owned(), shape: shape.to_vec() });
        };
        *innermost /= 2;
    }
    Ok(dimensions)
}

/// The strides of a row-major tensor, in elements; `None` if one exceeds `i64`.
pub(crate) fn strides(shape: &[i64]) -> Option<Vec<i64>> {
    let mut strides = vec![1_i64; shape.len()];
    for dimension in (1..shape.len()).rev() {
        // An empty dimension would make strides of zero, which would mean that rows share memory.
        strides[dimension - 1] = strides[dimension].checked_mul(shape[dimension].max(1))?;
    }
    Some(strides)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_element_has_the_bits_of_its_type() {
        for dtype in DType::ALL {
            let element = data_type(dtype).unwrap();
            let bits = u64::from(element.bits) * u64::from(element.lanes);
            let values = if dtype == DType::F4 { 2 } else { 1 };
            assert_eq!(Some(bits), dtype.bits().map(|bits| bits * values), "{dtype}");
        }
        assert_eq!(data_type(DType::Opaque), None);
        let block = DType::Block(onelayer::checkpoint::BlockType::Q4_K);
        assert_eq!(data_type(block), data_type(DType::U8));
        assert_eq!(shape("w", block, &[3, 512]).unwrap(), [3, 288]);
    }

    #[test]
    fn no_two_types_are_the_same_element() {
        for (place, dtype) in DType::ALL.into_iter().enumerate() {
            for other in &DType::ALL[..place] {
                assert_ne!(data_type(dtype), data_type(*other), "{dtype}, {other}");
            }
        }
    }

    #[test]
    fn codes_are_those_of_the_header() {
        let of = |dtype| data_type(dtype).map(|element| (element.code, element.bits, element.lanes));
        assert_eq!(of(DType::I32), Some((0, 32, 1)));
        assert_eq!(of(DType::U8), Some((1, 8, 1)));
        assert_eq!(of(DType::F16), Some((2, 16, 1)));
        assert_eq!(of(DType::Bf16), Some((4, 16, 1)));
        assert_eq!(of(DType::C64), Some((5, 64, 1)));
        assert_eq!(of(DType::Bool), Some((6, 8, 1)));
        assert_eq!(of(DType::F8E4M3), Some((10, 8, 1)));
        assert_eq!(of(DType::F8E4M3Fnuz), Some((11, 8, 1)));
        assert_eq!(of(DType::F8E5M2), Some((12, 8, 1)));
        assert_eq!(of(DType::F8E5M2Fnuz), Some((13, 8, 1)));
        assert_eq!(of(DType::F8E8M0), Some((14, 8, 1)));
        assert_eq!(of(DType::F6E2M3), Some((15, 6, 1)));
        assert_eq!(of(DType::F6E3M2), Some((16, 6, 1)));
        assert_eq!(of(DType::F4), Some((17, 4, 2)));
    }

    #[test]
    fn four_bit_floats_count_in_pairs() {
        assert_eq!(shape("w", DType::F4, &[3, 8]).unwrap(), [3, 4]);
        for odd in [&[3, 7][..], &[]] {
            let refused = shape("w", DType::F4, odd).unwrap_err();
            assert!(matches!(refused, ExportError::HalfElement { .. }), "{refused}");
        }
    }

    #[test]
    fn what_cannot_be_counted_is_refused() {
        let refused = shape("w", DType::U8, &[0, 1 << 63]).unwrap_err().to_string();
        assert!(refused.contains("\"w\"") && refused.contains("9223372036854775808"), "{refused}");
        assert_eq!(strides(&[0, 1 << 62, 4]), None);
    }

    #[test]
    fn strides_are_those_of_rows() {
        assert_eq!(strides(&[]), Some(vec![]));
        assert_eq!(strides(&[5]), Some(vec![1]));
        assert_eq!(strides(&[2, 3, 4]), Some(vec![12, 4, 1]));
        assert_eq!(strides(&[2, 0, 4]), Some(vec![4, 4, 1]), "never zero");
    }

    #[test]
    fn devices_are_those_of_the_header() {
        assert_eq!(device(Target::Host), Some(DLDevice { device_type: 1, device_id: 0 }));
        assert_eq!(device(Target::Cuda(3)), Some(DLDevice { device_type: 2, device_id: 3 }));
        assert_eq!(device(Target::Cuda(u32::MAX)), None);
        assert_eq!(device(Target::None), None);
    }
}
