//! Errors of reading, always with the file's path, and with the offset where there is one.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::checkpoint::{FileIdentity, FileKind, OpenFault};

/// Errors of reading.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// A checked file can no longer be opened: removed, or not permitted.
    #[error("{}: cannot be opened for reading, although it was checked before", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A checked file was replaced by something that is not a regular file.
    #[error("{}: expected a regular file, found a {found}", path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
        /// What is there now.
        found: FileKind,
    },
    /// The status of the file cannot be read, so the bytes that were read cannot be trusted.
    #[error("{}: its status cannot be read", path.display())]
    Status {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A read failed: a damaged device, a lost network file system.
    #[error("{}: reading at byte {offset_bytes} failed", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// File offset at which the failed read began.
        offset_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The file is not the one that was checked. Bytes that were read must not be used.
    #[error(
        "{}: changed since it was checked ({}); load again when nothing writes to it",
        path.display(),
        Difference { was, now }
    )]
    FileChanged {
        /// The file.
        path: PathBuf,
        /// Its identity when it was checked.
        was: Box<FileIdentity>,
        /// Its identity now.
        now: Box<FileIdentity>,
    },
    /// The file ended before the requested bytes, although its length is unchanged.
    #[error(
        "{}: ended at byte {found_end_bytes}, expected bytes up to {expected_end_bytes}",
        path.display()
    )]
    EndOfFile {
        /// The file.
        path: PathBuf,
        /// Where the requested bytes end, as a file offset.
        expected_end_bytes: u64,
        /// Where reading ended, as a file offset.
        found_end_bytes: u64,
    },
}

impl SourceError {
    pub(super) fn from_open(path: &Path, fault: OpenFault) -> Self {
        let path = path.to_owned();
        match fault {
            OpenFault::Io(source) => Self::Open { path, source },
            OpenFault::NotRegular(found) => Self::NotRegular { path, found },
        }
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Open { path, .. }
            | Self::NotRegular { path, .. }
            | Self::Status { path, .. }
            | Self::Read { path, .. }
            | Self::FileChanged { path, .. }
            | Self::EndOfFile { path, .. } => path,
        }
    }

    /// True if a file changed between the check and the read.
    #[must_use]
    pub fn is_file_changed(&self) -> bool {
        matches!(self, Self::FileChanged { .. })
    }
}

/// Prints the differences between two identities.
struct Difference<'a> {
    was: &'a FileIdentity,
    now: &'a FileIdentity,
}

impl fmt::Display for Difference<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (was, now) = (self.was, self.now);
        if (was.device, was.inode) != (now.device, now.inode) {
            return write!(
                f,
                "another file took its place: was inode {} on device {}, now inode {} on device {}",
                was.inode, was.device, now.inode, now.device
            );
        }
        let mut parts = Vec::new();
        if was.len_bytes != now.len_bytes {
            parts.push(format!("its length was {} bytes, now {}", was.len_bytes, now.len_bytes));
        }
        if was.modified_ns != now.modified_ns {
            parts.push(format!("its modification time was {}, now {}", was.modified_ns, now.modified_ns));
        }
        if parts.is_empty() {
            // Renaming over the file, removing, linking and chmod leave the bytes alone.
            parts.push(format!(
                "its change time was {}, now {}: replaced, removed, renamed, linked or its mode was set",
                was.changed_ns, now.changed_ns
            ));
        }
        f.write_str(&parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAS: FileIdentity =
        FileIdentity { device: 1, inode: 2, len_bytes: 3, modified_ns: 4, changed_ns: 5 };

    fn message(now: FileIdentity) -> String {
        SourceError::FileChanged { path: "a.safetensors".into(), was: Box::new(WAS), now: Box::new(now) }
            .to_string()
    }

    #[test]
    fn a_change_names_what_differs_and_nothing_else() {
        let replaced = message(FileIdentity { inode: 9, len_bytes: 8, ..WAS });
        assert!(replaced.contains("was inode 2 on device 1, now inode 9 on device 1"), "{replaced}");
        assert!(!replaced.contains("length"), "{replaced}");

        let truncated = message(FileIdentity { len_bytes: 1, modified_ns: 7, changed_ns: 7, ..WAS });
        assert!(truncated.starts_with("a.safetensors: changed since it was checked"), "{truncated}");
        assert!(truncated.contains("length was 3 bytes, now 1"), "{truncated}");
        assert!(truncated.contains("modification time was 4, now 7"), "{truncated}");
        assert!(!truncated.contains("change time"), "{truncated}");

        let removed = message(FileIdentity { changed_ns: 6, ..WAS });
        assert!(removed.contains("change time was 5, now 6: replaced, removed"), "{removed}");
    }
}
