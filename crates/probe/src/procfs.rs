//! Reads the files of one process in `/proc`, through a descriptor of its directory.
//!
//! A [`Process`] is opened once, and every read is relative to that descriptor. The kernel binds
//! the descriptor to the process, not to its id, so a reused id reads as "ended" and never as
//! another process. Opening never fails: if `/proc` is missing or hidden, each metric has that
//! reason. The modules `memory`, `rollup` and `activity` parse the files.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::Reason;

/// Enough for `status`, `stat`, `io` and `smaps_rollup` on most machines; the buffer can grow.
const BUFFER_BYTES: usize = 8 << 10;

/// A mounted proc file system.
#[derive(Clone, Debug)]
pub struct Procfs {
    root: PathBuf,
}

impl Default for Procfs {
    fn default() -> Self {
        Self::at("/proc")
    }
}

impl Procfs {
    /// The proc file system at `root`, real or fake.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The mount point.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// False if its process ids are those of another namespace, such as after `unshare --pid`
    /// without a new `/proc`. Then only `self` is right, and every id means another process.
    #[must_use]
    pub fn is_of_this_namespace(&self) -> bool {
        let myself = std::fs::read_link(self.root.join("self")).ok();
        let number = myself.and_then(|myself| myself.to_str()?.parse::<u32>().ok());
        // True if unknown.
        number.is_none_or(|number| number == std::process::id())
    }

    /// The calling process. After a `fork` it is still the parent.
    #[must_use]
    pub fn myself(&self) -> Process {
        Process::open(self.root.join("self"))
    }

    /// The process that has this id now.
    #[must_use]
    pub fn process(&self, pid: u32) -> Process {
        Process::open(self.root.join(pid.to_string()))
    }
}

/// One process. Never reads the files of a later process with the same id.
#[derive(Debug)]
pub struct Process {
    path: PathBuf,
    directory: Result<OwnedFd, Reason>,
}

impl Process {
    fn open(path: PathBuf) -> Self {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(&path, flags, Mode::empty()).map_err(|errno| {
            if errno == rustix::io::Errno::NOENT
                && path.parent().is_some_and(|root| root.join("stat").exists())
            {
                Reason::ProcessEnded
            } else {
                Reason::Unreadable { file: "/proc/<pid>", errno: errno.raw_os_error() }
            }
        });
        Self { path, directory }
    }

    /// The process's directory, such as `/proc/self`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn open_file(&self, name: &'static ProcFile, flags: OFlags) -> Result<File, Reason> {
        let directory = self.directory.as_ref().map_err(|reason| *reason)?;
        let descriptor = rustix::fs::openat(directory, name.name, flags | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| Reason::unreadable(name.pattern, &errno.into()))?;
        Ok(File::from(descriptor))
    }

    /// The contents of one of its files.
    pub(crate) fn read(&self, name: &'static ProcFile) -> Result<Vec<u8>, Reason> {
        let mut reader = ProcReader::open(self, name)?;
        reader.read()?;
        Ok(reader.buffer)
    }
}

/// A file below `/proc/<pid>`, and its name in messages.
#[derive(Debug)]
pub(crate) struct ProcFile {
    pub(crate) name: &'static str,
    pub(crate) pattern: &'static str,
}

pub(crate) static STATUS: ProcFile = ProcFile { name: "status", pattern: "/proc/<pid>/status" };
pub(crate) static ROLLUP: ProcFile = ProcFile { name: "smaps_rollup", pattern: "/proc/<pid>/smaps_rollup" };
pub(crate) static STAT: ProcFile = ProcFile { name: "stat", pattern: "/proc/<pid>/stat" };
pub(crate) static IO: ProcFile = ProcFile { name: "io", pattern: "/proc/<pid>/io" };
pub(crate) static CGROUP: ProcFile = ProcFile { name: "cgroup", pattern: "/proc/<pid>/cgroup" };
pub(crate) static MOUNTINFO: ProcFile = ProcFile { name: "mountinfo", pattern: "/proc/<pid>/mountinfo" };

/// One open file with a reused buffer: reading it again allocates nothing.
#[derive(Debug)]
pub(crate) struct ProcReader {
    file: File,
    name: &'static ProcFile,
    buffer: Vec<u8>,
}

impl ProcReader {
    pub(crate) fn open(process: &Process, name: &'static ProcFile) -> Result<Self, Reason> {
        let file = process.open_file(name, OFlags::RDONLY)?;
        // Touched here, so that its pages are part of a later baseline.
        Ok(Self { file, name, buffer: vec![0; BUFFER_BYTES] })
    }

    /// The current contents of the file.
    pub(crate) fn read(&mut self) -> Result<&[u8], Reason> {
        read_from_start(&self.file, &mut self.buffer)
            .map_err(|error| Reason::unreadable(self.name.pattern, &error))?;
        Ok(&self.buffer)
    }
}

/// Fills `buffer` with the whole file, keeping its capacity.
fn read_from_start(file: &File, buffer: &mut Vec<u8>) -> io::Result<()> {
    let capacity = buffer.capacity().max(BUFFER_BYTES);
    buffer.resize(capacity, 0);
    let mut len = 0;
    loop {
        if len == buffer.len() {
            buffer.resize(len * 2, 0);
        }
        match file.read_at(&mut buffer[len..], onelayer_system::units::to_u64(len)) {
            Ok(0) => break,
            Ok(count) => len += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    buffer.truncate(len);
    Ok(())
}

/// The number after `Key:` in a line such as `VmRSS:     1752 kB`, in bytes.
pub(crate) fn kib_field(value: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(value).ok()?.trim();
    text.strip_suffix("kB")?.trim_end().parse::<u64>().ok()?.checked_mul(1024)
}

/// The lines of `text` as `(key, rest)`, split at the first colon.
pub(crate) fn keyed_lines(text: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    text.split(|&byte| byte == b'\n').filter_map(|line| {
        let colon = line.iter().position(|&byte| byte == b':')?;
        Some((&line[..colon], &line[colon + 1..]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_kib_are_strict() {
        assert_eq!(kib_field(b"\t    1752 kB"), Some(1752 * 1024));
        assert_eq!(kib_field(b"\t       0 kB"), Some(0));
        for broken in [&b" 12"[..], b" kB", b" -1 kB", b" 18446744073709551615 kB", b" 1 2 kB", b"\xff kB"] {
            assert_eq!(kib_field(broken), None, "{broken:?}");
        }
    }

    #[test]
    fn a_file_larger_than_the_buffer_is_read_whole_and_again() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("7");
        std::fs::create_dir(&directory).unwrap();
        let long: Vec<u8> =
            (0..BUFFER_BYTES * 3 + 5).map(|index| u8::try_from(index % 251).unwrap()).collect();
        std::fs::write(directory.join("status"), &long).unwrap();
        let process = Procfs::at(root.path()).process(7);
        let mut reader = ProcReader::open(&process, &STATUS).unwrap();
        assert_eq!(reader.read().unwrap(), long);
        std::fs::write(directory.join("status"), b"short").unwrap();
        assert_eq!(reader.read().unwrap(), b"short");
    }

    #[test]
    fn the_numbers_of_another_namespace_are_noticed() {
        assert!(Procfs::default().is_of_this_namespace());
        let root = tempfile::tempdir().unwrap();
        assert!(Procfs::at(root.path()).is_of_this_namespace(), "nothing says otherwise");
        std::os::unix::fs::symlink("4194311", root.path().join("self")).unwrap();
        assert!(!Procfs::at(root.path()).is_of_this_namespace());
    }

    #[test]
    fn a_pinned_process_that_ends_stays_ended() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Procfs::default().process(child.id());
        let mut reader = ProcReader::open(&process, &STATUS).unwrap();
        assert!(!reader.read().unwrap().is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(process.read(&STATUS).unwrap_err(), Reason::ProcessEnded);
        assert_eq!(reader.read().unwrap_err(), Reason::ProcessEnded);
    }

    #[test]
    fn a_missing_proc_and_a_missing_process_differ() {
        let missing = Procfs::at("/nonexistent/proc").myself().read(&STATUS).unwrap_err();
        assert_eq!(missing, Reason::Unreadable { file: "/proc/<pid>", errno: libc::ENOENT });
        let ended = Procfs::default().process(u32::MAX).read(&STATUS).unwrap_err();
        assert_eq!(ended, Reason::ProcessEnded);
    }
}
