//! Sets at the edge: texts over the limit, more files than anybody has, names that are almost those
//! of a numbered set, and files that the system refuses to open.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::{Path, PathBuf};

use onelayer::checkpoint::{Checkpoint, CheckpointError, FileKind, HubCache, OpenOptions};
use onelayer_testing::safetensors_file::{FileBuilder, index};
use onelayer_testing::skipped;

/// The most files of a checkpoint.
const FILES_MAX: usize = 1 << 16;

fn write(folder: &Path, file: &str) {
    FileBuilder::new().bytes_tensor(file, 1).write(folder.join(file));
}

fn file_names(checkpoint: &Checkpoint) -> Vec<String> {
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    checkpoint.shards().iter().map(|shard| name(&shard.path)).collect()
}

#[test]
fn texts_over_the_limit_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "a.safetensors");
    // Longer than the shard's header, which has the same limit.
    let text = index(&[("a.safetensors", "a.safetensors")]) + &" ".repeat(100);
    let text_bytes = u64::try_from(text.len()).unwrap();
    for name in ["model.safetensors.index.json", "model_index.json"] {
        let path = folder.path().join(name);
        fs::write(&path, &text).unwrap();
        let error = OpenOptions::new().header_bytes_max(text_bytes - 1).open(&path).unwrap_err();
        match &error {
            CheckpointError::OverLimit { path: found, found_bytes, limit_bytes, .. } => {
                assert_eq!((found, *found_bytes, *limit_bytes), (&path, text_bytes, text_bytes - 1));
            }
            other => panic!("{other}"),
        }
        // At the limit it is read, and what is wrong is something else, if anything is.
        let outcome = OpenOptions::new().header_bytes_max(text_bytes).open(&path);
        assert!(!matches!(outcome, Err(CheckpointError::OverLimit { .. })), "{name}");
        fs::remove_file(path).unwrap();
    }
    // A name of a revision is a line.
    let refs = folder.path().join("models--org--name/refs");
    fs::create_dir_all(&refs).unwrap();
    fs::write(refs.join("main"), "0".repeat(1 << 20)).unwrap();
    let error = HubCache::new(folder.path()).resolve("org/name").unwrap_err();
    assert!(matches!(error, CheckpointError::OverLimit { .. }), "{error}");
}

#[test]
fn a_checkpoint_has_a_limited_number_of_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors.index.json");
    for (count, is_too_many) in [(FILES_MAX, false), (FILES_MAX + 1, true)] {
        let names: Vec<String> = (0..count).map(|number| number.to_string()).collect();
        let entries: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), name.as_str())).collect();
        fs::write(&path, index(&entries)).unwrap();
        match Checkpoint::open(&path).unwrap_err() {
            CheckpointError::TooMany { what: "files", limit, .. } if is_too_many => {
                assert_eq!(limit, 1 << 16)
            }
            // None of them is there, and the first are named.
            CheckpointError::MissingShards { missing, missing_count, .. } if !is_too_many => {
                assert_eq!((missing.len(), missing_count), (64, 1 << 16));
            }
            other => panic!("{count}: {other}"),
        }
    }
    let folder = tempfile::tempdir().unwrap();
    for number in 0..=FILES_MAX {
        File::create(folder.path().join(format!("{number}.safetensors"))).unwrap();
    }
    match Checkpoint::open(folder.path()).unwrap_err() {
        CheckpointError::TooMany { what: "files", .. } => {}
        other => panic!("{other}"),
    }
}

#[test]
fn many_links_that_lead_nowhere_are_told_up_to_a_number() {
    let folder = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..40).map(|number| format!("{number}.safetensors")).collect();
    names.iter().for_each(|name| symlink("../gone", folder.path().join(name)).unwrap());
    let entries: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), name.as_str())).collect();
    fs::write(folder.path().join("model.safetensors.index.json"), index(&entries)).unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert_eq!(error.problems().len(), 32);
    let is_link = |problem: &CheckpointError| matches!(problem, CheckpointError::DanglingLink { .. });
    assert!(error.problems().iter().all(is_link) && error.is_missing(), "{error}");
}

#[test]
fn an_index_that_leads_nowhere_is_a_link_that_does() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "model.safetensors");
    symlink("../blobs/gone", folder.path().join("model.safetensors.index.json")).unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::DanglingLink { .. }), "{error}");
}

#[test]
fn names_that_are_almost_numbered_are_those_of_single_files() {
    for (files, expected) in [
        // No number, no separator, no digits behind: a set without a rule.
        (&["m--of-2.safetensors", "n.safetensors"][..], 2),
        (&["m1-of-2.safetensors", "n.safetensors"], 2),
        (&["m-1-of-.safetensors", "n.safetensors"], 2),
        (&["m-1-of-2a.safetensors", "n.safetensors"], 2),
        // The usual name with numbers is one of a set, not the one file.
        (&["model.fp16-1-of-2.safetensors", "model.fp16-2-of-2.safetensors"], 2),
        // What cannot be counted up to is not counted.
        (&["m-1-of-99999999999999999999.safetensors"], 1),
    ] {
        let folder = tempfile::tempdir().unwrap();
        files.iter().for_each(|file| write(folder.path(), file));
        let checkpoint = Checkpoint::open(folder.path()).unwrap_or_else(|error| panic!("{files:?}: {error}"));
        assert_eq!(file_names(&checkpoint).len(), expected, "{files:?}");
    }
}

#[test]
fn what_the_system_refuses_is_said_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    // A link to itself among the shards.
    symlink("a.safetensors", folder.path().join("a.safetensors")).unwrap();
    let path = folder.path().join("model.safetensors.index.json");
    fs::write(&path, index(&[("a", "a.safetensors")])).unwrap();
    match Checkpoint::open(&path).unwrap_err() {
        CheckpointError::Io { path, operation: "open", .. } => assert!(path.ends_with("a.safetensors")),
        other => panic!("{other}"),
    }
    // A regular file that not even root may read.
    let write_only = Path::new("/proc/sys/vm/compact_memory");
    if write_only.exists() {
        match Checkpoint::open(write_only).unwrap_err() {
            CheckpointError::Io { source, .. } => {
                assert_eq!(source.kind(), std::io::ErrorKind::PermissionDenied);
            }
            other => panic!("{other}"),
        }
    } else {
        skipped("no file here that nobody may read");
    }
    let is_block_device =
        |path: &PathBuf| fs::metadata(path).is_ok_and(|data| data.file_type().is_block_device());
    let device = fs::read_dir("/dev").unwrap().map(|entry| entry.unwrap().path()).find(is_block_device);
    match device.map(|device| Checkpoint::open(device).unwrap_err()) {
        Some(CheckpointError::NotRegular { found, .. }) => assert_eq!(found, FileKind::BlockDevice),
        Some(other) => panic!("{other}"),
        None => skipped("no block device here"),
    }
}
