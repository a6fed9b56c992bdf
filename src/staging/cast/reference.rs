//! Casts by the definition, for tests. Shares no code with the casts: a number is an integer times
//! a power of two, divided by the target's unit, and the remainder decides the rounding.

use crate::checkpoint::DType;
use crate::plan::{Cast, FloatType};

/// A number of any type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    /// The payload's top bit is bit 63.
    NaN(u64),
    Infinity,
    /// `whole * 2^power`.
    Finite(u64, i64),
}

/// Fields of a binary float.
#[derive(Clone, Copy)]
struct Format {
    mantissa_bits: u32,
    exponent_bits: u32,
}

impl Format {
    fn of(dtype: DType) -> Option<Self> {
        let (mantissa_bits, exponent_bits) = match dtype {
            DType::F64 => (52, 11),
            DType::F32 => (23, 8),
            DType::F16 => (10, 5),
            DType::Bf16 => (7, 8),
            DType::F8E5M2 => (2, 5),
            DType::F8E4M3 => (3, 4),
            _ => return None,
        };
        Some(Self { mantissa_bits, exponent_bits })
    }

    fn bias(self) -> i64 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    /// The bits of the infinity.
    fn infinity(self) -> u64 {
        ((1 << self.exponent_bits) - 1) << self.mantissa_bits
    }
}

/// Sign and magnitude of an element, given by its bits.
fn read(bits: u64, dtype: DType) -> (bool, Number) {
    let width = dtype.bits().unwrap();
    let is_top_bit_set = bits >> (width - 1) & 1 == 1;
    let Some(format) = Format::of(dtype) else {
        return match dtype {
            DType::F8E8M0 if bits == 0xFF => (false, Number::NaN(1 << 63)),
            DType::F8E8M0 => (false, Number::Finite(1, i64::try_from(bits).unwrap() - 127)),
            DType::U8 | DType::U16 | DType::U32 | DType::U64 => (false, Number::Finite(bits, 0)),
            // The two's complement.
            _ if is_top_bit_set => (true, Number::Finite((!bits & (u64::MAX >> (64 - width))) + 1, 0)),
            _ => (false, Number::Finite(bits, 0)),
        };
    };
    let fraction = bits & ((1 << format.mantissa_bits) - 1);
    let exponent = bits >> format.mantissa_bits & ((1 << format.exponent_bits) - 1);
    let is_largest = exponent == (1 << format.exponent_bits) - 1;
    let is_nan = match dtype {
        DType::F8E4M3 => is_largest && fraction == 7,
        _ => is_largest && fraction != 0,
    };
    let number = if is_nan {
        Number::NaN(fraction << (64 - format.mantissa_bits))
    } else if is_largest && dtype != DType::F8E4M3 {
        Number::Infinity
    } else {
        let whole = if exponent == 0 { fraction } else { fraction | 1 << format.mantissa_bits };
        let power = i64::try_from(exponent.max(1)).unwrap() - format.bias() - i64::from(format.mantissa_bits);
        Number::Finite(whole, power)
    };
    (is_top_bit_set, number)
}

/// The bits of `whole * 2^power` rounded, without the sign.
fn round(whole: u64, power: i64, to: Format) -> u64 {
    if whole == 0 {
        return 0;
    }
    // The power of the leading bit gives the target's unit; subnormals share the unit of the
    // smallest normal number.
    let leading = power + i64::from(63 - whole.leading_zeros());
    let unit = leading.max(1 - to.bias()) - i64::from(to.mantissa_bits);
    let (quotient, up) = match u32::try_from(unit - power) {
        // Exact: the target's unit is finer.
        Err(_) => (whole << (power - unit), false),
        Ok(0) => (whole, false),
        Ok(dropped @ 1..=63) => {
            let (quotient, remainder) = (whole >> dropped, whole & ((1 << dropped) - 1));
            let half = 1 << (dropped - 1);
            (quotient, remainder > half || remainder == half && quotient % 2 == 1)
        }
        Ok(64) => (0, whole > 1 << 63),
        Ok(_) => (0, false),
    };
    // Exponent field of the unit, and a mantissa that may carry into it.
    let exponent = u64::try_from(unit + i64::from(to.mantissa_bits) + to.bias()).unwrap();
    // Anything above the largest number is infinite.
    let fields = ((exponent.min(1 << to.exponent_bits) - 1) << to.mantissa_bits) + quotient + u64::from(up);
    fields.min(to.infinity())
}

/// The bits of an element, cast.
pub(crate) fn cast_bits(bits: u64, cast: Cast) -> u64 {
    let to = Format::of(cast.to().into()).unwrap();
    let (is_negative, number) = read(bits, cast.source());
    let size = match number {
        Number::NaN(payload) => {
            to.infinity() | 1 << (to.mantissa_bits - 1) | payload >> (64 - to.mantissa_bits)
        }
        Number::Infinity => to.infinity(),
        Number::Finite(whole, power) => round(whole, power, to),
    };
    // Integers have one zero.
    let is_negative = is_negative && (size != 0 || Format::of(cast.source()).is_some());
    size | u64::from(is_negative) << (to.mantissa_bits + to.exponent_bits)
}

/// True if an element is finite before it is cast, and infinite afterwards.
pub(crate) fn is_overflow(bits: u64, cast: Cast) -> bool {
    let to = Format::of(cast.to().into()).unwrap();
    let (_, number) = read(bits, cast.source());
    matches!(number, Number::Finite(whole, power) if round(whole, power, to) == to.infinity())
}

/// The bits of elements of `element_bytes` bytes.
pub(crate) fn elements(bytes: &[u8], element_bytes: usize) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(element_bytes).map(|element| {
        let mut bits = [0; 8];
        bits[..element.len()].copy_from_slice(element);
        u64::from_le_bytes(bits)
    })
}

/// All elements in `bytes`, cast one after the other.
pub(crate) fn cast_bytes(bytes: &[u8], cast: Cast) -> Vec<u8> {
    let [from_bytes, to_bytes] =
        [cast.source_unit_bytes(), cast.to().bytes()].map(|bytes| usize::try_from(bytes).unwrap());
    let cast_one = |bits| cast_bits(bits, cast).to_le_bytes()[..to_bytes].to_vec();
    elements(bytes, from_bytes).flat_map(cast_one).collect()
}

/// Every cast there is.
pub(crate) fn every_cast() -> impl Iterator<Item = Cast> {
    let targets = [FloatType::Bf16, FloatType::F16, FloatType::F32];
    DType::ALL.into_iter().flat_map(move |dtype| targets.map(|to| Cast::between(dtype, to))).flatten()
}

/// Random words, the same in each run.
pub(crate) fn seeded(count: usize) -> impl Iterator<Item = u64> {
    let mut state = 0x1234_5678_9ABC_DEF1_u64;
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let word = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    })
    .take(count)
}
