//! Opens regular files and records their identity, so that a later read can prove that the file is
//! still the same.
//!
//! Every path from outside is opened here, by this stage and by the readers of a later one. Only
//! regular files are accepted, and opening never waits.

use std::fmt;
use std::fs::{File, FileType, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

/// The identity and state of a file. Any changed field means that the file changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct FileIdentity {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Last modification of the bytes, nanoseconds since 1970.
    pub modified_ns: i128,
    /// Last change of bytes, links or mode, nanoseconds since 1970.
    pub changed_ns: i128,
}

impl FileIdentity {
    /// The state of an open file, from `fstat`. The path plays no role.
    ///
    /// # Errors
    /// The error of `fstat`.
    pub fn of(file: &File) -> io::Result<Self> {
        Ok(Self::from_metadata(&file.metadata()?))
    }

    fn from_metadata(metadata: &Metadata) -> Self {
        let nanoseconds = |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            len_bytes: metadata.size(),
            modified_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

impl fmt::Display for FileIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "inode {} on device {}, {} bytes, modified {} ns, changed {} ns",
            self.inode, self.device, self.len_bytes, self.modified_ns, self.changed_ns
        )
    }
}

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileKind {
    /// A file of bytes.
    Regular,
    /// A directory.
    Directory,
    /// A pipe with a name.
    Fifo,
    /// A socket.
    Socket,
    /// A block device.
    BlockDevice,
    /// A character device.
    CharacterDevice,
    /// Any other kind.
    Other,
}

impl FileKind {
    pub(crate) fn of(kind: FileType) -> Self {
        if kind.is_file() {
            Self::Regular
        } else if kind.is_dir() {
            Self::Directory
        } else if kind.is_fifo() {
            Self::Fifo
        } else if kind.is_socket() {
            Self::Socket
        } else if kind.is_block_device() {
            Self::BlockDevice
        } else if kind.is_char_device() {
            Self::CharacterDevice
        } else {
            Self::Other
        }
    }
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Regular => "regular file",
            Self::Directory => "directory",
            Self::Fifo => "named pipe",
            Self::Socket => "socket",
            Self::BlockDevice => "block device",
            Self::CharacterDevice => "character device",
            Self::Other => "special file",
        })
    }
}

/// Why a file was not opened. The caller's error adds the path.
#[derive(Debug)]
pub(crate) enum OpenFault {
    /// Error of the system.
    Io(io::Error),
    /// It is not a regular file.
    NotRegular(FileKind),
}

/// Opens a regular file for reading and returns its identity.
///
/// Never waits: with `O_NONBLOCK`, opening a pipe without a writer does not hang. `fstat` on the
/// descriptor tells the kind; a `stat` of the path before opening would be a race. Symbolic links
/// are followed.
pub(crate) fn open_regular(path: &Path) -> Result<(File, FileIdentity), OpenFault> {
    open_regular_with(path, OFlags::empty())
}

/// [`open_regular`] with more open flags, such as `O_DIRECT`.
pub(crate) fn open_regular_with(path: &Path, flags: OFlags) -> Result<(File, FileIdentity), OpenFault> {
    let waitless = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | flags;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(waitless.bits().cast_signed())
        .open(path)
        .map_err(|error| refine(path, error))?;
    let metadata = file.metadata().map_err(OpenFault::Io)?;
    match FileKind::of(metadata.file_type()) {
        FileKind::Regular => {}
        other => return Err(OpenFault::NotRegular(other)),
    }
    // Some file systems honour O_NONBLOCK on regular files. Reads may block from here on.
    rustix::fs::fcntl_setfl(&file, flags).map_err(|errno| OpenFault::Io(errno.into()))?;
    Ok((file, FileIdentity::from_metadata(&metadata)))
}

/// Opening a socket fails with ENXIO; the kind of the file explains more than that error.
fn refine(path: &Path, error: io::Error) -> OpenFault {
    match path.metadata().map(|metadata| FileKind::of(metadata.file_type())) {
        Ok(kind) if kind != FileKind::Regular => OpenFault::NotRegular(kind),
        _ => OpenFault::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn special_files_are_named_and_never_awaited() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
        let socket = folder.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        for (path, expected) in [
            (fifo.as_path(), FileKind::Fifo),
            (socket.as_path(), FileKind::Socket),
            (folder.path(), FileKind::Directory),
            (Path::new("/dev/zero"), FileKind::CharacterDevice),
        ] {
            match open_regular(path) {
                Err(OpenFault::NotRegular(found)) => assert_eq!(found, expected, "{}", path.display()),
                other => panic!("{}: {other:?}", path.display()),
            }
        }
        assert!(matches!(open_regular(&folder.path().join("none")), Err(OpenFault::Io(_))));
    }

    #[test]
    fn identity_changes_with_every_touch() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"one").unwrap();
        let (file, before) = open_regular(&path).unwrap();
        assert_eq!(FileIdentity::of(&file).unwrap(), before);
        assert!(!rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));

        std::fs::write(&path, b"four").unwrap();
        assert_ne!(FileIdentity::of(&file).unwrap(), before, "length");
        let other = folder.path().join("other");
        std::fs::write(&other, b"one").unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert_ne!(open_regular(&path).unwrap().1.inode, before.inode, "replaced");
    }
}
