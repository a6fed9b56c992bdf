//! Quantised weights back to floats: `value * scale` in single precision, rounded once.
//!
//! The result is written past the processor's cache, block by block: a weight is larger than the
//! cache, and an ordinary store would read its memory first.

use std::num::NonZero;
use std::thread;

use super::floats;
use super::level::{Level, Work};
use crate::plan::{FloatType, Quantisation};
use crate::staging::copy::copy_past_cache;
use crate::units::{to_u64, to_usize};

/// Bytes of a block of results, which stays in the cache until it is written.
const BLOCK_BYTES: usize = 64 << 10;
/// The most threads for one weight, and the fewest elements for each of them.
const THREADS_MAX: usize = 16;
const ELEMENTS_PER_THREAD_MIN: usize = 1 << 20;

/// Decodes whole rows of `columns` elements that were quantised to `form`, to `to`. Little-endian,
/// row-major; docs/quantise.md has the definitions. Several cores share a large weight.
///
/// # Panics
/// If the lengths of `values`, `scales` and `target` are not those of the same number of rows.
///
/// # Example
/// ```
/// use onelayer::{FloatType, Quantisation, dequantise};
/// let mut row = [0; 8];
/// let scale = 0.5_f32.to_le_bytes();
/// dequantise(Quantisation::Int8, FloatType::F32, 2, &[3, 0xFF], &scale, &mut row);
/// assert_eq!(row, [1.5_f32.to_le_bytes(), (-0.5_f32).to_le_bytes()].concat()[..]);
/// ```
pub fn dequantise(
    form: Quantisation,
    to: FloatType,
    columns: usize,
    values: &[u8],
    scales: &[u8],
    target: &mut [u8],
) {
    let row = RowBytes::new(form, to, columns);
    let rows = target.len().checked_div(row.target).unwrap_or(0);
    let expected = [rows * row.values, rows * row.scales, rows * row.target];
    assert_eq!([values.len(), scales.len(), target.len()], expected, "rows of {columns} elements as {form}");
    if rows == 0 {
        return;
    }
    let cores = thread::available_parallelism().map_or(1, NonZero::get).min(THREADS_MAX);
    let threads = (rows * columns / ELEMENTS_PER_THREAD_MIN).clamp(1, cores);
    let share = rows.div_ceil(threads);
    let parts = values.chunks(share * row.values).zip(scales.chunks(share * row.scales));
    let parts = parts.zip(target.chunks_mut(share * row.target));
    let parts =
        parts.map(|((values, scales), target)| Rows { form, to, columns, row, values, scales, target });
    let mut parts: Vec<Rows<'_>> = parts.collect();
    let own = parts.pop();
    thread::scope(|scope| {
        for part in parts {
            scope.spawn(move || Level::detected().run(part));
        }
        if let Some(part) = own {
            Level::detected().run(part);
        }
    });
}

/// Bytes of one row.
#[derive(Clone, Copy)]
struct RowBytes {
    values: usize,
    scales: usize,
    target: usize,
}

impl RowBytes {
    fn new(form: Quantisation, to: FloatType, columns: usize) -> Self {
        let values = form.value_row_bytes(to_u64(columns));
        let scales = form.row_bytes(to_u64(columns)) - values;
        Self { values: to_usize(values), scales: to_usize(scales), target: columns * to_usize(to.bytes()) }
    }
}

/// Neighbouring rows.
struct Rows<'a> {
    form: Quantisation,
    to: FloatType,
    columns: usize,
    row: RowBytes,
    values: &'a [u8],
    scales: &'a [u8],
    target: &'a mut [u8],
}

impl Work for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        match self.to {
            FloatType::Bf16 => self.decode(|single| floats::bf16_of_f32(single).to_le_bytes()),
            FloatType::F16 => self.decode(|single| floats::f16_of_f32(single).to_le_bytes()),
            FloatType::F32 => self.decode(u32::to_le_bytes),
        }
    }
}

impl Rows<'_> {
    #[inline(always)]
    fn decode<const TO: usize>(self, narrow: impl Fn(u32) -> [u8; TO] + Copy) {
        let Self { form, columns, row, values, scales, target, .. } = self;
        // At least one row, so that rows are never cut.
        let rows = (BLOCK_BYTES / row.target).max(1);
        let mut block = vec![0; rows * row.target];
        let blocks = values.chunks(rows * row.values).zip(scales.chunks(rows * row.scales));
        for ((values, scales), target) in blocks.zip(target.chunks_mut(rows * row.target)) {
            let done = &mut block[..target.len()];
            let each = values.chunks_exact(row.values).zip(scales.chunks_exact(row.scales));
            for ((values, scales), done) in each.zip(done.chunks_exact_mut(row.target)) {
                let (done, _) = done.as_chunks_mut::<TO>();
                match form.group_elements() {
                    None => {
                        let scale = f32::from_le_bytes(*scales.first_chunk().expect("four bytes"));
                        match form {
                            Quantisation::Fp8 => whole(values, scale, done, narrow, |value| {
                                f32::from_bits(floats::f32_of_f8_e4m3(value))
                            }),
                            _ => whole(values, scale, done, narrow, |value| {
                                f32::from(i8::from_le_bytes([value]))
                            }),
                        }
                    }
                    Some(group) => {
                        groups(values, scales, to_usize(u64::from(group)), &mut done[..columns], narrow)
                    }
                }
            }
            copy_past_cache(target, &block[..target.len()]);
        }
    }
}

/// A row with one scale.
#[inline(always)]
fn whole<const TO: usize>(
    values: &[u8],
    scale: f32,
    target: &mut [[u8; TO]],
    narrow: impl Fn(u32) -> [u8; TO],
    number: impl Fn(u8) -> f32,
) {
    for (target, &value) in target.iter_mut().zip(values) {
        *target = narrow((number(value) * scale).to_bits());
    }
}

/// A row of 4-bit values, two in a byte, the first in the low bits.
#[inline(always)]
fn groups<const TO: usize>(
    values: &[u8],
    scales: &[u8],
    group: usize,
    target: &mut [[u8; TO]],
    narrow: impl Fn(u32) -> [u8; TO],
) {
    let (scales, _) = scales.as_chunks::<2>();
    let parts = values.chunks(group / 2).zip(target.chunks_mut(group)).zip(scales);
    for ((values, target), &scale) in parts {
        let scale = f32::from_bits(floats::f32_of_bf16(u16::from_le_bytes(scale)));
        let decoded = |nibble: u8| narrow(((f32::from(nibble) - 8.0) * scale).to_bits());
        let (pairs, last) = target.as_chunks_mut::<2>();
        for (pair, &value) in pairs.iter_mut().zip(values) {
            *pair = [decoded(value & 15), decoded(value >> 4)];
        }
        if let ([last], Some(&value)) = (last, values.last()) {
            *last = decoded(value & 15);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, element by element.
    fn expected(form: Quantisation, columns: usize, values: &[u8], scales: &[u8]) -> Vec<f32> {
        let row = RowBytes::new(form, FloatType::F32, columns);
        let mut found = Vec::new();
        for (values, scales) in values.chunks(row.values).zip(scales.chunks(row.scales)) {
            for column in 0..columns {
                found.push(match form.group_elements() {
                    None => {
                        let scale = f32::from_le_bytes(scales.try_into().unwrap());
                        let value = values[column];
                        match form {
                            Quantisation::Fp8 => f32::from_bits(floats::f32_of_f8_e4m3(value)) * scale,
                            _ => f32::from(i8::from_le_bytes([value])) * scale,
                        }
                    }
                    Some(group) => {
                        let at = column / to_usize(u64::from(group)) * 2;
                        let scale = half::bf16::from_le_bytes([scales[at], scales[at + 1]]).to_f32();
                        let nibble = values[column / 2] >> (column % 2 * 4) & 15;
                        (f32::from(nibble) - 8.0) * scale
                    }
                });
            }
        }
        found
    }

    #[test]
    fn every_form_and_type_is_the_definition() {
        let mut seed = 1_u32;
        let mut random = |len: usize| -> Vec<u8> {
            let next = |_| {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                seed.to_le_bytes()[3]
            };
            (0..len).map(next).collect()
        };
        for form in Quantisation::ALL {
            for (rows, columns) in [(1, 1), (3, 33), (5, 64), (2, 257), (40, 4096)] {
                let row = RowBytes::new(form, FloatType::F32, columns);
                let values = random(rows * row.values);
                let scales: Vec<u8> = match form.group_elements() {
                    None => {
                        (1_u16..).take(rows).flat_map(|row| (1.0 / f32::from(row)).to_le_bytes()).collect()
                    }
                    Some(_) => (0_u16..)
                        .take(rows * row.scales / 2)
                        .flat_map(|group| half::bf16::from_f32(0.01 * f32::from(group)).to_le_bytes())
                        .collect(),
                };
                let singles = expected(form, columns, &values, &scales);
                let mut found = vec![0; singles.len() * 4];
                dequantise(form, FloatType::F32, columns, &values, &scales, &mut found);
                for (found, single) in found.chunks(4).zip(&singles) {
                    let found = f32::from_le_bytes(found.try_into().unwrap());
                    assert!(
                        found == *single || (found.is_nan() && single.is_nan()),
                        "{form}: {found} {single}"
                    );
                }
                for to in [FloatType::Bf16, FloatType::F16] {
                    let mut found = vec![0; singles.len() * 2];
                    dequantise(form, to, columns, &values, &scales, &mut found);
                    for (found, single) in found.chunks(2).zip(&singles) {
                        let found: [u8; 2] = found.try_into().unwrap();
                        let right = match to {
                            FloatType::Bf16 => half::bf16::from_f32(*single).to_le_bytes(),
                            _ => half::f16::from_f32(*single).to_le_bytes(),
                        };
                        assert!(found == right || single.is_nan(), "{form} to {to}: {single}");
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "rows of 3 elements as int8")]
    fn lengths_must_fit() {
        dequantise(Quantisation::Int8, FloatType::F32, 3, &[0; 6], &[0; 4], &mut [0; 24]);
    }
}
