//! Blocks of GGUF files to floats, in the slot.
//!
//! Each type has a function that decodes one block to single precision, with the operations of
//! gguf-py 0.19 in their order: the results are equal bit by bit, but for the payloads of NaNs. The
//! loop decodes a group of blocks into a buffer in the first-level cache, casts the buffer to the
//! wanted type as it casts any `F32`, and writes it. Floats take more bytes than their block, so
//! the loop goes from the back to the front:
//!
//! ```text
//! slot    |b|b|b|b|..............|      blocks, one behind the other
//!         |b|b|...|floats |floats|      the last groups are decoded
//! ```
//!
//! `small` has the types with short blocks, `k` the K types, `iq` those with grids (`grids`).

use super::cast_in_place;
use super::floats;
use super::level::{Level, Work};
use crate::checkpoint::{BlockType, DType};
use crate::plan::{Cast, FloatType};
use crate::units::to_usize;

mod grids;
mod iq;
mod k;
mod small;
#[cfg(not(loom))]
#[cfg(test)]
mod tests;

/// Elements that are decoded before they are cast and written: a multiple of every block's.
const GROUP_ELEMENTS: usize = 1024;
/// Bytes of the blocks of a group, at most.
const GROUP_BYTES_MAX: usize = GROUP_ELEMENTS / 256 * BlockType::BYTES_MAX;

/// Four bytes of a little-endian single-precision number.
type Single = [u8; 4];

/// Decodes the blocks in the first `source_bytes` of `bytes`. The result begins at their front.
/// Returns the number of finite elements that became infinite when they were cast to `to`.
///
/// # Panics
/// If `source_bytes` does not hold whole blocks, or the result exceeds `bytes`.
pub(super) fn decode(
    level: Level,
    bytes: &mut [u8],
    source_bytes: usize,
    block: BlockType,
    to: FloatType,
) -> u64 {
    let blocks = Blocks { level, bytes, source_bytes, to };
    match block {
        BlockType::Q4_0 => blocks.each(small::q4_0),
        BlockType::Q4_1 => blocks.each(small::q4_1),
        BlockType::Q5_0 => blocks.each(small::q5_0),
        BlockType::Q5_1 => blocks.each(small::q5_1),
        BlockType::Q8_0 => blocks.each(small::q8_0),
        BlockType::Q1_0 => blocks.each(small::q1_0),
        BlockType::MXFP4 => blocks.each(small::mxfp4),
        BlockType::NVFP4 => blocks.each(small::nvfp4),
        BlockType::IQ4_NL => blocks.each(small::iq4_nl),
        BlockType::IQ4_XS => blocks.each(small::iq4_xs),
        BlockType::TQ1_0 => blocks.each(small::tq1_0),
        BlockType::TQ2_0 => blocks.each(small::tq2_0),
        BlockType::Q2_K => blocks.each(k::q2_k),
        BlockType::Q3_K => blocks.each(k::q3_k),
        BlockType::Q4_K => blocks.each(k::q4_k),
        BlockType::Q5_K => blocks.each(k::q5_k),
        BlockType::Q6_K => blocks.each(k::q6_k),
        BlockType::Q8_K => blocks.each(k::q8_k),
        BlockType::IQ1_S => blocks.each(iq::iq1_s),
        BlockType::IQ1_M => blocks.each(iq::iq1_m),
        BlockType::IQ2_XXS => blocks.each(iq::iq2_xxs),
        BlockType::IQ2_XS => blocks.each(iq::iq2_xs),
        BlockType::IQ2_S => blocks.each(iq::iq2_s),
        BlockType::IQ3_XXS => blocks.each(iq::iq3_xxs),
        BlockType::IQ3_S => blocks.each(iq::iq3_s),
        BlockType::Q8_1 => unreachable!("there is no cast from {block}"),
    }
}

/// A stretch of blocks.
struct Blocks<'a> {
    level: Level,
    bytes: &'a mut [u8],
    source_bytes: usize,
    to: FloatType,
}

impl Blocks<'_> {
    fn each<const BYTES: usize, const ELEMENTS: usize>(
        self,
        decode: impl Fn(&[u8; BYTES], &mut [Single; ELEMENTS]),
    ) -> u64 {
        assert!(self.source_bytes.is_multiple_of(BYTES), "{} are no whole blocks", self.source_bytes);
        self.level.run(Decode { blocks: self, decode })
    }
}

/// The loop over all groups.
struct Decode<'a, D, const BYTES: usize, const ELEMENTS: usize> {
    blocks: Blocks<'a>,
    decode: D,
}

impl<D, const BYTES: usize, const ELEMENTS: usize> Work for Decode<'_, D, BYTES, ELEMENTS>
where
    D: Fn(&[u8; BYTES], &mut [Single; ELEMENTS]),
{
    type Output = u64;

    #[inline(always)]
    fn run(self) -> u64 {
        let Self { blocks: Blocks { level, bytes, source_bytes, to }, decode } = self;
        let (count, to_bytes) = (source_bytes / BYTES, to_usize(to.bytes()));
        let group = GROUP_ELEMENTS / ELEMENTS;
        let narrowing = Cast::between(DType::F32, to);
        let mut source = [0; GROUP_BYTES_MAX];
        let mut singles: [Single; GROUP_ELEMENTS] = [[0; 4]; GROUP_ELEMENTS];
        let mut overflowed = 0;
        let mut end = count;
        while end > 0 {
            // The last group is what the others leave.
            let len = if end.is_multiple_of(group) { group } else { end % group };
            let first = end - len;
            source[..len * BYTES].copy_from_slice(&bytes[first * BYTES..end * BYTES]);
            let (from, _) = source[..len * BYTES].as_chunks::<BYTES>();
            let (into, _) = singles.as_chunks_mut::<ELEMENTS>();
            for (from, into) in from.iter().zip(into) {
                decode(from, into);
            }
            let done = singles[..len * ELEMENTS].as_flattened_mut();
            if let Some(narrowing) = narrowing {
                let single_bytes = done.len();
                overflowed += cast_in_place(level, done, 0, single_bytes, narrowing);
            }
            let target = &mut bytes[first * ELEMENTS * to_bytes..end * ELEMENTS * to_bytes];
            target.copy_from_slice(&done[..target.len()]);
            end = first;
        }
        overflowed
    }
}

/// The half-precision number at this place of a block.
#[inline(always)]
fn half(bytes: &[u8], at: usize) -> f32 {
    f32::from_bits(floats::f32_of_f16(u16::from_le_bytes([bytes[at], bytes[at + 1]])))
}

/// The part of a block that begins at this place.
#[inline(always)]
fn part<const LEN: usize>(bytes: &[u8], at: usize) -> &[u8; LEN] {
    bytes[at..].first_chunk().expect("the parts of a block lie inside it")
}

/// The same, of decoded elements.
#[inline(always)]
fn part_mut<const LEN: usize>(singles: &mut [Single], at: usize) -> &mut [Single; LEN] {
    singles[at..].first_chunk_mut().expect("the elements of a block lie inside it")
}

/// The number at the index `nibble` of a table. Masks instead of a load: the compiler turns loops
/// over it into vectors.
#[inline(always)]
fn looked_up(table: [i8; 16], nibble: u8) -> i8 {
    let mask = |bit: u8| 0_i8.wrapping_sub((nibble >> bit & 1).cast_signed());
    let masks = [mask(0), mask(1), mask(2), mask(3)];
    let pick = |low: i8, high: i8, mask: i8| low ^ ((low ^ high) & mask);
    let mut eight = [0; 8];
    for (at, picked) in eight.iter_mut().enumerate() {
        *picked = pick(table[2 * at], table[2 * at + 1], masks[0]);
    }
    let four = [0, 2, 4, 6].map(|at| pick(eight[at], eight[at + 1], masks[1]));
    let two = [0, 2].map(|at| pick(four[at], four[at + 1], masks[2]));
    pick(two[0], two[1], masks[3])
}
