//! Which file exactly was checked: so that a later read can prove it is still the same.

/// What identifies the state of a file: a change in any field means that the file was touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
