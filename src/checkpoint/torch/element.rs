//! The element types of torch, and the classes of storages named after them.

use super::super::DType;

/// An element type of torch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Element(u8);

struct Row {
    name: &'static str,
    /// Its class of storages, for the types that have one.
    storage: &'static str,
    bytes: u64,
    dtype: Option<DType>,
}

const fn row(name: &'static str, storage: &'static str, bytes: u64, dtype: Option<DType>) -> Row {
    Row { name, storage, bytes, dtype }
}

/// The types of torch 2.15.
const ROWS: [Row; 33] = [
    row("uint8", "ByteStorage", 1, Some(DType::U8)),
    row("float64", "DoubleStorage", 8, Some(DType::F64)),
    row("float32", "FloatStorage", 4, Some(DType::F32)),
    row("float16", "HalfStorage", 2, Some(DType::F16)),
    row("bfloat16", "BFloat16Storage", 2, Some(DType::Bf16)),
    row("int64", "LongStorage", 8, Some(DType::I64)),
    row("int32", "IntStorage", 4, Some(DType::I32)),
    row("int16", "ShortStorage", 2, Some(DType::I16)),
    row("int8", "CharStorage", 1, Some(DType::I8)),
    row("bool", "BoolStorage", 1, Some(DType::Bool)),
    row("complex64", "ComplexFloatStorage", 8, Some(DType::C64)),
    row("complex128", "ComplexDoubleStorage", 16, None),
    row("qint8", "QInt8Storage", 1, None),
    row("qint32", "QInt32Storage", 4, None),
    row("quint8", "QUInt8Storage", 1, None),
    row("quint4x2", "QUInt4x2Storage", 1, None),
    row("quint2x4", "QUInt2x4Storage", 1, None),
    row("uint16", "", 2, Some(DType::U16)),
    row("uint32", "", 4, Some(DType::U32)),
    row("uint64", "", 8, Some(DType::U64)),
    row("float8_e5m2", "", 1, Some(DType::F8E5M2)),
    row("float8_e4m3fn", "", 1, Some(DType::F8E4M3)),
    row("float8_e5m2fnuz", "", 1, Some(DType::F8E5M2Fnuz)),
    row("float8_e4m3fnuz", "", 1, Some(DType::F8E4M3Fnuz)),
    row("float8_e8m0fnu", "", 1, Some(DType::F8E8M0)),
    row("float4_e2m1fn_x2", "", 1, Some(DType::F4)),
    row("complex32", "", 4, None),
    row("bcomplex32", "", 4, None),
    row("bits8", "", 1, None),
    row("bits16", "", 2, None),
    row("bits1x8", "", 1, None),
    row("bits2x4", "", 1, None),
    row("bits4x2", "", 1, None),
];

impl Element {
    /// Bytes without a type.
    pub(super) const BYTE: Self = Self(0);

    fn row(self) -> &'static Row {
        &ROWS[usize::from(self.0)]
    }

    fn found(is: impl Fn(&Row) -> bool) -> Option<Self> {
        let position = ROWS.iter().position(is)?;
        u8::try_from(position).ok().map(Self)
    }

    /// The type that `torch.NAME` is.
    pub(super) fn of_dtype(name: &str) -> Option<Self> {
        Self::found(|row| row.name == name)
    }

    /// The type of the elements in a storage of this class.
    pub(super) fn of_storage(class: &str) -> Option<Self> {
        match class {
            "" => None,
            "UntypedStorage" | "_UntypedStorage" => Some(Self::BYTE),
            class => Self::found(|row| row.storage == class),
        }
    }

    /// Its name in torch.
    pub(super) fn name(self) -> &'static str {
        self.row().name
    }

    /// Bytes of one element.
    pub(super) fn bytes(self) -> u64 {
        self.row().bytes
    }

    /// Our name for it, if it has one.
    pub(super) fn dtype(self) -> Option<DType> {
        self.row().dtype
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_of_ours_that_torch_has_is_there_once() {
        let dtypes: Vec<DType> = ROWS.iter().filter_map(|row| row.dtype).collect();
        for dtype in DType::ALL {
            let times = dtypes.iter().filter(|other| **other == dtype).count();
            // torch has no type of 6 bits.
            let expected = usize::from(!matches!(dtype, DType::F6E2M3 | DType::F6E3M2));
            assert_eq!(times, expected, "{dtype}");
        }
        for row in ROWS.iter().filter(|row| row.dtype != Some(DType::F4)) {
            let bits = row.dtype.and_then(DType::bits).unwrap_or(row.bytes * 8);
            assert_eq!(bits, row.bytes * 8, "{}", row.name);
        }
    }

    #[test]
    fn types_are_found_by_both_names() {
        let named = |element: Option<Element>| element.map(Element::name);
        assert_eq!(named(Element::of_dtype("bfloat16")), Some("bfloat16"));
        assert_eq!(named(Element::of_storage("BFloat16Storage")), Some("bfloat16"));
        assert_eq!(Element::of_storage("UntypedStorage"), Some(Element::BYTE));
        assert_eq!((Element::of_storage(""), Element::of_dtype("float")), (None, None));
    }
}
