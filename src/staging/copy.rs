//! Copies with streaming stores, which bypass the CPU cache.
//!
//! Bytes copied out of a slot are not needed again soon; the slot is, for its next bytes. An
//! ordinary copy reads the target's lines before it writes them, and evicts the ring from the
//! cache. By hand: no library offers streaming stores.
#![allow(unsafe_code, reason = "stores that no safe function offers; each says where it writes")]

/// Shorter copies stay in the cache: small data is likely used at once.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const PAST_CACHE_MIN: usize = 64 << 10;

/// Copies `source` to `target`, which must have the same length.
///
/// # Panics
/// If they are not.
pub(crate) fn copy_past_cache(target: &mut [u8], source: &[u8]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if target.len() >= PAST_CACHE_MIN {
        // SAFETY: each processor of this architecture has SSE2.
        return unsafe { copy_streaming(target, source) };
    }
    target.copy_from_slice(source);
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "sse2")]
fn copy_streaming(target: &mut [u8], source: &[u8]) {
    use std::arch::x86_64::{
        __m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128,
    };

    /// Bytes of a cache line.
    const LINE: usize = 64;
    /// Prefetch distance: a few lines, for the latency of memory.
    const AHEAD: usize = 8 * LINE;

    assert_eq!(target.len(), source.len(), "both ends of a copy are equally long");
    let to_line = target.as_ptr().align_offset(LINE).min(target.len());
    let ((target_head, target), (source_head, source)) =
        (target.split_at_mut(to_line), source.split_at(to_line));
    target_head.copy_from_slice(source_head);
    let whole_lines = target.len() - target.len() % LINE;
    let ((target, target_tail), (source, source_tail)) =
        (target.split_at_mut(whole_lines), source.split_at(whole_lines));
    for (target, source) in target.chunks_exact_mut(LINE).zip(source.chunks_exact(LINE)) {
        // Prefetching reads nothing: an address past the end is harmless.
        _mm_prefetch::<_MM_HINT_T0>(source.as_ptr().wrapping_add(AHEAD).cast());
        let (target, source) = (target.as_mut_ptr().cast::<__m128i>(), source.as_ptr().cast::<__m128i>());
        for quarter in 0..4 {
            let (target, source) = (target.wrapping_add(quarter), source.wrapping_add(quarter));
            // SAFETY: a quarter of a line of `LINE` bytes; a load need not be aligned.
            let bytes = unsafe { _mm_loadu_si128(source) };
            // SAFETY: the same quarter of the target's line, which starts on a multiple of `LINE`.
            unsafe { _mm_stream_si128(target, bytes) };
        }
    }
    // Streaming stores are unordered: a thread that is told of the copy must see them.
    _mm_sfence();
    target_tail.copy_from_slice(source_tail);
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "half a million bytes, many times; and miri takes the plain copy")]
    fn every_length_and_place_arrives_and_nothing_beside_it() {
        let source: Vec<u8> =
            (0..300_000_u32).map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
        for len in [0, 1, 63, 64, 65_535, 65_536, 65_537, 65_600, 131_072, 200_000, 262_143] {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (7, 63), (64, 33), (4095, 17)] {
                let mut target = vec![0xA5; to + len + 100];
                copy_past_cache(&mut target[to..to + len], &source[from..from + len]);
                assert_eq!(target[to..to + len], source[from..from + len], "{len} bytes, {from} to {to}");
                let beside = target[..to].iter().chain(&target[to + len..]);
                assert!(beside.copied().all(|byte| byte == 0xA5), "{len} bytes, {from} to {to}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "equally long")]
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    fn ends_of_different_lengths_are_refused() {
        copy_past_cache(&mut [0; 100_000], &[0; 100_001]);
    }
}
