//! The K types: 256 elements, whose parts of 16 or 32 have scales of 4 to 8 bits.
//!
//! Elements stand in rows of 32. A byte holds numbers of several rows: its lowest bits those of the
//! first.

use super::{Single, half, part, part_mut};

/// A row of 32 elements.
#[inline(always)]
fn row(singles: &mut [Single; 256], row: usize, number: impl Fn(usize) -> f32) {
    for (at, single) in part_mut::<32>(singles, row * 32).iter_mut().enumerate() {
        *single = number(at).to_le_bytes();
    }
}

/// Half a row: the elements that share a scale.
#[inline(always)]
fn half_row(singles: &mut [Single; 256], part: usize, number: impl Fn(usize) -> f32) {
    for (at, single) in part_mut::<16>(singles, part * 16).iter_mut().enumerate() {
        *single = number(at).to_le_bytes();
    }
}

/// Scales and minima of 4 bits in 16 bytes, 256 numbers of 2 bits, d, dmin.
#[inline(always)]
pub(super) fn q2_k(block: &[u8; 84], singles: &mut [Single; 256]) {
    let (d, dmin) = (half(block, 80), half(block, 82));
    let scales = part::<16>(block, 0);
    for at in 0..16 {
        let (dl, ml) = (d * f32::from(scales[at] & 15), dmin * f32::from(scales[at] >> 4));
        let codes = part::<16>(block, 16 + at / 8 * 32 + at % 2 * 16);
        let shift = at / 2 % 4 * 2;
        half_row(singles, at, |at| dl * f32::from(codes[at] >> shift & 3) - ml);
    }
}

/// 256 top bits, which mean 4 less if they are 0; 256 numbers of 2 bits; 16 scales of 6 bits in 12
/// bytes; d.
#[inline(always)]
pub(super) fn q3_k(block: &[u8; 110], singles: &mut [Single; 256]) {
    let d = half(block, 108);
    let scales = part::<12>(block, 96);
    for at in 0..16 {
        let low = scales[at % 8] >> (at / 8 * 4) & 15;
        let high = scales[8 + at % 4] >> (at / 4 * 2) & 3;
        let dl = d * (f32::from(low | high << 4) - 32.0);
        let codes = part::<16>(block, 32 + at / 8 * 32 + at % 2 * 16);
        let top = part::<16>(block, at % 2 * 16);
        let (shift, bit) = (at / 2 % 4 * 2, at / 2);
        half_row(singles, at, |at| {
            let code = (codes[at] >> shift & 3) | (top[at] >> bit & 1) << 2;
            dl * (f32::from(code) - 4.0)
        });
    }
}

/// The scale and the minimum of each row, of 6 bits, in 12 bytes.
#[inline(always)]
fn scales_and_minima(packed: &[u8; 12]) -> [(f32, f32); 8] {
    let mut rows = [(0.0, 0.0); 8];
    for at in 0..4 {
        let (scale, min, both) = (packed[at], packed[at + 4], packed[at + 8]);
        rows[at] = (f32::from(scale & 63), f32::from(min & 63));
        rows[at + 4] = (f32::from((both & 15) | (scale >> 2 & 48)), f32::from((both >> 4) | (min >> 2 & 48)));
    }
    rows
}

/// d, dmin, scales and minima, 256 numbers of 4 bits.
#[inline(always)]
pub(super) fn q4_k(block: &[u8; 144], singles: &mut [Single; 256]) {
    let (d, dmin) = (half(block, 0), half(block, 2));
    for (at, (scale, min)) in scales_and_minima(part(block, 4)).into_iter().enumerate() {
        let (d, m) = (d * scale, dmin * min);
        let codes = part::<32>(block, 16 + at / 2 * 32);
        let shift = at % 2 * 4;
        row(singles, at, |at| d * f32::from(codes[at] >> shift & 15) - m);
    }
}

/// d, dmin, scales and minima, 256 top bits, 256 numbers of 4 bits.
#[inline(always)]
pub(super) fn q5_k(block: &[u8; 176], singles: &mut [Single; 256]) {
    let (d, dmin) = (half(block, 0), half(block, 2));
    let top = part::<32>(block, 16);
    for (bit, (scale, min)) in scales_and_minima(part(block, 4)).into_iter().enumerate() {
        let (d, m) = (d * scale, dmin * min);
        let codes = part::<32>(block, 48 + bit / 2 * 32);
        let shift = bit % 2 * 4;
        row(singles, bit, |at| {
            let code = (codes[at] >> shift & 15) | (top[at] >> bit & 1) << 4;
            d * f32::from(code) - m
        });
    }
}

/// 256 numbers of 4 bits, 256 x 2 top bits, 16 scales of 8 bits, d.
#[inline(always)]
pub(super) fn q6_k(block: &[u8; 210], singles: &mut [Single; 256]) {
    let d = half(block, 208);
    let scales = part::<16>(block, 192);
    for at in 0..16 {
        let dl = d * f32::from(scales[at].cast_signed());
        let (half, row) = (at / 8, at / 2 % 4);
        let codes = part::<16>(block, half * 64 + row % 2 * 32 + at % 2 * 16);
        let top = part::<16>(block, 128 + half * 32 + at % 2 * 16);
        let (shift, top_shift) = (row / 2 * 4, row * 2);
        half_row(singles, at, |at| {
            let code = (codes[at] >> shift & 15) | (top[at] >> top_shift & 3) << 4;
            dl * (f32::from(code) - 32.0)
        });
    }
}

/// d in single precision, 256 numbers of 8 bits; sums that are not needed.
#[inline(always)]
pub(super) fn q8_k(block: &[u8; 292], singles: &mut [Single; 256]) {
    let d = f32::from_le_bytes(*part(block, 0));
    for at in 0..8 {
        let codes = part::<32>(block, 4 + at * 32);
        row(singles, at, |at| d * f32::from(codes[at].cast_signed()));
    }
}
