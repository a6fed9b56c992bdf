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

use super::{Codes, Scale, Table, each, each_pair, half, part};

/// Codes of `E2M1`, doubled.
pub(super) static E2M1: Table = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// Codes of the 4-bit IQ types.
pub(super) static IQ4: Table = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Sixteen bytes, low halves first.
#[inline(always)]
fn nibbles(codes: &mut [Codes; 2], bytes: &[u8; 16], less: u8) {
    each(&mut codes[0], bytes, |byte| (byte & 15).wrapping_sub(less));
    each(&mut codes[1], bytes, |byte| (byte >> 4).wrapping_sub(less));
}

/// The same with a fifth bit each.
#[inline(always)]
fn with_top_bits(codes: &mut [Codes; 2], bytes: &[u8; 16], top: &[u8; 4], less: u8) {
    // A byte of all ones for each bit.
    let mut tops = [[0_u8; 16]; 2];
    for (at, top_of) in tops.as_flattened_mut().iter_mut().enumerate() {
        *top_of = top[at / 8] & (1 << (at % 8));
        *top_of = if *top_of == 0 { 0 } else { 16 };
    }
    each_pair(&mut codes[0], bytes, &tops[0], |byte, top| ((byte & 15) | top).wrapping_sub(less));
    each_pair(&mut codes[1], bytes, &tops[1], |byte, top| ((byte >> 4) | top).wrapping_sub(less));
}

#[inline(always)]
pub(super) fn q4_0(block: &[u8; 18], codes: &mut [Codes; 2], scales: &mut [Scale; 2]) {
    *scales = [Scale { scale: half(block, 0), min: 0.0 }; 2];
    nibbles(codes, part(block, 2), 8);
}

#[inline(always)]
pub(super) fn q4_1(block: &[u8; 20], codes: &mut [Codes; 2], scales: &mut [Scale; 2]) {
    *scales = [Scale { scale: half(block, 0), min: -half(block, 2) }; 2];
    nibbles(codes, part(block, 4), 0);
}

#[inline(always)]
pub(super) fn q5_0(block: &[u8; 22], codes: &mut [Codes; 2], scales: &mut [Scale; 2]) {
    *scales = [Scale { scale: half(block, 0), min: 0.0 }; 2];
    with_top_bits(codes, part(block, 6), part(block, 2), 16);
}

#[inline(always)]
pub(super) fn q5_1(block: &[u8; 24], codes: &mut [Codes; 2], scales: &mut [Scale; 2]) {
    *scales = [Scale { scale: half(block, 0), min: -half(block, 2) }; 2];
    with_top_bits(codes, part(block, 8), part(block, 4), 0);
}

#[inline(always)]
pub(super) fn q8_0(block: &[u8; 34], codes: &mut [Codes; 2], scales: &mut [Scale; 2]) {
    *scales = [Scale { scale: half(block, 0), min: 0.0 }; 2];
    for (at, codes) in codes.iter_mut().enumerate() {
        each(codes, part(block, 2 + at * 16), |byte| byte);
    }
}

/// A scale and 128 signs.
#[inline(always)]
pub(super) fn q1_0(block: &[u8; 18], codes: &mut [Codes; 8], scales: &mut [Scale; 8]) {
    *scales = [Scale { scale: half(block, 0), min: 0.0 }; 8];
    for (at, code) in codes.as_flattened_mut().iter_mut().enumerate() {
        *code = if block[2 + at / 8] & (1 << (at % 8)) == 0 { -1 } else { 1 };
    }
}

/// A power of two (`E8M0`), and 32 numbers of 4 bits (`E2M1`).
#[inline(always)]
pub(super) fn mxfp4(block: &[u8; 17], codes: &mut [Codes; 2], scales: &mut [Scale; 2]) {
    // Half the power, since the codes are doubled.
    let bits = match block[0] {
        exponent @ (0 | 1) => 0x0020_0000 << exponent,
        exponent => (u32::from(exponent) - 1) << 23,
    };
    *scales = [Scale { scale: f32::from_bits(bits), min: 0.0 }; 2];
    nibbles(codes, part(block, 1), 0);
}

/// Four parts of 16 elements, each with a scale (`E4M3` without a sign).
#[inline(always)]
pub(super) fn nvfp4(block: &[u8; 36], codes: &mut [Codes; 4], scales: &mut [Scale; 4]) {
    for at in 0..4 {
        scales[at] = Scale { scale: half_of_e4m3(block[at]), min: 0.0 };
        let (low, high) = codes[at].split_at_mut(8);
        for ((low, high), &byte) in low.iter_mut().zip(high).zip(part::<8>(block, 4 + at * 8)) {
            (*low, *high) = ((byte & 15).cast_signed(), (byte >> 4).cast_signed());
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
pub(super) fn iq4_nl(block: &[u8; 18], codes: &mut [Codes; 2], scales: &mut [Scale; 2]) {
    *scales = [Scale { scale: half(block, 0), min: 0.0 }; 2];
    nibbles(codes, part(block, 2), 0);
}

/// Eight parts of 32 elements, each with a scale of 6 bits: two in a word, four in a half byte.
#[inline(always)]
pub(super) fn iq4_xs(block: &[u8; 136], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    let d = half(block, 0);
    let top = u16::from_le_bytes([block[2], block[3]]);
    let low = part::<4>(block, 4);
    let rows = codes.as_chunks_mut::<2>().0.iter_mut().zip(scales.as_chunks_mut::<2>().0);
    for (at, (codes, scales)) in rows.enumerate() {
        let [top, _] = (top >> (2 * at) & 3).to_le_bytes();
        let scale = (low[at / 2] >> (at % 2 * 4) & 15) | top << 4;
        *scales = [Scale { scale: d * (f32::from(scale) - 32.0), min: 0.0 }; 2];
        nibbles(codes, part(block, 8 + at * 16), 0);
    }
}

/// Five numbers of -1, 0 or 1 in a byte: 5 x 32, 5 x 16 and 4 x 4 elements; then the scale.
#[inline(always)]
pub(super) fn tq1_0(block: &[u8; 54], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    *scales = [Scale { scale: half(block, 52), min: 0.0 }; 16];
    for (power, factor) in [1_u8, 3, 9, 27, 81].into_iter().enumerate() {
        let number = |byte: u8| {
            let [_, digit] = (u16::from(byte.wrapping_mul(factor)) * 3).to_le_bytes();
            digit.wrapping_sub(1)
        };
        each(&mut codes[power * 2], part(block, 0), number);
        each(&mut codes[power * 2 + 1], part(block, 16), number);
        each(&mut codes[10 + power], part(block, 32), number);
        for (at, &byte) in part::<4>(block, 48).iter().enumerate().filter(|_| power < 4) {
            codes[15][power * 4 + at] = number(byte).cast_signed();
        }
    }
}

/// Four numbers of -1, 0 or 1 in a byte; then the scale.
#[inline(always)]
pub(super) fn tq2_0(block: &[u8; 66], codes: &mut [Codes; 16], scales: &mut [Scale; 16]) {
    *scales = [Scale { scale: half(block, 64), min: 0.0 }; 16];
    for (at, codes) in codes.iter_mut().enumerate() {
        let shift = at / 2 % 4 * 2;
        each(codes, part(block, at / 8 * 32 + at % 2 * 16), |byte| (byte >> shift & 3).wrapping_sub(1));
    }
}
