//! The habits, held against the bytes of the files.

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

impl Follow for Counted {
    fn enter(&mut self, name: &str) {
        self.entered.push(name.to_owned());
    }

    fn arrived(&mut self, len_bytes: u64) -> Result<(), Stop> {
        self.arrived_bytes += len_bytes;
        match self.cancels_after_bytes {
            Some(most) if self.arrived_bytes > most => Err(Stop::Cancelled),
            _ => Ok(()),
        }
    }

    fn note(&mut self, note: String) {
        self.notes.push(note);
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

const HABITS: [Habit; 4] = [Habit::Mmap, Habit::Read, Habit::Pread, Habit::Direct];

#[test]
fn owned_tensors_have_the_bytes_of_their_files() {
    // Beside the test itself: on a disk, which temporary folders need not be.
    let test = std::env::current_exe().unwrap();
    let folder = tempfile::tempdir_in(test.parent().unwrap()).unwrap();
    let (checkpoint, tensors) = checkpoint(folder.path());
    for habit in [Habit::Pread, Habit::Direct] {
        let mut counted = Counted::default();
        let held = load(habit, &checkpoint, &all(&checkpoint), true, &mut counted).unwrap();
        assert_eq!(held.owned.len(), tensors.len());
        for (owned, id) in held.owned.iter().zip(all(&checkpoint)) {
            let name = checkpoint.tensor(id).name;
            let (_, expected) = tensors.iter().find(|(known, _)| known == name).unwrap();
            assert!(owned.bytes() == &expected[..], "{habit:?} {name}");
        }
        assert_eq!(counted.arrived_bytes, checkpoint.tensor_bytes(), "{habit:?}");
        if habit == Habit::Direct && !counted.notes.is_empty() {
            onelayer_testing::skipped(format!(
                "this file system is not read past its cache: {:?}",
                counted.notes
            ));
        }
        let dropped = load(habit, &checkpoint, &all(&checkpoint), false, &mut Counted::default()).unwrap();
        assert!(dropped.owned.is_empty());
    }
}

#[test]
fn whole_files_are_whole_and_mappings_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoint, _) = checkpoint(folder.path());
    let held = load(Habit::Read, &checkpoint, &all(&checkpoint), false, &mut Counted::default()).unwrap();
    for (owned, shard) in held.owned.iter().zip(checkpoint.shards()) {
        assert!(owned.bytes() == fs::read(&shard.path).unwrap());
    }
    let mut counted = Counted::default();
    let held = load(Habit::Mmap, &checkpoint, &all(&checkpoint), false, &mut counted).unwrap();
    assert_eq!((held.mappings.len(), held.owned.len()), (2, 0));
    assert_eq!(counted.arrived_bytes, checkpoint.tensor_bytes());
    assert_eq!(counted.entered.len(), 5);
}

#[test]
fn only_what_is_selected_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoint, _) = checkpoint(folder.path());
    let selected: Vec<TensorId> = ["b"].map(|name| checkpoint.find(name).unwrap().id).into();
    for (habit, arrived_bytes, expected_bytes) in [
        (Habit::Mmap, 5000, 0),
        (Habit::Pread, 5000, 5000),
        (Habit::Direct, 5000, 5000),
        (Habit::Read, fs::metadata(&checkpoint.shards()[0].path).unwrap().len(), u64::MAX),
    ] {
        let mut counted = Counted::default();
        load(habit, &checkpoint, &selected, true, &mut counted).unwrap();
        assert_eq!(counted.arrived_bytes, arrived_bytes, "{habit:?}");
        let found = needed_bytes(habit, &checkpoint, &selected, true).unwrap();
        assert_eq!(found, expected_bytes.min(arrived_bytes), "{habit:?}");
    }
    let largest = needed_bytes(Habit::Pread, &checkpoint, &all(&checkpoint), false).unwrap();
    assert_eq!(largest, 17 << 20, "dropped at once, only one tensor is there");
}

#[test]
fn a_file_that_was_cut_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoint, _) = checkpoint(folder.path());
    let path = &checkpoint.shards()[0].path;
    let len = fs::metadata(path).unwrap().len();
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len - 100).unwrap();
    for habit in HABITS {
        let result = load(habit, &checkpoint, &all(&checkpoint), true, &mut Counted::default());
        // A whole file is as long as it is.
        if habit == Habit::Read {
            assert!(result.is_ok());
        } else {
            assert!(matches!(result, Err(Stop::EndOfFile { .. })), "{habit:?}: {result:?}");
        }
    }
    fs::remove_file(path).unwrap();
    for habit in HABITS {
        let result = load(habit, &checkpoint, &all(&checkpoint), true, &mut Counted::default());
        let stop = result.unwrap_err();
        assert!(matches!(stop, Stop::File { action: "open", .. }), "{habit:?}: {stop}");
        assert_eq!(stop.path(), Some(path.as_path()));
    }
}

#[test]
fn each_can_be_cancelled_midway() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoint, _) = checkpoint(folder.path());
    for habit in HABITS {
        let mut counted = Counted { cancels_after_bytes: Some(1 << 20), ..Counted::default() };
        let stop = load(habit, &checkpoint, &all(&checkpoint), true, &mut counted).unwrap_err();
        assert!(matches!(stop, Stop::Cancelled), "{habit:?}: {stop}");
        assert!(counted.arrived_bytes <= 16 << 20, "{habit:?}: {}", counted.arrived_bytes);
    }
}

#[test]
fn names_are_read_as_they_are_written() {
    for (strategy, name) in Strategy::ALL {
        assert_eq!((Strategy::parse(name), strategy.name()), (Ok(strategy), name));
    }
    assert!(Strategy::parse("Mmap").unwrap_err().help.unwrap().contains("mmap, read"));
}
