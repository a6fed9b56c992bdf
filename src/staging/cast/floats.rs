//! Converts one element between number types, as plain integer code that the compiler vectorises.
//!
//! Each result is rounded once, to nearest, ties to even (IEEE 754): too large numbers become
//! infinities, too small ones subnormals or zeros with their sign. A NaN stays a quiet NaN, with
//! its sign and the top of its payload. (The NaN of `F8_E8M0` has neither.)
//!
//! ```text
//! F32, or exactly:  F16 BF16 F8 I8 U8 I16 U16  ->  single, which is rounded to BF16, F16
//! F64, or exactly:  I32 U32                    ->  double, which is rounded to F32; to odd, and then to BF16, F16
//! I64 U64, rounded to odd                      ->  double, the same
//! ```
//!
//! All are always inlined: they are compiled for the instruction set of the loop around them.
//!
//! Rounding to odd rounds towards zero, and sets the last bit of an inexact result. That bit tells
//! a second rounding, to a format with at least two bits fewer, on which side of a tie the number
//! was, so both together round as one would. (S. Boldo, G. Melquiond: Emulation of FMA and
//! correctly rounded sums: proved algorithms using rounding to odd, IEEE Transactions on Computers
//! 57, 2008.)

const F32_SIGN: u32 = 1 << 31;
const F32_INFINITY: u32 = 0xFF << 23;
/// The top bit of a NaN's payload says that it is quiet.
const F32_QUIET: u32 = 1 << 22;

/// The low half of a word.
#[inline(always)]
fn low_half(word: u32) -> u16 {
    let [low, high, ..] = word.to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// The low half of a double word.
#[inline(always)]
fn low_word(bits: u64) -> u32 {
    let [a, b, c, d, ..] = bits.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Single precision to bfloat16, which is its upper half.
#[inline(always)]
pub(super) fn bf16_of_f32(bits: u32) -> u16 {
    let is_odd = (bits >> 16) & 1;
    // Half a unit, except for the tie that goes down to even. A carry out of the mantissa gives the
    // next power of two, or infinity.
    let rounded = bits.wrapping_add(0x7FFF + is_odd) >> 16;
    let quiet = (bits | F32_QUIET) >> 16;
    low_half(if bits & !F32_SIGN > F32_INFINITY { quiet } else { rounded })
}

/// Single to half precision: 5 bits of exponent biased by 15, 10 of mantissa.
#[inline(always)]
pub(super) fn f16_of_f32(bits: u32) -> u16 {
    /// The smallest normal number of half precision, 2^-14, and 2^16, which is beyond its range.
    const NORMAL_MIN: u32 = (127 - 14) << 23;
    const TOO_LARGE: u32 = (127 + 16) << 23;
    /// The last place of this number is the smallest subnormal, 2^-24: adding it rounds as needed.
    const SUBNORMAL_UNIT: u32 = (127 - 24 + 23) << 23;
    const INFINITY: u32 = 0x1F << 10;
    const QUIET: u32 = 1 << 9;

    let sign = (bits & F32_SIGN) >> 16;
    let size = bits & !F32_SIGN;
    let is_odd = (size >> 13) & 1;
    // The other exponent bias, then as above. A carry out of the largest number gives infinity.
    let normal = size.wrapping_sub((127 - 15) << 23).wrapping_add(0xFFF + is_odd) >> 13;
    let sum = f32::from_bits(size) + f32::from_bits(SUBNORMAL_UNIT);
    let subnormal = sum.to_bits().wrapping_sub(SUBNORMAL_UNIT);
    let special = if size > F32_INFINITY { INFINITY | QUIET | (size >> 13 & 0x3FF) } else { INFINITY };
    let finite = if size < NORMAL_MIN { subnormal } else { normal };
    low_half(sign | if size < TOO_LARGE { finite } else { special })
}

/// Double to single precision.
#[inline(always)]
pub(super) fn f32_of_f64(number: f64) -> u32 {
    let bits = number.to_bits();
    let [sign_and_exponent, payload] = [bits >> 32, bits >> 29].map(low_word);
    let quiet = (sign_and_exponent & F32_SIGN) | F32_INFINITY | F32_QUIET | (payload & 0x7F_FFFF);
    #[expect(clippy::as_conversions, reason = "rounds to nearest even; nothing else in std does")]
    #[expect(clippy::cast_possible_truncation, reason = "what is rounded away is what narrowing is")]
    let rounded = number as f32;
    // The payload of a NaN after `as` depends on the machine.
    if number.is_nan() { quiet } else { rounded.to_bits() }
}

/// Double to single precision, rounded to odd.
#[inline(always)]
pub(super) fn f32_of_f64_to_odd(number: f64) -> u32 {
    let nearest = f32_of_f64(number);
    let back = f64::from(f32::from_bits(nearest));
    // Both are false for a NaN.
    let is_beyond = back.abs() > number.abs();
    let is_inexact = is_beyond || back.abs() < number.abs();
    (nearest - u32::from(is_beyond)) | u32::from(is_inexact)
}

/// An integer as a double, rounded to odd, to 42 bits at least.
#[inline(always)]
pub(super) fn f64_of_u64_to_odd(number: u64) -> f64 {
    /// Bits of 64 that do not fit a double.
    const EXCESS: u32 = 64 - 53;
    let is_inexact = number & ((1 << EXCESS) - 1) != 0;
    let odd = (number >> EXCESS | u64::from(is_inexact)) << EXCESS;
    let kept = if number >> 53 == 0 { number } else { odd };
    // Both halves and their sum are exact.
    f64::from(low_word(kept >> 32)) * 4_294_967_296.0 + f64::from(low_word(kept))
}

/// The same for a signed integer.
#[inline(always)]
pub(super) fn f64_of_i64_to_odd(number: i64) -> f64 {
    let size = f64_of_u64_to_odd(number.unsigned_abs());
    if number < 0 { -size } else { size }
}

/// bfloat16 to single precision.
#[inline(always)]
pub(super) fn f32_of_bf16(bits: u16) -> u32 {
    let bits = u32::from(bits) << 16;
    if bits & !F32_SIGN > F32_INFINITY { bits | F32_QUIET } else { bits }
}

/// Magnitudes of finite floats with `MANTISSA` mantissa bits and the exponent bias `BIAS`, as f32
/// bits.
#[inline(always)]
fn f32_of_small<const MANTISSA: u32, const BIAS: u32>(size: u32) -> u32 {
    let placed = size << (23 - MANTISSA);
    // Subnormals have the smallest normal exponent and no leading one: it is added and subtracted.
    let one = (127 - BIAS + 1) << 23;
    let subnormal = f32::from_bits(placed + one) - f32::from_bits(one);
    let normal = placed + ((127 - BIAS) << 23);
    if size >> MANTISSA == 0 { subnormal.to_bits() } else { normal }
}

/// Half to single precision.
#[inline(always)]
pub(super) fn f32_of_f16(bits: u16) -> u32 {
    const INFINITY: u32 = 0x1F << 10;
    let sign = u32::from(bits & 0x8000) << 16;
    let size = u32::from(bits & 0x7FFF);
    let quiet = if size > INFINITY { F32_QUIET } else { 0 };
    let special = F32_INFINITY | quiet | size << 13;
    sign | if size < INFINITY { f32_of_small::<10, 15>(size) } else { special }
}

/// `F8_E5M2` to single precision: the upper half of half precision.
#[inline(always)]
pub(super) fn f32_of_f8_e5m2(bits: u8) -> u32 {
    f32_of_f16(u16::from(bits) << 8)
}

/// `F8_E4M3` to single precision. It has no infinity; its NaN has the bits of the largest
/// magnitude.
///
/// (P. Micikevicius et al.: FP8 Formats for Deep Learning, 2022, table 1.)
#[inline(always)]
pub(super) fn f32_of_f8_e4m3(bits: u8) -> u32 {
    const NAN: u32 = 0x7F;
    let sign = u32::from(bits & 0x80) << 24;
    let size = u32::from(bits & 0x7F);
    sign | if size == NAN { F32_INFINITY | (size & 7) << 20 } else { f32_of_small::<3, 7>(size) }
}

/// `F8_E8M0` to single precision: an exponent without sign and mantissa.
///
/// (OCP Microscaling Formats Specification 1.0, section 5.4.1.)
#[inline(always)]
pub(super) fn f32_of_f8_e8m0(bits: u8) -> u32 {
    match bits {
        0 => 1 << 22, // half of the smallest normal number
        0xFF => F32_INFINITY | F32_QUIET,
        exponent => u32::from(exponent) << 23,
    }
}

/// True if any element is infinite or NaN.
#[inline(always)]
pub(super) fn is_any_bf16_special(elements: &[[u8; 2]]) -> bool {
    is_any_exponent_full::<{ 1 << 7 }>(elements)
}

/// True if any element is infinite or NaN.
#[inline(always)]
pub(super) fn is_any_f16_special(elements: &[[u8; 2]]) -> bool {
    is_any_exponent_full::<{ 1 << 10 }>(elements)
}

/// True if the exponent of any 16-bit float has only ones; `UNIT` is the exponent's last bit.
#[inline(always)]
fn is_any_exponent_full<const UNIT: u16>(elements: &[[u8; 2]]) -> bool {
    // Adding one carries such an exponent into the sign bit.
    let carry = |element: &[u8; 2]| (u16::from_le_bytes(*element) & 0x7FFF) + UNIT;
    elements.iter().fold(0, |all, element| all | carry(element)) >> 15 == 1
}

/// True if any element is infinite or NaN.
#[inline(always)]
pub(super) fn is_any_f32_special(elements: &[[u8; 4]]) -> bool {
    let carry = |element: &[u8; 4]| (u32::from_le_bytes(*element) & !F32_SIGN) + (1 << 23);
    elements.iter().fold(0, |all, element| all | carry(element)) >> 31 == 1
}
