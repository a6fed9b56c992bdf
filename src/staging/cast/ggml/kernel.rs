//! Codes and scales to floats. The same for all types.

use super::{Codes, PART, Scale, Table};
use crate::checkpoint::DType;
use crate::plan::{Cast, FloatType};
use crate::staging::cast::cast_in_place;
use crate::staging::cast::level::Level;
use crate::units::to_usize;

#[cfg(target_arch = "x86_64")]
use super::x86;

/// Replaces 4-bit numbers by the codes they stand for.
pub(super) fn look_up(level: Level, codes: &mut [Codes], table: &Table) {
    #[cfg(target_arch = "x86_64")]
    if x86::look_up(level, codes, table) {
        return;
    }
    let _ = level;
    for code in codes.as_flattened_mut() {
        *code = table[usize::from(code.cast_unsigned() & 15)];
    }
}

/// Writes `scale * code - min` of each code to `target`. Returns the number of finite elements that
/// became infinite. `is_wide`: elements may be too large for bf16.
pub(super) fn scale(
    level: Level,
    codes: &[Codes],
    scales: &[Scale],
    target: &mut [u8],
    to: FloatType,
    is_wide: bool,
) -> u64 {
    let is_counted = to == FloatType::F16 || is_wide && to == FloatType::Bf16;
    #[cfg(target_arch = "x86_64")]
    if !is_counted && x86::scale(level, codes, scales, target, to == FloatType::Bf16) {
        return 0;
    }
    let _ = is_counted;
    match Cast::between(DType::F32, to) {
        None => {
            singles(codes, scales, target);
            0
        }
        Some(narrowing) => narrowed(level, codes, scales, target, narrowing),
    }
}

/// Through single precision, part by part.
fn narrowed(level: Level, codes: &[Codes], scales: &[Scale], target: &mut [u8], narrowing: Cast) -> u64 {
    /// As many as a block of the casts.
    const PARTS: usize = 8;
    let mut buffer = [0; PARTS * PART * 4];
    let mut overflowed = 0;
    let target_bytes = PARTS * PART * to_usize(narrowing.to().bytes());
    let parts = codes.chunks(PARTS).zip(scales.chunks(PARTS)).zip(target.chunks_mut(target_bytes));
    for ((codes, scales), target) in parts {
        let done = &mut buffer[..codes.len() * PART * 4];
        singles(codes, scales, done);
        overflowed += cast_in_place(level, done, 0, done.len(), narrowing);
        target.copy_from_slice(&done[..target.len()]);
    }
    overflowed
}

/// Single precision.
fn singles(codes: &[Codes], scales: &[Scale], target: &mut [u8]) {
    let target = target.as_chunks_mut::<4>().0.as_chunks_mut::<PART>().0;
    for ((codes, &Scale { scale, min }), target) in codes.iter().zip(scales).zip(target) {
        for (single, &code) in target.iter_mut().zip(codes) {
            *single = (scale * f32::from(code) - min).to_le_bytes();
        }
    }
}
