//! The layouts that the tests convert are legal checkpoints with the tensors that they list.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    reason = "a test that cannot go on panics"
)]

use onelayer_testing::layouts;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use onelayer::{Checkpoint, DType};

/// The tensors of a checkpoint, from the reference reader: name in the file, type, shape, bytes.
fn reference(files: &[&Path]) -> BTreeSet<(String, String, Vec<u64>, Vec<u8>)> {
    let mut found = BTreeSet::new();
    for file in files {
        let bytes = std::fs::read(file).unwrap();
        let parsed = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, view) in parsed.tensors() {
            let dtype = serde_json::to_value(view.dtype()).unwrap();
            let shape = view.shape().iter().map(|&elements| elements as u64).collect();
            found.insert((name, dtype.as_str().unwrap().to_owned(), shape, view.data().to_vec()));
        }
    }
    found
}

#[test]
fn layouts_are_what_they_say() {
    let folder = tempfile::tempdir().unwrap();
    let mut dtypes = BTreeSet::new();
    for layout in layouts::all(folder.path()) {
        let name = layout.name;
        let checkpoint = Checkpoint::open(&layout.path).unwrap_or_else(|error| panic!("{name}: {error}"));
        let found: BTreeMap<String, (String, Vec<u64>, Vec<u8>)> = checkpoint
            .tensors()
            .map(|tensor| {
                let file = std::fs::File::open(&checkpoint.shard(tensor.shard).path).unwrap();
                let mut bytes = vec![0; tensor.extent.len_bytes() as usize];
                file.read_exact_at(&mut bytes, tensor.extent.start()).unwrap();
                (tensor.name.to_owned(), (tensor.dtype_name.to_owned(), tensor.shape.to_vec(), bytes))
            })
            .collect();
        let expected = layout.tensors.iter().map(|(name, tensor)| {
            dtypes.insert(tensor.dtype);
            (name.clone(), (tensor.dtype.to_owned(), tensor.shape.clone(), tensor.bytes.clone()))
        });
        assert!(found == expected.collect(), "{name}");
        let files: Vec<&Path> = checkpoint.shards().iter().map(|shard| shard.path.as_path()).collect();
        let expected = layout.tensors.into_values();
        let expected =
            expected.map(|tensor| (tensor.name, tensor.dtype.to_owned(), tensor.shape, tensor.bytes));
        assert!(reference(&files) == expected.collect(), "{name}, as the reference reads it");
    }
    assert_eq!(dtypes.len(), DType::ALL.len(), "every type of the format is in some layout");
}

#[test]
fn layouts_are_the_same_on_every_run() {
    let (left, right) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (left, right) in layouts::all(left.path()).into_iter().zip(layouts::all(right.path())) {
        assert_eq!(left.side_files, right.side_files);
        let bytes = |layout: &layouts::Layout| {
            layout.tensors.values().map(|tensor| tensor.bytes.clone()).collect::<Vec<_>>()
        };
        assert!(bytes(&left) == bytes(&right), "{}", left.name);
        let distinct: BTreeSet<Vec<u8>> = bytes(&left).into_iter().filter(|bytes| bytes.len() > 8).collect();
        let expected = left.tensors.values().filter(|tensor| tensor.bytes.len() > 8).count();
        let copies = usize::from(left.name == "tied head");
        assert_eq!(distinct.len(), expected - copies, "{}: no two tensors are alike", left.name);
    }
}
