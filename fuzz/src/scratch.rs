//! Files for what is read from paths alone: in memory where the system has a folder for that.

#![allow(clippy::unwrap_used, reason = "a check that cannot go on panics")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Where files are in memory, unless somebody has said where temporary ones belong.
fn place() -> PathBuf {
    let memory = Path::new("/dev/shm");
    match std::env::var_os("TMPDIR") {
        None if memory.is_dir() => memory.to_owned(),
        _ => std::env::temp_dir(),
    }
}

/// A folder that goes away with its owner, unless that is killed.
pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(place()).unwrap()
}

/// A file without a name, reached through its descriptor: a process that is killed leaves nothing
/// behind.
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

    /// The file's path, once it consists of these bytes.
    pub(crate) fn holding(&self, bytes: &[u8]) -> &Path {
        overwrite(&self.file, bytes, bytes.len().try_into().unwrap());
        &self.path
    }
}

/// Makes a file consist of these bytes and, if it is to be longer, a hole behind them.
pub(crate) fn overwrite(file: &File, bytes: &[u8], len_bytes: u64) {
    file.set_len(0).unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file.set_len(len_bytes).unwrap();
}
