//! The target directory. Files get their final names only after everything is on disk.
//!
//! ```text
//! open ──> create_part* ──> publish        everything renamed, the configuration last; the directory synced
//!   │           │              │
//!   └───────────┴──────────────┴─> drop    without publish: every file and directory of this run is removed
//! ```
//!
//! A part is an unfinished file. Its name starts with a dot and ends in [`PART_SUFFIX`], so that no
//! reader takes it for a checkpoint, even after a kill without cleanup. Names are resolved relative
//! to the open directory and created exclusively: a link or file that appears meanwhile is neither
//! followed nor overwritten.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};

use super::error::SynthError;

/// The end of the name of an unfinished file.
pub(super) const PART_SUFFIX: &str = ".loadcheck-part";

/// Attempts to find a free name for a part. Only leftovers of a process with the same id can occupy
/// names.
const PART_TRIES: u32 = 100;

/// An open target directory, and the files that this run has created in it.
#[derive(Debug)]
pub(super) struct TargetDirectory {
    path: PathBuf,
    handle: OwnedFd,
    /// Directories that this run created, outermost first.
    created: Vec<PathBuf>,
    overwrite: bool,
    /// Bytes of the whole checkpoint, for messages about a full file system.
    needed_bytes: u64,
    /// Names to remove if the run fails.
    unfinished: Mutex<Vec<String>>,
}

/// A file that is being written.
#[derive(Debug)]
pub(super) struct Part {
    /// Its temporary name.
    pub(super) name: String,
    /// Its final name.
    pub(super) final_name: String,
}

impl TargetDirectory {
    /// Opens the directory, creating it if missing, and checks that `final_names` may be written.
    pub(super) fn open(
        path: &Path,
        overwrite: bool,
        final_names: &[String],
        needed_bytes: u64,
    ) -> Result<Self, SynthError> {
        let created = create_missing(path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let handle = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| match error {
            rustix::io::Errno::NOTDIR => SynthError::NotADirectory { path: path.to_path_buf() },
            _ => failed("open directory", path.to_path_buf(), error),
        });
        let handle = match handle {
            Ok(handle) => handle,
            Err(error) => {
                remove_directories(&created);
                return Err(error);
            }
        };
        let unfinished = Mutex::new(Vec::new());
        let this = Self { path: path.to_path_buf(), handle, created, overwrite, needed_bytes, unfinished };
        this.check_entries(final_names)?;
        this.check_space()?;
        Ok(this)
    }

    /// The full path of an entry, for messages.
    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// An error of a system call on an entry.
    pub(super) fn error(&self, action: &'static str, name: &str, source: io::Error) -> SynthError {
        SynthError::from_io(action, self.path_of(name), self.needed_bytes, source)
    }

    /// Refuses a directory with conflicting files. If overwriting is allowed, removes the parts of
    /// killed runs to free their space.
    fn check_entries(&self, final_names: &[String]) -> Result<(), SynthError> {
        let list_failed = |error| failed("list", self.path.clone(), error);
        let mut leftovers = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.handle).map_err(list_failed)? {
            let entry = entry.map_err(list_failed)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name == "." || name == ".." {
                continue;
            }
            if !self.overwrite {
                return Err(SynthError::NotEmpty { path: self.path.clone(), entry: name });
            }
            if belongs_to_checkpoint(&name) && !final_names.contains(&name) {
                return Err(SynthError::ForeignCheckpoint { path: self.path.clone(), entry: name });
            }
            if name.starts_with('.') && name.ends_with(PART_SUFFIX) {
                leftovers.push(name);
            }
        }
        for name in leftovers {
            rustix::fs::unlinkat(&self.handle, name.as_str(), AtFlags::empty())
                .map_err(|error| self.error("remove", &name, error.into()))?;
        }
        Ok(())
    }

    /// Refuses a file system with too little free space for the files, in whole blocks.
    fn check_space(&self) -> Result<(), SynthError> {
        let space = rustix::fs::fstatvfs(&self.handle)
            .map_err(|error| failed("ask for the free space of", self.path.clone(), error))?;
        let available_bytes = space.f_bavail.saturating_mul(space.f_frsize);
        // File systems without a size (ramfs, some network ones) report zero for everything.
        if space.f_blocks > 0 && available_bytes < self.needed_bytes {
            return Err(SynthError::NoSpace {
                path: self.path.clone(),
                needed_bytes: self.needed_bytes,
                available_bytes,
            });
        }
        Ok(())
    }

    /// Creates a new, empty file for writing; with `direct`, bypassing the page cache if possible.
    ///
    /// The mode is 0666 without the bits of the umask.
    pub(super) fn create_part(
        &self,
        final_name: &str,
        direct: bool,
    ) -> Result<(File, Part, bool), SynthError> {
        let base = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut direct = direct;
        let mut tries = 0;
        loop {
            let name = format!(".{final_name}.{}-{tries}{PART_SUFFIX}", std::process::id());
            let flags = if direct { base | OFlags::DIRECT } else { base };
            match rustix::fs::openat(&self.handle, name.as_str(), flags, Mode::from_raw_mode(0o666)) {
                Ok(handle) => {
                    self.remember(name.clone());
                    return Ok((
                        File::from(handle),
                        Part { name, final_name: final_name.to_owned() },
                        direct,
                    ));
                }
                Err(rustix::io::Errno::EXIST) if tries < PART_TRIES => tries += 1,
                // The file system does not support direct writes. Some kernels notice after
                // creating the file.
                Err(rustix::io::Errno::INVAL) if direct => {
                    let _ = rustix::fs::unlinkat(&self.handle, name.as_str(), AtFlags::empty());
                    direct = false;
                }
                Err(error) => return Err(self.error("create", &name, error.into())),
            }
        }
    }

    /// Writes a small file whole and syncs it.
    pub(super) fn write_small(&self, final_name: &str, text: &str) -> Result<Part, SynthError> {
        use std::io::Write;
        let (mut file, part, _) = self.create_part(final_name, false)?;
        file.write_all(text.as_bytes()).map_err(|error| self.error("write", &part.name, error))?;
        file.sync_all().map_err(|error| self.error("sync", &part.name, error))?;
        Ok(part)
    }

    /// Gives every part its final name, in the given order, and syncs the directory.
    pub(super) fn publish(mut self, parts: &[Part]) -> Result<(), SynthError> {
        for part in parts {
            self.rename(part)?;
            self.remember(part.final_name.clone());
        }
        rustix::fs::fsync(&self.handle).map_err(|error| failed("sync", self.path.clone(), error))?;
        sync_parents(&self.created)?;
        self.names().clear();
        self.created.clear();
        Ok(())
    }

    fn rename(&self, part: &Part) -> Result<(), SynthError> {
        let (from, to) = (part.name.as_str(), part.final_name.as_str());
        let at = &self.handle;
        let result = if self.overwrite {
            rustix::fs::renameat(at, from, at, to)
        } else {
            match rustix::fs::renameat_with(at, from, at, to, RenameFlags::NOREPLACE) {
                // Not every file system has this flag. A hard link never replaces a file either.
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                    rustix::fs::linkat(at, from, at, to, AtFlags::empty())
                        .and_then(|()| rustix::fs::unlinkat(at, from, AtFlags::empty()))
                }
                result => result,
            }
        };
        result.map_err(|error| match error {
            rustix::io::Errno::EXIST if !self.overwrite => SynthError::Appeared { path: self.path_of(to) },
            _ => self.error("rename to", to, error.into()),
        })
    }

    fn remember(&self, name: String) {
        self.names().push(name);
    }

    fn names(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        // The list is consistent after every step, so a panic elsewhere does not matter.
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TargetDirectory {
    /// Removes the files of a failed run. Errors are ignored: the error of the run is reported.
    fn drop(&mut self) {
        for name in self.names().drain(..) {
            let _ = rustix::fs::unlinkat(&self.handle, name.as_str(), AtFlags::empty());
        }
        remove_directories(&self.created);
    }
}

/// Creates the directory and its missing parents. Returns those created, outermost first.
fn create_missing(path: &Path) -> Result<Vec<PathBuf>, SynthError> {
    let mut missing = Vec::new();
    let mut next = Some(path);
    while let Some(directory) = next {
        if directory.as_os_str().is_empty() || directory.symlink_metadata().is_ok() {
            break;
        }
        missing.push(directory.to_path_buf());
        next = directory.parent();
    }
    let mut created = Vec::new();
    for directory in missing.into_iter().rev() {
        if let Err(source) = std::fs::create_dir(&directory) {
            remove_directories(&created);
            return Err(match source.kind() {
                io::ErrorKind::NotADirectory => SynthError::NotADirectory { path: path.to_path_buf() },
                _ => SynthError::Io { action: "create directory", path: directory, source },
            });
        }
        created.push(directory);
    }
    Ok(created)
}

/// Removes the empty ones of the directories that this run created.
fn remove_directories(created: &[PathBuf]) {
    for directory in created.iter().rev() {
        let _ = std::fs::remove_dir(directory);
    }
}

/// Syncs the parents of new directories.
fn sync_parents(created: &[PathBuf]) -> Result<(), SynthError> {
    for directory in created {
        let parent = match directory.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        File::open(parent).and_then(|handle| handle.sync_all()).map_err(|source| SynthError::Io {
            action: "sync",
            path: parent.to_path_buf(),
            source,
        })?;
    }
    Ok(())
}

/// An error of a system call on the directory itself.
fn failed(action: &'static str, path: PathBuf, error: rustix::io::Errno) -> SynthError {
    SynthError::Io { action, path, source: error.into() }
}

/// True for file names that readers of checkpoints open.
pub fn belongs_to_checkpoint(name: &str) -> bool {
    [".safetensors", ".safetensors.index.json", ".bin.index.json"].iter().any(|end| name.ends_with(end))
        || (name.starts_with("pytorch_model") && name.ends_with(".bin"))
}
