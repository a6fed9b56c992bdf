//! Temporary files for code that reads only paths: in memory if the system has such a folder.

#![allow(clippy::unwrap_used, reason = "a check that cannot go on panics")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The in-memory folder, unless TMPDIR names another one.
fn place() -> PathBuf {
    let memory = Path::new("/dev/shm");
    match std::env::var_os("TMPDIR") {
        None if memory.is_dir() => memory.to_owned(),
        _ => std::env::temp_dir(),
    }
}

/// A folder that is removed on drop.
pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(place()).unwrap()
}

/// An unnamed file with a path through its descriptor. A killed process leaves nothing behind.
pub(crate) struct Scratch {
    file: File,
    path: PathBuf,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        let file = tempfile::tempfile_in(place()).unwrap();
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        Self { file, path }
    }

    /// Writes these bytes and returns the path of the file.
    pub(crate) fn holding(&self, bytes: &[u8]) -> &Path {
        overwrite(&self.file, bytes, bytes.len().try_into().unwrap());
        &self.path
    }
}

/// Replaces the contents of a file by these bytes, followed by a hole up to its length.
pub(crate) fn overwrite(file: &File, bytes: &[u8], len_bytes: u64) {
    file.set_len(0).unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file.set_len(len_bytes).unwrap();
}
