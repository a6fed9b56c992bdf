//! Casts all elements of a stretch, block by block. Compiled once per [`Level`].

use std::ops::Range;

use super::level::{Level, Work};
use crate::units::to_u64;

/// Elements per block: a block stays in registers or the first-level cache, and the compiler knows
/// that source and target do not overlap.
pub(super) const BLOCK_ELEMENTS: usize = 128;

/// One block of elements of `BYTES` bytes.
pub(super) type Block<const BYTES: usize> = [[u8; BYTES]; BLOCK_ELEMENTS];

/// A stretch to be cast, and the instructions to use.
pub(super) struct Elements<'a> {
    pub(super) level: Level,
    pub(super) bytes: &'a mut [u8],
    /// Where the elements begin in `bytes`. The result begins at its front.
    pub(super) source_start: usize,
    pub(super) source_bytes: usize,
    pub(super) can_overflow: bool,
}

impl Elements<'_> {
    /// Casts every element. Returns the number of finite elements that became infinite.
    ///
    /// Elements are only examined one by one if their block contains an infinity or a NaN
    /// afterwards.
    pub(super) fn each<const FROM: usize, const TO: usize>(
        self,
        cast: impl Fn([u8; FROM]) -> [u8; TO],
        is_any_special: impl Fn(&[[u8; TO]]) -> bool,
        is_finite: impl Fn([u8; FROM]) -> bool,
    ) -> u64 {
        let can_overflow = self.can_overflow;
        let cast_block = |source: &Block<FROM>, target: &mut Block<TO>| {
            for (target, source) in target.iter_mut().zip(source) {
                *target = cast(*source);
            }
            can_overflow && is_any_special(target)
        };
        let is_lost = |source: [u8; FROM], target: [u8; TO]| is_finite(source) && is_any_special(&[target]);
        self.each_block(cast_block, is_lost)
    }

    /// Casts every block. `cast_block` returns whether the block may contain elements for which
    /// `is_lost` is true; those are counted.
    pub(super) fn each_block<const FROM: usize, const TO: usize>(
        self,
        cast_block: impl Fn(&Block<FROM>, &mut Block<TO>) -> bool,
        is_lost: impl Fn([u8; FROM], [u8; TO]) -> bool,
    ) -> u64 {
        let Self { level, bytes, source_start, source_bytes, .. } = self;
        level.run(Replace { bytes, source: source_start..source_start + source_bytes, cast_block, is_lost })
    }
}

/// Casts all blocks of `source`, so that the result begins at the front of `bytes`.
struct Replace<'a, C, L, const FROM: usize, const TO: usize> {
    bytes: &'a mut [u8],
    source: Range<usize>,
    cast_block: C,
    is_lost: L,
}

impl<C, L, const FROM: usize, const TO: usize> Work for Replace<'_, C, L, FROM, TO>
where
    C: Fn(&Block<FROM>, &mut Block<TO>) -> bool,
    L: Fn([u8; FROM], [u8; TO]) -> bool,
{
    type Output = u64;

    #[inline(always)]
    fn run(self) -> u64 {
        replace(self.bytes, self.source, self.cast_block, self.is_lost)
    }
}

/// The loop: from the front, or from the back if elements grow. A block is only written over blocks
/// that were read.
#[inline(always)]
fn replace<const FROM: usize, const TO: usize>(
    bytes: &mut [u8],
    source: Range<usize>,
    cast_block: impl Fn(&Block<FROM>, &mut Block<TO>) -> bool,
    is_lost: impl Fn([u8; FROM], [u8; TO]) -> bool,
) -> u64 {
    assert!(source.len().is_multiple_of(FROM), "{} bytes are no whole elements of {FROM}", source.len());
    let (start, count) = (source.start, source.len() / FROM);
    assert!(TO <= FROM || start == 0, "what grows is cast from the back");
    let whole_end = count - count % BLOCK_ELEMENTS;
    let blocks = (0..whole_end).step_by(BLOCK_ELEMENTS);
    let mut overflowed = 0;
    if TO > FROM {
        overflowed += replace_block(bytes, start, whole_end, count - whole_end, &cast_block, &is_lost);
        for first in blocks.rev() {
            overflowed += replace_block(bytes, start, first, BLOCK_ELEMENTS, &cast_block, &is_lost);
        }
    } else {
        for first in blocks {
            overflowed += replace_block(bytes, start, first, BLOCK_ELEMENTS, &cast_block, &is_lost);
        }
        overflowed += replace_block(bytes, start, whole_end, count - whole_end, &cast_block, &is_lost);
    }
    overflowed
}

/// One block, or the rest. The compiler vectorises the loops because the length of a block is
/// constant.
#[inline(always)]
fn replace_block<const FROM: usize, const TO: usize>(
    bytes: &mut [u8],
    start: usize,
    first: usize,
    len: usize,
    cast_block: &impl Fn(&Block<FROM>, &mut Block<TO>) -> bool,
    is_lost: &impl Fn([u8; FROM], [u8; TO]) -> bool,
) -> u64 {
    let mut source = [[0; FROM]; BLOCK_ELEMENTS];
    let mut target = [[0; TO]; BLOCK_ELEMENTS];
    source.as_flattened_mut()[..len * FROM].copy_from_slice(&bytes[start + first * FROM..][..len * FROM]);
    let may_have_lost = cast_block(&source, &mut target);
    bytes[first * TO..][..len * TO].copy_from_slice(&target.as_flattened()[..len * TO]);
    if !may_have_lost {
        return 0;
    }
    let pairs = source[..len].iter().zip(&target[..len]);
    to_u64(pairs.filter(|(source, target)| is_lost(**source, **target)).count())
}
