//! An index (or pipeline index) in a folder of shards: no path may leave the folder, and an
//! accepted checkpoint matches the index.
//!
//! Input: a byte that selects the folder, then the text of the index.
//!
//! ```text
//! bits 0-1  a.safetensors: none, {a.x, a.y}, {a.x, both}, cut off
//! bits 2-3  b.safetensors: none, {b.x}, {both}, a link to a file outside
//! bits 4-5  beside them: nothing, sub/c.safetensors, model.safetensors, a folder d.safetensors
//! bits 6-7  the text: an index that is found in the folder, one that is named, one of a variant, one of a pipeline
//! ```
//! The file `outside.safetensors` is outside the folder; its tensor must never be visible.

#![allow(clippy::unwrap_used, reason = "a check that cannot go on panics")]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Component, Path, PathBuf};

use onelayer::{Checkpoint, CheckpointError};
use serde_json::Value;
use tempfile::TempDir;

use super::header::{check_message, open_bounded};
use super::scratch;
use onelayer_testing::safetensors_file::FileBuilder;

/// The tensor outside.
const OUTSIDE: &str = "outside";

/// The kind of path to the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Found,
    Named,
    Variant,
    Pipeline,
}

/// Checks one input.
pub fn check(data: &[u8]) {
    thread_local!(static FOLDERS: RefCell<Folders> = RefCell::new(Folders::new()));
    let Some((&choice, text)) = data.split_first() else { return };
    FOLDERS.with(|folders| {
        let mut folders = folders.borrow_mut();
        let folder = folders.of(choice);
        scratch::overwrite(&folder.index, text, text.len().try_into().unwrap());
        match open_bounded(&folder.opened, text.len()) {
            Ok(checkpoint) => check_checkpoint(&checkpoint, folder, text),
            Err(error) => check_error(&error, &folder.path),
        }
    });
}

/// A folder of shards and its index.
struct Folder {
    path: PathBuf,
    opened: PathBuf,
    index: File,
    way: Way,
}

/// A folder for each choice, created on first use.
struct Folders {
    root: TempDir,
    made: BTreeMap<u8, Folder>,
}

impl Folders {
    fn new() -> Self {
        Self { root: scratch::folder(), made: BTreeMap::new() }
    }

    fn of(&mut self, choice: u8) -> &Folder {
        let root = self.root.path();
        self.made.entry(choice).or_insert_with(|| make(&root.join(format!("{choice:02x}")), choice))
    }
}

fn make(root: &Path, choice: u8) -> Folder {
    let path = root.join("model");
    fs::create_dir_all(&path).unwrap();
    one(OUTSIDE).write(root.join("outside.safetensors"));
    one("b.x").write(root.join("linked.safetensors"));
    let (a, b) = (path.join("a.safetensors"), path.join("b.safetensors"));
    match choice & 3 {
        0 => {}
        1 => one("a.x").bytes_tensor("a.y", 3).write(&a),
        2 => one("a.x").bytes_tensor("both", 3).write(&a),
        _ => fs::write(&a, &one("a.x").build()[..20]).unwrap(),
    }
    match choice >> 2 & 3 {
        0 => {}
        1 => one("b.x").write(&b),
        2 => one("both").write(&b),
        _ => std::os::unix::fs::symlink("../linked.safetensors", &b).unwrap(),
    }
    match choice >> 4 & 3 {
        0 => {}
        1 => write_below(&path, "sub/c.safetensors", "c.x"),
        2 => one("a.x").write(path.join("model.safetensors")),
        _ => fs::create_dir(path.join("d.safetensors")).unwrap(),
    }
    let (way, name) = match choice >> 6 {
        0 => (Way::Found, "model.safetensors.index.json"),
        1 => (Way::Named, "index.json"),
        2 => (Way::Variant, "model.safetensors.index.fp16.json"),
        _ => (Way::Pipeline, "model_index.json"),
    };
    if way == Way::Pipeline {
        write_below(&path, "unet/diffusion_pytorch_model.safetensors", "u.x");
        write_below(&path, "text_encoder/model.safetensors", "t.x");
        fs::create_dir(path.join("vae")).unwrap();
    }
    let index_path = path.join(name);
    let index = File::create(&index_path).unwrap();
    let opened = if way == Way::Named { index_path } else { path.clone() };
    Folder { path, opened, index, way }
}

/// A file with that tensor.
fn one(tensor: &str) -> FileBuilder {
    FileBuilder::new().bytes_tensor(tensor, 5)
}

fn write_below(folder: &Path, name: &str, tensor: &str) {
    fs::create_dir(folder.join(name).parent().unwrap()).unwrap();
    one(tensor).write(folder.join(name));
}

/// A path inside the folder by its spelling. Links on disk are allowed.
fn assert_inside(path: &Path, folder: &Path) {
    let rest = path.strip_prefix(folder).unwrap_or_else(|_| panic!("{} leads out", path.display()));
    let is_inside = rest.components().all(|part| matches!(part, Component::Normal(_)));
    assert!(is_inside, "{} leads out", path.display());
}

fn check_checkpoint(checkpoint: &Checkpoint, folder: &Folder, text: &[u8]) {
    let mut found = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        assert!(!tensor.name.contains(OUTSIDE), "{} was read", tensor.name);
        found.insert(tensor.name.to_owned(), checkpoint.shard(tensor.shard).path.clone());
    }
    checkpoint.shards().iter().for_each(|shard| assert_inside(&shard.path, &folder.path));
    // The library skips numbers beyond f64, serde_json refuses them.
    let Ok(value) = serde_json::from_slice::<Value>(text) else { return };
    match folder.way {
        Way::Found | Way::Named => {
            let map = value.get("weight_map").unwrap_or(&value).as_object().expect("an index is an object");
            let texts = map.iter().filter_map(|(tensor, file)| Some((tensor, file.as_str()?)));
            let expected: BTreeMap<String, PathBuf> =
                texts.map(|(tensor, file)| (tensor.clone(), joined(&folder.path, file))).collect();
            assert_eq!(found, expected, "{}", text.escape_ascii());
        }
        Way::Pipeline => {
            let components = value.as_object().expect("the index of a pipeline is an object");
            let named: BTreeSet<&str> = components.keys().map(String::as_str).collect();
            let is_named =
                |tensor: &String| tensor.split_once('/').is_some_and(|(part, _)| named.contains(part));
            assert!(found.keys().all(is_named), "{found:?}");
        }
        // Another file in the folder may take precedence.
        Way::Variant => {}
    }
}

/// The path of a shard, without a leading `./`.
fn joined(folder: &Path, mut file: &str) -> PathBuf {
    while let Some(rest) = file.strip_prefix("./") {
        file = rest;
    }
    folder.join(file)
}

fn check_error(error: &CheckpointError, folder: &Path) {
    match error {
        CheckpointError::Several { problems } => {
            assert!((2..=32).contains(&problems.len()));
            problems.iter().for_each(|problem| check_error(problem, folder));
        }
        error => {
            let path = error.path().expect("it is about a file");
            assert_inside(path, folder);
            assert!(!error.tensor().is_some_and(|tensor| tensor == OUTSIDE && is_read(error)), "{error}");
            check_message(error);
        }
    }
}

/// True if the tensor's name comes from the header of a shard. An index may use any name.
fn is_read(error: &CheckpointError) -> bool {
    matches!(error, CheckpointError::UnindexedTensor { .. } | CheckpointError::WrongShard { .. })
}
