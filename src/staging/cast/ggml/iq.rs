//! The types with grids: 256 elements in 32 vectors of 8, each an index into a grid and signs.

use super::{Codes, Scale, grids, half, part};
use crate::units::to_usize;

/// A vector of 8: the numbers of a grid, with the signs that `signs` has as bits.
#[inline(always)]
fn signed(codes: &mut [Codes; 16], at: usize, numbers: [u8; 8], signs: u8) {
    // All at once: the complement and 1, where a bit is set. No number is 0, so nothing carries.
    let spread = SPREAD[usize::from(signs)];
    let numbers = u64::from_le_bytes(numbers);
    let signed = (numbers ^ spread).wrapping_add(spread & LOWEST);
    let target = &mut codes[at / 2][at % 2 * 8..][..8];
    for (code, byte) in target.iter_mut().zip(signed.to_le_bytes()) {
        *code = byte.cast_signed();
    }
}

/// The lowest bit of each of 8 bytes.
const LOWEST: u64 = 0x0101_0101_0101_0101;

/// For each byte, 8 bytes of all ones where it has a bit.
static SPREAD: [u64; 256] = {
    let mut spread = [0; 256];
    let mut at = 0;
    while at < 256 * 8 {
        if (at / 8) >> (at % 8) & 1 == 1 {
            spread[at / 8] |= 0xFF << (at % 8 * 8);
        }
        at += 1;
    }
    spread
};

/// Eight signs of which seven are stored: their number is even.
#[inline(always)]
fn even_signs(stored: u32) -> u8 {
    let [signs, ..] = (stored & 127).to_le_bytes();
    signs | u8::from(signs.count_ones() % 2 == 1) << 7
}

/// Two vectors of 4.
#[inline(always)]
fn joined(first: [u8; 4], second: [u8; 4]) -> [u8; 8] {
    let ([a, b, c, d], [e, f, g, h]) = (first, second);
    [a, b, c, d, e, f, g, h]
}

#[inline(always)]
fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*part(bytes, at))
}

#[inline(always)]
fn short(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(*part(bytes, at))
}

/// The half byte `at` of packed half bytes.
#[inline(always)]
fn nibble(bytes: &[u8], at: usize) -> u8 {
    bytes[at / 2] >> (at % 2 * 4) & 15
}

/// d; for each 32 elements: 4 indices, and a word of 4 x 7 signs and a scale.
#[inline(always)]
pub(super) fn iq2_xxs(block: &[u8; 66], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    let d = half(block, 0);
    for at in 0..8 {
        let signs = word(block, 2 + at * 8 + 4);
        let [scale, ..] = (signs >> 28).to_le_bytes();
        let scale = d * (0.5 + f32::from(scale)) * 0.25;
        scales[at * 2..][..2].fill(Scale { scale, min: 0.0 });
        for (inner, &index) in part::<4>(block, 2 + at * 8).iter().enumerate() {
            let numbers = grids::IQ2_XXS[usize::from(index)];
            signed(codes, at * 4 + inner, numbers, even_signs(signs >> (7 * inner)));
        }
    }
}

/// Sixteen scales of 4 bits: a half is added, and a quarter of that taken.
#[inline(always)]
fn quarters(d: f32, packed: &[u8; 8], scales: &mut [Scale; 16]) {
    for (at, scale) in scales.iter_mut().enumerate() {
        *scale = Scale { scale: d * (0.5 + f32::from(nibble(packed, at))) * 0.25, min: 0.0 };
    }
}

/// d; for each vector an index of 9 bits and 7 signs; 16 scales of 4 bits.
#[inline(always)]
pub(super) fn iq2_xs(block: &[u8; 74], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    let d = half(block, 0);
    quarters(d, part(block, 66), scales);
    for at in 0..32 {
        let both = short(block, 2 + at * 2);
        let numbers = grids::IQ2_XS[usize::from(both & 511)];
        signed(codes, at, numbers, even_signs(u32::from(both >> 9)));
    }
}

/// d, 32 indices, 32 x 8 signs, two more bits for each index, 16 scales of 4 bits.
#[inline(always)]
pub(super) fn iq2_s(block: &[u8; 82], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    let d = half(block, 0);
    let (indices, signs) = (part::<32>(block, 2), part::<32>(block, 34));
    let tops = part::<8>(block, 66);
    quarters(d, part(block, 74), scales);
    for at in 0..32 {
        let top = tops[at / 4] >> (at % 4 * 2) & 3;
        let index = usize::from(u16::from_le_bytes([indices[at], top]));
        signed(codes, at, grids::IQ2_S[index], signs[at]);
    }
}

/// d, 64 indices of vectors of 4; for each 32 elements a word of 4 x 7 signs and a scale.
#[inline(always)]
pub(super) fn iq3_xxs(block: &[u8; 98], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    let d = half(block, 0);
    let indices = part::<64>(block, 2);
    for at in 0..8 {
        let signs = word(block, 66 + at * 4);
        let [scale, ..] = (signs >> 28).to_le_bytes();
        let scale = d * (0.5 + f32::from(scale)) * 0.5;
        scales[at * 2..][..2].fill(Scale { scale, min: 0.0 });
        for inner in 0..4 {
            let first = (at * 4 + inner) * 2;
            let [left, right] = [first, first + 1].map(|at| grids::IQ3_XXS[usize::from(indices[at])]);
            signed(codes, at * 4 + inner, joined(left, right), even_signs(signs >> (7 * inner)));
        }
    }
}

/// d, 64 indices, one more bit for each, 32 x 8 signs, 8 scales of 4 bits.
#[inline(always)]
pub(super) fn iq3_s(block: &[u8; 110], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    let d = half(block, 0);
    let (indices, tops) = (part::<64>(block, 2), part::<8>(block, 66));
    let (signs, packed) = (part::<32>(block, 74), part::<4>(block, 106));
    for (at, scale) in scales.iter_mut().enumerate() {
        *scale = Scale { scale: d * f32::from(1 + 2 * nibble(packed, at / 2)), min: 0.0 };
    }
    for (at, &signs) in signs.iter().enumerate() {
        let [left, right] = [at * 2, at * 2 + 1].map(|at| {
            let top = tops[at / 8] >> (at % 8) & 1;
            grids::IQ3_S[usize::from(u16::from_le_bytes([indices[at], top]))]
        });
        signed(codes, at, joined(left, right), signs);
    }
}

/// A vector of 8 out of -1, 0 and 1, moved by an eighth; in eighths.
#[inline(always)]
fn moved(codes: &mut [Codes; 16], at: usize, index: u16, is_down: bool) {
    // The grid has one more than the number.
    let less = if is_down { 8 + 1 } else { 8 - 1 };
    let numbers = grids::IQ1[to_usize(u64::from(index))];
    let target = &mut codes[at / 2][at % 2 * 8..][..8];
    for (code, number) in target.iter_mut().zip(numbers) {
        *code = (number * 8).wrapping_sub(less).cast_signed();
    }
}

/// A scale for codes in eighths.
#[inline(always)]
fn eighths(d: f32, odd: u16) -> Scale {
    Scale { scale: d * f32::from(2 * odd + 1) * 0.125, min: 0.0 }
}

/// d, 32 indices; for each 32 elements 4 x 3 more bits, a scale of 3 bits and a direction.
#[inline(always)]
pub(super) fn iq1_s(block: &[u8; 50], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    let d = half(block, 0);
    let indices = part::<32>(block, 2);
    for at in 0..32 {
        let high = short(block, 34 + at / 4 * 2);
        scales[at / 2] = eighths(d, high >> 12 & 7);
        let index = u16::from(indices[at]) | (high >> (at % 4 * 3) & 7) << 8;
        moved(codes, at, index, high & 0x8000 != 0);
    }
}

/// 32 indices, 32 x 3 more bits and a direction; 16 scales of 3 bits in four words, whose top bits
/// are d.
#[inline(always)]
pub(super) fn iq1_m(block: &[u8; 56], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    let (indices, highs) = (part::<32>(block, 0), part::<16>(block, 32));
    let words = [0, 2, 4, 6].map(|at| short(block, 48 + at));
    let top = |at: usize| words[at] >> 12;
    let d = half(&(top(0) | top(1) << 4 | top(2) << 8 | top(3) << 12).to_le_bytes(), 0);
    for at in 0..32 {
        scales[at / 2] = eighths(d, words[at / 8] >> (at / 2 % 4 * 3) & 7);
        let high = nibble(highs, at);
        let index = u16::from(indices[at]) | u16::from(high & 7) << 8;
        moved(codes, at, index, high & 8 != 0);
    }
}
