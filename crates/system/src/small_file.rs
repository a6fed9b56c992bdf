//! Reads a small text file from the command line. A mistaken argument must neither hang nor fill
//! memory.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Why a file was not read.
#[derive(Debug, thiserror::Error)]
pub enum SmallFileError {
    /// Error of the system, or it is a pipe, a device or a directory.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file is too large.
    #[error("it holds {found_bytes} bytes, at most {limit_bytes} are read")]
    TooLarge {
        /// Its length.
        found_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
}

/// The bytes of a regular file of at most `limit_bytes`.
///
/// # Errors
/// [`SmallFileError`]; nothing is read then.
pub fn read(path: &Path, limit_bytes: u64) -> Result<Vec<u8>, SmallFileError> {
    // Otherwise opening a pipe without a writer would block.
    let nonblocking =
        i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).expect("a flag of open(2) fits an int");
    let file = File::options().read(true).custom_flags(nonblocking).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file").into());
    }
    if metadata.len() > limit_bytes {
        return Err(SmallFileError::TooLarge { found_bytes: metadata.len(), limit_bytes });
    }
    let mut text = Vec::new();
    // Files of procfs have no length, and any file may grow meanwhile.
    file.take(limit_bytes).read_to_end(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_small_regular_files_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read(&path, 5).unwrap(), b"12345");
        let refused = read(&path, 4).unwrap_err();
        assert!(matches!(refused, SmallFileError::TooLarge { found_bytes: 5, limit_bytes: 4 }), "{refused}");
        for special in ["/dev/zero", "/dev/null", "/"] {
            let refused = read(Path::new(special), 5).unwrap_err();
            assert!(refused.to_string().contains("not a regular file"), "{special}: {refused}");
        }
        assert!(matches!(read(&directory.path().join("none"), 5), Err(SmallFileError::Io(_))));
    }
}
