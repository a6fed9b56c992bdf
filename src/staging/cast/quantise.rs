//! Quantises rows in a slot, in place, right after they were read: values in front, their scales
//! behind them.
//!
//! ```text
//! |row 0        |row 1        |row 2        |   ->   |v0   |v1   |v2   |s0|s1|s2|..........|
//! ```
//!
//! A row is read twice: for the largest magnitude of the row or of each group, and to divide by the
//! scale. Scales are kept in a buffer until all values are in place. Rounding is plain integer and
//! single-precision code, compiled for each [`Level`]; all give the same bits. Errors are summed in
//! double precision, row by row in one order, so a row's sums do not depend on where reads are cut.

use super::floats;
use super::level::{Level, Work};
use crate::checkpoint::DType;
use crate::plan::{Quantisation, QuantiseOp, Quantised, QuantisedPart};
use crate::units::{to_u64, to_usize};

/// Elements per block: the largest group, and a multiple of the others.
const BLOCK: usize = 128;
/// Number of partial sums: as many as the widest vectors hold, so that all instruction sets add in
/// the same order.
const LANES: usize = 8;

/// The error of quantising, summed up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Loss {
    /// Number of elements.
    pub(crate) elements: u64,
    /// Their largest magnitude.
    pub(crate) max_abs: f32,
    /// The largest difference between an element and its quantised value.
    pub(crate) max_abs_error: f32,
    /// Sum of the squares of these differences, and the rounding error of that sum.
    pub(crate) squares: [f64; 2],
}

impl Loss {
    /// Adds the error of another stretch. The sum does not depend on the order of stretches, far
    /// beyond single precision.
    pub(crate) fn add(&mut self, other: Self) {
        self.elements += other.elements;
        self.max_abs = self.max_abs.max(other.max_abs);
        self.max_abs_error = self.max_abs_error.max(other.max_abs_error);
        self.add_squares(other.squares[0]);
        self.squares[1] += other.squares[1];
    }

    /// Root of the mean square error.
    pub(crate) fn rms(&self) -> f32 {
        // Counts of elements are exact in double precision up to 2^53.
        let (high, low) = (self.elements >> 32, self.elements & u64::from(u32::MAX));
        let part = |part: u64| u32::try_from(part).map_or(f64::INFINITY, f64::from);
        let elements = part(high) * 4_294_967_296.0 + part(low);
        let mean = if elements > 0.0 { (self.squares[0] + self.squares[1]) / elements } else { 0.0 };
        f32::from_bits(floats::f32_of_f64(mean.sqrt()))
    }

    /// Knuth's two-sum.
    fn add_squares(&mut self, squares: f64) {
        let [sum, rest] = self.squares;
        let total = sum + squares;
        let added = total - sum;
        self.squares = [total, rest + ((sum - (total - added)) + (squares - added))];
    }
}

/// A row with an infinity or a NaN in single precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotFinite {
    /// Its number in the tensor.
    pub(crate) row: u64,
}

/// Quantises one stretch of a slot.
///
/// # Errors
/// [`NotFinite`] for the first row that is not finite. The slot then holds anything.
///
/// # Panics
/// If the stretch does not hold whole rows, or exceeds the slot.
pub(crate) fn quantise_step(slot: &mut [u8], step: &QuantiseOp) -> Result<Loss, NotFinite> {
    quantise_step_with(Level::detected(), slot, step)
}

fn quantise_step_with(level: Level, slot: &mut [u8], step: &QuantiseOp) -> Result<Loss, NotFinite> {
    let bytes = &mut slot[to_usize(step.slot_offset_bytes)..][..to_usize(step.source_len_bytes)];
    let form = step.form;
    let outcome = match form.source() {
        DType::Bf16 => {
            of_type(level, bytes, form, |element| floats::f32_of_bf16(u16::from_le_bytes(element)))
        }
        DType::F16 => of_type(level, bytes, form, |element| floats::f32_of_f16(u16::from_le_bytes(element))),
        DType::F32 => of_type(level, bytes, form, u32::from_le_bytes),
        DType::F64 => of_type(level, bytes, form, |element| floats::f32_of_f64(f64::from_le_bytes(element))),
        other => unreachable!("{other} is not quantised"),
    };
    outcome.map_err(|row| NotFinite { row: step.first_row + to_u64(row) })
}

fn of_type<const FROM: usize>(
    level: Level,
    bytes: &mut [u8],
    form: Quantised,
    decode: impl Fn([u8; FROM]) -> u32 + Copy,
) -> Result<Loss, usize> {
    level.run(Rows { bytes, form, decode })
}

/// A stretch of rows to be quantised.
struct Rows<'a, D, const FROM: usize> {
    bytes: &'a mut [u8],
    form: Quantised,
    decode: D,
}

impl<D: Fn([u8; FROM]) -> u32 + Copy, const FROM: usize> Work for Rows<'_, D, FROM> {
    type Output = Result<Loss, usize>;

    #[inline(always)]
    fn run(self) -> Result<Loss, usize> {
        rows(self.bytes, self.form, self.decode)
    }
}

/// Quantises all rows of a stretch. The error is the number of a row.
#[inline(always)]
fn rows<const FROM: usize>(
    bytes: &mut [u8],
    form: Quantised,
    decode: impl Fn([u8; FROM]) -> u32 + Copy,
) -> Result<Loss, usize> {
    let source_bytes = to_u64(bytes.len());
    let row_bytes = to_usize(form.source_row_bytes());
    assert!(bytes.len().is_multiple_of(row_bytes), "{source_bytes} bytes are no whole rows of {row_bytes}");
    let value_bytes = match form.part() {
        QuantisedPart::Scales | QuantisedPart::ScalesOfSame => 0,
        QuantisedPart::Values | QuantisedPart::ValuesWithScales => to_usize(form.value_bytes(source_bytes)),
    };
    let scale_bytes = match form.part() {
        QuantisedPart::Values => 0,
        _ => to_usize(form.scale_bytes(source_bytes)),
    };
    let mut scales = Vec::with_capacity(scale_bytes);
    let mut total = Loss::default();
    let value_row_bytes = to_usize(form.to().value_row_bytes(form.row_elements()));
    for row in 0..bytes.len() / row_bytes {
        let mut work = Row {
            form,
            bytes: &mut *bytes,
            source: row * row_bytes,
            target: row * value_row_bytes,
            has_values: value_bytes > 0,
            loss: RowLoss::default(),
        };
        let mut keep = |scale: &[u8]| {
            if scale_bytes > 0 {
                scales.extend_from_slice(scale);
            }
        };
        match form.to() {
            Quantisation::Int8 | Quantisation::Fp8 => work.whole(decode, &mut keep),
            Quantisation::Int4G32 => work.groups::<FROM, 32>(decode, &mut keep),
            Quantisation::Int4G64 => work.groups::<FROM, 64>(decode, &mut keep),
            Quantisation::Int4G128 => work.groups::<FROM, 128>(decode, &mut keep),
        }
        .map_err(|IsNotFinite| row)?;
        if value_bytes > 0 {
            total.add(work.loss.sum(form.row_elements()));
        }
    }
    bytes[value_bytes..][..scale_bytes].copy_from_slice(&scales);
    Ok(total)
}

/// There is an infinity or a NaN.
struct IsNotFinite;

/// The error of one row.
#[derive(Default)]
struct RowLoss {
    /// As bits: magnitudes have the same order as their bits.
    max_abs: u32,
    max_abs_error: u32,
    squares: [f64; LANES],
}

impl RowLoss {
    #[inline(always)]
    fn sum(&self, elements: u64) -> Loss {
        let [a, b, c, d, e, f, g, h] = self.squares;
        let squares = ((a + b) + (c + d)) + ((e + f) + (g + h));
        let (max_abs, max_abs_error) = (f32::from_bits(self.max_abs), f32::from_bits(self.max_abs_error));
        Loss { elements, max_abs, max_abs_error, squares: [squares, 0.0] }
    }
}

/// One row: where it is, and where its values go.
struct Row<'a> {
    form: Quantised,
    bytes: &'a mut [u8],
    source: usize,
    target: usize,
    has_values: bool,
    loss: RowLoss,
}

impl Row<'_> {
    /// The bits of a block of its elements in single precision, and zeros behind the row's end.
    #[inline(always)]
    fn block<const FROM: usize, const LEN: usize>(
        &self,
        first: usize,
        decode: impl Fn([u8; FROM]) -> u32,
    ) -> ([u32; LEN], usize) {
        let len = LEN.min(to_usize(self.form.row_elements()) - first);
        let mut source = [[0; FROM]; LEN];
        let start = self.source + first * FROM;
        source.as_flattened_mut()[..len * FROM].copy_from_slice(&self.bytes[start..start + len * FROM]);
        (source.map(decode), len)
    }

    /// Quantises with one scale for the row.
    #[inline(always)]
    fn whole<const FROM: usize>(
        &mut self,
        decode: impl Fn([u8; FROM]) -> u32 + Copy,
        keep: &mut impl FnMut(&[u8]),
    ) -> Result<(), IsNotFinite> {
        let elements = to_usize(self.form.row_elements());
        let mut max = 0;
        for first in (0..elements).step_by(BLOCK) {
            max = max_magnitude(max, &self.block::<FROM, BLOCK>(first, decode).0);
        }
        let is_int8 = self.form.to() == Quantisation::Int8;
        let scale = scale(max, if is_int8 { 127.0 } else { 448.0 })?;
        keep(&scale.to_le_bytes());
        self.loss.max_abs = max;
        if !self.has_values {
            return Ok(());
        }
        for first in (0..elements).step_by(BLOCK) {
            let (block, len) = self.block::<FROM, BLOCK>(first, decode);
            let (values, left) = match is_int8 {
                true => divided(&block, scale, |quotient| rounded_integer(quotient, 127.0)),
                false => divided(&block, scale, rounded_e4m3),
            };
            self.note_loss(&block, &left);
            let start = self.target + first;
            self.bytes[start..start + len].copy_from_slice(&values[..len]);
        }
        Ok(())
    }

    /// Quantises to 4 bits with a scale for each group.
    #[inline(always)]
    fn groups<const FROM: usize, const GROUP: usize>(
        &mut self,
        decode: impl Fn([u8; FROM]) -> u32 + Copy,
        keep: &mut impl FnMut(&[u8]),
    ) -> Result<(), IsNotFinite> {
        for first in (0..to_usize(self.form.row_elements())).step_by(GROUP) {
            let (block, len) = self.block::<FROM, GROUP>(first, decode);
            let max = max_magnitude(0, &block);
            let scale = scale(max, 7.0)?;
            let scale = half_of(scale);
            keep(&scale.to_le_bytes());
            self.loss.max_abs = self.loss.max_abs.max(max);
            if !self.has_values {
                continue;
            }
            let scale = f32::from_bits(u32::from(scale) << 16);
            let (values, left) = divided(&block, scale, |quotient| rounded_integer(quotient, 7.0));
            self.note_loss(&block, &left);
            // The padding behind the last element of a row is zero, which no element is kept as.
            let mut nibbles = values.map(|value| value.wrapping_add(8));
            nibbles[len..].fill(0);
            let start = self.target + first / 2;
            let packed = &mut self.bytes[start..start + len.div_ceil(2)];
            for (byte, pair) in packed.iter_mut().zip(nibbles.as_chunks::<2>().0) {
                *byte = pair[0] | pair[1] << 4;
            }
        }
        Ok(())
    }

    /// Adds the differences between a block and its quantised values. Behind the end of the row
    /// both are zero.
    #[inline(always)]
    fn note_loss<const LEN: usize>(&mut self, block: &[u32; LEN], left: &[f32; LEN]) {
        let mut errors = [0.0_f32; LEN];
        for ((error, &was), &left) in errors.iter_mut().zip(block).zip(left) {
            *error = (f32::from_bits(was) - left).abs();
        }
        self.loss.max_abs_error =
            errors.iter().fold(self.loss.max_abs_error, |max, error| max.max(error.to_bits()));
        for lanes in errors.as_chunks::<LANES>().0 {
            for (sum, &error) in self.loss.squares.iter_mut().zip(lanes) {
                *sum += f64::from(error) * f64::from(error);
            }
        }
    }
}

#[inline(always)]
fn max_magnitude<const LEN: usize>(max: u32, block: &[u32; LEN]) -> u32 {
    block.iter().fold(max, |max, &bits| max.max(bits & 0x7FFF_FFFF))
}

/// The scale for a largest magnitude, given by its bits: `magnitude / largest value`, or 1 where
/// that is zero.
#[inline(always)]
fn scale(max: u32, largest_value: f32) -> Result<f32, IsNotFinite> {
    let max = f32::from_bits(max);
    if !max.is_finite() {
        return Err(IsNotFinite);
    }
    let scale = max / largest_value;
    Ok(if scale == 0.0 { 1.0 } else { scale })
}

/// A scale as `bf16`: rounded to nearest even; 1 where that is zero.
#[inline(always)]
fn half_of(scale: f32) -> u16 {
    const ONE: u16 = 0x3F80;
    match floats::bf16_of_f32(scale.to_bits()) {
        0 => ONE,
        bits => bits,
    }
}

/// Each element divided by the scale and rounded: the value, and the number that it stands for.
#[inline(always)]
fn divided<const LEN: usize>(
    block: &[u32; LEN],
    scale: f32,
    round: impl Fn(f32) -> (u8, f32),
) -> ([u8; LEN], [f32; LEN]) {
    let (mut values, mut left) = ([0; LEN], [0.0; LEN]);
    for ((value, left), &bits) in values.iter_mut().zip(&mut left).zip(block) {
        let (rounded, number) = round(f32::from_bits(bits) / scale);
        (*value, *left) = (rounded, number * scale);
    }
    (values, left)
}

/// The nearest integer (ties to even) of at most this magnitude: as a signed byte, and as a number.
#[inline(always)]
fn rounded_integer(quotient: f32, largest: f32) -> (u8, f32) {
    /// 1.5 * 2^23: adding a small number rounds it to an integer in the last bits.
    const MAGIC: f32 = 12_582_912.0;
    let shifted = quotient.clamp(-largest, largest) + MAGIC;
    (shifted.to_bits().to_le_bytes()[0], shifted - MAGIC)
}

/// The nearest E4M3 (ties to even) of at most 448: as bits, and as a number.
#[inline(always)]
fn rounded_e4m3(quotient: f32) -> (u8, f32) {
    /// Below this, numbers are multiples of 2^-9.
    const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
    /// 1.5 * 2^14: adding a small number rounds it to a multiple of 2^-9.
    const MAGIC: f32 = 24_576.0;
    /// Mantissa bits of an f32 that E4M3 lacks.
    const DROPPED: u32 = 23 - 3;
    /// The difference of the exponents' biases.
    const REBIAS: u32 = (127 - 7) << 3;
    let bits = quotient.clamp(-448.0, 448.0).to_bits();
    let (sign, magnitude) = (bits & 0x8000_0000, bits & 0x7FFF_FFFF);
    let up = (1 << (DROPPED - 1)) - 1 + (magnitude >> DROPPED & 1);
    let normal = magnitude.wrapping_add(up) >> DROPPED << DROPPED;
    let shifted = f32::from_bits(magnitude) + MAGIC;
    let (tiny, tiny_value) = (shifted - MAGIC, shifted.to_bits().wrapping_sub(MAGIC.to_bits()));
    let is_tiny = f32::from_bits(magnitude) < SMALLEST_NORMAL;
    let value = if is_tiny { tiny_value } else { (normal >> DROPPED).wrapping_sub(REBIAS) };
    let number = if is_tiny { tiny.to_bits() } else { normal };
    ((value | sign >> 24).to_le_bytes()[0], f32::from_bits(number | sign))
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::super::reference::seeded;
    use super::super::tests::levels;
    use super::*;
    use crate::checkpoint::TensorId;

    /// The levels of this machine above the baseline.
    fn newer_levels() -> impl Iterator<Item = Level> {
        levels().into_iter().skip(1)
    }

    fn step(form: Quantised, rows: u64) -> QuantiseOp {
        let source_len_bytes = rows * form.source_row_bytes();
        QuantiseOp { tensor: TensorId(0), slot_offset_bytes: 7, source_len_bytes, first_row: 5, form }
    }

    /// Random bits of each type, without infinities and NaNs.
    fn rows(source: DType, elements: usize) -> Vec<u8> {
        let numbers = seeded(elements).map(|bits| match source {
            DType::F64 => (bits & !(0x7FF << 52) | (1023 - 40 + bits % 60) << 52).to_le_bytes().to_vec(),
            DType::F32 => (bits & 0xBFFF_FFFF).to_le_bytes()[..4].to_vec(),
            _ => (bits & 0xBFFF).to_le_bytes()[..2].to_vec(),
        });
        numbers.flatten().collect()
    }

    #[test]
    fn all_instruction_sets_give_the_same_bits() {
        for source in [DType::F64, DType::F32, DType::F16, DType::Bf16] {
            for to in Quantisation::ALL {
                for row_elements in [32, 33, 127, 128, 129, 300] {
                    let form = Quantised::for_tests(to, source, row_elements);
                    let step = step(form, 9);
                    let mut slot = vec![0xA5; 7];
                    slot.extend(rows(source, 9 * usize::try_from(row_elements).unwrap()));
                    slot.extend([0xA5; 3]);
                    let mut expected = slot.clone();
                    let loss = quantise_step_with(Level::Baseline, &mut expected, &step).unwrap();
                    assert!(
                        expected[..7].iter().chain(&expected[slot.len() - 3..]).all(|&byte| byte == 0xA5)
                    );
                    let made = to_usize(
                        form.value_bytes(step.source_len_bytes) + form.scale_bytes(step.source_len_bytes),
                    );
                    for level in newer_levels() {
                        let mut found = slot.clone();
                        assert_eq!(
                            quantise_step_with(level, &mut found, &step),
                            Ok(loss),
                            "{to}, {source}, {level}"
                        );
                        assert!(found[7..][..made] == expected[7..][..made], "{to}, {source}, {level}");
                    }
                }
            }
        }
    }

    /// Every number of single precision between two neighbours of E4M3 goes to the nearer one.
    #[test]
    fn e4m3_is_rounded_to_nearest_even() {
        let number = |code: u8| f32::from_bits(floats::f32_of_f8_e4m3(code));
        for code in 0..0x7E_u8 {
            let (low, high) = (number(code), number(code + 1));
            let middle = f32::midpoint(low, high);
            let [below, above] = [middle.next_down(), middle.next_up()];
            let even = code + (code & 1);
            for (quotient, nearest) in [(low, code), (below, code), (middle, even), (above, code + 1)] {
                assert_eq!(rounded_e4m3(quotient), (nearest, number(nearest)), "{quotient:e}");
                let negative = rounded_e4m3(-quotient);
                assert_eq!((negative.0, negative.1), (nearest | 0x80, -number(nearest)), "-{quotient:e}");
            }
        }
        for large in [448.0, 463.9, 464.0, 480.0, f32::MAX] {
            assert_eq!((rounded_e4m3(large).0, rounded_e4m3(-large).0), (0x7E, 0xFE));
        }
    }

    #[test]
    fn the_first_row_that_is_not_finite_is_named() {
        let form = Quantised::for_tests(Quantisation::Int8, DType::F32, 40);
        let mut slot = vec![0; 7];
        slot.extend(rows(DType::F32, 40 * 6));
        slot[7 + 160 * 3 + 12..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
        slot[7 + 160 * 4..][..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
        assert_eq!(quantise_step(&mut slot, &step(form, 6)), Err(NotFinite { row: 8 }));
    }

    /// Prints rates: `cargo test --release -p onelayer --lib quantise::tests::speed -- --ignored
    /// --nocapture`.
    #[test]
    #[ignore = "measures"]
    #[allow(clippy::print_stderr, reason = "that is what it is for")]
    fn speed() {
        for (to, source) in Quantisation::ALL.into_iter().flat_map(|to| [(to, DType::Bf16), (to, DType::F32)])
        {
            let form = Quantised::for_tests(to, source, 4096);
            let rows_count = 2 * 1024 * 1024 / form.source_row_bytes();
            let mut slot = vec![0; 7];
            slot.extend(rows(source, to_usize(rows_count * 4096)));
            for level in std::iter::once(Level::Baseline).chain(newer_levels()) {
                let best = (0..40).map(|_| {
                    let mut slot = slot.clone();
                    let start = std::time::Instant::now();
                    quantise_step_with(level, &mut slot, &step(form, rows_count)).unwrap();
                    start.elapsed()
                });
                let seconds = best.min().unwrap().as_secs_f64();
                let bytes = f64::from(u32::try_from(rows_count * form.source_row_bytes()).unwrap());
                eprintln!("{source} to {to}, {level}: {:.2} GB/s", bytes / seconds / 1e9);
            }
        }
    }
}
