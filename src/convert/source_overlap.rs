//! Refuses targets in which a conversion would replace or remove files of its source.
//!
//! A source may be reached through links, lie inside the target, or share a folder with it by a
//! mount. So not paths are compared, but the device and inode of the folder that a name is in, and
//! the name. For a link, both the link and the files that it leads to belong to the source. Hard
//! links are two names: one may be removed, and the source is still there.
//!
//! Checked before anything is written, and before the files of another conversion are removed.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::ConvertError;
use super::side_files::{SideFiles, directory_of, inode_of};
use crate::checkpoint::Checkpoint;

/// Most links that lead to each other: as many as the system follows.
const LINKS_MAX: usize = 40;

/// Refuses a target that is a directory of the source.
///
/// # Errors
/// [`ConvertError::SameDirectory`].
pub(super) fn check_directories(
    source: &Path,
    checkpoint: &Checkpoint,
    target: &Path,
) -> Result<(), ConvertError> {
    let Some(target_inode) = inode_of(target) else { return Ok(()) };
    let folders = checkpoint.shards().iter().filter_map(|shard| shard.path.parent());
    // An index may lie elsewhere than the files that it lists.
    let root = directory_of(source);
    if folders.chain(root.as_deref()).any(|folder| inode_of(folder) == Some(target_inode)) {
        return Err(ConvertError::SameDirectory { path: target.to_owned() });
    }
    Ok(())
}

/// Every path that the conversion reads.
pub(super) fn paths_of(source: &Path, checkpoint: &Checkpoint, side_files: &SideFiles) -> Vec<PathBuf> {
    let root = directory_of(source).unwrap_or_default();
    let shards = checkpoint.shards().iter().map(|shard| shard.path.clone());
    let side = side_files.files.iter().map(|file| file.path.clone());
    let indices = side_files.indices.iter().map(|name| root.join(name));
    // The source itself may be an index, or a file of tensors.
    shards.chain(side).chain(indices).chain([source.to_owned()]).collect()
}

/// Refuses names below the target that are files of the source.
///
/// # Errors
/// [`ConvertError::OfSource`].
pub(super) fn check_names(source: &[PathBuf], target: &Path, names: &[&str]) -> Result<(), ConvertError> {
    let folders: BTreeSet<&str> = names.iter().map(|name| folder_of(name)).collect();
    let folders: BTreeMap<(u64, u64), &str> =
        folders.into_iter().filter_map(|folder| Some((inode_of(&target.join(folder))?, folder))).collect();
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

/// The folder of a name: empty, or with a slash at its end.
fn folder_of(name: &str) -> &str {
    &name[..name.rfind('/').map_or(0, |at| at + 1)]
}

/// Adds the names that a path of the source has in `folders`.
fn names_in(path: &Path, folders: &BTreeMap<(u64, u64), &str>, found: &mut BTreeSet<String>) {
    let mut path = path.to_owned();
    for _ in 0..=LINKS_MAX {
        let parent = path.parent().unwrap_or(Path::new("")).to_owned();
        let name = path.file_name().and_then(OsStr::to_str);
        if let (Some(name), Some(folder)) = (name, inode_of(&parent).and_then(|id| folders.get(&id))) {
            found.insert(format!("{folder}{name}"));
        }
        match path.read_link() {
            Ok(next) => path = parent.join(next),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn inodes_are_compared_and_not_paths() {
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
            let checked = check_names(&[root.join(path)], &root.join("target"), &names);
            let found = checked.err().map(|error| error.to_string());
            assert_eq!(found.is_some(), expected.is_some(), "{path}: {found:?}");
            if let (Some(found), Some(expected)) = (found, expected) {
                assert!(found.contains(&format!("target/{expected}: ")), "{path}: {found}");
            }
        }
        // A target that is missing has no file of the source.
        assert!(check_names(&[root.join("target/a")], &root.join("none"), &names).is_ok());
    }
}
