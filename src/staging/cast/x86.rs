//! `F32` to `BF16` with x86-64 vector intrinsics. By hand: most casts of loads are this one, and
//! the compiler's loop over `floats` is half as fast (38 GB/s of source on one core, against 75;
//! memory delivers 13).
#![allow(
    unsafe_code,
    reason = "calls functions compiled for more than the baseline; each block says why it may"
)]

use std::arch::x86_64::*;

use super::blocks::{Block, Elements};
use super::floats;
use super::level::Level;

/// Casts all elements, which are f32. For levels above the baseline.
///
/// Works on halves of words. The upper half is kept, plus one if the lower half is more than half a
/// unit, or exactly half and the upper half is odd: if `lower | (upper & 1) > 0x8000`. That is
/// wrong for some NaNs, and finite numbers may become infinite, so blocks with an upper half as
/// large as that of the largest finite number are cast again, element by element.
pub(super) fn bf16_of_f32(elements: Elements<'_>) -> u64 {
    let is_lost = |source: [u8; 4], target: [u8; 2]| {
        f32::from_le_bytes(source).is_finite() && floats::is_any_bf16_special(&[target])
    };
    match elements.level {
        Level::Avx512(_) => elements.each_block(
            // SAFETY: a value of this level exists only on machines that have its instructions.
            |source, target| unsafe { block_avx512(source, target) } && cast_again(source, target),
            is_lost,
        ),
        Level::Baseline => unreachable!("the baseline has casts of its own"),
        Level::Avx2(_) => elements.each_block(
            // SAFETY: as above.
            |source, target| unsafe { block_avx2(source, target) } && cast_again(source, target),
            is_lost,
        ),
    }
}

/// Casts a block that has large numbers. Returns true, so that new infinities are counted.
#[cold]
fn cast_again(source: &Block<4>, target: &mut Block<2>) -> bool {
    for (target, source) in target.iter_mut().zip(source) {
        *target = floats::bf16_of_f32(u32::from_le_bytes(*source)).to_le_bytes();
    }
    true
}

/// Twice the upper half of the largest finite number: with the sign shifted out, no element below
/// it is or becomes infinite or NaN.
const LARGE: u16 = 0x7F7F << 1;

/// Casts a block. True if some of its numbers may be wrong.
#[target_feature(enable = "avx512f,avx512bw")]
fn block_avx512(source: &Block<4>, target: &mut Block<2>) -> bool {
    const LOWER: [u16; 32] = every_second(0);
    const UPPER: [u16; 32] = every_second(1);
    let load = |words: &[u16; 32]| {
        // SAFETY: reads the 64 bytes of an array, at any address.
        unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
    };
    let (lower_places, upper_places) = (load(&LOWER), load(&UPPER));
    let (one, half) = (_mm512_set1_epi16(1), _mm512_set1_epi16(i16::MIN));
    let mut largest = _mm512_setzero_si512();
    let (sources, _) = source.as_flattened().as_chunks::<64>();
    let (targets, _) = target.as_flattened_mut().as_chunks_mut::<64>();
    for (pair, target) in sources.chunks_exact(2).zip(targets) {
        // SAFETY: reads the 64 bytes of an array, at any address.
        let first = unsafe { _mm512_loadu_si512(pair[0].as_ptr().cast()) };
        // SAFETY: as above.
        let second = unsafe { _mm512_loadu_si512(pair[1].as_ptr().cast()) };
        let lower = _mm512_permutex2var_epi16(first, lower_places, second);
        let upper = _mm512_permutex2var_epi16(first, upper_places, second);
        largest = _mm512_max_epu16(largest, _mm512_add_epi16(upper, upper));
        // `lower | (upper & one)`
        let is_up = _mm512_cmpgt_epu16_mask(_mm512_ternarylogic_epi32::<0xF8>(lower, upper, one), half);
        let rounded = _mm512_mask_add_epi16(upper, is_up, upper, one);
        // SAFETY: writes the 64 bytes of an array, at any address.
        unsafe { _mm512_storeu_si512(target.as_mut_ptr().cast(), rounded) };
    }
    _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(LARGE.cast_signed())) != 0
}

/// Indices of the lower or upper halves of all words in two vectors.
const fn every_second(first: u16) -> [u16; 32] {
    let mut places = [first; 32];
    let mut index = 1;
    while index < places.len() {
        places[index] = places[index - 1] + 2;
        index += 1;
    }
    places
}

/// Casts a block. True if some of its numbers may be wrong.
#[target_feature(enable = "avx2")]
fn block_avx2(source: &Block<4>, target: &mut Block<2>) -> bool {
    let (one, half, zero) = (_mm256_set1_epi16(1), _mm256_set1_epi16(i16::MIN), _mm256_setzero_si256());
    let mut largest = zero;
    let (sources, _) = source.as_flattened().as_chunks::<32>();
    let (targets, _) = target.as_flattened_mut().as_chunks_mut::<32>();
    for (pair, target) in sources.chunks_exact(2).zip(targets) {
        // SAFETY: reads the 32 bytes of an array, at any address.
        let first = unsafe { _mm256_loadu_si256(pair[0].as_ptr().cast()) };
        // SAFETY: as above.
        let second = unsafe { _mm256_loadu_si256(pair[1].as_ptr().cast()) };
        // Packing interleaves the halves of both vectors; the permutation at the end undoes that.
        let upper = _mm256_packus_epi32(_mm256_srli_epi32::<16>(first), _mm256_srli_epi32::<16>(second));
        let lower = _mm256_packus_epi32(
            _mm256_blend_epi16::<0xAA>(first, zero),
            _mm256_blend_epi16::<0xAA>(second, zero),
        );
        largest = _mm256_max_epu16(largest, _mm256_add_epi16(upper, upper));
        let tie_to_even = _mm256_or_si256(lower, _mm256_and_si256(upper, one));
        // There is no unsigned comparison: a signed one with flipped top bits does the same.
        let is_up = _mm256_cmpgt_epi16(_mm256_xor_si256(tie_to_even, half), zero);
        let rounded = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_sub_epi16(upper, is_up));
        // SAFETY: writes the 32 bytes of an array, at any address.
        unsafe { _mm256_storeu_si256(target.as_mut_ptr().cast(), rounded) };
    }
    let large = _mm256_set1_epi16(LARGE.cast_signed());
    let is_large = _mm256_cmpeq_epi16(_mm256_max_epu16(largest, large), largest);
    _mm256_movemask_epi8(is_large) != 0
}
