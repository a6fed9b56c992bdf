//! Lists the names in a folder, as `std::fs::read_dir`, which panics if closing the folder fails.
//! File systems behind a network or a program may do that, and the listed names are still right.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{Dir, Mode, OFlags};

/// The names in a folder, without `.` and `..`, in no order. An empty path is the current folder.
pub fn names_in(folder: &Path) -> io::Result<impl Iterator<Item = io::Result<OsString>>> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let open = rustix::io::retry_on_intr(|| rustix::fs::open(folder, flags, Mode::empty()))?;
    Ok(Dir::new(open)?.filter_map(|entry| match entry {
        Ok(entry) if matches!(entry.file_name().to_bytes(), b"." | b"..") => None,
        Ok(entry) => Some(Ok(OsStr::from_bytes(entry.file_name().to_bytes()).to_owned())),
        Err(error) => Some(Err(error.into())),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_the_standard_library_lists() {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..500 {
            std::fs::write(folder.path().join(format!(".hidden or not {number}")), b"").unwrap();
        }
        std::fs::write(folder.path().join(OsStr::from_bytes(b"no \xff text")), b"").unwrap();
        let mut found: Vec<_> = names_in(folder.path()).unwrap().map(Result::unwrap).collect();
        let expected = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name());
        let mut expected: Vec<_> = expected.collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
        assert_eq!(found.len(), 501);
        let error = names_in(&folder.path().join("none")).map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
