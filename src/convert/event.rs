//! What a conversion tells while it runs.

/// What a conversion tells while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConvertEvent<'a> {
    /// Bytes of tensors that have been read, of all that this run has to read. Several times a
    /// second.
    Progress {
        /// So far.
        done_bytes: u64,
        /// In all.
        total_bytes: u64,
    },
    /// An earlier run has made this file; it is kept.
    FileKept {
        /// Its path below the target.
        file: &'a str,
        /// Its length.
        bytes: u64,
    },
    /// A file of tensors is complete, under its final name, and on the disk.
    FilePublished {
        /// Its path below the target.
        file: &'a str,
        /// Its length.
        bytes: u64,
    },
    /// A side file is in its place.
    SideFile {
        /// Its path below the target.
        file: &'a str,
        /// Its length.
        bytes: u64,
    },
    /// Index and manifest are in their place: the target is complete.
    Finished,
    /// Bytes that the verification has compared, of all.
    Verifying {
        /// So far.
        done_bytes: u64,
        /// In all.
        total_bytes: u64,
    },
}
