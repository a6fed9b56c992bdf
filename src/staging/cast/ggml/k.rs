//! The K types: 256 elements, whose parts of 16 or 32 have scales of 4 to 8 bits.
//!
//! Elements stand in rows of 32. A byte holds numbers of several rows: its lowest bits those of the
//! first.

use super::{Codes, Scale, each, each_pair, half, part};

/// Where the numbers of a part of 16 elements lie: a byte of 2 bits a number holds four rows.
#[inline(always)]
fn in_quarters(at: usize) -> (usize, usize) {
    (at / 8 * 32 + at % 2 * 16, at / 2 % 4 * 2)
}

/// The same for 4 bits a number: a byte holds two rows.
#[inline(always)]
fn in_halves(at: usize) -> (usize, usize) {
    (at / 4 * 32 + at % 2 * 16, at / 2 % 2 * 4)
}

/// Scales and minima of 4 bits in 16 bytes, 256 numbers of 2 bits, d, dmin.
#[inline(always)]
pub(super) fn q2_k(block: &[u8; 84], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    let (d, dmin) = (half(block, 80), half(block, 82));
    for (at, (codes, scale)) in codes.iter_mut().zip(scales).enumerate() {
        let both = block[at];
        *scale = Scale { scale: d * f32::from(both & 15), min: dmin * f32::from(both >> 4) };
        let (start, shift) = in_quarters(at);
        each(codes, part(block, 16 + start), |byte| byte >> shift & 3);
    }
}

/// 256 top bits, which mean 4 less if they are 0; 256 numbers of 2 bits; 16 scales of 6 bits in 12
/// bytes; d.
#[inline(always)]
pub(super) fn q3_k(block: &[u8; 110], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    let d = half(block, 108);
    let packed = part::<12>(block, 96);
    for (at, (codes, scale)) in codes.iter_mut().zip(scales).enumerate() {
        let low = packed[at % 8] >> (at / 8 * 4) & 15;
        let high = packed[8 + at % 4] >> (at / 4 * 2) & 3;
        *scale = Scale { scale: d * (f32::from(low | high << 4) - 32.0), min: 0.0 };
        let (start, shift) = in_quarters(at);
        let (top, bit) = (part(block, at % 2 * 16), at / 2);
        each_pair(codes, part(block, 32 + start), top, |byte, top| {
            ((byte >> shift & 3) | (top >> bit & 1) << 2).wrapping_sub(4)
        });
    }
}

/// The scale and the minimum of each row, of 6 bits, in 12 bytes.
#[inline(always)]
fn scales_and_minima(block: &[u8]) -> [Scale; 8] {
    let (d, dmin) = (half(block, 0), half(block, 2));
    let packed = part::<12>(block, 4);
    let of = |scale, min| Scale { scale: d * f32::from(scale), min: dmin * f32::from(min) };
    let mut rows = [Scale::default(); 8];
    for at in 0..4 {
        let (scale, min, both) = (packed[at], packed[at + 4], packed[at + 8]);
        rows[at] = of(scale & 63, min & 63);
        rows[at + 4] = of((both & 15) | (scale >> 2 & 48), (both >> 4) | (min >> 2 & 48));
    }
    rows
}

/// d, dmin, scales and minima, 256 numbers of 4 bits.
#[inline(always)]
pub(super) fn q4_k(block: &[u8; 144], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    let rows = scales_and_minima(block);
    for (at, (codes, scale)) in codes.iter_mut().zip(scales).enumerate() {
        *scale = rows[at / 2];
        let (start, shift) = in_halves(at);
        each(codes, part(block, 16 + start), |byte| byte >> shift & 15);
    }
}

/// d, dmin, scales and minima, 256 top bits, 256 numbers of 4 bits.
#[inline(always)]
pub(super) fn q5_k(block: &[u8; 176], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    let rows = scales_and_minima(block);
    for (at, (codes, scale)) in codes.iter_mut().zip(scales).enumerate() {
        *scale = rows[at / 2];
        let (start, shift) = in_halves(at);
        let (top, bit) = (part(block, 16 + at % 2 * 16), at / 2);
        each_pair(codes, part(block, 48 + start), top, |byte, top| {
            (byte >> shift & 15) | (top >> bit & 1) << 4
        });
    }
}

/// 256 numbers of 4 bits, 256 x 2 top bits, 16 scales of 8 bits, d.
#[inline(always)]
pub(super) fn q6_k(block: &[u8; 210], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    let d = half(block, 208);
    for (at, (codes, scale)) in codes.iter_mut().zip(scales).enumerate() {
        *scale = Scale { scale: d * f32::from(block[192 + at].cast_signed()), min: 0.0 };
        // Of the low bits, a byte holds the first and the third of four rows, or the others.
        let (start, shift) = (at / 8 * 64 + at / 2 % 2 * 32 + at % 2 * 16, at / 4 % 2 * 4);
        let (top_start, top_shift) = in_quarters(at);
        each_pair(codes, part(block, start), part(block, 128 + top_start), |byte, top| {
            ((byte >> shift & 15) | (top >> top_shift & 3) << 4).wrapping_sub(32)
        });
    }
}

/// d in single precision, 256 numbers of 8 bits; sums that are not needed.
#[inline(always)]
pub(super) fn q8_k(block: &[u8; 292], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    let d = f32::from_le_bytes(*part(block, 0));
    let d = if d.is_nan() { f32::NAN } else { d };
    *scales = [Scale { scale: d, min: 0.0 }; 16];
    for (at, codes) in codes.iter_mut().enumerate() {
        each(codes, part(block, 4 + at * 16), |byte| byte);
    }
}
