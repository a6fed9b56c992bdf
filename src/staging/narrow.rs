//! Narrows floats in a slot, in place, right after they have been read and while they are in the core's cache.
//!
//! Each element is rounded once, to nearest, ties to even, as IEEE 754 has it: what is too large becomes an infinity, what is
//! too small a subnormal or a zero of its sign. A NaN stays one: quiet, with its sign and as much of the top of its
//! payload as there is room for. Elements may start at any byte: slots are phased to blocks of a file and not to tensors.
//!
//! Readers call it with what [`LoadPlan::narrowings`](crate::plan::LoadPlan::narrowings) lists.

use crate::plan::{NarrowOp, Narrowing};
use crate::units::to_usize;

/// Elements that are taken out of the slot at once: a block stays in the first-level cache, and the compiler knows that
/// what is read and what is written are two places.
const BLOCK_ELEMENTS: usize = 128;

/// Narrows everything in a slot that is to be narrowed.
pub(crate) fn narrow_slot(slot: &mut [u8], narrowings: impl Iterator<Item = NarrowOp>) {
    for step in narrowings {
        let start = to_usize(step.slot_offset_bytes);
        let elements = &mut slot[start..start + to_usize(step.source_len_bytes)];
        narrow_in_place(elements, step.narrowing);
    }
}

/// Narrows all elements in `bytes` to the front of it. Returns how many bytes they take there; what lies behind is
/// undefined.
///
/// # Panics
/// If `bytes` does not hold whole elements.
pub(crate) fn narrow_in_place(bytes: &mut [u8], narrowing: Narrowing) -> usize {
    match narrowing {
        Narrowing::F32ToBf16 => each(bytes, |element| bf16_bits(u32::from_le_bytes(element)).to_le_bytes()),
        Narrowing::F32ToF16 => each(bytes, |element| f16_bits(u32::from_le_bytes(element)).to_le_bytes()),
        Narrowing::F64ToBf16 => each(bytes, |element| bf16_bits(f32_bits_to_odd(element)).to_le_bytes()),
        Narrowing::F64ToF16 => each(bytes, |element| f16_bits(f32_bits_to_odd(element)).to_le_bytes()),
        Narrowing::F64ToF32 => each(bytes, |element| f32_bits(f64::from_le_bytes(element)).to_le_bytes()),
    }
}

/// Replaces every element by its narrower form, block by block. Returns the bytes of all.
fn each<const FROM: usize, const TO: usize>(
    bytes: &mut [u8],
    narrow: impl Fn([u8; FROM]) -> [u8; TO],
) -> usize {
    const { assert!(TO < FROM, "what is written stays behind what is read") };
    assert!(bytes.len().is_multiple_of(FROM), "{} bytes are no whole elements of {FROM}", bytes.len());
    let mut source = [[0; FROM]; BLOCK_ELEMENTS];
    let mut target = [[0; TO]; BLOCK_ELEMENTS];
    let (mut read, mut written) = (0, 0);
    while read < bytes.len() {
        let source_bytes = (bytes.len() - read).min(FROM * BLOCK_ELEMENTS);
        let target_bytes = source_bytes / FROM * TO;
        source.as_flattened_mut()[..source_bytes].copy_from_slice(&bytes[read..read + source_bytes]);
        // All of a block even at the end: a fixed length is what makes this loop one of vectors.
        for (target, source) in target.iter_mut().zip(&source) {
            *target = narrow(*source);
        }
        bytes[written..written + target_bytes].copy_from_slice(&target.as_flattened()[..target_bytes]);
        (read, written) = (read + source_bytes, written + target_bytes);
    }
    written
}

const F32_SIGN: u32 = 1 << 31;
const F32_INFINITY: u32 = 0xFF << 23;
/// The top bit of a NaN's payload says that it is quiet.
const F32_QUIET: u32 = 1 << 22;

/// The low half of a word.
fn low_half(word: u32) -> u16 {
    let [low, high, ..] = word.to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// Single precision to bfloat16, which is its upper half.
fn bf16_bits(bits: u32) -> u16 {
    let is_odd = (bits >> 16) & 1;
    // Half a unit, less the tie that goes down to even. A carry out of the mantissa is the next power of two, or infinity.
    let rounded = bits.wrapping_add(0x7FFF + is_odd) >> 16;
    let quiet = (bits | F32_QUIET) >> 16;
    low_half(if bits & !F32_SIGN > F32_INFINITY { quiet } else { rounded })
}

/// Single to half precision: 5 bits of exponent biased by 15, 10 of mantissa.
fn f16_bits(bits: u32) -> u16 {
    /// The smallest number that is normal in half precision, 2^-14, and 2^16, which is beyond all of them.
    const NORMAL_MIN: u32 = (127 - 14) << 23;
    const TOO_LARGE: u32 = (127 + 16) << 23;
    /// A unit in the last place of this number is the smallest subnormal, 2^-24: adding it rounds as wanted.
    const SUBNORMAL_UNIT: u32 = (127 - 24 + 23) << 23;
    const INFINITY: u32 = 0x1F << 10;
    const QUIET: u32 = 1 << 9;

    let sign = (bits & F32_SIGN) >> 16;
    let size = bits & !F32_SIGN;
    let is_odd = (size >> 13) & 1;
    // The exponent's other bias, then as above; infinity is what a carry out of the largest number gives.
    let normal = size.wrapping_sub((127 - 15) << 23).wrapping_add(0xFFF + is_odd) >> 13;
    let sum = f32::from_bits(size) + f32::from_bits(SUBNORMAL_UNIT);
    let subnormal = sum.to_bits().wrapping_sub(SUBNORMAL_UNIT);
    let special = if size > F32_INFINITY { INFINITY | QUIET | (size >> 13 & 0x3FF) } else { INFINITY };
    let finite = if size < NORMAL_MIN { subnormal } else { normal };
    low_half(sign | if size < TOO_LARGE { finite } else { special })
}

/// Double to single precision.
fn f32_bits(number: f64) -> u32 {
    let bits = number.to_bits();
    let [sign_and_exponent, payload] = [bits >> 32, bits >> 29].map(low_word);
    let quiet = (sign_and_exponent & F32_SIGN) | F32_INFINITY | F32_QUIET | (payload & 0x7F_FFFF);
    #[expect(clippy::as_conversions, reason = "rounds to nearest even; nothing else in std does")]
    #[expect(clippy::cast_possible_truncation, reason = "what is rounded away is what narrowing is")]
    let rounded = number as f32;
    // What `as` makes of a NaN's payload is up to the machine.
    if number.is_nan() { quiet } else { rounded.to_bits() }
}

/// The low half of a double word.
fn low_word(bits: u64) -> u32 {
    let [a, b, c, d, ..] = bits.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Double to single precision, rounded to odd: towards zero, and what is not exact gets a last bit of one.
///
/// That bit tells a second rounding, to a format with at least two bits less, on which side of a tie the number was. So
/// both together round as one would. (S. Boldo, G. Melquiond: Emulation of FMA and correctly rounded sums: proved
/// algorithms using rounding to odd, IEEE Transactions on Computers 57, 2008.)
fn f32_bits_to_odd(element: [u8; 8]) -> u32 {
    let number = f64::from_le_bytes(element);
    let nearest = f32_bits(number);
    let back = f64::from(f32::from_bits(nearest));
    // Both are false for a NaN.
    let is_beyond = back.abs() > number.abs();
    let is_inexact = is_beyond || back.abs() < number.abs();
    (nearest - u32::from(is_beyond)) | u32::from(is_inexact)
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::FloatType;

    const ALL: [Narrowing; 5] = [
        Narrowing::F32ToBf16,
        Narrowing::F32ToF16,
        Narrowing::F64ToBf16,
        Narrowing::F64ToF16,
        Narrowing::F64ToF32,
    ];

    /// Bits of mantissa and of exponent.
    fn format(float: FloatType) -> (u32, u32) {
        match float {
            FloatType::Bf16 => (7, 8),
            FloatType::F16 => (10, 5),
            FloatType::F32 => (23, 8),
        }
    }

    /// The same by the definition, shared with nothing above: the number as an integer times a power of two, its
    /// quotient and remainder by the target's unit, and a decision by the remainder.
    fn reference(bits: u64, (mantissa, exponent): (u32, u32), (to_mantissa, to_exponent): (u32, u32)) -> u64 {
        let field = |bits: u64, low: u32, count: u32| bits >> low & ((1 << count) - 1);
        let sign = bits >> (mantissa + exponent) << (to_mantissa + to_exponent);
        let (raw, fraction) = (field(bits, mantissa, exponent), field(bits, 0, mantissa));
        let infinity = ((1_u64 << to_exponent) - 1) << to_mantissa;
        if raw == (1 << exponent) - 1 {
            let payload = fraction >> (mantissa - to_mantissa);
            let quiet = 1 << (to_mantissa - 1);
            return sign | infinity | if fraction == 0 { 0 } else { quiet | payload };
        }
        // The value is `whole * 2^power`.
        let bias = |exponent: u32| (1_i64 << (exponent - 1)) - 1;
        let whole = if raw == 0 { fraction } else { fraction | 1 << mantissa };
        let power = i64::try_from(raw.max(1)).unwrap() - bias(exponent) - i64::from(mantissa);
        if whole == 0 {
            return sign;
        }
        // The power of the leading bit gives the target's unit there; subnormals share that of the smallest normal.
        let leading = power + i64::from(63 - whole.leading_zeros());
        let unit = leading.max(1 - bias(to_exponent)) - i64::from(to_mantissa);
        let dropped = u32::try_from(unit - power).unwrap();
        let (quotient, remainder) = match dropped {
            0..=63 => (whole >> dropped, whole & ((1 << dropped) - 1)),
            _ => (0, 1), // less than half a unit: `whole` has at most 53 bits
        };
        let half = if dropped == 0 || dropped > 63 { u64::MAX } else { 1 << (dropped - 1) };
        let up = remainder > half || remainder == half && quotient % 2 == 1;
        let rounded = quotient + u64::from(up);
        // As fields: the exponent of the unit, and a mantissa that may carry into it.
        let raw = u64::try_from(unit + i64::from(to_mantissa) + bias(to_exponent)).unwrap();
        let fields = ((raw - 1) << to_mantissa) + rounded;
        sign | fields.min(infinity)
    }

    /// Narrows one batch of elements, given by their bits, and compares each with the reference.
    fn check(narrowing: Narrowing, numbers: &[u64]) -> Vec<u64> {
        let from_bytes = to_usize(narrowing.source_element_bytes());
        let to_bytes = to_usize(narrowing.to().bytes());
        let source = if from_bytes == 4 { (23, 8) } else { (52, 11) };
        let mut bytes: Vec<u8> =
            numbers.iter().flat_map(|number| number.to_le_bytes()[..from_bytes].to_vec()).collect();
        let len = narrow_in_place(&mut bytes, narrowing);
        assert_eq!(len, numbers.len() * to_bytes);
        let found = bytes[..len].chunks_exact(to_bytes).map(|element| {
            let mut bits = [0; 8];
            bits[..to_bytes].copy_from_slice(element);
            u64::from_le_bytes(bits)
        });
        let found: Vec<u64> = found.collect();
        for (&number, &found) in numbers.iter().zip(&found) {
            let expected = reference(number, source, format(narrowing.to()));
            assert_eq!(found, expected, "{narrowing:?} of {number:#x}: {found:#x}, not {expected:#x}");
        }
        found
    }

    fn seeded(count: usize) -> impl Iterator<Item = u64> {
        let mut state = 0x1234_5678_9ABC_DEF1_u64;
        std::iter::repeat_with(move || {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let word = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            word ^ (word >> 31)
        })
        .take(count)
    }

    #[test]
    fn single_precision_is_narrowed_as_defined_and_as_the_half_crate_does() {
        // Around the ties of both targets, for every sign, exponent and upper part of the mantissa.
        let low_parts = [
            0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001,
            0xFFFF,
        ];
        let mut numbers: Vec<u64> =
            (0..=0xFFFF_u64).flat_map(|high| low_parts.map(|low| high << 16 | low)).collect();
        numbers.extend(seeded(100_000).map(|word| word >> 32));
        let singles = || numbers.iter().map(|&bits| f32::from_bits(u32::try_from(bits).unwrap()));
        let found = check(Narrowing::F32ToBf16, &numbers);
        assert!(singles().map(|x| u64::from(half::bf16::from_f32(x).to_bits())).eq(found));
        let found = check(Narrowing::F32ToF16, &numbers);
        assert!(singles().map(|x| u64::from(half::f16::from_f32(x).to_bits())).eq(found));
    }

    /// What lies at, just below and just above every number of a format and every tie between two of them.
    fn around_all_halves() -> Vec<f64> {
        let numbers = (0..=u16::MAX).flat_map(|bits| {
            let (bf16, f16) = (half::bf16::from_bits(bits), half::f16::from_bits(bits));
            let next = bits.wrapping_add(1);
            let (next_bf16, next_f16) = (half::bf16::from_bits(next), half::f16::from_bits(next));
            let tie = |a: f64, b: f64| a / 2.0 + b / 2.0;
            [
                bf16.to_f64(),
                f16.to_f64(),
                tie(bf16.to_f64(), next_bf16.to_f64()),
                tie(f16.to_f64(), next_f16.to_f64()),
            ]
        });
        // Also what is too large for all, and between the largest number and infinity.
        numbers.chain([65520.0, 3.396e38, 3.402_823_567e38, 1e300, f64::MAX, 1e-46, 1e-60, 5e-324]).collect()
    }

    #[test]
    fn double_precision_is_rounded_once() {
        let near = |number: f64| [-1, 0, 1].map(|step| number.to_bits().wrapping_add_signed(step));
        let mut numbers: Vec<u64> = around_all_halves().into_iter().flat_map(near).collect();
        numbers.extend(seeded(50_000));
        // Exponents of the targets only: most of the others are zeros and infinities.
        numbers.extend(seeded(50_000).map(|bits| bits & !(0x7FF << 52) | (1023 - 30 + bits % 60) << 52));
        numbers.extend(seeded(50_000).map(|bits| bits & !(0x7FF << 52) | (1023 - 155 + bits % 290) << 52));
        for narrowing in [Narrowing::F64ToBf16, Narrowing::F64ToF16] {
            check(narrowing, &numbers);
        }
        let found = check(Narrowing::F64ToF32, &numbers);
        for (&number, found) in numbers.iter().zip(found) {
            let number = f64::from_bits(number);
            #[expect(clippy::as_conversions, clippy::cast_possible_truncation, reason = "the other oracle")]
            let expected = number as f32;
            assert!(number.is_nan() || u64::from(expected.to_bits()) == found, "{number:e}");
        }
    }

    #[test]
    fn any_place_and_any_length_and_nothing_around_it() {
        for narrowing in ALL {
            let (from_bytes, to_bytes) =
                (to_usize(narrowing.source_element_bytes()), to_usize(narrowing.to().bytes()));
            let bytes: Vec<u8> = seeded(400).flat_map(u64::to_le_bytes).collect();
            let mut whole = bytes.clone();
            narrow_in_place(&mut whole, narrowing);
            for (start, count) in (0..20).flat_map(|start| [0, 1, 2, 127, 128, 129, 300].map(|n| (start, n)))
            {
                let len = count * from_bytes;
                let mut slot = vec![0xA5; start + len + 9];
                slot[start..start + len].copy_from_slice(&bytes[..len]);
                let step = NarrowOp {
                    slot_offset_bytes: u64::try_from(start).unwrap(),
                    source_len_bytes: u64::try_from(len).unwrap(),
                    narrowing,
                };
                narrow_slot(&mut slot, std::iter::once(step));
                assert_eq!(slot[start..start + count * to_bytes], whole[..count * to_bytes]);
                assert!(slot[..start].iter().chain(&slot[start + len..]).all(|&byte| byte == 0xA5));
            }
        }
    }

    #[test]
    #[should_panic(expected = "no whole elements")]
    fn half_an_element_is_refused() {
        narrow_in_place(&mut [0; 6], Narrowing::F32ToF16);
    }

    /// `cargo test --release --lib narrow -- --ignored --nocapture`
    #[test]
    #[ignore = "a measurement"]
    #[allow(clippy::print_stderr, reason = "that is what it is for")]
    fn speed() {
        let mib: u32 = 4;
        let pristine: Vec<u8> = seeded(to_usize(u64::from(mib)) << 17).flat_map(u64::to_le_bytes).collect();
        for narrowing in ALL {
            let best = (0..50).map(|_| {
                let mut bytes = pristine.clone();
                let start = std::time::Instant::now();
                std::hint::black_box(narrow_in_place(std::hint::black_box(&mut bytes), narrowing));
                start.elapsed()
            });
            let best = best.min().unwrap();
            let rate = f64::from(mib) * 1_048_576.0 / best.as_secs_f64() / 1e9;
            eprintln!("{narrowing:?}: {rate:.1} GB/s of source, {mib} MiB, one core");
        }
    }
}
