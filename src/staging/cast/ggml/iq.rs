//! The types with grids: 256 elements in 32 vectors of 8, each an index into a grid and signs.

use super::{Single, grids, half, part, part_mut};
use crate::units::to_usize;

/// A vector of 8: the numbers of a grid, times `scale`, with the signs that `signs` has as bits.
#[inline(always)]
fn signed(singles: &mut [Single; 256], at: usize, numbers: [u8; 8], signs: u8, scale: f32) {
    for (bit, (single, number)) in (0..).zip(part_mut::<8>(singles, at * 8).iter_mut().zip(numbers)) {
        let sign = if signs >> bit & 1 == 1 { -1.0 } else { 1.0 };
        *single = (scale * f32::from(number) * sign).to_le_bytes();
    }
}

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
pub(super) fn iq2_xxs(block: &[u8; 66], singles: &mut [Single; 256]) {
    let d = half(block, 0);
    for at in 0..8 {
        let signs = word(block, 2 + at * 8 + 4);
        let [scale, ..] = (signs >> 28).to_le_bytes();
        let db = d * (0.5 + f32::from(scale)) * 0.25;
        for (inner, &index) in part::<4>(block, 2 + at * 8).iter().enumerate() {
            let numbers = grids::IQ2_XXS[usize::from(index)];
            signed(singles, at * 4 + inner, numbers, even_signs(signs >> (7 * inner)), db);
        }
    }
}

/// d; for each vector an index of 9 bits and 7 signs; 16 scales of 4 bits.
#[inline(always)]
pub(super) fn iq2_xs(block: &[u8; 74], singles: &mut [Single; 256]) {
    let d = half(block, 0);
    let scales = part::<8>(block, 66);
    for at in 0..32 {
        let both = short(block, 2 + at * 2);
        let db = d * (0.5 + f32::from(nibble(scales, at / 2))) * 0.25;
        let numbers = grids::IQ2_XS[usize::from(both & 511)];
        signed(singles, at, numbers, even_signs(u32::from(both >> 9)), db);
    }
}

/// d, 32 indices, 32 x 8 signs, two more bits for each index, 16 scales of 4 bits.
#[inline(always)]
pub(super) fn iq2_s(block: &[u8; 82], singles: &mut [Single; 256]) {
    let d = half(block, 0);
    let (indices, signs) = (part::<32>(block, 2), part::<32>(block, 34));
    let (tops, scales) = (part::<8>(block, 66), part::<8>(block, 74));
    for at in 0..32 {
        let top = tops[at / 4] >> (at % 4 * 2) & 3;
        let db = d * (0.5 + f32::from(nibble(scales, at / 2))) * 0.25;
        let index = usize::from(u16::from_le_bytes([indices[at], top]));
        signed(singles, at, grids::IQ2_S[index], signs[at], db);
    }
}

/// d, 64 indices of vectors of 4; for each 32 elements a word of 4 x 7 signs and a scale.
#[inline(always)]
pub(super) fn iq3_xxs(block: &[u8; 98], singles: &mut [Single; 256]) {
    let d = half(block, 0);
    let indices = part::<64>(block, 2);
    for at in 0..8 {
        let signs = word(block, 66 + at * 4);
        let [scale, ..] = (signs >> 28).to_le_bytes();
        let db = d * (0.5 + f32::from(scale)) * 0.5;
        for inner in 0..4 {
            let first = (at * 4 + inner) * 2;
            let [left, right] = [first, first + 1].map(|at| grids::IQ3_XXS[usize::from(indices[at])]);
            signed(singles, at * 4 + inner, joined(left, right), even_signs(signs >> (7 * inner)), db);
        }
    }
}

/// d, 64 indices, one more bit for each, 32 x 8 signs, 8 scales of 4 bits.
#[inline(always)]
pub(super) fn iq3_s(block: &[u8; 110], singles: &mut [Single; 256]) {
    let d = half(block, 0);
    let (indices, tops) = (part::<64>(block, 2), part::<8>(block, 66));
    let (signs, scales) = (part::<32>(block, 74), part::<4>(block, 106));
    for at in 0..32 {
        let db = d * f32::from(1 + 2 * nibble(scales, at / 4));
        let [left, right] = [at * 2, at * 2 + 1].map(|at| {
            let top = tops[at / 8] >> (at % 8) & 1;
            grids::IQ3_S[usize::from(u16::from_le_bytes([indices[at], top]))]
        });
        signed(singles, at, joined(left, right), signs[at], db);
    }
}

/// A vector of 8 out of -1, 0 and 1, moved by an eighth.
#[inline(always)]
fn moved(singles: &mut [Single; 256], at: usize, index: u16, is_down: bool, scale: f32) {
    let delta = if is_down { -0.125 } else { 0.125 };
    let numbers = grids::IQ1[to_usize(u64::from(index))];
    for (single, number) in part_mut::<8>(singles, at * 8).iter_mut().zip(numbers) {
        *single = (scale * ((f32::from(number) - 1.0) + delta)).to_le_bytes();
    }
}

/// d, 32 indices; for each 32 elements 4 x 3 more bits, a scale of 3 bits and a direction.
#[inline(always)]
pub(super) fn iq1_s(block: &[u8; 50], singles: &mut [Single; 256]) {
    let d = half(block, 0);
    let indices = part::<32>(block, 2);
    for at in 0..32 {
        let high = short(block, 34 + at / 4 * 2);
        let dl = d * f32::from(2 * (high >> 12 & 7) + 1);
        let index = u16::from(indices[at]) | (high >> (at % 4 * 3) & 7) << 8;
        moved(singles, at, index, high & 0x8000 != 0, dl);
    }
}

/// 32 indices, 32 x 3 more bits and a direction; 16 scales of 3 bits in four words, whose top bits
/// are d.
#[inline(always)]
pub(super) fn iq1_m(block: &[u8; 56], singles: &mut [Single; 256]) {
    let (indices, highs) = (part::<32>(block, 0), part::<16>(block, 32));
    let words = [0, 2, 4, 6].map(|at| short(block, 48 + at));
    let top = |at: usize| words[at] >> 12;
    let d = half(&(top(0) | top(1) << 4 | top(2) << 8 | top(3) << 12).to_le_bytes(), 0);
    for at in 0..32 {
        let scale = words[at / 8] >> (at / 2 % 4 * 3) & 7;
        let dl = d * f32::from(2 * scale + 1);
        let high = nibble(highs, at);
        let index = u16::from(indices[at]) | u16::from(high & 7) << 8;
        moved(singles, at, index, high & 8 != 0, dl);
    }
}
