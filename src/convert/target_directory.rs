//! The target directory. Nothing is written outside of it or through a link, and no file has its
//! final name before it is whole.
//!
//! ```text
//! .NAME.partial  --write, fsync-->  rename to NAME  --fsync the folder-->  published
//! ```
//!
//! Every path is opened relative to the descriptor of its folder, one name at a time, and links are
//! refused. A file that is dropped before it is published is removed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::ConvertError;

/// The end of the name of an unfinished file, which begins with a dot.
const PARTIAL_SUFFIX: &str = ".partial";
/// Longest name in a folder, in bytes: `NAME_MAX` of every file system in use.
const NAME_BYTES_MAX: usize = 255;

/// The directory of the target. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct TargetDirectory {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    root: OwnedFd,
    /// Open folders below it, by their path.
    folders: Mutex<BTreeMap<String, Arc<OwnedFd>>>,
}

/// A file without its final name. Dropping it removes it.
#[derive(Debug)]
pub(super) struct PartialFile {
    directory: TargetDirectory,
    folder: Arc<OwnedFd>,
    /// Its final path below the target, and the last part of it.
    path: String,
    name: String,
    file: File,
    is_kept: bool,
}

/// A file, directory or other thing in the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// A regular file: its length, its last modification in nanoseconds since 1970, and the bytes
    /// it takes on the disk.
    File { len_bytes: u64, modified_ns: i128, allocated_bytes: u64 },
    /// A directory.
    Directory,
    /// Something else, in words.
    Other(&'static str),
}

impl Found {
    /// A name for errors.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::File { .. } => "a file",
            Self::Directory => "a directory",
            Self::Other(name) => name,
        }
    }
}

impl TargetDirectory {
    /// Opens the directory, if it is there.
    ///
    /// # Errors
    /// [`ConvertError::Write`] if it is not a directory, or if the system refuses.
    pub(super) fn open(path: &Path) -> Result<Option<Self>, ConvertError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(root) => {
                let folders = Mutex::default();
                Ok(Some(Self { inner: Arc::new(Inner { path: path.to_owned(), root, folders }) }))
            }
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(failed(path, "open the directory", error)),
        }
    }

    /// Opens the directory. Makes it, and those above it, if it is missing.
    ///
    /// # Errors
    /// [`ConvertError::Write`].
    pub(super) fn create(path: &Path) -> Result<Self, ConvertError> {
        if let Some(directory) = Self::open(path)? {
            return Ok(directory);
        }
        let make =
            |source| ConvertError::Write { path: path.to_owned(), operation: "make the directory", source };
        // Without a `.` at the end, which would count as a directory to be made.
        let plain: PathBuf = path.components().collect();
        let is_missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
        let missing: Vec<&Path> = plain.ancestors().take_while(is_missing).collect();
        std::fs::create_dir_all(&plain).map_err(make)?;
        let directory = Self::open(path)?.ok_or_else(|| make(io::ErrorKind::NotFound.into()))?;
        // New directories have to survive a power cut.
        for folder in missing {
            let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty());
            let parent = File::open(parent.unwrap_or(Path::new("."))).map_err(make)?;
            sync_folder(&OwnedFd::from(parent), path)?;
        }
        Ok(directory)
    }

    /// Its path.
    pub(super) fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The path of something below it.
    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        self.inner.path.join(name)
    }

    /// Bytes that are free for this user.
    pub(super) fn free_bytes(&self) -> Result<u64, ConvertError> {
        let system = rustix::fs::fstatvfs(&self.inner.root);
        let system = system.map_err(|error| failed(self.path(), "ask for the free space", error))?;
        Ok(system.f_bavail.saturating_mul(system.f_frsize))
    }

    /// The folder of a path, and the last part of the path. With `create`, missing folders are
    /// made; without, `None` if one is missing.
    fn folder_of<'a>(
        &self,
        path: &'a str,
        create: bool,
    ) -> Result<Option<(Arc<OwnedFd>, &'a str)>, ConvertError> {
        let (folder, name) = path.rsplit_once('/').map_or(("", path), |(folder, name)| (folder, name));
        assert!(!name.is_empty() && name != "." && name != "..", "{path:?} is a path below the target");
        Ok(self.folder(folder, create)?.map(|folder| (folder, name)))
    }

    fn folder(&self, folder: &str, create: bool) -> Result<Option<Arc<OwnedFd>>, ConvertError> {
        let mut folders = self.inner.folders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = folders.get(folder) {
            return Ok(Some(Arc::clone(open)));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = rustix::fs::openat(&self.inner.root, ".", flags, Mode::empty());
        let mut current = root.map_err(|error| failed(self.path(), "open the directory", error))?;
        let mut walked = String::new();
        for part in folder.split('/').filter(|part| !part.is_empty()) {
            assert!(part != "." && part != "..", "{folder:?} is a path below the target");
            walked.push_str(part);
            let mut opened = rustix::fs::openat(&current, part, flags, Mode::empty());
            if opened.as_ref().err() == Some(&Errno::NOENT) {
                if !create {
                    return Ok(None);
                }
                let made = rustix::fs::mkdirat(&current, part, Mode::from(0o777));
                made.or_else(|error| if error == Errno::EXIST { Ok(()) } else { Err(error) })
                    .map_err(|error| failed(&self.path_of(&walked), "make the directory", error))?;
                sync_folder(&current, &self.path_of(&walked))?;
                opened = rustix::fs::openat(&current, part, flags, Mode::empty());
            }
            current = opened.map_err(|error| match error {
                Errno::NOTDIR | Errno::LOOP => ConvertError::Exists {
                    path: self.path_of(&walked),
                    found: "something that is not a directory",
                },
                error => failed(&self.path_of(&walked), "open the directory", error),
            })?;
            walked.push('/');
        }
        let opened = Arc::new(current);
        folders.insert(folder.to_owned(), Arc::clone(&opened));
        Ok(Some(opened))
    }

    /// Finds a path; links are not followed.
    pub(super) fn find(&self, path: &str) -> Result<Option<Found>, ConvertError> {
        let Some((folder, name)) = self.folder_of(path, false)? else { return Ok(None) };
        match rustix::fs::statat(&*folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(found(&stat))),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(failed(&self.path_of(path), "stat", error)),
        }
    }

    /// Finds the unfinished name of a path.
    pub(super) fn find_partial(&self, path: &str) -> Result<Option<Found>, ConvertError> {
        self.find(&partial_path(path))
    }

    /// Opens a file for reading; links are refused.
    pub(super) fn open_file(&self, path: &str) -> Result<File, ConvertError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        self.open_with(path, flags, "open")
    }

    /// Opens a file to append to it. Makes it if it is missing.
    pub(super) fn open_appending(&self, path: &str) -> Result<File, ConvertError> {
        let flags = OFlags::RDWR | OFlags::APPEND | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.open_with(path, flags, "open")
    }

    fn open_with(&self, path: &str, flags: OFlags, operation: &'static str) -> Result<File, ConvertError> {
        let refused = |error| failed(&self.path_of(path), operation, error);
        let (folder, name) =
            self.folder_of(path, flags.contains(OFlags::CREATE))?.ok_or_else(|| refused(Errno::NOENT))?;
        let file = rustix::fs::openat(&*folder, name, flags, Mode::from(0o666)).map_err(refused)?;
        Ok(File::from(file))
    }

    /// Names in a folder, without `.` and `..`; none if there is no such folder.
    pub(super) fn names_in(&self, folder: &str) -> Result<Vec<String>, ConvertError> {
        let refused = |error| failed(&self.path_of(folder), "list the directory", error);
        let Some(open) = self.folder(folder.trim_end_matches('/'), false)? else { return Ok(Vec::new()) };
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&*open).map_err(refused)? {
            let entry = entry.map_err(refused)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// Makes an unfinished file. One that an earlier run left is removed.
    pub(super) fn create_file(&self, path: &str) -> Result<PartialFile, ConvertError> {
        let (folder, name) = self.folder_of(path, true)?.expect("missing folders are made");
        let partial = partial_name(name);
        let refused = |operation, error| failed(&self.path_of(&partial_path(path)), operation, error);
        match rustix::fs::unlinkat(&*folder, &partial, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(refused("remove the file of an earlier run", error)),
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&*folder, &partial, flags, Mode::from(0o666))
            .map_err(|error| refused("make the file", error))?;
        Ok(self.partial(folder, path, name, File::from(file)))
    }

    /// Opens the unfinished file that an earlier run left.
    pub(super) fn open_partial(&self, path: &str) -> Result<PartialFile, ConvertError> {
        let file =
            self.open_with(&partial_path(path), OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC, "open")?;
        let (folder, name) = self.folder_of(path, false)?.expect("the file in it was opened");
        Ok(self.partial(folder, path, name, file))
    }

    fn partial(&self, folder: Arc<OwnedFd>, path: &str, name: &str, file: File) -> PartialFile {
        let (path, name) = (path.to_owned(), name.to_owned());
        PartialFile { directory: self.clone(), folder, path, name, file, is_kept: false }
    }

    /// Removes a file, if it is there.
    pub(super) fn remove(&self, path: &str) -> Result<(), ConvertError> {
        let Some((folder, name)) = self.folder_of(path, false)? else { return Ok(()) };
        match rustix::fs::unlinkat(&*folder, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(failed(&self.path_of(path), "remove the file", error)),
        }
    }

    /// Removes the unfinished file of a path, if it is there.
    pub(super) fn remove_partial(&self, path: &str) -> Result<(), ConvertError> {
        self.remove(&partial_path(path))
    }

    /// Removes an empty folder, if it is there. One that is in use or not empty stays.
    pub(super) fn remove_folder(&self, path: &str) -> Result<(), ConvertError> {
        let mut folders = self.inner.folders.lock().unwrap_or_else(PoisonError::into_inner);
        folders.remove(path);
        match rustix::fs::unlinkat(&self.inner.root, path, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST | Errno::BUSY) => Ok(()),
            Err(error) => Err(failed(&self.path_of(path), "remove the directory", error)),
        }
    }

    /// Makes the names in the folder of a path durable.
    pub(super) fn sync_folder_of(&self, path: &str) -> Result<(), ConvertError> {
        match self.folder_of(path, false)? {
            Some((folder, _)) => sync_folder(&folder, &self.path_of(path)),
            None => Ok(()),
        }
    }
}

impl PartialFile {
    /// The file, for reading and writing.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Its final path below the target.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Its final path.
    pub(super) fn full_path(&self) -> PathBuf {
        self.directory.path_of(&self.path)
    }

    /// Makes its bytes durable, gives it its final name, and makes that durable too. An existing
    /// file is replaced only with `replace`. Returns the time of its last modification, in
    /// nanoseconds since 1970.
    ///
    /// # Errors
    /// [`ConvertError::Exists`], [`ConvertError::Write`]. The file is removed then, since its bytes
    /// on the disk are unknown.
    pub(super) fn publish(mut self, replace: bool) -> Result<i128, ConvertError> {
        let path = self.full_path();
        let refused = |operation, error| failed(&path, operation, error);
        rustix::fs::fsync(&self.file).map_err(|error| refused("sync the file", error))?;
        let stat = rustix::fs::fstat(&self.file).map_err(|error| refused("stat", error))?;
        let partial = partial_name(&self.name);
        let renamed = match replace {
            true => rustix::fs::renameat(&*self.folder, &partial, &*self.folder, &self.name),
            false => rename_to_free_name(&self.folder, &partial, &self.name),
        };
        match renamed {
            Ok(()) => self.is_kept = true,
            Err(Errno::EXIST) => return Err(ConvertError::Exists { path, found: "a file" }),
            Err(error) => return Err(refused("rename the file", error)),
        }
        sync_folder(&self.folder, &path)?;
        Ok(modified_ns(&stat))
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.is_kept {
            // The error that ended it is reported already.
            let _ = rustix::fs::unlinkat(&*self.folder, partial_name(&self.name), AtFlags::empty());
        }
    }
}

/// Renames without replacing. Where a file system cannot do that, the name is checked first.
fn rename_to_free_name(folder: &OwnedFd, from: &str, to: &str) -> Result<(), Errno> {
    match rustix::fs::renameat_with(folder, from, folder, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) => {}
        outcome => return outcome,
    }
    match rustix::fs::statat(folder, to, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => rustix::fs::renameat(folder, from, folder, to),
        Ok(_) => Err(Errno::EXIST),
        Err(error) => Err(error),
    }
}

fn sync_folder(folder: &OwnedFd, path: &Path) -> Result<(), ConvertError> {
    match rustix::fs::fsync(folder) {
        // A file system that cannot sync folders has nothing to sync.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(error) => Err(failed(path, "sync the directory of the file", error)),
    }
}

/// The name of an unfinished file. A name that is too long for the suffix is replaced by its hash.
fn partial_name(name: &str) -> String {
    if name.len() + 1 + PARTIAL_SUFFIX.len() <= NAME_BYTES_MAX {
        return format!(".{name}{PARTIAL_SUFFIX}");
    }
    format!(".{}{PARTIAL_SUFFIX}", blake3::hash(name.as_bytes()).to_hex())
}

fn partial_path(path: &str) -> String {
    match path.rsplit_once('/') {
        Some((folder, name)) => format!("{folder}/{}", partial_name(name)),
        None => partial_name(path),
    }
}

fn found(stat: &Stat) -> Found {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Found::File {
            len_bytes: u64::try_from(stat.st_size).unwrap_or(0),
            modified_ns: modified_ns(stat),
            allocated_bytes: u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512),
        },
        FileType::Directory => Found::Directory,
        FileType::Symlink => Found::Other("a symbolic link"),
        FileType::Fifo => Found::Other("a named pipe"),
        _ => Found::Other("a special file"),
    }
}

fn modified_ns(stat: &Stat) -> i128 {
    i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec)
}

fn failed(path: &Path, operation: &'static str, error: Errno) -> ConvertError {
    ConvertError::Write { path: path.to_owned(), operation, source: error.into() }
}
