//! Blocks of GGUF files to floats, in the slot.
//!
//! An element of any type is `scale * code - min`: a code of 8 bits or less, and a scale and a
//! minimum that 16 neighbours share, at least. So each type has a function that *unpacks* one block
//! to codes and scales, and one kernel for each instruction set and target does the arithmetic. Its
//! results are those of gguf-py 0.19, bit by bit. Where gguf-py multiplies in another order or adds
//! a minimum, the results are the same: signs and powers of two commute with rounding. NaNs stay
//! NaNs.
//!
//! Floats take more bytes than their block, so the loop goes in groups from the back to the front:
//!
//! ```text
//! slot    |b|b|b|b|..............|      blocks, one behind the other
//!         |b|b|...|floats |floats|      the last groups are decoded
//! ```
//!
//! `small` has the types with short blocks, `k` the K types, `iq` those with grids (`grids`);
//! `kernel` the arithmetic, `x86` its vectors.

use std::marker::PhantomData;

use super::floats;
use super::level::{Level, Work};
use crate::checkpoint::BlockType;
use crate::plan::FloatType;
use crate::units::to_usize;

mod grids;
mod iq;
mod k;
mod kernel;
mod small;
#[cfg(not(loom))]
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

/// Elements that share a scale, at least.
const PART: usize = 16;
/// Elements that are unpacked at once: a multiple of every block's. Everything about a group stays
/// in the first-level cache.
const GROUP_ELEMENTS: usize = 1024;
const GROUP_PARTS: usize = GROUP_ELEMENTS / PART;
/// Bytes of the blocks of a group, at most.
const GROUP_BYTES_MAX: usize = GROUP_ELEMENTS / 256 * BlockType::BYTES_MAX;

/// The codes of a part.
type Codes = [i8; PART];

/// What the codes of a part become: `scale * code - min`.
#[derive(Clone, Copy, Debug, Default)]
struct Scale {
    scale: f32,
    min: f32,
}

/// The codes that the 4-bit numbers of a type stand for.
type Table = [i8; 16];

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
    let blocks = Blocks { level, bytes, source_bytes, to, table: None, is_wide: block == BlockType::Q8_K };
    let coded = |blocks, table| Blocks { table: Some(table), ..blocks };
    match block {
        BlockType::Q4_0 => blocks.each(formats::Q4_0),
        BlockType::Q4_1 => blocks.each(formats::Q4_1),
        BlockType::Q5_0 => blocks.each(formats::Q5_0),
        BlockType::Q5_1 => blocks.each(formats::Q5_1),
        BlockType::Q8_0 => blocks.each(formats::Q8_0),
        BlockType::Q1_0 => blocks.each(formats::Q1_0),
        BlockType::MXFP4 => coded(blocks, &small::E2M1).each(formats::MXFP4),
        BlockType::NVFP4 => coded(blocks, &small::E2M1).each(formats::NVFP4),
        BlockType::IQ4_NL => coded(blocks, &small::IQ4).each(formats::IQ4_NL),
        BlockType::IQ4_XS => coded(blocks, &small::IQ4).each(formats::IQ4_XS),
        BlockType::TQ1_0 => blocks.each(formats::TQ1_0),
        BlockType::TQ2_0 => blocks.each(formats::TQ2_0),
        BlockType::Q2_K => blocks.each(formats::Q2_K),
        BlockType::Q3_K => blocks.each(formats::Q3_K),
        BlockType::Q4_K => blocks.each(formats::Q4_K),
        BlockType::Q5_K => blocks.each(formats::Q5_K),
        BlockType::Q6_K => blocks.each(formats::Q6_K),
        BlockType::Q8_K => blocks.each(formats::Q8_K),
        BlockType::IQ1_S => blocks.each(formats::IQ1_S),
        BlockType::IQ1_M => blocks.each(formats::IQ1_M),
        BlockType::IQ2_XXS => blocks.each(formats::IQ2_XXS),
        BlockType::IQ2_XS => blocks.each(formats::IQ2_XS),
        BlockType::IQ2_S => blocks.each(formats::IQ2_S),
        BlockType::IQ3_XXS => blocks.each(formats::IQ3_XXS),
        BlockType::IQ3_S => blocks.each(formats::IQ3_S),
        BlockType::Q8_1 => unreachable!("there is no cast from {block}"),
    }
}

/// How a type is unpacked. Functions would not do: a call through `Fn` may be compiled apart from
/// the loop, and so for the oldest processors.
trait Unpack<const BYTES: usize, const PARTS: usize> {
    fn unpack(block: &[u8; BYTES], codes: &mut [Codes; PARTS], scales: &mut [Scale; PARTS]);
}

/// A type for each block type.
#[allow(non_camel_case_types, reason = "the names of the format")]
mod formats {
    use super::{Codes, Scale, Unpack, iq, k, small};

    macro_rules! formats {
        ($($name:ident($bytes:literal, $parts:literal) = $unpack:path;)*) => {$(
            pub(super) struct $name;

            impl Unpack<$bytes, $parts> for $name {
                #[inline(always)]
                fn unpack(block: &[u8; $bytes], codes: &mut [Codes; $parts], scales: &mut [Scale; $parts]) {
                    $unpack(block, codes, scales);
                }
            }
        )*};
    }

    formats! {
        Q4_0(18, 2) = small::q4_0;
        Q4_1(20, 2) = small::q4_1;
        Q5_0(22, 2) = small::q5_0;
        Q5_1(24, 2) = small::q5_1;
        Q8_0(34, 2) = small::q8_0;
        Q1_0(18, 8) = small::q1_0;
        MXFP4(17, 2) = small::mxfp4;
        NVFP4(36, 4) = small::nvfp4;
        IQ4_NL(18, 2) = small::iq4_nl;
        IQ4_XS(136, 16) = small::iq4_xs;
        TQ1_0(54, 16) = small::tq1_0;
        TQ2_0(66, 16) = small::tq2_0;
        Q2_K(84, 16) = k::q2_k;
        Q3_K(110, 16) = k::q3_k;
        Q4_K(144, 16) = k::q4_k;
        Q5_K(176, 16) = k::q5_k;
        Q6_K(210, 16) = k::q6_k;
        Q8_K(292, 16) = k::q8_k;
        IQ1_S(50, 16) = iq::iq1_s;
        IQ1_M(56, 16) = iq::iq1_m;
        IQ2_XXS(66, 16) = iq::iq2_xxs;
        IQ2_XS(74, 16) = iq::iq2_xs;
        IQ2_S(82, 16) = iq::iq2_s;
        IQ3_XXS(98, 16) = iq::iq3_xxs;
        IQ3_S(110, 16) = iq::iq3_s;
    }
}

/// A stretch of blocks.
struct Blocks<'a> {
    level: Level,
    bytes: &'a mut [u8],
    source_bytes: usize,
    to: FloatType,
    table: Option<&'static Table>,
    /// True if finite elements may become infinite in bf16: only where scales are single precision.
    is_wide: bool,
}

impl Blocks<'_> {
    fn each<U: Unpack<BYTES, PARTS>, const BYTES: usize, const PARTS: usize>(self, _: U) -> u64 {
        assert!(self.source_bytes.is_multiple_of(BYTES), "{} are no whole blocks", self.source_bytes);
        self.level.run(Decode::<U, BYTES, PARTS> { blocks: self, unpack: PhantomData })
    }
}

/// The loop over all groups.
struct Decode<'a, U, const BYTES: usize, const PARTS: usize> {
    blocks: Blocks<'a>,
    unpack: PhantomData<U>,
}

impl<U: Unpack<BYTES, PARTS>, const BYTES: usize, const PARTS: usize> Work for Decode<'_, U, BYTES, PARTS> {
    type Output = u64;

    #[inline(always)]
    fn run(self) -> u64 {
        let Self { blocks: Blocks { level, bytes, source_bytes, to, table, is_wide }, .. } = self;
        let target_bytes = PARTS * PART * to_usize(to.bytes());
        let group = GROUP_PARTS / PARTS;
        let mut source = [0; GROUP_BYTES_MAX];
        let mut codes = [[0; PART]; GROUP_PARTS];
        let mut scales = [Scale::default(); GROUP_PARTS];
        let mut overflowed = 0;
        let mut end = source_bytes / BYTES;
        while end > 0 {
            // The last group is what the others leave.
            let len = if end.is_multiple_of(group) { group } else { end % group };
            let first = end - len;
            source[..len * BYTES].copy_from_slice(&bytes[first * BYTES..end * BYTES]);
            let (blocks, _) = source[..len * BYTES].as_chunks::<BYTES>();
            let into = codes.as_chunks_mut::<PARTS>().0.iter_mut().zip(scales.as_chunks_mut::<PARTS>().0);
            for (block, (codes, scales)) in blocks.iter().zip(into) {
                U::unpack(block, codes, scales);
            }
            let (codes, scales) = (&mut codes[..len * PARTS], &scales[..len * PARTS]);
            if let Some(table) = table {
                kernel::look_up(level, codes, table);
            }
            let target = &mut bytes[first * target_bytes..end * target_bytes];
            overflowed += kernel::scale(level, codes, scales, target, to, is_wide);
            end = first;
        }
        overflowed
    }
}

/// The half-precision number at this place of a block. NaNs lose their payload, so that rounding
/// cannot carry out of it.
#[inline(always)]
fn half(bytes: &[u8], at: usize) -> f32 {
    let number = f32::from_bits(floats::f32_of_f16(u16::from_le_bytes([bytes[at], bytes[at + 1]])));
    if number.is_nan() { f32::NAN } else { number }
}

/// The bytes of a block that begin at this place.
#[inline(always)]
fn part<const LEN: usize>(bytes: &[u8], at: usize) -> &[u8; LEN] {
    bytes[at..].first_chunk().expect("the parts of a block lie inside it")
}

/// Codes out of bytes.
#[inline(always)]
fn each(codes: &mut Codes, bytes: &[u8; PART], code: impl Fn(u8) -> u8) {
    for (target, &byte) in codes.iter_mut().zip(bytes) {
        *target = code(byte).cast_signed();
    }
}

/// The same, out of two bytes each.
#[inline(always)]
fn each_pair(codes: &mut Codes, low: &[u8; PART], high: &[u8; PART], code: impl Fn(u8, u8) -> u8) {
    for (target, (&low, &high)) in codes.iter_mut().zip(low.iter().zip(high)) {
        *target = code(low, high).cast_signed();
    }
}
