//! What belongs to the source is not replaced or removed, wherever its names stand.
//!
//! A source may be reached through links, lie inside of the target, or share a folder with it by a
//! mount. So not paths are compared but places: the folder that a name is really in, and the name.
//! Of a link, its own place counts and those that it leads through. Two names of one file (hard
//! links) are two places: one may go, and the source is still there.
//!
//! The conversion asks before it writes, and before it removes what another conversion has left.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::ConvertError;
use super::side_files::{SideFiles, directory_of};
use crate::checkpoint::Checkpoint;

/// Links that lead to links, at most: what the system follows.
const LINKS_MAX: usize = 40;

/// Every path from which the conversion reads.
pub(super) fn paths_of(source: &Path, checkpoint: &Checkpoint, side_files: &SideFiles) -> Vec<PathBuf> {
    let root = directory_of(source).unwrap_or_default();
    let shards = checkpoint.shards().iter().map(|shard| shard.path.clone());
    let side = side_files.files.iter().map(|file| file.path.clone());
    let indices = side_files.indices.iter().map(|name| root.join(name));
    // A source that is no folder is an index, or a file of tensors.
    shards.chain(side).chain(indices).chain([source.to_owned()]).collect()
}

/// Refuses names of the target, relative to it, that are places of the source.
///
/// # Errors
/// [`ConvertError::OfSource`].
pub(super) fn check(source: &[PathBuf], target: &Path, names: &[&str]) -> Result<(), ConvertError> {
    let folders: BTreeSet<&str> = names.iter().map(|name| folder_of(name)).collect();
    let folders: BTreeMap<(u64, u64), &str> =
        folders.into_iter().filter_map(|folder| Some((folder_id(&target.join(folder))?, folder))).collect();
    if folders.is_empty() {
        return Ok(());
    }
    let mut shared = BTreeSet::new();
    for path in source {
        names_in(path, &folders, &mut shared);
    }
    match names.iter().find(|name| shared.contains(**name)) {
        Some(name) => Err(ConvertError::OfSource { path: target.join(name) }),
        None => Ok(()),
    }
}

/// The folder of a name, which is empty or ends in a slash.
fn folder_of(name: &str) -> &str {
    &name[..name.rfind('/').map_or(0, |at| at + 1)]
}

/// Adds the names that a path of the source has in some folders.
fn names_in(path: &Path, folders: &BTreeMap<(u64, u64), &str>, found: &mut BTreeSet<String>) {
    let mut path = path.to_owned();
    for _ in 0..=LINKS_MAX {
        let parent = path.parent().unwrap_or(Path::new("")).to_owned();
        let name = path.file_name().and_then(OsStr::to_str);
        if let (Some(name), Some(folder)) = (name, folder_id(&parent).and_then(|id| folders.get(&id))) {
            found.insert(format!("{folder}{name}"));
        }
        match path.read_link() {
            Ok(next) => path = parent.join(next),
            Err(_) => return,
        }
    }
}

/// What tells a folder from all others, if it is there.
fn folder_id(path: &Path) -> Option<(u64, u64)> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let metadata = path.metadata().ok()?;
    Some((metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn places_are_compared_and_not_paths() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("target/part")).unwrap();
        fs::create_dir_all(root.join("source")).unwrap();
        for name in ["target/a", "target/part/b", "source/c"] {
            fs::write(root.join(name), name).unwrap();
        }
        symlink("../target/a", root.join("source/first")).unwrap();
        symlink("first", root.join("source/second")).unwrap();
        symlink(root.join("target/part"), root.join("source/folder")).unwrap();
        symlink(root.join("source/c"), root.join("target/link")).unwrap();
        symlink("loop", root.join("source/loop")).unwrap();
        fs::hard_link(root.join("source/c"), root.join("target/hard")).unwrap();
        let names = ["a", "part/b", "link", "hard", "new", "absent/d"];
        for (path, expected) in [
            ("source/first", Some("a")),
            ("source/second", Some("a")),
            ("source/folder/b", Some("part/b")),
            ("source/../target/part/../a", Some("a")),
            ("target/link", Some("link")),
            ("target/part/a", None),
            ("source/c", None),
            ("source/loop", None),
            ("nothing/a", None),
            ("", None),
        ] {
            let checked = check(&[root.join(path)], &root.join("target"), &names);
            let found = checked.err().map(|error| error.to_string());
            assert_eq!(found.is_some(), expected.is_some(), "{path}: {found:?}");
            if let (Some(found), Some(expected)) = (found, expected) {
                assert!(found.contains(&format!("target/{expected}: ")), "{path}: {found}");
            }
        }
        // Where no target is, nothing of it is the source.
        assert!(check(&[root.join("target/a")], &root.join("none"), &names).is_ok());
    }
}
