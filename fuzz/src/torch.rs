//! A PyTorch file of any bytes: it is read or refused, in bounded memory, and what is read is
//! inside the file.
//!
//! Input: a file, if it begins like one; else a pickle, which the check puts into an archive with
//! two storages, so that the fuzzer need not keep a directory right.

use std::collections::BTreeSet;

use onelayer::checkpoint::{Checkpoint, CheckpointError, OpenOptions};
use onelayer::{Layers, checkpoint::FileFormat};
use onelayer_testing::torch_file::archive;

use super::header::check_message;
use super::layers::check_layers;
use super::memory::peak_of;
use super::scratch::Scratch;

/// A pickle of one opcode per byte may describe so many bytes per byte.
const MEMORY_PER_BYTE: u64 = 100;
/// Buffers, and what the smallest tables take.
const MEMORY_BYTES: u64 = 1 << 20;
/// A limit below which the same holds for every file.
const HEADER_BYTES_MAX: u64 = 4 << 10;

/// Checks one input.
pub fn check(data: &[u8]) {
    let is_file = data.starts_with(b"PK")
        || data.get(257..262) == Some(b"ustar")
        || data.windows(12).take(16).any(|word| word == b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19");
    match is_file {
        true => check_file(data),
        false => check_file(&archive(data, &[&[7; 64], &[1, 2, 3, 4, 5, 6, 7, 8]]).0),
    }
}

fn check_file(bytes: &[u8]) {
    thread_local!(static SCRATCH: Scratch = Scratch::new());
    SCRATCH.with(|scratch| {
        let path = scratch.holding(bytes);
        let len = u64::try_from(bytes.len()).expect("a length fits");
        let (opened, peak_bytes) = peak_of(|| OpenOptions::new().whole_file().open(path));
        assert!(peak_bytes <= MEMORY_PER_BYTE * len + MEMORY_BYTES, "{peak_bytes} bytes of heap for {len}");
        check_outcome(&opened, len);
        let again = OpenOptions::new().whole_file().open(path);
        assert_eq!(opened.is_ok(), again.is_ok(), "the same file, another verdict");
        // The weights are some of the tensors, if there are any.
        if let (Ok(weights), Ok(whole)) = (Checkpoint::open(path), &opened) {
            assert!(weights.tensor_count() <= whole.tensor_count());
        }
        let (limited, peak_bytes) =
            peak_of(|| OpenOptions::new().header_bytes_max(HEADER_BYTES_MAX).whole_file().open(path));
        assert!(
            peak_bytes <= 4 * HEADER_BYTES_MAX + MEMORY_BYTES,
            "{peak_bytes} bytes of heap at most 4 KiB"
        );
        check_outcome(&limited, len);
    });
}

fn check_outcome(opened: &Result<Checkpoint, CheckpointError>, len: u64) {
    let checkpoint = match opened {
        Err(error) => {
            assert!(error.is_invalid() && error.path().is_some(), "{error}");
            return check_message(error);
        }
        Ok(checkpoint) => checkpoint,
    };
    let mut names = BTreeSet::new();
    for tensor in checkpoint.tensors() {
        assert!(tensor.extent.end() <= len, "{} is outside the file", tensor.name);
        assert_eq!(checkpoint.find(tensor.name), Some(tensor));
        assert!(names.insert(tensor.name), "{} twice", tensor.name);
        let bits = tensor.dtype.bits().expect("the reader knows all its types");
        let elements: u64 = tensor.shape.iter().product();
        match tensor.strides {
            [] => assert_eq!(tensor.extent.len_bytes() * 8, elements * bits),
            strides => {
                assert_eq!(strides.len(), tensor.shape.len());
                let steps = tensor.shape.iter().zip(strides);
                let last: u64 = steps.map(|(&dim, &stride)| (dim - 1) * stride).sum();
                assert_eq!(tensor.extent.len_bytes(), (last + 1) * bits / 8, "{}", tensor.name);
            }
        }
    }
    for (name, id) in checkpoint.aliases() {
        assert!(names.insert(name), "{name} twice");
        assert_eq!(checkpoint.find(name), Some(checkpoint.tensor(id)));
    }
    assert!(checkpoint.notes().iter().all(|note| note.len() < 4000));
    if checkpoint.shards()[0].format != FileFormat::Safetensors {
        let layers = Layers::group(checkpoint).expect("whatever the names are");
        check_layers(&layers, checkpoint.tensor_count());
    }
}
