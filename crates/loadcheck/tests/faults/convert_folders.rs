//! Folders and names of a target: durable at any length, and removed in an order that works on
//! network file systems.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    reason = "a test that cannot go on panics"
)]

use std::fs;
use std::process::Command;

use crate::convert_support::{World, differences, run, tree, wrapped};
use crate::support::strace;
use crate::support::{assert_code, stderr};

/// The lines that strace writes about the calls of a command, with paths; `None`, which is printed,
/// if there is no strace.
fn trace(world: &World, command: &Command, calls: &str) -> Option<Vec<String>> {
    if !strace::is_there() {
        return None;
    }
    let log = world.path("trace");
    let calls = format!("trace={calls}");
    let outer = ["strace", "-f", "-y", "-qq", "-s", "4096", "-o", log.to_str().unwrap(), "-e", &calls, "--"];
    let output = wrapped(outer, command).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    Some(fs::read_to_string(log).unwrap().lines().map(str::to_owned).collect())
}

/// Every folder with a new folder in it is synced, and not only the last.
#[test]
fn folders_above_the_target_are_made_durably() {
    let world = World::new(&[]);
    let target = world.path("new/folders/target");
    let Some(lines) = trace(&world, &world.convert(&target), "fsync") else { return };
    for folder in ["", "/new", "/new/folders"] {
        let path = format!("<{}{folder}>)", world.path("").to_str().unwrap().trim_end_matches('/'));
        assert!(lines.iter().any(|line| line.contains(&path)), "{path} was not synced: {lines:?}");
    }
}

#[test]
fn a_target_that_is_named_with_dots_is_made() {
    let world = World::new(&[]);
    let target = world.path("dotted/.");
    assert_code(&run(&world.convert(&target)), 0);
    assert_eq!(differences(&tree(&target), &world.golden), [""; 0]);
}

/// Where a server does not know of open files, the folder of an open file that is removed cannot be
/// removed.
#[test]
fn journals_are_closed_before_their_folder_goes() {
    let world = World::new(&[]);
    let Some(lines) = trace(&world, &world.convert(&world.path("target")), "close,unlinkat") else { return };
    let position = |text: &str| lines.iter().rposition(|line| line.contains(text));
    let folder_goes = position("AT_REMOVEDIR").unwrap();
    let journal_closes =
        lines.iter().rposition(|line| line.contains("close(") && line.contains(".journal")).unwrap();
    assert!(journal_closes < folder_goes, "{}, {}", lines[journal_closes], lines[folder_goes]);
}

/// A side file may have the longest possible name: its unfinished name is not longer.
#[test]
fn side_files_with_long_names_go_along() {
    let world = World::new(&[]);
    for len in [245, 246, 247, 255] {
        let name = "n".repeat(len);
        fs::write(world.source.join(&name), &name).unwrap();
        let target = world.path("target");
        assert_code(&run(&world.convert(&target)), 0);
        let mut found = tree(&target);
        assert_eq!(found.remove(&name).unwrap(), name.as_bytes());
        assert!(found.keys().all(|name| !name.starts_with('.')), "{:?}", found.keys());
        fs::remove_file(world.source.join(&name)).unwrap();
        fs::remove_dir_all(&target).unwrap();
    }
}
