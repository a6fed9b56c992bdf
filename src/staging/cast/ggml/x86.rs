//! The arithmetic with x86-64 vector intrinsics. By hand: the compiler unrolls loops over 16 codes
//! and then keeps to vectors of 128 bits, at a third of the speed.
#![allow(
    unsafe_code,
    reason = "calls functions compiled for more than the baseline; each block says why it may"
)]

use std::arch::x86_64::*;

use super::{Codes, PART, Scale, Table};
use crate::staging::cast::level::Level;

/// Looks up codes, if the level has vectors for it.
pub(super) fn look_up(level: Level, codes: &mut [Codes], table: &Table) -> bool {
    match level {
        Level::Baseline => return false,
        // SAFETY: values of these levels exist only on machines that have AVX2.
        Level::Avx2(_) | Level::Avx512(_) => unsafe { look_up_avx2(codes, table) },
    }
    true
}

/// Writes floats, bf16 or single precision, if the level has vectors for it. As in `kernel`.
pub(super) fn scale(
    level: Level,
    codes: &[Codes],
    scales: &[Scale],
    target: &mut [u8],
    is_bf16: bool,
) -> bool {
    match (level, is_bf16) {
        (Level::Baseline, _) => return false,
        // SAFETY: a value of this level exists only on machines that have its instructions.
        (Level::Avx512(_), true) => unsafe { bf16_avx512(codes, scales, target.as_chunks_mut().0) },
        // SAFETY: as above.
        (Level::Avx512(_), false) => unsafe { singles_avx512(codes, scales, target.as_chunks_mut().0) },
        // SAFETY: as above.
        (Level::Avx2(_), true) => unsafe { bf16_avx2(codes, scales, target.as_chunks_mut().0) },
        // SAFETY: as above.
        (Level::Avx2(_), false) => unsafe { singles_avx2(codes, scales, target.as_chunks_mut().0) },
    }
    true
}

#[target_feature(enable = "avx2")]
fn load(codes: &Codes) -> __m128i {
    // SAFETY: reads the 16 bytes of an array, at any address.
    unsafe { _mm_loadu_si128(codes.as_ptr().cast()) }
}

#[target_feature(enable = "avx2")]
fn look_up_avx2(codes: &mut [Codes], table: &Table) {
    let table = load(table);
    for codes in codes {
        let found = _mm_shuffle_epi8(table, load(codes));
        // SAFETY: writes the 16 bytes of an array, at any address.
        unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), found) };
    }
}

/// `scale * code - min` of a part.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn part_avx512(codes: &Codes, scale: &Scale) -> __m512 {
    let numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load(codes)));
    let product = _mm512_mul_ps(_mm512_set1_ps(scale.scale), numbers);
    _mm512_sub_ps(product, _mm512_set1_ps(scale.min))
}

#[target_feature(enable = "avx512f,avx512bw")]
fn singles_avx512(codes: &[Codes], scales: &[Scale], target: &mut [[u8; PART * 4]]) {
    for ((codes, scale), target) in codes.iter().zip(scales).zip(target) {
        let floats = part_avx512(codes, scale);
        // SAFETY: writes the 64 bytes of an array, at any address.
        unsafe { _mm512_storeu_ps(target.as_mut_ptr().cast(), floats) };
    }
}

/// Rounded to nearest even by adding almost half a unit. NaNs have no payload that could carry;
/// infinities stay.
#[target_feature(enable = "avx512f,avx512bw")]
fn bf16_avx512(codes: &[Codes], scales: &[Scale], target: &mut [[u8; PART * 2]]) {
    let (one, below_half) = (_mm512_set1_epi32(1), _mm512_set1_epi32(0x7FFF));
    for ((codes, scale), target) in codes.iter().zip(scales).zip(target) {
        let bits = _mm512_castps_si512(part_avx512(codes, scale));
        let is_odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), one);
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, below_half));
        let halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded));
        // SAFETY: writes the 32 bytes of an array, at any address.
        unsafe { _mm256_storeu_si256(target.as_mut_ptr().cast(), halves) };
    }
}

/// `scale * code - min` of both halves of a part.
#[inline]
#[target_feature(enable = "avx2")]
fn part_avx2(codes: &Codes, scale: &Scale) -> [__m256; 2] {
    let codes = load(codes);
    let (scale, min) = (_mm256_set1_ps(scale.scale), _mm256_set1_ps(scale.min));
    let low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
    let high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(codes, codes)));
    [_mm256_sub_ps(_mm256_mul_ps(scale, low), min), _mm256_sub_ps(_mm256_mul_ps(scale, high), min)]
}

#[target_feature(enable = "avx2")]
fn singles_avx2(codes: &[Codes], scales: &[Scale], target: &mut [[u8; PART * 4]]) {
    for ((codes, scale), target) in codes.iter().zip(scales).zip(target) {
        let (targets, _) = target.as_chunks_mut::<32>();
        for (target, half) in targets.iter_mut().zip(part_avx2(codes, scale)) {
            // SAFETY: writes the 32 bytes of an array, at any address.
            unsafe { _mm256_storeu_ps(target.as_mut_ptr().cast(), half) };
        }
    }
}

#[target_feature(enable = "avx2")]
fn bf16_avx2(codes: &[Codes], scales: &[Scale], target: &mut [[u8; PART * 2]]) {
    let (one, below_half) = (_mm256_set1_epi32(1), _mm256_set1_epi32(0x7FFF));
    for ((codes, scale), target) in codes.iter().zip(scales).zip(target) {
        let [low, high] = part_avx2(codes, scale).map(|half| {
            let bits = _mm256_castps_si256(half);
            let is_odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), one);
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, below_half));
            _mm256_srli_epi32::<16>(rounded)
        });
        // Packing interleaves the halves of both vectors; the permutation undoes that.
        let halves = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
        // SAFETY: writes the 32 bytes of an array, at any address.
        unsafe { _mm256_storeu_si256(target.as_mut_ptr().cast(), halves) };
    }
}
