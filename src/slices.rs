//! Parts of tensors: a range for each dimension -> runs of bytes.
//!
//! Tensors are row-major. A range of the outermost dimension is one run of bytes; a range of an
//! inner dimension is one run for each index of the dimensions around it. All runs of a slice have
//! the same length, and they are in the order of the slice's bytes:
//!
//! ```text
//! tensor [4, 6], rows 1..3           |. . . . . .|x x x x x x x x x x x x|. . . . . .|     one run
//! tensor [4, 6], columns 2..4        |. . x x . .|. . x x . .|. . x x . .|. . x x . .|     four runs
//! ```
//!
//! A tensor that is not row-major in its file has runs in the order of a row-major one; they may
//! lie in any order in the file.
//!
//! Only arithmetic: [`TensorReader`](crate::TensorReader) reads the runs.

use std::ops::Range;

use crate::checkpoint::TensorEntry;

/// Why a part of a tensor cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SliceError {
    /// More ranges than dimensions.
    #[error("{ranges} ranges for {tensor:?}, which has {dimensions} dimensions")]
    TooManyRanges {
        /// The tensor.
        tensor: String,
        /// Ranges that were given.
        ranges: usize,
        /// Dimensions of the tensor.
        dimensions: usize,
    },
    /// A range is reversed, or ends beyond its dimension.
    #[error(
        "the range {start}..{end} is not inside dimension {dimension} of {tensor:?}, which has {len} elements"
    )]
    OutOfRange {
        /// The tensor.
        tensor: String,
        /// The dimension, from 0, the outermost.
        dimension: usize,
        /// First element of the range.
        start: u64,
        /// One past its last element.
        end: u64,
        /// Elements of the dimension.
        len: u64,
    },
    /// The slice would cut a byte: elements of less than 8 bits are read in whole bytes only.
    #[error("a slice of {tensor:?} cuts a byte: its elements have {element_bits} bits")]
    CutsByte {
        /// The tensor.
        tensor: String,
        /// Bits of an element.
        element_bits: u64,
    },
    /// The size of the elements is not known, so only the whole tensor can be read.
    #[error("{tensor:?} can only be read whole: the size of its elements ({dtype}) is not known")]
    UnknownElements {
        /// The tensor.
        tensor: String,
        /// Its type as the file spells it.
        dtype: String,
    },
    /// The rows lie in another order in the file, so only the whole tensor can be read.
    #[error("{tensor:?} can only be read whole: its rows lie in another order in the file")]
    Reordered {
        /// The tensor.
        tensor: String,
    },
    /// Bytes beyond the end of the tensor.
    #[error(
        "{len_bytes} bytes from byte {offset_bytes} on go beyond the end of {tensor:?}, which has {tensor_bytes}"
    )]
    BeyondEnd {
        /// The tensor.
        tensor: String,
        /// First byte that was wanted.
        offset_bytes: u64,
        /// Bytes that were wanted.
        len_bytes: u64,
        /// Bytes of the tensor.
        tensor_bytes: u64,
    },
    /// The target and the slice differ in length.
    #[error("the target has {found_bytes} bytes, the slice of {tensor:?} has {expected_bytes}")]
    WrongTargetLength {
        /// The tensor.
        tensor: String,
        /// Bytes of the slice.
        expected_bytes: u64,
        /// Bytes of the target.
        found_bytes: u64,
    },
}

/// The runs of bytes of a slice: of equal length, in the order of the slice's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Runs {
    /// First byte of the first run in the tensor.
    start_bytes: u64,
    run_bytes: u64,
    /// Repetitions of the run, the outermost first.
    loops: Vec<Loop>,
}

/// Runs at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Strided {
    /// First byte of the first run in the tensor.
    pub(crate) start_bytes: u64,
    pub(crate) run_bytes: u64,
    /// From the start of one run to the start of the next.
    pub(crate) stride_bytes: u64,
    pub(crate) count: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Loop {
    count: u64,
    stride_bytes: u64,
}

impl Runs {
    /// One contiguous run.
    pub(crate) fn contiguous(start_bytes: u64, len_bytes: u64) -> Self {
        Self { start_bytes, run_bytes: len_bytes, loops: Vec::new() }
    }

    /// The runs of a slice: one range for each of the first dimensions, the other dimensions whole.
    pub(crate) fn of_slice(tensor: &TensorEntry<'_>, ranges: &[Range<u64>]) -> Result<Self, SliceError> {
        check(tensor, ranges)?;
        if !tensor.strides.is_empty() {
            return Self::of_view(tensor, ranges);
        }
        let is_cut = |(range, &len): (&Range<u64>, &u64)| *range != (0..len);
        let Some(innermost) = ranges.iter().zip(tensor.shape).rposition(is_cut) else {
            return Ok(Self::contiguous(0, tensor.extent.len_bytes()));
        };
        let element_bits = tensor.dtype.bits().ok_or_else(|| SliceError::UnknownElements {
            tensor: tensor.name.to_owned(),
            dtype: tensor.dtype_name.to_owned(),
        })?;
        let ranges = &ranges[..=innermost];
        if tensor.extent.is_empty() || ranges.iter().any(Range::is_empty) {
            return Ok(Self::contiguous(0, 0));
        }
        let cuts_byte = || SliceError::CutsByte { tensor: tensor.name.to_owned(), element_bits };
        Self::in_bits(tensor.shape, ranges, element_bits).ok_or_else(cuts_byte)
    }

    /// The runs of a tensor that is not row-major. `ranges` are inside it.
    fn of_view(tensor: &TensorEntry<'_>, ranges: &[Range<u64>]) -> Result<Self, SliceError> {
        let (unit_bytes, steps) = tensor.steps();
        if ranges.iter().zip(tensor.shape).all(|(range, &len)| *range == (0..len)) {
            return Ok(Self::of_loops(0, unit_bytes, steps.rev()));
        }
        if tensor.stride_dims != tensor.shape {
            return Err(SliceError::Reordered { tensor: tensor.name.to_owned() });
        }
        let dims = || {
            let whole = tensor.shape[ranges.len()..].iter().map(|&len| 0..len);
            ranges.iter().cloned().chain(whole).zip(steps.clone().map(|(_, stride_bytes)| stride_bytes))
        };
        if dims().any(|(range, _)| range.is_empty()) {
            return Ok(Self::contiguous(0, 0));
        }
        // No product exceeds the extent, which is inside the file.
        let start_bytes = dims().map(|(range, stride_bytes)| range.start * stride_bytes).sum();
        let mut loops: Vec<_> =
            dims().map(|(range, stride_bytes)| (range.end - range.start, stride_bytes)).collect();
        loops.reverse();
        Ok(Self::of_loops(start_bytes, unit_bytes, loops.into_iter()))
    }

    /// Repetitions of an element, the innermost first, with the distance of one to the next.
    pub(crate) fn of_loops(
        start_bytes: u64,
        element_bytes: u64,
        innermost_first: impl Iterator<Item = (u64, u64)>,
    ) -> Self {
        let mut runs = Self::contiguous(start_bytes, element_bytes);
        for (count, stride_bytes) in innermost_first.filter(|&(count, _)| count > 1) {
            match runs.loops.last_mut() {
                None if stride_bytes == runs.run_bytes => runs.run_bytes *= count,
                Some(inner) if inner.count * inner.stride_bytes == stride_bytes => inner.count *= count,
                _ => runs.loops.push(Loop { count, stride_bytes }),
            }
        }
        runs.loops.reverse();
        runs
    }

    /// The runs of ranges that are inside the tensor and not empty; the last one is not its whole
    /// dimension. `None` if a run does not consist of whole bytes.
    fn in_bits(shape: &[u64], ranges: &[Range<u64>], element_bits: u64) -> Option<Self> {
        let whole_bytes = |bits: u128| bits.is_multiple_of(8).then(|| u64::try_from(bits / 8).ok()).flatten();
        // From the innermost dimension outwards. No product exceeds the bits of the tensor, which
        // are below 2^67.
        let inside = shape[ranges.len()..].iter().map(|&len| u128::from(len));
        let mut stride_bits = inside.product::<u128>() * u128::from(element_bits);
        let (mut start_bits, mut run_bits) = (0, 0);
        let mut loops: Vec<Loop> = Vec::new();
        for (place, (range, &len)) in ranges.iter().zip(shape).enumerate().rev() {
            let count = range.end - range.start;
            start_bits += u128::from(range.start) * stride_bits;
            if place + 1 == ranges.len() {
                run_bits = u128::from(count) * stride_bits;
            } else if count > 1 {
                let stride_bytes = whole_bytes(stride_bits)?;
                match loops.last_mut() {
                    // The inner loop covers its dimension: one loop over both.
                    Some(inner) if inner.count.checked_mul(inner.stride_bytes) == Some(stride_bytes) => {
                        inner.count *= count;
                    }
                    _ => loops.push(Loop { count, stride_bytes }),
                }
            }
            stride_bits *= u128::from(len);
        }
        loops.reverse();
        Some(Self { start_bytes: whole_bytes(start_bits)?, run_bytes: whole_bytes(run_bits)?, loops })
    }

    /// The runs, if they are at equal distances, as those of a range of one dimension are.
    pub(crate) fn strided(&self) -> Option<Strided> {
        let &Self { start_bytes, run_bytes, .. } = self;
        match *self.loops {
            [] => Some(Strided { start_bytes, run_bytes, stride_bytes: run_bytes, count: 1 }),
            [Loop { count, stride_bytes }] => Some(Strided { start_bytes, run_bytes, stride_bytes, count }),
            _ => None,
        }
    }

    /// Bytes of each run.
    pub(crate) fn run_bytes(&self) -> u64 {
        self.run_bytes
    }

    /// Host memory of the loops, in bytes with the allocator's overhead.
    pub(crate) fn held_bytes(&self) -> u64 {
        crate::footprint::list_bytes(&self.loops)
    }

    /// Number of runs: at least one, which may be empty.
    pub(crate) fn count(&self) -> u64 {
        self.loops.iter().map(|around| around.count).product()
    }

    /// Bytes of all runs.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.count() * self.run_bytes
    }

    /// The first bytes of all runs in the tensor, in order: cheaper than [`Self::start_of`] of each.
    pub(crate) fn starts(&self) -> impl Iterator<Item = u64> {
        // The innermost loop counts, the others follow once a turn.
        let (inner, outer) = match self.loops.split_last() {
            Some((&inner, outer)) => (inner, outer),
            None => (Loop { count: 1, stride_bytes: 0 }, &[][..]),
        };
        let turns = outer.iter().map(|around| around.count).product::<u64>();
        let turn_start = move |turn: u64| self.start_of(turn * inner.count);
        (0..turns).flat_map(move |turn| {
            let start = turn_start(turn);
            (0..inner.count).map(move |index| start + index * inner.stride_bytes)
        })
    }

    /// First byte of a run in the tensor.
    pub(crate) fn start_of(&self, index: u64) -> u64 {
        let mut rest = index;
        let outward = self.loops.iter().rev();
        self.start_bytes
            + outward
                .map(|around| {
                    let turn = rest % around.count;
                    rest /= around.count;
                    turn * around.stride_bytes
                })
                .sum::<u64>()
    }
}

/// Checks that the ranges are inside their dimensions.
fn check(tensor: &TensorEntry<'_>, ranges: &[Range<u64>]) -> Result<(), SliceError> {
    if ranges.len() > tensor.shape.len() {
        return Err(SliceError::TooManyRanges {
            tensor: tensor.name.to_owned(),
            ranges: ranges.len(),
            dimensions: tensor.shape.len(),
        });
    }
    for (dimension, (range, &len)) in ranges.iter().zip(tensor.shape).enumerate() {
        if range.start > range.end || range.end > len {
            let (start, end) = (range.start, range.end);
            return Err(SliceError::OutOfRange {
                tensor: tensor.name.to_owned(),
                dimension,
                start,
                end,
                len,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "a range of one dimension")]
mod tests {
    use super::*;
    use crate::checkpoint::{DType, ShardId, TensorId};
    use crate::units::ByteRange;

    fn tensor(dtype: DType, shape: &[u64]) -> TensorEntry<'_> {
        let elements: u64 = shape.iter().product();
        let extent = ByteRange::with_len(100, elements * dtype.bits().unwrap_or(8) / 8).unwrap();
        let (id, shard) = (TensorId(0), ShardId(0));
        let (strides, stride_dims) = (&[][..], &[][..]);
        let dtype_name = dtype.name();
        TensorEntry { id, name: "w", dtype, dtype_name, shape, shard, extent, strides, stride_dims }
    }

    /// The elements of a slice in order, by the definition of row-major.
    fn elements(shape: &[u64], ranges: &[Range<u64>]) -> Vec<u64> {
        let Some((&len, inner)) = shape.split_first() else { return vec![0] };
        let (range, rest) = match ranges.split_first() {
            Some((range, rest)) => (range.clone(), rest),
            None => (0..len, ranges),
        };
        let stride: u64 = inner.iter().product();
        let inside = elements(inner, rest);
        range.flat_map(|index| inside.iter().map(move |at| index * stride + at)).collect()
    }

    fn all_ranges(len: u64) -> impl Iterator<Item = Range<u64>> + Clone {
        (0..=len).flat_map(move |start| (start..=len).map(move |end| start..end))
    }

    fn check_slice(dtype: DType, shape: &[u64], ranges: &[Range<u64>]) -> bool {
        let bits = dtype.bits().unwrap();
        let Ok(runs) = Runs::of_slice(&tensor(dtype, shape), ranges) else { return false };
        let expected: Vec<u64> = elements(shape, ranges)
            .into_iter()
            .flat_map(|at| (0..bits).map(move |bit| at * bits + bit))
            .collect();
        let found: Vec<u64> = (0..runs.count())
            .flat_map(|run| runs.start_of(run) * 8..(runs.start_of(run) + runs.run_bytes()) * 8)
            .collect();
        assert_eq!(found, expected, "{dtype} {shape:?} {ranges:?}");
        assert_eq!(runs.len_bytes() * 8, crate::units::to_u64(expected.len()));
        true
    }

    #[test]
    fn every_slice_of_small_tensors() {
        let ranges = || all_ranges(2).flat_map(|a| all_ranges(3).map(move |b| (a.clone(), b)));
        for (a, b) in ranges() {
            for c in all_ranges(4) {
                assert!(check_slice(DType::Bf16, &[2, 3, 4], &[a.clone(), b.clone(), c]));
            }
            assert!(check_slice(DType::U8, &[2, 3, 4], &[a, b]));
        }
        for a in all_ranges(3) {
            assert!(check_slice(DType::F32, &[3], std::slice::from_ref(&a)));
            assert!(check_slice(DType::F64, &[3, 1, 1, 2], &[a]));
        }
        assert!(check_slice(DType::F32, &[], &[]));
        assert!(check_slice(DType::F32, &[0, 3], &[0..0, 1..2]));
    }

    #[test]
    fn slices_of_tensors_that_are_not_row_major() {
        // A transposed tensor, channels last, a part of a larger storage, dimensions of one.
        let cases: [(&[u64], &[u64]); 5] = [
            (&[3, 4], &[1, 3]),
            (&[2, 3, 2, 2], &[12, 1, 6, 3]),
            (&[3, 4], &[10, 1]),
            (&[3, 1, 4], &[4, 77, 1]),
            (&[2, 3, 4], &[4, 8, 1]),
        ];
        for (shape, strides) in cases {
            let last: u64 = shape.iter().zip(strides).map(|(len, stride)| (len - 1) * stride).sum();
            let extent = ByteRange::with_len(100, (last + 1) * 2).unwrap();
            let view = TensorEntry { strides, stride_dims: shape, extent, ..tensor(DType::Bf16, shape) };
            assert_eq!(view.len_bytes(), shape.iter().product::<u64>() * 2);
            for first in all_ranges(shape[0]) {
                let second = 0..shape[1];
                let ranges = [first.clone(), second];
                let runs = Runs::of_slice(&view, &ranges).unwrap();
                let expected: Vec<u64> = elements(shape, &ranges)
                    .into_iter()
                    .flat_map(|at| {
                        let mut rest = at;
                        let inward = shape.iter().zip(strides).rev();
                        let places = inward.map(|(len, stride)| {
                            let index = rest % len;
                            rest /= len;
                            index * stride
                        });
                        let place: u64 = places.sum();
                        [place * 2, place * 2 + 1]
                    })
                    .collect();
                let found: Vec<u64> = (0..runs.count())
                    .flat_map(|run| runs.start_of(run)..runs.start_of(run) + runs.run_bytes())
                    .collect();
                assert_eq!(found, expected, "{shape:?} {strides:?} {ranges:?}");
            }
        }
    }

    #[test]
    fn what_is_whole_inside_is_one_loop_or_one_run() {
        let runs = |shape: &[u64], ranges: &[Range<u64>]| {
            let runs = Runs::of_slice(&tensor(DType::U8, shape), ranges).unwrap();
            (runs.count(), runs.run_bytes(), runs.loops.len())
        };
        assert_eq!(runs(&[4, 6], &[1..3]), (1, 12, 0));
        assert_eq!(runs(&[4, 6], &[0..4, 2..4]), (4, 2, 1));
        assert_eq!(runs(&[4, 6], &[1..2, 2..4]), (1, 2, 0));
        assert_eq!(runs(&[4, 5, 6], &[0..4, 0..5, 2..4]), (20, 2, 1));
        assert_eq!(runs(&[4, 5, 6], &[0..4, 1..5, 2..4]), (16, 2, 2));
    }

    #[test]
    fn elements_of_few_bits_come_in_whole_bytes() {
        let (mut cut, mut whole) = (0, 0);
        for dtype in [DType::F4, DType::F6E2M3] {
            for (a, b) in all_ranges(4).flat_map(|a| all_ranges(8).map(move |b| (a.clone(), b))) {
                // An odd row, too: its second one begins inside a byte.
                for shape in [[4, 8], [4, 12]] {
                    match check_slice(dtype, &shape, &[a.clone(), b.clone()]) {
                        true => whole += 1,
                        false => cut += 1,
                    }
                }
            }
        }
        assert!(cut > 50 && whole > 50, "{cut} cut, {whole} whole");
        let odd = tensor(DType::F4, &[2, 3]);
        assert!(matches!(Runs::of_slice(&odd, &[1..2]), Err(SliceError::CutsByte { element_bits: 4, .. })));
        assert!(Runs::of_slice(&odd, &[0..2]).is_ok(), "all of it is no slice");
    }

    #[test]
    fn what_cannot_be_had_says_why() {
        let square = tensor(DType::F32, &[4, 6]);
        let refused = |ranges: &[Range<u64>]| Runs::of_slice(&square, ranges).unwrap_err();
        assert!(matches!(refused(&[0..4, 0..6, 0..1]), SliceError::TooManyRanges { dimensions: 2, .. }));
        assert!(matches!(refused(&[0..4, 5..7]), SliceError::OutOfRange { dimension: 1, len: 6, .. }));
        #[expect(clippy::reversed_empty_ranges, reason = "what is refused")]
        let reversed = refused(&[3..2]);
        assert!(matches!(reversed, SliceError::OutOfRange { dimension: 0, .. }), "{reversed}");
        let opaque = TensorEntry { dtype: DType::Opaque, dtype_name: "F3", ..tensor(DType::U8, &[4, 6]) };
        assert!(matches!(Runs::of_slice(&opaque, &[0..1]), Err(SliceError::UnknownElements { .. })));
        assert_eq!(Runs::of_slice(&opaque, &[0..4, 0..6]).unwrap().len_bytes(), 24);
    }
}
