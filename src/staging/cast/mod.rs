//! Casts numbers in a slot, in place, right after they were read and while they are in the core's
//! cache.
//!
//! Elements may start at any byte: slots are aligned to blocks of a file, not to tensors. The
//! result begins where the elements began. Elements that do not grow are cast from the front;
//! elements that grow are cast from the back, into room that the plan left behind them:
//!
//! ```text
//! narrower   |1|2|3|4|5|6|   ->   |1|2|3|.....|      block by block, forwards
//! wider      |1|2|3|.....|   ->   |1 |2 |3 |  |      block by block, backwards
//! ```
//!
//! Blocks of GGUF files become floats the same way (`ggml`).
//!
//! Readers call it with the steps of [`LoadPlan::casts`](crate::plan::LoadPlan::casts). `floats`
//! casts one element, `blocks` a block of them, `pieces` the part of a read that has arrived;
//! `quantise` makes values and scales. Loops are compiled once per instruction set ([`Level`]), and
//! the machine chooses at run time. All give the same bits.
//!
//! By hand: the `half` crate has no variants chosen at run time, no in-place operation, not all
//! source types, and no single rounding from `f64` (docs/casting.md). The tests compare every path
//! with it.

use crate::checkpoint::{BlockType, DType};
use crate::plan::{Cast, CastOp, FloatType};
use crate::units::{to_u64, to_usize};

use self::blocks::Elements;
pub use self::dequantise::dequantise;
use self::level::Level;
pub(crate) use self::pieces::{Casting, Narrowing};
pub(crate) use self::quantise::{Loss, quantise_step};

mod blocks;
mod dequantise;
mod floats;
mod ggml;
mod level;
mod pieces;
#[cfg(not(loom))]
#[cfg(test)]
mod plan_tests;
mod quantise;
#[cfg(not(loom))]
#[cfg(test)]
pub(crate) mod reference;
#[cfg(target_arch = "x86_64")]
mod x86;

/// Decodes blocks of a GGUF type to single precision, as `--dtype f32` does, but without vector
/// instructions: a second way to the same bits. `None` for a type that only occurs in computations
/// (`Q8_1`).
///
/// # Panics
/// If `blocks` does not hold whole blocks.
///
/// # Example
/// ```
/// use onelayer::{BlockType, decode_blocks};
/// let mut block = vec![0; 34]; // a scale in half precision, then 32 signed bytes
/// block[1] = 0x3C; // 1.0
/// block[2] = 7;
/// assert_eq!(decode_blocks(BlockType::Q8_0, &block).unwrap()[..2], [7.0, 0.0]);
/// ```
#[must_use]
pub fn decode_blocks(block: BlockType, blocks: &[u8]) -> Option<Vec<f32>> {
    let cast = Cast::between(DType::Block(block), FloatType::F32)?;
    let delivered_bytes = cast.delivered_bytes(to_u64(blocks.len()));
    let mut bytes = blocks.to_vec();
    bytes.resize(to_usize(delivered_bytes).max(blocks.len()), 0);
    cast_in_place(Level::Baseline, &mut bytes, 0, blocks.len(), cast);
    let (singles, _) = bytes[..to_usize(delivered_bytes)].as_chunks::<4>();
    Some(singles.iter().map(|&single| f32::from_le_bytes(single)).collect())
}

/// Casts one stretch of a slot. Returns the number of finite elements that became infinite.
///
/// # Panics
/// If the stretch does not hold whole elements, or the result exceeds the slot.
pub(crate) fn cast_step(slot: &mut [u8], step: &CastOp) -> u64 {
    cast_step_with(Level::detected(), slot, step)
}

fn cast_step_with(level: Level, slot: &mut [u8], step: &CastOp) -> u64 {
    let delivered_bytes = step.cast.delivered_bytes(step.source_len_bytes);
    let (start, source_bytes) = (to_usize(step.slot_offset_bytes), to_usize(step.source_len_bytes));
    let end = start + source_bytes.max(to_usize(delivered_bytes));
    cast_in_place(level, &mut slot[start..end], 0, source_bytes, step.cast)
}

/// Casts the elements between two offsets of one stretch whose elements before are cast already, to
/// the place behind those. The elements lie at `source` in the slot. Returns as [`cast_step`] does.
///
/// # Panics
/// If the offsets are not between elements of the stretch, if `source` is in front of the target,
/// or the cast widens.
fn cast_part(slot: &mut [u8], step: &CastOp, source: u64, start_bytes: u64, end_bytes: u64) -> u64 {
    assert!(!step.cast.is_widening() && start_bytes <= end_bytes && end_bytes <= step.source_len_bytes);
    let target = step.slot_offset_bytes + step.cast.delivered_bytes(start_bytes);
    let len_bytes = end_bytes - start_bytes;
    let bytes = &mut slot[to_usize(target)..to_usize(source + len_bytes)];
    cast_in_place(Level::detected(), bytes, to_usize(source - target), to_usize(len_bytes), step.cast)
}

/// Casts the elements in `source_bytes` bytes from `source_start` of `bytes`, to the front of
/// `bytes`. The bytes behind the result, up to the old end, are undefined then. Only elements that
/// do not grow may start behind the front. Returns the number of finite elements that became
/// infinite.
///
/// # Panics
/// If `source_bytes` does not hold whole elements, or the result exceeds `bytes`.
fn cast_in_place(
    level: Level,
    bytes: &mut [u8],
    source_start: usize,
    source_bytes: usize,
    cast: Cast,
) -> u64 {
    let to = cast.to();
    if let DType::Block(block) = cast.source() {
        assert_eq!(source_start, 0, "what grows is cast from the back");
        return ggml::decode(level, bytes, source_bytes, block, to);
    }
    let elements = Elements { level, bytes, source_start, source_bytes, can_overflow: cast.can_overflow() };
    match cast.source() {
        DType::F64 => doubles(elements, to, f64::from_le_bytes),
        #[cfg(target_arch = "x86_64")]
        DType::F32 if to == FloatType::Bf16 && level != Level::Baseline => x86::bf16_of_f32(elements),
        DType::F32 => singles(elements, to, u32::from_le_bytes),
        DType::F16 => singles(elements, to, |element| floats::f32_of_f16(u16::from_le_bytes(element))),
        DType::Bf16 => singles(elements, to, |element| floats::f32_of_bf16(u16::from_le_bytes(element))),
        DType::F8E4M3 => singles(elements, to, |[element]| floats::f32_of_f8_e4m3(element)),
        DType::F8E5M2 => singles(elements, to, |[element]| floats::f32_of_f8_e5m2(element)),
        DType::F8E8M0 => singles(elements, to, |[element]| floats::f32_of_f8_e8m0(element)),
        DType::I8 => singles(elements, to, |element| f32::from(i8::from_le_bytes(element)).to_bits()),
        DType::U8 => singles(elements, to, |[element]| f32::from(element).to_bits()),
        DType::I16 => singles(elements, to, |element| f32::from(i16::from_le_bytes(element)).to_bits()),
        DType::U16 => singles(elements, to, |element| f32::from(u16::from_le_bytes(element)).to_bits()),
        DType::I32 => doubles(elements, to, |element| f64::from(i32::from_le_bytes(element))),
        DType::U32 => doubles(elements, to, |element| f64::from(u32::from_le_bytes(element))),
        DType::I64 => doubles(elements, to, |element| floats::f64_of_i64_to_odd(i64::from_le_bytes(element))),
        DType::U64 => doubles(elements, to, |element| floats::f64_of_u64_to_odd(u64::from_le_bytes(element))),
        other => unreachable!("there is no cast from {other}"),
    }
}

/// Elements that `decode` converts exactly to the bits of an f32.
fn singles<const FROM: usize>(
    elements: Elements<'_>,
    to: FloatType,
    decode: impl Fn([u8; FROM]) -> u32,
) -> u64 {
    let is_finite = |element| f32::from_bits(decode(element)).is_finite();
    let bf16 = |element| floats::bf16_of_f32(decode(element)).to_le_bytes();
    let f16 = |element| floats::f16_of_f32(decode(element)).to_le_bytes();
    match to {
        FloatType::Bf16 => elements.each(bf16, floats::is_any_bf16_special, is_finite),
        FloatType::F16 => elements.each(f16, floats::is_any_f16_special, is_finite),
        FloatType::F32 => elements.each(|element| decode(element).to_le_bytes(), |_| false, is_finite),
    }
}

/// Elements that `decode` converts to f64, exactly or rounded to odd.
fn doubles<const FROM: usize>(
    elements: Elements<'_>,
    to: FloatType,
    decode: impl Fn([u8; FROM]) -> f64,
) -> u64 {
    let is_finite = |element| decode(element).is_finite();
    let single = |element| floats::f32_of_f64_to_odd(decode(element));
    let bf16 = |element| floats::bf16_of_f32(single(element)).to_le_bytes();
    let f16 = |element| floats::f16_of_f32(single(element)).to_le_bytes();
    let f32 = |element| floats::f32_of_f64(decode(element)).to_le_bytes();
    match to {
        FloatType::Bf16 => elements.each(bf16, floats::is_any_bf16_special, is_finite),
        FloatType::F16 => elements.each(f16, floats::is_any_f16_special, is_finite),
        FloatType::F32 => elements.each(f32, floats::is_any_f32_special, is_finite),
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::sync::Once;

    use super::reference::{cast_bytes, elements, every_cast, is_overflow, seeded};
    use super::*;
    use crate::checkpoint::TensorId;
    use crate::units::to_u64;
    use onelayer_testing::{all_or, skipped};

    fn cast(source: DType, to: FloatType) -> Cast {
        Cast::between(source, to).unwrap()
    }

    /// Every level of this machine. Missing levels are reported as skipped, once for all tests.
    pub(super) fn levels() -> Vec<Level> {
        static SAID: Once = Once::new();
        let newer = [("avx2", Level::avx2()), ("avx512", Level::avx512())];
        SAID.call_once(|| {
            for (name, _) in newer.iter().filter(|(_, level)| level.is_none()) {
                skipped(format_args!("casts with {name}, which this machine has not"));
            }
        });
        std::iter::once(Level::Baseline).chain(newer.into_iter().filter_map(|(_, level)| level)).collect()
    }

    /// Casts a batch of elements, given by their bits, with every level, and compares each with the
    /// reference.
    fn check(cast: Cast, numbers: &[u64]) -> Vec<u64> {
        let found: Vec<_> = levels().into_iter().map(|level| check_with(level, cast, numbers)).collect();
        found.into_iter().next().unwrap()
    }

    fn check_with(level: Level, cast: Cast, numbers: &[u64]) -> Vec<u64> {
        let [from_bytes, to_bytes] = [cast.source_unit_bytes(), cast.to().bytes()].map(to_usize);
        let source: Vec<u8> =
            numbers.iter().flat_map(|number| number.to_le_bytes()[..from_bytes].to_vec()).collect();
        let mut bytes = source.clone();
        bytes.resize(numbers.len() * from_bytes.max(to_bytes), 0xA5);
        let overflowed = cast_in_place(level, &mut bytes, 0, source.len(), cast);
        assert_eq!(
            overflowed,
            to_u64(numbers.iter().filter(|&&bits| is_overflow(bits, cast)).count()),
            "{cast}, {level}"
        );
        assert_eq!(overflowed > 0, cast.can_overflow(), "{cast}: every batch has the largest numbers");
        let found: Vec<u64> = elements(&bytes[..numbers.len() * to_bytes], to_bytes).collect();
        let expected = cast_bytes(&source, cast);
        for ((&number, &found), expected) in numbers.iter().zip(&found).zip(elements(&expected, to_bytes)) {
            assert_eq!(found, expected, "{cast}, {level}, of {number:#x}: {found:#x}, not {expected:#x}");
        }
        found
    }

    #[test]
    fn every_number_of_up_to_16_bits() {
        for cast in every_cast().filter(|cast| cast.source_unit_bytes() <= 2) {
            let count = 1_u64 << (8 * cast.source_unit_bytes());
            let numbers: Vec<u64> = (0..count).collect();
            let found = check(cast, &numbers);
            // Second opinions, where there are some.
            let half = |bits: u64| u16::try_from(bits).unwrap();
            let opinion = |bits: u64| match (cast.source(), cast.to()) {
                (DType::Bf16, FloatType::F32) => half::bf16::from_bits(half(bits)).to_f32().to_bits(),
                (DType::F16, FloatType::F32) => half::f16::from_bits(half(bits)).to_f32().to_bits(),
                (DType::Bf16, FloatType::F16) => {
                    half::f16::from_f32(half::bf16::from_bits(half(bits)).to_f32()).to_bits().into()
                }
                (DType::F16, FloatType::Bf16) => {
                    half::bf16::from_f32(half::f16::from_bits(half(bits)).to_f32()).to_bits().into()
                }
                _ => u32::try_from(found[to_usize(bits)]).unwrap(),
            };
            assert!(numbers.iter().map(|&bits| u64::from(opinion(bits))).eq(found.iter().copied()), "{cast}");
        }
    }

    /// The 8-bit floats by hand: the largest and smallest numbers that their specifications list.
    #[test]
    fn landmarks_of_8_bit_floats() {
        let landmarks = [
            (DType::F8E4M3, 0x7E, 448.0),
            (DType::F8E4M3, 0xFE, -448.0),
            (DType::F8E4M3, 0x08, 1.0 / 64.0),
            (DType::F8E4M3, 0x01, 1.0 / 512.0),
            (DType::F8E4M3, 0x38, 1.0),
            (DType::F8E5M2, 0x7B, 57_344.0),
            (DType::F8E5M2, 0x04, 1.0 / 16_384.0),
            (DType::F8E5M2, 0x01, 1.0 / 65_536.0),
            (DType::F8E5M2, 0x7C, f32::INFINITY),
            (DType::F8E8M0, 0x7F, 1.0),
            (DType::F8E8M0, 0x80, 2.0),
        ];
        for (dtype, bits, number) in landmarks {
            assert_eq!(check(cast(dtype, FloatType::F32), &[bits]), [u64::from(number.to_bits())]);
        }
        for (dtype, bits) in [(DType::F8E4M3, 0x7F), (DType::F8E5M2, 0x7D), (DType::F8E8M0, 0xFF)] {
            let found = check(cast(dtype, FloatType::F32), &[bits]);
            assert!(f32::from_bits(u32::try_from(found[0]).unwrap()).is_nan());
        }
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
        numbers.extend(seeded(all_or(100_000, 20_000)).map(|word| word >> 32));
        let singles = || numbers.iter().map(|&bits| f32::from_bits(u32::try_from(bits).unwrap()));
        let found = check(cast(DType::F32, FloatType::Bf16), &numbers);
        assert!(singles().map(|x| u64::from(half::bf16::from_f32(x).to_bits())).eq(found));
        let found = check(cast(DType::F32, FloatType::F16), &numbers);
        assert!(singles().map(|x| u64::from(half::f16::from_f32(x).to_bits())).eq(found));
    }

    /// Every number of a 16-bit format and every tie between two of them, with the neighbours of
    /// both.
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
        // Also numbers that are too large for all formats, and between the largest number and
        // infinity.
        numbers.chain([65520.0, 3.396e38, 3.402_823_567e38, 1e300, f64::MAX, 1e-46, 1e-60, 5e-324]).collect()
    }

    #[test]
    fn double_precision_is_rounded_once() {
        let near = |number: f64| [-1, 0, 1].map(|step| number.to_bits().wrapping_add_signed(step));
        let mut numbers: Vec<u64> = around_all_halves().into_iter().flat_map(near).collect();
        numbers.extend(seeded(all_or(50_000, 10_000)));
        // Exponents of the targets only: most of the others are zeros and infinities.
        numbers.extend(
            seeded(all_or(50_000, 10_000)).map(|bits| bits & !(0x7FF << 52) | (1023 - 30 + bits % 60) << 52),
        );
        numbers.extend(
            seeded(all_or(50_000, 10_000))
                .map(|bits| bits & !(0x7FF << 52) | (1023 - 155 + bits % 290) << 52),
        );
        for to in [FloatType::Bf16, FloatType::F16] {
            check(cast(DType::F64, to), &numbers);
        }
        let found = check(cast(DType::F64, FloatType::F32), &numbers);
        for (&number, found) in numbers.iter().zip(found) {
            let number = f64::from_bits(number);
            #[expect(clippy::as_conversions, clippy::cast_possible_truncation, reason = "the other oracle")]
            let expected = number as f32;
            assert!(number.is_nan() || u64::from(expected.to_bits()) == found, "{number:e}");
        }
    }

    /// Integers of every length: at, just below and just above the numbers of all targets and the
    /// ties between them.
    fn integers(bits: u32) -> Vec<u64> {
        let mut numbers: Vec<u64> = (0..300).collect();
        for (len, kept) in (1..=bits).flat_map(|len| [8, 11, 24].map(|kept| (len, kept))) {
            // One bit more than the target keeps: both a tie and none.
            let Some(shift) = len.checked_sub(kept + 1) else { continue };
            let tops = seeded(64).map(|word| word >> (63 - kept) | 1 << kept);
            numbers
                .extend(tops.flat_map(|top| [-1, 0, 1].map(|step| (top << shift).wrapping_add_signed(step))));
        }
        let all = u64::MAX >> (64 - bits);
        numbers.into_iter().flat_map(|number| [number & all, number.wrapping_neg() & all]).collect()
    }

    #[test]
    fn integers_are_rounded_once() {
        for cast in every_cast() {
            let bits = match cast.source() {
                DType::I32 | DType::U32 => 32,
                DType::I64 | DType::U64 => 64,
                _ => continue,
            };
            let mut numbers = integers(bits);
            numbers.extend(seeded(all_or(100_000, 20_000)).map(|word| word >> (64 - bits)));
            let found = check(cast, &numbers);
            if cast.to() != FloatType::F32 {
                continue;
            }
            for (&number, found) in numbers.iter().zip(found) {
                #[expect(clippy::as_conversions, reason = "the language rounds integers once, too")]
                #[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "the bits")]
                let expected = match cast.source() {
                    DType::I32 => number as u32 as i32 as f32,
                    DType::I64 => number as i64 as f32,
                    _ => number as f32,
                };
                assert_eq!(u64::from(expected.to_bits()), found, "{cast} of {number:#x}");
            }
        }
    }

    #[test]
    fn any_place_and_any_length_and_nothing_around_it() {
        let bytes: Vec<u8> = seeded(400).flat_map(u64::to_le_bytes).collect();
        for cast in every_cast() {
            let [from_bytes, to_bytes] = [cast.source_unit_bytes(), cast.to().bytes()].map(to_usize);
            let expected = cast_bytes(&bytes[..300 * from_bytes], cast);
            for (start, count) in (0..20).flat_map(|start| [0, 1, 2, 127, 128, 129, 300].map(|n| (start, n)))
            {
                let end = start + count * from_bytes.max(to_bytes);
                let step = CastOp {
                    tensor: TensorId(0),
                    slot_offset_bytes: u64::try_from(start).unwrap(),
                    source_len_bytes: u64::try_from(count * from_bytes).unwrap(),
                    cast,
                };
                for level in levels() {
                    let mut slot = vec![0xA5; end + 9];
                    slot[start..start + count * from_bytes].copy_from_slice(&bytes[..count * from_bytes]);
                    cast_step_with(level, &mut slot, &step);
                    let found = &slot[start..start + count * to_bytes];
                    assert!(found == &expected[..count * to_bytes], "{cast}, {level}");
                    let around = slot[..start].iter().chain(&slot[end..]);
                    assert!(around.copied().all(|byte| byte == 0xA5), "{cast}, {level}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "no whole elements")]
    fn half_an_element_is_refused() {
        cast_in_place(Level::Baseline, &mut [0; 6], 0, 6, cast(DType::F32, FloatType::F16));
    }

    /// Sets the exponents of the floats in a word, so that they are between 0.5 and 1: as weights
    /// are, and no infinities.
    fn ordinary(word: u64, dtype: DType) -> u64 {
        let (element_bits, exponent, mantissa_bits) = match dtype {
            DType::F64 => (64, (0x7FF, 1022), 52),
            DType::F32 => (32, (0xFF, 126), 23),
            DType::F16 => (16, (0x1F, 14), 10),
            DType::Bf16 => (16, (0xFF, 126), 7),
            DType::F8E4M3 => (8, (0xF, 6), 3),
            DType::F8E5M2 => (8, (0x1F, 14), 2),
            _ => return word,
        };
        (0..64).step_by(element_bits).fold(word, |word, at| {
            word & !(exponent.0 << mantissa_bits << at) | exponent.1 << mantissa_bits << at
        })
    }

    /// `cargo test --release -p onelayer --lib cast::tests::speed -- --ignored --nocapture`
    #[test]
    #[ignore = "a measurement"]
    #[allow(clippy::print_stderr, reason = "that is what it is for")]
    fn speed() {
        let mib: u32 = 4;
        for cast in every_cast() {
            let words = seeded(to_usize(u64::from(mib)) << 17).map(|word| ordinary(word, cast.source()));
            let pristine: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            // The larger side fills the buffer, as it does in a slot.
            let ratio = (cast.to().bytes() / cast.source_unit_bytes()).max(1);
            let source_bytes = pristine.len() / to_usize(ratio);
            let mut bytes = pristine.clone();
            let rates: Vec<String> = levels()
                .into_iter()
                .map(|level| {
                    let best = (0..50).map(|_| {
                        bytes.copy_from_slice(&pristine);
                        let start = std::time::Instant::now();
                        let bytes = std::hint::black_box(&mut bytes);
                        std::hint::black_box(cast_in_place(level, bytes, 0, source_bytes, cast));
                        start.elapsed()
                    });
                    let best = best.min().unwrap();
                    let rate = f64::from(u32::try_from(source_bytes).unwrap()) / best.as_secs_f64() / 1e9;
                    format!("{level} {rate:.1}")
                })
                .collect();
            eprintln!("{cast}: {} GB/s of source, {mib} MiB, one core", rates.join(", "));
        }
    }
}
