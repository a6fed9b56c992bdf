//! A GGUF file of any bytes: refused with a short message that names the file, or described so that
//! every tensor lies inside the file and apart from the others. In bounded memory.
//!
//! Input: a file. Without the magic number, it is put in front, with version 3: the fuzzer need not
//! find them.

use onelayer::Layers;
use onelayer::checkpoint::{DType, OpenOptions, TensorEntry, TensorNames};

use super::header::{check_message, open_bounded, open_bounded_with};
use super::layers::check_layers;
use super::scratch::Scratch;

/// Checks one input.
pub fn check(data: &[u8]) {
    match data.starts_with(b"GGUF") {
        true => check_file(data),
        false => check_file(&[b"GGUF\x03\0\0\0", data].concat()),
    }
}

fn check_file(bytes: &[u8]) {
    thread_local!(static SCRATCH: Scratch = Scratch::new());
    SCRATCH.with(|scratch| {
        let path = scratch.holding(bytes);
        let checkpoint = match open_bounded(path, bytes.len()) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                assert!(error.is_invalid(), "{error}");
                assert_eq!(error.path(), Some(path), "{error}");
                return check_message(&error);
            }
        };
        let mut end = 0;
        for tensor in checkpoint.tensors() {
            assert!(tensor.name.len() < 64 && tensor.shape.len() <= 4 && !tensor.shape.contains(&0));
            assert!(tensor.extent.start() >= end && tensor.extent.end() <= bytes.len().try_into().unwrap());
            end = tensor.extent.end();
            let elements: u64 = tensor.shape.iter().product();
            let expected = match tensor.dtype {
                DType::Block(block) => {
                    assert!(
                        tensor.shape.last().is_some_and(|columns| columns.is_multiple_of(block.elements()))
                    );
                    elements / block.elements() * block.bytes()
                }
                plain => elements * plain.bits().expect("no other type is opaque") / 8,
            };
            assert_eq!(tensor.extent.len_bytes(), expected);
        }
        for (key, value) in checkpoint.shards()[0].metadata.iter() {
            assert!(key.len() < 1 << 16 && value.len() <= 1 << 10);
        }
        let layers = Layers::group(&checkpoint).expect("whatever the names are");
        check_layers(&layers, checkpoint.tensor_count());
        let names = OpenOptions::new().names(TensorNames::HuggingFace);
        match open_bounded_with(path, bytes.len(), &names) {
            Ok(named) => {
                assert!(named.tensor_count() <= checkpoint.tensor_count());
                named.tensors().for_each(|tensor| check_strides(&tensor));
            }
            Err(error) => {
                assert!(error.is_invalid(), "{error}");
                check_message(&error);
            }
        }
    });
}

/// The strides of a tensor go through all elements of its extent.
fn check_strides(tensor: &TensorEntry<'_>) {
    assert_eq!(tensor.len_bytes(), tensor.extent.len_bytes());
    let elements = |dims: &[u64]| dims.iter().product::<u64>();
    if !tensor.strides.is_empty() {
        assert_eq!(elements(tensor.stride_dims), elements(tensor.shape));
        let steps = tensor.stride_dims.iter().zip(tensor.strides);
        let last: u64 = steps.map(|(len, stride)| (len - 1) * stride).sum();
        assert_eq!(last + 1, elements(tensor.shape));
    }
}
