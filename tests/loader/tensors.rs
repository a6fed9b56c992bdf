//! Tensors and slices on demand: the same bytes as a plain reader has, of every dtype and on every
//! axis, from cold and warm files; and what cannot be had is an error that names the tensor or the
//! file.
#![allow(clippy::single_range_in_vec_init, reason = "a range of one dimension")]
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]
#![allow(clippy::cast_possible_truncation, reason = "lengths of small test files")]

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::path::Path;

use onelayer::checkpoint::TensorEntry;
use onelayer::{Checkpoint, DType, LoadError, SliceError, TensorReader};
use onelayer_testing::{TestTensor, fixture, random_bytes, write_file};

const FIXTURES: [&str; 5] = ["gemma2", "gpt2", "llama", "llama_sharded", "qwen2_moe"];

fn bytes_of(checkpoint: &Checkpoint, tensor: &TensorEntry<'_>) -> Vec<u8> {
    let file = std::fs::read(&checkpoint.shard(tensor.shard).path).unwrap();
    file[tensor.extent.start() as usize..tensor.extent.end() as usize].to_vec()
}

/// The definition: one element after the other, bit by bit where they have no bytes of their own.
fn slice_of(bytes: &[u8], bits: u64, shape: &[u64], ranges: &[Range<u64>]) -> Vec<u8> {
    fn elements(shape: &[u64], ranges: &[Range<u64>]) -> Vec<u64> {
        let Some((&len, inner)) = shape.split_first() else { return vec![0] };
        let range = ranges.first().cloned().unwrap_or(0..len);
        let stride: u64 = inner.iter().product();
        let inside = elements(inner, ranges.get(1..).unwrap_or_default());
        range.flat_map(|index| inside.iter().map(move |at| index * stride + at)).collect()
    }
    if bits.is_multiple_of(8) {
        let len = (bits / 8) as usize;
        return elements(shape, ranges)
            .into_iter()
            .flat_map(|at| &bytes[at as usize * len..][..len])
            .copied()
            .collect();
    }
    let bit = |at: u64| bytes[(at / 8) as usize] >> (at % 8) & 1;
    let wanted: Vec<u8> =
        elements(shape, ranges).into_iter().flat_map(|at| (at * bits..(at + 1) * bits).map(bit)).collect();
    wanted.chunks(8).map(|bits| bits.iter().rev().fold(0, |byte, bit| byte << 1 | bit)).collect()
}

/// Numbers that look random, the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 += 1;
        u64::from_le_bytes(random_bytes(8, self.0).try_into().unwrap()) % end
    }

    fn range(&mut self, len: u64) -> Range<u64> {
        let (a, b) = (self.below(len + 1), self.below(len + 1));
        a.min(b)..a.max(b)
    }

    /// Some dimensions whole, some cut, the last ones maybe left out.
    fn ranges(&mut self, shape: &[u64]) -> Vec<Range<u64>> {
        let count = self.below(shape.len() as u64 + 1) as usize;
        shape[..count].iter().map(|&len| if self.below(3) == 0 { 0..len } else { self.range(len) }).collect()
    }
}

fn read_slice(
    reader: &TensorReader,
    tensor: &TensorEntry<'_>,
    ranges: &[Range<u64>],
) -> Result<Vec<u8>, LoadError> {
    let mut target = vec![0xA5; reader.slice_bytes(tensor.id, ranges)? as usize];
    reader.read_slice(tensor.id, ranges, &mut target)?;
    Ok(target)
}

#[test]
fn slices_of_every_fixture_are_what_a_plain_reader_has() {
    let mut random = Random(1);
    for name in FIXTURES {
        let checkpoint = Checkpoint::open(fixture(name)).unwrap();
        let reader = TensorReader::open(&checkpoint).unwrap();
        let mut some = 0;
        for tensor in checkpoint.tensors() {
            let bytes = bytes_of(&checkpoint, &tensor);
            let mut whole = vec![0; bytes.len()];
            reader.read(tensor.id, 0, &mut whole).unwrap();
            assert!(whole == bytes, "{name}: {}", tensor.name);
            for _ in 0..8 {
                let ranges = random.ranges(tensor.shape);
                let expected = slice_of(&bytes, tensor.dtype.bits().unwrap(), tensor.shape, &ranges);
                let found = read_slice(&reader, &tensor, &ranges).unwrap();
                assert!(found == expected, "{name}: {} {ranges:?}", tensor.name);
                some += u64::from(!expected.is_empty());
                let within = random.range(bytes.len() as u64);
                let mut part = vec![0; (within.end - within.start) as usize];
                reader.read(tensor.id, within.start, &mut part).unwrap();
                assert!(part == bytes[within.start as usize..within.end as usize]);
            }
        }
        assert!(some > 50, "{name}: {some} slices had bytes");
    }
}

/// A tensor of every dtype whose rows are whole bytes, one of odd length, a scalar, empty ones, and
/// some bytes before them.
fn every_dtype(path: &Path) -> Checkpoint {
    let mut tensors = vec![TestTensor::random("odd", 7, 1)];
    for (seed, dtype) in (2..).zip(DType::ALL) {
        let bits = dtype.bits().unwrap();
        let shape = vec![6, 5, 8];
        let bytes = random_bytes((6 * 5 * 8 * bits / 8) as usize, seed);
        tensors.push(TestTensor { name: format!("w.{dtype}"), dtype: dtype.name(), shape, bytes });
    }
    let tensor = |name: &str, shape: &[u64], len: usize| TestTensor {
        name: name.to_owned(),
        dtype: "F32",
        shape: shape.to_vec(),
        bytes: random_bytes(len, 99),
    };
    tensors.extend([tensor("scalar", &[], 4), tensor("empty", &[3, 0, 5], 0), tensor("row", &[1, 3], 12)]);
    write_file(path, &tensors, 3);
    Checkpoint::open(path).unwrap()
}

#[test]
fn every_dtype_is_sliced_on_every_axis() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = every_dtype(&folder.path().join("model.safetensors"));
    let reader = TensorReader::open(&checkpoint).unwrap();
    let mut random = Random(7);
    let mut cut = 0;
    for tensor in checkpoint.tensors() {
        let bytes = bytes_of(&checkpoint, &tensor);
        let bits = tensor.dtype.bits().unwrap();
        for _ in 0..60 {
            let ranges = random.ranges(tensor.shape);
            match read_slice(&reader, &tensor, &ranges) {
                Ok(found) => {
                    assert!(
                        found == slice_of(&bytes, bits, tensor.shape, &ranges),
                        "{} {ranges:?}",
                        tensor.name
                    );
                }
                Err(LoadError::Slice(SliceError::CutsByte { tensor: named, element_bits })) => {
                    assert_eq!((named.as_str(), element_bits), (tensor.name, bits));
                    assert!(bits < 8, "{}", tensor.name);
                    cut += 1;
                }
                Err(other) => panic!("{}: {other}", tensor.name),
            }
        }
    }
    assert!(cut > 10, "{cut} slices of small elements cut a byte");
}

/// Large enough for several threads, several pieces each, and for the page cache to matter.
#[test]
fn large_tensors_arrive_whole_warm_and_cold_and_by_many_callers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    // 24 MB: rows of 3 kB and rows of 3 MB.
    let bytes = random_bytes(24_000_000, 5);
    let shape = |shape: &[u64]| shape.to_vec();
    let large =
        |name: &str, shape| TestTensor { name: name.to_owned(), dtype: "BF16", shape, bytes: bytes.clone() };
    let tensors = [
        TestTensor::random("odd", 4097, 1),
        large("narrow", shape(&[8000, 1500])),
        large("wide", shape(&[8, 1_500_000])),
    ];
    write_file(&path, &tensors, 0);
    File::open(&path).unwrap().sync_all().unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let slices: [(&str, &[Range<u64>]); 6] = [
        ("narrow", &[100..7900]),
        ("narrow", &[0..8000, 750..1500]),
        ("narrow", &[3..7999, 1499..1500]),
        ("wide", &[0..8, 0..750_000]),
        ("wide", &[1..7, 10_000..1_490_001]),
        ("wide", &[0..8, 5..200_000]),
    ];
    for warm in [false, true] {
        // Dropped or brought in anew; where the system does not obey, both are read warm, and right all the
        // same.
        let file = File::open(&path).unwrap();
        if warm {
            std::fs::read(&path).unwrap();
        } else {
            rustix_drop(&file);
        }
        let reader = TensorReader::open(&checkpoint).unwrap();
        let read_all = || {
            for name in ["narrow", "wide"] {
                let id = checkpoint.find(name).unwrap().id;
                let mut whole = vec![0; bytes.len()];
                reader.read(id, 0, &mut whole).unwrap();
                assert!(whole == bytes, "{name}, warm: {warm}");
            }
            for (name, ranges) in slices {
                let tensor = checkpoint.find(name).unwrap();
                let found = read_slice(&reader, &tensor, ranges).unwrap();
                // In steps of rows: bit by bit takes too long here.
                let row_bytes = tensor.shape[1] as usize * 2;
                let columns = ranges.get(1).cloned().unwrap_or(0..tensor.shape[1]);
                let columns = columns.start as usize * 2..columns.end as usize * 2;
                let rows = ranges[0].start as usize..ranges[0].end as usize;
                let expected = rows.flat_map(|row| &bytes[row * row_bytes..][columns.clone()]);
                assert!(found.iter().eq(expected), "{name} {ranges:?}, warm: {warm}");
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(read_all);
            }
        });
        assert!(reader.ways().buffered_bytes + reader.ways().direct_bytes >= 3 * 48_000_000);
    }
}

fn rustix_drop(file: &File) {
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
}

#[test]
fn rows_are_one_read_and_columns_cost_the_gaps_between_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write_file(&path, &[TestTensor { shape: vec![1000, 4000], ..TestTensor::random("w", 4_000_000, 5) }], 0);
    std::fs::read(&path).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let id = checkpoint.find("w").unwrap().id;
    let read_bytes = |ranges: &[Range<u64>]| {
        let reader = TensorReader::open(&checkpoint).unwrap();
        let mut target = vec![0; reader.slice_bytes(id, ranges).unwrap() as usize];
        reader.read_slice(id, ranges, &mut target).unwrap();
        reader.ways().buffered_bytes + reader.ways().direct_bytes
    };
    assert_eq!(read_bytes(&[250..500]), 1_000_000);
    let columns = read_bytes(&[0..1000, 1000..2000]);
    assert!((1_000_000..=4_000_000).contains(&columns), "{columns}");
    assert!(columns > 3_900_000, "gaps of 3 kB are read through: {columns}");
}

#[test]
fn what_cannot_be_had_names_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = every_dtype(&folder.path().join("model.safetensors"));
    let reader = TensorReader::open(&checkpoint).unwrap();
    let tensor = checkpoint.find("w.F32").unwrap();
    let slice = |error: LoadError| match error {
        LoadError::Slice(slice) => {
            assert!(slice.to_string().contains("w.F32"), "{slice}");
            slice
        }
        other => panic!("{other}"),
    };
    let beyond = reader.read(tensor.id, 955, &mut [0; 6]).unwrap_err();
    assert!(matches!(slice(beyond), SliceError::BeyondEnd { tensor_bytes: 960, offset_bytes: 955, .. }));
    let overflow = reader.read(tensor.id, u64::MAX, &mut [0; 6]).unwrap_err();
    assert!(matches!(slice(overflow), SliceError::BeyondEnd { .. }));
    let wrong = reader.read_slice(tensor.id, &[1..2], &mut [0; 159]).unwrap_err();
    assert!(matches!(
        slice(wrong),
        SliceError::WrongTargetLength { expected_bytes: 160, found_bytes: 159, .. }
    ));
    let outside = reader.read_slice(tensor.id, &[1..7], &mut []).unwrap_err();
    assert!(matches!(slice(outside), SliceError::OutOfRange { dimension: 0, len: 6, .. }));
    let many = reader.slice_bytes(tensor.id, &[0..1, 0..1, 0..1, 0..1]).unwrap_err();
    assert!(matches!(slice(many), SliceError::TooManyRanges { ranges: 4, dimensions: 3, .. }));
    reader.read(tensor.id, 960, &mut []).unwrap();
}

#[test]
fn a_file_that_changes_is_an_error_of_the_next_read() {
    type Change = fn(&Path);
    let truncate: Change = |path| OpenOptions::new().write(true).open(path).unwrap().set_len(5000).unwrap();
    let append: Change =
        |path| OpenOptions::new().append(true).open(path).unwrap().write_all(b"more").unwrap();
    let replace: Change = |path| {
        let other = path.with_extension("new");
        std::fs::copy(path, &other).unwrap();
        std::fs::rename(&other, path).unwrap();
    };
    for (number, change) in [truncate, append, replace].into_iter().enumerate() {
        for len in [20_000, 9_000_000] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("model.safetensors");
            write_file(
                &path,
                &[TestTensor { shape: vec![1000, len / 1000], ..TestTensor::random("w", len as usize, 5) }],
                0,
            );
            let checkpoint = Checkpoint::open(&path).unwrap();
            let reader = TensorReader::open(&checkpoint).unwrap();
            let tensor = checkpoint.find("w").unwrap();
            let mut target = vec![0; len as usize];
            reader.read(tensor.id, 0, &mut target).unwrap();
            change(&path);
            let whole = reader.read(tensor.id, 0, &mut target).unwrap_err();
            assert!(whole.is_file_changed(), "{number}: {whole}");
            let columns = read_slice(&reader, &tensor, &[0..1000, 1..5]).unwrap_err();
            assert!(columns.is_file_changed(), "{number}: {columns}");
            assert!(columns.to_string().contains("model.safetensors"), "{columns}");
            let later = TensorReader::open(&checkpoint).unwrap_err();
            assert!(later.is_file_changed(), "{later}");
        }
    }
}
