//! `--verify`: compares delivered tensors with the files.
//!
//! Every tensor is read back from where it lies, a piece at a time, and held against bytes that are
//! read from its file a second time: by plain reads of this file's own, not by the library's
//! sources, its ring or its narrowing. Narrowed tensors are held against a conversion with other
//! means (`half` and the language's own casts), blocks of GGUF files against the library's decoder
//! without vectors, which the tests hold against gguf-py.
//!
//! A NaN that is narrowed has to arrive as a NaN. Which NaN is not defined, so its sign
//! and payload are not compared; tensors that are not narrowed are compared bit by bit, NaN or not.

use onelayer_system::units::to_u64;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use half::{bf16, f16};
use onelayer::checkpoint::{Checkpoint, ShardId, TensorEntry};
use onelayer::load::{LoadedLayer, LoadedTensor};
use onelayer::plan::{Cast, Placement};
use onelayer::{DType, FloatType, LoadPlan, decode_blocks};

use super::failure::Failure;
use crate::problem::{Code, Problem};
use crate::report::{Mismatch, Verified};

/// Bytes of a file that are compared at once.
const PIECE_BYTES: usize = 1 << 20;
/// Bytes that a report shows of a difference.
const SHOWN_BYTES: usize = 8;

/// Compares delivered tensors with their files. Always holds two pieces of 1 MiB;
/// they are resident from the start, so that they count for the baseline and not for the load.
pub(super) struct Verifier {
    in_file: Vec<u8>,
    delivered: Vec<u8>,
    /// The file that was read last.
    file: Option<(ShardId, File)>,
    verified: Verified,
    spent: Duration,
}

impl Verifier {
    pub(super) fn new() -> Self {
        // Zeros would be promised by the system and not yet there.
        let piece = || vec![0xa5; PIECE_BYTES];
        Self {
            in_file: piece(),
            delivered: piece(),
            file: None,
            verified: Verified::default(),
            spent: Duration::ZERO,
        }
    }

    /// Compares one layer.
    pub(super) fn compare(
        &mut self,
        checkpoint: &Checkpoint,
        plan: &LoadPlan,
        layer: &LoadedLayer,
        cancel: &AtomicBool,
    ) -> Result<(), Failure> {
        let start = Instant::now();
        let planned = &plan.layers()[layer.index()];
        let compared =
            plan.placements(planned).iter().zip(layer.tensors()).try_for_each(|(placement, tensor)| {
                if cancel.load(Ordering::Relaxed) {
                    return Err(Failure::Cancelled);
                }
                self.tensor(checkpoint, placement, &tensor)
            });
        self.spent += start.elapsed();
        compared
    }

    /// Time that comparing took.
    pub(super) fn spent(&self) -> Duration {
        self.spent
    }

    /// The result.
    pub(super) fn finish(self) -> Verified {
        Verified { seconds: self.spent.as_secs_f64(), ..self.verified }
    }

    fn tensor(
        &mut self,
        checkpoint: &Checkpoint,
        placement: &Placement,
        tensor: &LoadedTensor,
    ) -> Result<(), Failure> {
        let entry = tensor.entry();
        let path = &checkpoint.shard(entry.shard).path;
        let unreadable = |error: std::io::Error| {
            let message = format!("--verify cannot read the file again: {error}");
            Failure::Failed(Problem::new(Code::LoadFailed, message).at(path.display().to_string()))
        };
        if self.file.as_ref().is_none_or(|(shard, _)| *shard != entry.shard) {
            self.file = Some((entry.shard, File::open(path).map_err(unreadable)?));
        }
        let Some((_, file)) = &self.file else { return Ok(()) };
        let file_bytes = placement.source_bytes();
        let (mut in_file, mut delivered) = (0_u64, 0_u64);
        let mut difference = None;
        while in_file < file_bytes {
            let piece_bytes = placement.cast.map_or(PIECE_BYTES, piece_bytes);
            let len = piece_bytes.min(usize::try_from(file_bytes - in_file).unwrap_or(usize::MAX));
            let piece = &mut self.in_file[..len];
            match entry.strides {
                [] => read_wanted(file, placement, in_file, piece),
                _ => read_elements(file, &entry, in_file, piece),
            }
            .map_err(unreadable)?;
            let expected_len = placement.cast.map_or(len, |cast| convert(cast, &mut self.in_file, len));
            let found = &mut self.delivered[..expected_len];
            let is_there = tensor.read(delivered, found).map_err(|error| Failure::of(&error, None))?;
            debug_assert!(is_there, "refused for targets that keep nothing");
            if difference.is_none() {
                let expected = &self.in_file[..expected_len];
                difference = first_difference(expected, found, placement.cast)
                    .map(|at| mismatch(entry.name, delivered, at, expected, found));
            }
            in_file += u64::try_from(len).unwrap_or(u64::MAX);
            delivered += u64::try_from(expected_len).unwrap_or(u64::MAX);
        }
        self.verified.count(delivered, difference);
        Ok(())
    }
}

/// Reads what is wanted of a tensor's extent, from its `start`th byte on: all of it, or runs of it
/// one by one.
fn read_wanted(file: &File, placement: &Placement, start: u64, target: &mut [u8]) -> std::io::Result<()> {
    let extent = placement.extent;
    let Some(gather) = placement.gather else {
        return file.read_exact_at(target, extent.start() + start);
    };
    let (mut at, mut rest) = (start, target);
    while !rest.is_empty() {
        let (run, in_run) = (at / gather.run_bytes(), at % gather.run_bytes());
        let left = usize::try_from(gather.run_bytes() - in_run).unwrap_or(usize::MAX);
        let (target, behind) = rest.split_at_mut(left.min(rest.len()));
        file.read_exact_at(target, extent.start() + run * gather.stride_bytes() + in_run)?;
        at += to_u64(target.len());
        rest = behind;
    }
    Ok(())
}

/// Reads elements of a tensor that is not row-major in its file, one by one, from the `start`th
/// byte of its row-major order on.
fn read_elements(file: &File, entry: &TensorEntry<'_>, start: u64, target: &mut [u8]) -> std::io::Result<()> {
    let element_bytes = entry.dtype.bits().unwrap_or(8) / 8;
    let element_len = usize::try_from(element_bytes).unwrap_or(usize::MAX);
    for (number, target) in (start / element_bytes..).zip(target.chunks_mut(element_len)) {
        let mut rest = number;
        let inward = entry.stride_dims.iter().zip(entry.strides).rev();
        let places = inward.map(|(len, stride)| {
            let index = rest % len;
            rest /= len;
            index * stride
        });
        file.read_exact_at(target, entry.extent.start() + places.sum::<u64>() * element_bytes)?;
    }
    Ok(())
}

impl Verified {
    fn count(&mut self, bytes: u64, difference: Option<Mismatch>) {
        self.tensors += 1;
        self.bytes += bytes;
        if let Some(difference) = difference {
            self.mismatches += 1;
            self.first_mismatch.get_or_insert(difference);
        }
    }

    /// The problem, if a tensor differs.
    pub(super) fn problem(&self) -> Option<Problem> {
        let first = self.first_mismatch.as_ref()?;
        let what = if self.mismatches == 1 {
            "1 tensor was delivered with other bytes than its file has".to_owned()
        } else {
            format!("{} tensors were delivered with other bytes than their files have", self.mismatches)
        };
        let mut problem = Problem::new(Code::BytesDiffer, format!("{what} ({} were compared)", self.tensors))
            .at(format!("{}, byte {}", first.tensor, first.offset_bytes))
            .help("if nothing wrote to the file meanwhile, this is a fault of the machine or of onelayer: please report it");
        problem.detail = Some(format!("expected {}, found {}", first.expected, first.found));
        Some(problem)
    }
}

/// Where two pieces differ, if they do.
fn first_difference(expected: &[u8], found: &[u8], cast: Option<Cast>) -> Option<usize> {
    if expected == found {
        return None;
    }
    let Some(cast) = cast else {
        return expected.iter().zip(found).position(|(expected, found)| expected != found);
    };
    let size = usize::try_from(cast.to().bytes()).unwrap_or(1);
    let elements = expected.chunks_exact(size).zip(found.chunks_exact(size));
    let differs = |(expected, found): (&[u8], &[u8])| {
        expected != found && !(is_nan(expected, cast.to()) && is_nan(found, cast.to()))
    };
    elements.map(differs).position(|differs| differs).map(|element| element * size)
}

fn mismatch(tensor: &str, start_bytes: u64, at: usize, expected: &[u8], found: &[u8]) -> Mismatch {
    let shown = |bytes: &[u8]| {
        let shown = bytes[at..].iter().take(SHOWN_BYTES);
        shown.map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ")
    };
    Mismatch {
        tensor: tensor.to_owned(),
        offset_bytes: start_bytes + u64::try_from(at).unwrap_or(u64::MAX),
        expected: shown(expected),
        found: shown(found),
    }
}

fn is_nan(element: &[u8], float: FloatType) -> bool {
    match float {
        FloatType::Bf16 => element.try_into().is_ok_and(|bytes| bf16::from_le_bytes(bytes).is_nan()),
        FloatType::F16 => element.try_into().is_ok_and(|bytes| f16::from_le_bytes(bytes).is_nan()),
        FloatType::F32 => element.try_into().is_ok_and(|bytes| f32::from_le_bytes(bytes).is_nan()),
    }
}

/// Bytes of a file that are compared at once: whole units, which fit a piece after the cast too.
fn piece_bytes(cast: Cast) -> usize {
    let units = to_u64(PIECE_BYTES) / cast.source_unit_bytes().max(cast.target_unit_bytes());
    usize::try_from(units * cast.source_unit_bytes()).unwrap_or(PIECE_BYTES)
}

/// Casts the first `len` bytes in their place; returns how many bytes there are then.
fn convert(cast: Cast, bytes: &mut [u8], len: usize) -> usize {
    let DType::Block(block) = cast.source() else { return narrow(cast, &mut bytes[..len]) };
    // The library's own decoder, without the vectors that the load used.
    let Some(singles) = decode_blocks(block, &bytes[..len]) else { return 0 };
    let size = usize::try_from(cast.to().bytes()).unwrap_or(4);
    for (single, target) in singles.iter().zip(bytes.chunks_exact_mut(size)) {
        match cast.to() {
            FloatType::F32 => target.copy_from_slice(&single.to_le_bytes()),
            FloatType::Bf16 => target.copy_from_slice(&bf16::from_f32(*single).to_le_bytes()),
            FloatType::F16 => target.copy_from_slice(&f16::from_f32(*single).to_le_bytes()),
        }
    }
    singles.len() * size
}

/// Narrows whole elements in their place, to the front; returns how many bytes there are then.
fn narrow(cast: Cast, bytes: &mut [u8]) -> usize {
    match (cast.source(), cast.to()) {
        (DType::F32, FloatType::Bf16) => {
            each(bytes, |from| bf16::from_f32(f32::from_le_bytes(from)).to_le_bytes())
        }
        (DType::F32, FloatType::F16) => {
            each(bytes, |from| f16::from_f32(f32::from_le_bytes(from)).to_le_bytes())
        }
        (DType::F64, FloatType::Bf16) => each(bytes, |from| bf16::from_f32(to_odd(from)).to_le_bytes()),
        (DType::F64, FloatType::F16) => each(bytes, |from| f16::from_f32(to_odd(from)).to_le_bytes()),
        (DType::F64, FloatType::F32) => each(bytes, |from| nearest(from).to_le_bytes()),
        _ => unreachable!("program and library are of one version, whose loads do not cast {cast}"),
    }
}

fn each<const FROM: usize, const TO: usize>(
    bytes: &mut [u8],
    convert: impl Fn([u8; FROM]) -> [u8; TO],
) -> usize {
    let count = bytes.len() / FROM;
    for element in 0..count {
        let mut from = [0; FROM];
        from.copy_from_slice(&bytes[element * FROM..][..FROM]);
        bytes[element * TO..][..TO].copy_from_slice(&convert(from));
    }
    count * TO
}

/// The nearest single, ties to even, as the language defines its cast.
#[expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    reason = "this rounding is what is wanted"
)]
fn nearest(from: [u8; 8]) -> f32 {
    f64::from_le_bytes(from) as f32
}

/// A double as a single, rounded to odd: not to the nearest, but to the neighbour whose last bit is
/// one, unless it is exact. Rounded once more, to fewer bits, that gives what rounding once would
/// have given. (`half` takes doubles as well, by ways that round twice or drop the lower half.)
fn to_odd(from: [u8; 8]) -> f32 {
    let exact = f64::from_le_bytes(from);
    let single = nearest(from);
    if exact.is_nan() || f64::from(single) == exact {
        return single;
    }
    // Towards zero, then odd; one step back from infinity is the largest number, which is odd.
    let away = f64::from(single).abs() > exact.abs();
    f32::from_bits((single.to_bits() - u32::from(away)) | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn narrowed(source: DType, to: FloatType, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        let len = narrow(Cast::between(source, to).unwrap(), &mut bytes);
        bytes.truncate(len);
        bytes
    }

    fn f64_to_bf16(number: f64) -> u16 {
        u16::from_le_bytes(narrowed(DType::F64, FloatType::Bf16, &number.to_le_bytes()).try_into().unwrap())
    }

    fn f64_to_f16(number: f64) -> u16 {
        u16::from_le_bytes(narrowed(DType::F64, FloatType::F16, &number.to_le_bytes()).try_into().unwrap())
    }

    #[test]
    fn doubles_are_rounded_once() {
        // Halfway between 1 and its neighbour: to even. A hair more, which is lost to a single: up.
        let hair = 2_f64.powi(-40);
        assert_eq!(f64_to_bf16(1.0 + 2_f64.powi(-8)), 0x3f80);
        assert_eq!(f64_to_bf16(1.0 + 2_f64.powi(-8) + hair), 0x3f81);
        assert_eq!(f64_to_bf16(1.0 + 3.0 * 2_f64.powi(-8)), 0x3f82);
        assert_eq!(f64_to_bf16(1.0 + 3.0 * 2_f64.powi(-8) - hair), 0x3f81);
        assert_eq!(f64_to_f16(1.0 + 2_f64.powi(-11)), 0x3c00);
        assert_eq!(f64_to_f16(1.0 + 2_f64.powi(-11) + hair), 0x3c01);
        assert_eq!(f64_to_f16(-1.0 - 2_f64.powi(-11) - hair), 0xbc01);
        // Subnormals, the smallest of all, overflow, infinities.
        assert_eq!(f64_to_f16(2_f64.powi(-25)), 0, "halfway to the smallest");
        assert_eq!(f64_to_f16(2_f64.powi(-25) * (1.0 + hair)), 1);
        assert_eq!(f64_to_f16(65520.0), 0x7c00);
        assert_eq!(f64_to_f16(65520.0 - hair * 65536.0), 0x7bff);
        assert_eq!(f64_to_bf16(1e300), 0x7f80);
        assert_eq!(f64_to_bf16(f64::NEG_INFINITY), 0xff80);
        assert_eq!(f64_to_bf16(-1e-300), 0x8000);
        assert!(bf16::from_bits(f64_to_bf16(f64::NAN)).is_nan());
        assert_eq!(narrowed(DType::F64, FloatType::F32, &0.1_f64.to_le_bytes()), 0.1_f32.to_le_bytes());
    }

    #[test]
    fn several_elements_are_narrowed_in_their_place() {
        let numbers: Vec<u8> = [1.0_f32, -2.5, 3.75].iter().flat_map(|number| number.to_le_bytes()).collect();
        let expected: Vec<u8> =
            [0x3c00_u16, 0xc100, 0x4380].iter().flat_map(|bits| bits.to_le_bytes()).collect();
        assert_eq!(narrowed(DType::F32, FloatType::F16, &numbers), expected);
    }

    #[test]
    fn one_bit_is_a_difference_and_is_placed() {
        let expected: Vec<u8> = (0..=255).collect();
        assert_eq!(first_difference(&expected, &expected, None), None);
        for at in [0, 100, 201] {
            for bit in 0..8 {
                let mut found = expected.clone();
                found[at] ^= 1 << bit;
                assert_eq!(first_difference(&expected, &found, None), Some(at));
                // Of a narrowed tensor, whole elements differ; no pair of these bytes is a NaN.
                let element = at / 2 * 2;
                let differs = first_difference(&expected, &found, Cast::between(DType::F32, FloatType::Bf16));
                assert_eq!(differs, Some(element), "byte {at}, bit {bit}");
            }
        }
    }

    #[test]
    fn a_nan_is_a_nan_only_where_it_was_narrowed() {
        let (quiet, other) = (0x7fc0_u16.to_le_bytes(), 0xffff_u16.to_le_bytes());
        assert_eq!(first_difference(&quiet, &other, Cast::between(DType::F32, FloatType::Bf16)), None);
        assert_eq!(first_difference(&quiet, &other, None), Some(0));
        let infinity = 0x7f80_u16.to_le_bytes();
        assert_eq!(
            first_difference(&quiet, &infinity, Cast::between(DType::F32, FloatType::Bf16)),
            Some(0),
            "that is no NaN"
        );
        assert_eq!(first_difference(&infinity, &quiet, Cast::between(DType::F32, FloatType::Bf16)), Some(0));
    }

    #[test]
    fn a_mismatch_names_tensor_byte_and_both_sides() {
        let mut verified = Verified::default();
        verified.count(10, None);
        assert_eq!(verified.problem(), None);
        verified.count(20, Some(mismatch("a.weight", 1 << 20, 2, &[0, 1, 2, 3], &[0, 1, 0xff, 3])));
        verified.count(30, Some(mismatch("b.weight", 0, 0, &[0], &[1])));
        assert_eq!((verified.tensors, verified.bytes, verified.mismatches), (3, 60, 2));
        let problem = verified.problem().unwrap();
        assert_eq!(problem.code, Code::BytesDiffer);
        assert_eq!(problem.place.as_deref(), Some("a.weight, byte 1048578"));
        assert_eq!(problem.detail.as_deref(), Some("expected 02 03, found ff 03"));
        assert!(problem.message.contains("2 tensors") && problem.message.contains("3 were compared"));
    }
}
