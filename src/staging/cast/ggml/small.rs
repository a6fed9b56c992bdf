//! Types with short blocks, and the others without grids or packed scales.
//!
//! ```text
//! Q4_0  d                 16 x two 4-bit numbers           d * (q - 8)
//! Q4_1  d m               16 x two 4-bit numbers           d * q + m
//! Q5_0  d    32 top bits  16 x two 4-bit numbers           d * (q - 16)
//! Q5_1  d m  32 top bits  16 x two 4-bit numbers           d * q + m
//! Q8_0  d                 32 x i8                          d * q
//! ```
//!
//! Of two numbers in a byte, the low one belongs to the first half of the elements. `d` and `m` are
//! half precision.

use super::{Single, half, looked_up, part, part_mut};

/// Codes of `E2M1`, doubled.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// Codes of the 4-bit IQ types.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Sixteen bytes, low halves first.
#[inline(always)]
fn nibbles(bytes: &[u8; 16]) -> [u8; 32] {
    let mut nibbles = [0; 32];
    for at in 0..16 {
        nibbles[at] = bytes[at] & 15;
        nibbles[at + 16] = bytes[at] >> 4;
    }
    nibbles
}

/// Adds a fifth bit to each number.
#[inline(always)]
fn with_top_bits(mut nibbles: [u8; 32], top: [u8; 4]) -> [u8; 32] {
    let top = u32::from_le_bytes(top);
    for (at, nibble) in (0_u32..).zip(&mut nibbles) {
        *nibble |= if top >> at & 1 == 1 { 16 } else { 0 };
    }
    nibbles
}

#[inline(always)]
fn each<const LEN: usize, T: Copy>(codes: &[T; LEN], singles: &mut [Single; LEN], number: impl Fn(T) -> f32) {
    for (single, &code) in singles.iter_mut().zip(codes) {
        *single = number(code).to_le_bytes();
    }
}

#[inline(always)]
pub(super) fn q4_0(block: &[u8; 18], singles: &mut [Single; 32]) {
    let d = half(block, 0);
    each(&nibbles(part(block, 2)), singles, |q| d * (f32::from(q) - 8.0));
}

#[inline(always)]
pub(super) fn q4_1(block: &[u8; 20], singles: &mut [Single; 32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    each(&nibbles(part(block, 4)), singles, |q| d * f32::from(q) + m);
}

#[inline(always)]
pub(super) fn q5_0(block: &[u8; 22], singles: &mut [Single; 32]) {
    let d = half(block, 0);
    let codes = with_top_bits(nibbles(part(block, 6)), *part(block, 2));
    each(&codes, singles, |q| d * (f32::from(q) - 16.0));
}

#[inline(always)]
pub(super) fn q5_1(block: &[u8; 24], singles: &mut [Single; 32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    let codes = with_top_bits(nibbles(part(block, 8)), *part(block, 4));
    each(&codes, singles, |q| d * f32::from(q) + m);
}

#[inline(always)]
pub(super) fn q8_0(block: &[u8; 34], singles: &mut [Single; 32]) {
    let d = half(block, 0);
    each(part::<32>(block, 2), singles, |q| d * f32::from(q.cast_signed()));
}

/// A scale and 128 signs.
#[inline(always)]
pub(super) fn q1_0(block: &[u8; 18], singles: &mut [Single; 128]) {
    let d = half(block, 0);
    for (singles, &signs) in singles.as_chunks_mut::<8>().0.iter_mut().zip(part::<16>(block, 2)) {
        for (bit, single) in (0..).zip(singles) {
            *single = (if signs >> bit & 1 == 1 { d } else { -d }).to_le_bytes();
        }
    }
}

/// A power of two (`E8M0`), and 32 numbers of 4 bits (`E2M1`).
#[inline(always)]
pub(super) fn mxfp4(block: &[u8; 17], singles: &mut [Single; 32]) {
    // Half the power, since the codes are doubled.
    let bits = match block[0] {
        exponent @ (0 | 1) => 0x0020_0000 << exponent,
        exponent => (u32::from(exponent) - 1) << 23,
    };
    let d = f32::from_bits(bits);
    each(&nibbles(part(block, 1)), singles, |q| d * f32::from(looked_up(E2M1, q)));
}

/// Four parts of 16 elements, each with a scale (`E4M3` without a sign).
#[inline(always)]
pub(super) fn nvfp4(block: &[u8; 36], singles: &mut [Single; 64]) {
    let parts = singles.as_chunks_mut::<16>().0.iter_mut().zip(&block[..4]);
    for ((singles, &scale), codes) in parts.zip(block[4..].as_chunks::<8>().0) {
        let d = half_of_e4m3(scale);
        let (low, high) = singles.split_at_mut(8);
        for ((low, high), &code) in low.iter_mut().zip(high).zip(codes) {
            *low = (d * f32::from(looked_up(E2M1, code & 15))).to_le_bytes();
            *high = (d * f32::from(looked_up(E2M1, code >> 4))).to_le_bytes();
        }
    }
}

/// Half of an `E4M3` number without its sign. The largest code stands for zero.
#[inline(always)]
fn half_of_e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(code >> 3 & 15), f32::from(code & 7));
    match (code, exponent) {
        (0x7F, _) => 0.0,
        // 2^-10
        (_, 0) => mantissa * f32::from_bits((127 - 10) << 23),
        _ => (1.0 + mantissa / 8.0) * f32::from_bits((exponent + 127 - 7 - 1) << 23),
    }
}

#[inline(always)]
pub(super) fn iq4_nl(block: &[u8; 18], singles: &mut [Single; 32]) {
    let d = half(block, 0);
    each(&nibbles(part(block, 2)), singles, |q| d * f32::from(looked_up(IQ4, q)));
}

/// Eight parts of 32 elements, each with a scale of 6 bits: two in a word, four in a half byte.
#[inline(always)]
pub(super) fn iq4_xs(block: &[u8; 136], singles: &mut [Single; 256]) {
    let d = half(block, 0);
    let top = u16::from_le_bytes([block[2], block[3]]);
    let low = part::<4>(block, 4);
    for at in 0..8 {
        let [top, _] = (top >> (2 * at) & 3).to_le_bytes();
        let scale = (low[at / 2] >> (at % 2 * 4) & 15) | top << 4;
        let dl = d * (f32::from(scale) - 32.0);
        let codes = nibbles(part(block, 8 + at * 16));
        each(&codes, part_mut(singles, at * 32), |q| dl * f32::from(looked_up(IQ4, q)));
    }
}

/// Five numbers of -1, 0 or 1 in a byte: 5 x 32, 5 x 16 and 4 x 4 elements; then the scale.
#[inline(always)]
pub(super) fn tq1_0(block: &[u8; 54], singles: &mut [Single; 256]) {
    let d = half(block, 52);
    for (power, factor) in [1_u8, 3, 9, 27, 81].into_iter().enumerate() {
        let number = |byte: u8| {
            let [_, digit] = (u16::from(byte.wrapping_mul(factor)) * 3).to_le_bytes();
            d * (f32::from(digit) - 1.0)
        };
        each(part::<32>(block, 0), part_mut(singles, power * 32), number);
        each(part::<16>(block, 32), part_mut(singles, 160 + power * 16), number);
        if power < 4 {
            each(part::<4>(block, 48), part_mut(singles, 240 + power * 4), number);
        }
    }
}

/// Four numbers of -1, 0 or 1 in a byte; then the scale.
#[inline(always)]
pub(super) fn tq2_0(block: &[u8; 66], singles: &mut [Single; 256]) {
    let d = half(block, 64);
    for row in 0..8 {
        let codes = part::<32>(block, row / 4 * 32);
        let shift = row % 4 * 2;
        each(codes, part_mut(singles, row * 32), |code| d * (f32::from(code >> shift & 3) - 1.0));
    }
}
