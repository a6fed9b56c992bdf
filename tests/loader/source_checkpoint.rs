//! The sources as an engine would use them: a checkpoint is opened, its tensors are read in pieces
//! by every source, bit-equal to what the format's own crate reads; then somebody touches a file,
//! and the next read of it is an error that says what happened, while the other file is still read.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use memmap2::MmapMut;
use onelayer::checkpoint::{Checkpoint, TensorEntry};
use onelayer::source::{self, IoMode, ReadRequest, Source, SourceError};
use onelayer::units::ByteRange;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

const MODES: [IoMode; 5] = [IoMode::Auto, IoMode::Mmap, IoMode::Buffered, IoMode::Direct, IoMode::Uring];
const READ_BYTES: u64 = 64 << 10;

/// Two shards without an index; the first tensor of the second needs several reads.
fn write_checkpoint(folder: &Path) {
    let byte =
        |seed: usize| move |index: usize| u8::try_from((index * 31 + index / 257 + seed) % 255 + 1).unwrap();
    for (shard, lens) in [(1, [1, 5000]), (2, [300_001, 4096])] {
        let bytes: Vec<Vec<u8>> = lens.iter().map(|len| (0..*len).map(byte(shard)).collect()).collect();
        let tensors: BTreeMap<String, TensorView<'_>> = bytes
            .iter()
            .enumerate()
            .map(|(index, bytes)| {
                let view = TensorView::new(Dtype::U8, vec![bytes.len()], bytes).unwrap();
                (format!("layers.{shard}.w{index}"), view)
            })
            .collect();
        let path = folder.join(format!("model-0000{shard}-of-00002.safetensors"));
        serialize_to_file(tensors, None, &path).unwrap();
    }
}

/// Reads a tensor in pieces of at most [`READ_BYTES`], each phased to the alignment.
fn read_tensor(
    source: &dyn Source,
    checkpoint: &Checkpoint,
    tensor: &TensorEntry<'_>,
) -> Result<Vec<u8>, SourceError> {
    let alignment = source::alignment(checkpoint)?;
    let mut buffer = MmapMut::map_anon(1 << 20).unwrap();
    let mut bytes = Vec::new();
    let mut start = tensor.extent.start();
    while start < tensor.extent.end() {
        let end = tensor.extent.end().min(alignment.down(start) + READ_BYTES);
        let payload = ByteRange::new(start, end).unwrap();
        let extent = payload.align_outward(alignment).unwrap();
        source.read(&ReadRequest { shard: tensor.shard, extent, payload }, &mut buffer)?;
        let first = usize::try_from(payload.start() - extent.start()).unwrap();
        bytes.extend_from_slice(&buffer[first..][..usize::try_from(payload.len_bytes()).unwrap()]);
        start = end;
    }
    Ok(bytes)
}

#[test]
fn every_tensor_is_bit_equal_to_the_reference_reader() {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for mode in MODES {
        let source = source::open(mode, &checkpoint).unwrap();
        assert_eq!(source.mode(), mode);
        let mut compared = 0;
        for tensor in checkpoint.tensors() {
            let file = std::fs::read(&checkpoint.shard(tensor.shard).path).unwrap();
            let reference = SafeTensors::deserialize(&file).unwrap();
            let expected = reference.tensor(tensor.name).unwrap();
            assert_eq!(
                read_tensor(source.as_ref(), &checkpoint, &tensor).unwrap(),
                expected.data(),
                "{mode:?} {}",
                tensor.name
            );
            compared += 1;
        }
        assert_eq!(compared, 4);
    }
}

#[test]
fn a_touched_file_is_named_and_the_others_are_still_read() {
    for mode in MODES {
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path());
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let source = source::open(mode, &checkpoint).unwrap();
        let touched = checkpoint.find("layers.2.w0").unwrap();
        let untouched = checkpoint.find("layers.1.w1").unwrap();
        read_tensor(source.as_ref(), &checkpoint, &touched).unwrap();

        let path = &checkpoint.shard(touched.shard).path;
        let mut file = File::options().append(true).open(path).unwrap();
        file.write_all(b"x").unwrap();
        let error = read_tensor(source.as_ref(), &checkpoint, &touched).unwrap_err();
        assert!(error.is_file_changed());
        let message = error.to_string();
        let len = checkpoint.shard(touched.shard).identity.len_bytes;
        assert!(message.contains("model-00002-of-00002.safetensors"), "{message}");
        assert!(message.contains(&format!("its length was {len} bytes, now {}", len + 1)), "{message}");
        assert_eq!(read_tensor(source.as_ref(), &checkpoint, &untouched).unwrap().len(), 5000);

        let error = source::open(mode, &checkpoint).map(|_| ()).unwrap_err();
        assert!(error.is_file_changed(), "opening finds it, too: {error}");
        std::fs::remove_file(path).unwrap();
        let error = source::open(mode, &checkpoint).map(|_| ()).unwrap_err();
        assert!(matches!(&error, SourceError::Open { path: named, .. } if named == path), "{error}");
        assert!(error.source().unwrap().to_string().contains("No such file"), "{error:?}");
        assert!(source::alignment(&checkpoint).is_err());
    }
}
