//! What can go wrong while reading, always with the file's path and, where there is one, the
//! offset.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::checkpoint::{FileIdentity, FileKind, OpenFault};

/// What can go wrong while reading.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// A file that was checked can no longer be opened: removed or forbidden.
    #[error("{}: cannot be opened for reading, although it was checked before", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Something else than a regular file took the place of one that was checked.
    #[error("{}: expected a regular file, found a {found}", path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
        /// What is there now.
        found: FileKind,
    },
    /// The system refused to say what the file is now, so nothing that was read can be trusted.
    #[error("{}: its status cannot be read", path.display())]
    Status {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A read failed: a damaged device, a lost network file system.
    #[error("{}: reading at byte {offset_bytes} failed", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Where the read that failed began, counted from the start of the file.
        offset_bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// The file is not the one that was checked. The bytes that were read are not to be used.
    #[error(
        "{}: changed since it was checked ({}); load again when nothing writes to it",
        path.display(),
        Difference { was, now }
    )]
    FileChanged {
        /// The file.
        path: PathBuf,
        /// What it was when it was checked.
        was: Box<FileIdentity>,
        /// What it is now.
        now: Box<FileIdentity>,
    },
    /// The file ends before the bytes that were asked for, although its length is what it was.
    #[error(
        "{}: ended at byte {found_end_bytes}, expected bytes up to {expected_end_bytes}",
        path.display()
    )]
    EndOfFile {
        /// The file.
        path: PathBuf,
        /// Where the bytes that were asked for end, counted from the start of the file.
        expected_end_bytes: u64,
        /// Where reading ended.
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

    /// True if the cause is a file that changed between the check and the read.
    #[must_use]
    pub fn is_file_changed(&self) -> bool {
        matches!(self, Self::FileChanged { .. })
    }
}

/// Says which fields of two identities differ.
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
            // Renaming over it, removing it, linking it and chmod all leave the bytes alone.
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
