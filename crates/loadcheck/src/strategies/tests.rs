//! The strategies, compared with the bytes of the files.

use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};

use super::*;

/// Counts what arrives, and cancels when that is wanted.
#[derive(Default)]
struct Counted {
    arrived_bytes: u64,
    entered: Vec<String>,
    notes: Vec<String>,
    cancels_after_bytes: Option<u64>,
}

impl Counted {
    fn hear(&mut self, event: Event<'_>) -> Result<(), StrategyError> {
        match event {
            Event::Begins(name) => self.entered.push(name.to_owned()),
            Event::Note(note) => self.notes.push(note),
            Event::Arrived(len_bytes) => {
                self.arrived_bytes += len_bytes;
                if self.cancels_after_bytes.is_some_and(|most| self.arrived_bytes > most) {
                    return Err(StrategyError::Cancelled);
                }
            }
        }
        Ok(())
    }
}

/// Bytes that depend on where they are.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Two files: tensors that begin and end anywhere, one larger than a chunk, one without bytes.
fn checkpoint(folder: &Path) -> (Checkpoint, Vec<(String, Vec<u8>)>) {
    let sizes = [("a", 17 << 20), ("b", 5000), ("c", 0), ("d", 4096), ("e", 1)];
    let mut tensors = Vec::new();
    for (index, names) in [&sizes[..2], &sizes[2..]].into_iter().enumerate() {
        let bytes: Vec<(String, Vec<u8>)> = names
            .iter()
            .map(|(name, len)| ((*name).to_owned(), noise(*len, u64::try_from(*len).unwrap() + 3)))
            .collect();
        let views = bytes.iter().map(|(name, bytes)| {
            (name.clone(), TensorView::new(Dtype::U8, vec![bytes.len()], bytes).unwrap())
        });
        let path = folder.join(format!("model-{:05}-of-00002.safetensors", index + 1));
        fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
        tensors.extend(bytes);
    }
    (Checkpoint::open(folder).unwrap(), tensors)
}

fn all(checkpoint: &Checkpoint) -> Vec<TensorId> {
    checkpoint.tensors().map(|tensor| tensor.id).collect()
}

const SIMPLE: [SimpleStrategy; 4] =
    [SimpleStrategy::Mmap, SimpleStrategy::Read, SimpleStrategy::Pread, SimpleStrategy::Direct];

#[test]
fn owned_tensors_have_the_bytes_of_their_files() {
    // Beside the test itself: on a disk, which temporary folders need not be.
    let test = std::env::current_exe().unwrap();
    let folder = tempfile::tempdir_in(test.parent().unwrap()).unwrap();
    let (checkpoint, tensors) = checkpoint(folder.path());
    for strategy in [SimpleStrategy::Pread, SimpleStrategy::Direct] {
        let mut counted = Counted::default();
        let held =
            load(strategy, &checkpoint, &all(&checkpoint), true, &mut |event| counted.hear(event)).unwrap();
        assert_eq!(held.owned.len(), tensors.len());
        for (owned, id) in held.owned.iter().zip(all(&checkpoint)) {
            let name = checkpoint.tensor(id).name;
            let (_, expected) = tensors.iter().find(|(known, _)| known == name).unwrap();
            assert!(owned.bytes() == &expected[..], "{strategy:?} {name}");
        }
        assert_eq!(counted.arrived_bytes, checkpoint.tensor_bytes(), "{strategy:?}");
        if strategy == SimpleStrategy::Direct && !counted.notes.is_empty() {
            onelayer_testing::skipped(format!(
                "this file system is not read past its cache: {:?}",
                counted.notes
            ));
        }
        let dropped = load(strategy, &checkpoint, &all(&checkpoint), false, &mut |_| Ok(())).unwrap();
        assert!(dropped.owned.is_empty());
    }
}

#[test]
fn whole_files_are_whole_and_mappings_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoint, _) = checkpoint(folder.path());
    let held = load(SimpleStrategy::Read, &checkpoint, &all(&checkpoint), false, &mut |_| Ok(())).unwrap();
    for (owned, shard) in held.owned.iter().zip(checkpoint.shards()) {
        assert!(owned.bytes() == fs::read(&shard.path).unwrap());
    }
    let mut counted = Counted::default();
    let held =
        load(SimpleStrategy::Mmap, &checkpoint, &all(&checkpoint), false, &mut |event| counted.hear(event))
            .unwrap();
    assert_eq!((held.mappings.len(), held.owned.len()), (2, 0));
    assert_eq!(counted.arrived_bytes, checkpoint.tensor_bytes());
    assert_eq!(counted.entered.len(), 5);
}

#[test]
fn only_what_is_selected_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoint, _) = checkpoint(folder.path());
    let selected: Vec<TensorId> = ["b"].map(|name| checkpoint.find(name).unwrap().id).into();
    for (strategy, arrived_bytes, expected_bytes) in [
        (SimpleStrategy::Mmap, 5000, 0),
        (SimpleStrategy::Pread, 5000, 5000),
        (SimpleStrategy::Direct, 5000, 5000),
        (SimpleStrategy::Read, fs::metadata(&checkpoint.shards()[0].path).unwrap().len(), u64::MAX),
    ] {
        let mut counted = Counted::default();
        load(strategy, &checkpoint, &selected, true, &mut |event| counted.hear(event)).unwrap();
        assert_eq!(counted.arrived_bytes, arrived_bytes, "{strategy:?}");
        let found = needed_bytes(strategy, &checkpoint, &selected, true).unwrap();
        assert_eq!(found, expected_bytes.min(arrived_bytes), "{strategy:?}");
    }
    let largest = needed_bytes(SimpleStrategy::Pread, &checkpoint, &all(&checkpoint), false).unwrap();
    assert_eq!(largest, 17 << 20, "dropped at once, only one tensor is there");
}

#[test]
fn a_file_that_was_cut_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoint, _) = checkpoint(folder.path());
    let path = &checkpoint.shards()[0].path;
    let len = fs::metadata(path).unwrap().len();
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len - 100).unwrap();
    for strategy in SIMPLE {
        let result = load(strategy, &checkpoint, &all(&checkpoint), true, &mut |_| Ok(()));
        // A whole file is as long as it is.
        if strategy == SimpleStrategy::Read {
            assert!(result.is_ok());
        } else {
            assert!(matches!(result, Err(StrategyError::EndOfFile { .. })), "{strategy:?}: {result:?}");
        }
    }
    fs::remove_file(path).unwrap();
    for strategy in SIMPLE {
        let result = load(strategy, &checkpoint, &all(&checkpoint), true, &mut |_| Ok(()));
        let stop = result.unwrap_err();
        assert!(matches!(stop, StrategyError::File { action: "open", .. }), "{strategy:?}: {stop}");
        assert_eq!(stop.path(), Some(path.as_path()));
    }
}

#[test]
fn each_can_be_cancelled_midway() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoint, _) = checkpoint(folder.path());
    for strategy in SIMPLE {
        let mut counted = Counted { cancels_after_bytes: Some(1 << 20), ..Counted::default() };
        let stop = load(strategy, &checkpoint, &all(&checkpoint), true, &mut |event| counted.hear(event))
            .unwrap_err();
        assert!(matches!(stop, StrategyError::Cancelled), "{strategy:?}: {stop}");
        assert!(counted.arrived_bytes <= 16 << 20, "{strategy:?}: {}", counted.arrived_bytes);
    }
}

#[test]
fn names_are_read_as_they_are_written() {
    for (strategy, name) in Strategy::ALL {
        assert_eq!((Strategy::parse(name), strategy.name()), (Ok(strategy), name));
    }
    assert!(Strategy::parse("Mmap").unwrap_err().help.unwrap().contains("mmap, read"));
}
