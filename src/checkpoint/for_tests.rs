//! Descriptions of files without a header, for tests of what lies anywhere in a file.

use std::path::Path;
use std::sync::Arc;

use super::format::{FoundTensor, Input};
use super::tensor::{Coverage, Shard, TensorTable};
use super::{Checkpoint, DType, FileFormat, Inner, OpenOptions, file};

/// Name, dtype, shape, strides, first byte.
pub(crate) type Tensor<'a> = (&'a str, DType, &'a [u64], &'a [u64], u64);

/// The checkpoint of one file with these tensors.
pub(crate) fn checkpoint_of(path: &Path, tensors: &[Tensor<'_>]) -> Checkpoint {
    let (file, identity) = file::open(path).unwrap();
    let (mut table, format) = (TensorTable::default(), FileFormat::TorchZip);
    let options = OpenOptions::new();
    let input = Input {
        path,
        file: &file,
        len_bytes: identity.len_bytes,
        format,
        prefix: "",
        options: &options,
        first_keys: None,
    };
    let mark = table.mark();
    for &(name, dtype, shape, strides, start) in tensors {
        input.add(&mut table, FoundTensor { name, dtype, shape, dims: shape, strides, start }).unwrap();
    }
    let data = table.seal_file(mark, Coverage::Any).unwrap();
    let path = path.to_owned();
    let (metadata, name_prefix) = (Default::default(), Box::default());
    let shards = vec![Shard { path, format, identity, data, metadata, name_prefix }];
    let tensor_bytes = table.tensor_bytes().unwrap();
    let inner = Inner { table, shards, notes: Vec::new(), tensor_bytes, opening_bytes: 0 };
    Checkpoint { inner: Arc::new(inner) }
}
