//! Direct I/O and the page cache where checkpoints are, tried on an existing file or on an unnamed
//! one.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use onelayer_probe::{FileSystem, Measured, Residency, ResidencyMethod, residency};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};

use crate::report::Check;

/// An alignment that every direct read accepts.
const BLOCK_BYTES: usize = 4096;
/// Size of the unnamed file.
const TRIED_BYTES: usize = 1 << 20;

/// A file to try things on.
struct Tried {
    file: File,
    /// The path for queries of the page cache.
    path: PathBuf,
    name: String,
}

/// Both checks.
pub(super) fn files(path: &Path) -> Vec<Check> {
    let place = path.display();
    match tried(path) {
        Ok(tried) => {
            let cache = residency(&tried.path);
            let system = FileSystem::holding(&tried.file).ok();
            let name = system.and_then(FileSystem::name).unwrap_or("unknown file system");
            let is_network = system.is_some_and(FileSystem::is_network);
            let direct = Direct {
                system: name,
                is_network,
                alignment: alignment(&tried.file),
                read: read(&tried.file),
            };
            vec![judge_direct(&tried.name, &direct), judge_cache(name, cache)]
        }
        Err(error) => vec![
            Check::missing("direct_io", format!("{place}: {error}"), "nothing to try it on").fix(FIX_PATH),
            Check::missing("page_cache", format!("{place}: {error}"), "nothing to try it on").fix(FIX_PATH),
        ],
    }
}

const FIX_PATH: &str = "loadcheck doctor PATH, with a checkpoint or a folder that can be written to";

/// The file, or the largest file of the folder, or a new unnamed file in it.
fn tried(path: &Path) -> io::Result<Tried> {
    let existing = if path.is_dir() { largest(path)? } else { Some(path.to_owned()) };
    if let Some(path) = existing {
        if !fs::metadata(&path)?.is_file() {
            // Opening a pipe would wait for a writer.
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a regular file nor a folder"));
        }
        let file = File::open(&path)?;
        let name = path.display().to_string();
        return Ok(Tried { file, path, name });
    }
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?);
    let bytes: Vec<u8> = (0..TRIED_BYTES).map(|index| index.to_le_bytes()[0]).collect();
    file.write_all(&bytes)?;
    // Direct reads need the bytes on the disk.
    file.sync_all()?;
    let shown = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    Ok(Tried { file, path: shown, name: format!("a file without a name in {}", path.display()) })
}

fn largest(folder: &Path) -> io::Result<Option<PathBuf>> {
    let mut found: Option<(u64, PathBuf)> = None;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let Ok(metadata) = fs::metadata(&path) else { continue };
        // An unreadable file says nothing about the file system.
        let is_better = found.as_ref().is_none_or(|(largest, _)| metadata.len() > *largest);
        if metadata.is_file() && metadata.len() > 0 && is_better && File::open(&path).is_ok() {
            found = Some((metadata.len(), path));
        }
    }
    Ok(found.map(|(_, path)| path))
}

/// Findings about direct I/O on a file.
struct Direct<'a> {
    system: &'a str,
    is_network: bool,
    /// Alignment of addresses and of offsets; 0 means no direct I/O.
    alignment: Option<(u32, u32)>,
    /// Bytes of the trial read.
    read: io::Result<usize>,
}

fn alignment(file: &File) -> Option<(u32, u32)> {
    let status = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let answered = StatxFlags::from_bits_retain(status.stx_mask).contains(StatxFlags::DIOALIGN);
    answered.then_some((status.stx_dio_mem_align, status.stx_dio_offset_align))
}

/// Reads the first block with direct I/O, through a new descriptor.
fn read(file: &File) -> io::Result<usize> {
    let again = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let flags = rustix::fs::fcntl_getfl(&again)? | OFlags::DIRECT;
    rustix::fs::fcntl_setfl(&again, flags)?;
    let mut buffer = vec![0; 2 * BLOCK_BYTES];
    let start = buffer.as_ptr().align_offset(BLOCK_BYTES);
    let block = buffer.get_mut(start..start + BLOCK_BYTES).unwrap_or_default();
    again.read_at(block, 0)
}

fn judge_direct(name: &str, direct: &Direct<'_>) -> Check {
    const CONSEQUENCE: &str =
        "loads from there go through the page cache: slower when cold, and charged to the container";
    const FIX: &str = "keep checkpoints on a local disk (ext4, xfs, btrfs), in a container on a volume";
    let system = direct.system;
    match (&direct.read, direct.alignment) {
        (Err(error), _) => {
            Check::missing("direct_io", format!("{system}, {name}: {error}"), CONSEQUENCE).fix(FIX)
        }
        (Ok(0), _) => {
            Check::limited("direct_io", format!("{system}, {name}: nothing was read"), CONSEQUENCE).fix(FIX)
        }
        (Ok(_), Some((0, _) | (_, 0))) => {
            let found = format!("{system}: accepted, but the file system says that it has none");
            Check::limited("direct_io", found, CONSEQUENCE).fix(FIX)
        }
        (Ok(_), _) if matches!(system, "tmpfs" | "ramfs") => {
            Check::ok("direct_io", format!("{system}: files are memory, there is no cache to go past"))
        }
        (Ok(_), alignment) => {
            let alignment = alignment.map_or_else(
                || "alignment not told".to_owned(),
                |(memory, offset)| format!("aligned to {offset} bytes (in memory to {memory})"),
            );
            let network = if direct.is_network { ", over a network" } else { "" };
            Check::ok("direct_io", format!("{system}{network}: a block was read, {alignment}"))
        }
    }
}

fn judge_cache(system: &str, cache: Measured<Residency>) -> Check {
    match cache {
        Measured::Value(Residency { method: ResidencyMethod::Cachestat, .. }) => {
            Check::ok("page_cache", format!("{system}: cachestat tells how much of a file is cached"))
        }
        Measured::Value(_) => Check::ok("page_cache", format!("{system}: mincore tells how much of a file is cached")),
        Measured::Unavailable(reason) => Check::limited(
            "page_cache",
            format!("{system}: {reason}"),
            "--cache cold and warm work, but are reported as unchecked",
        )
        .fix("own the files, or be allowed to write them; or a kernel from 6.5 on, with cachestat allowed by seccomp"),
    }
}

#[cfg(test)]
mod tests {
    use onelayer_probe::Reason;

    use super::*;
    use crate::report::State;

    fn direct(alignment: Option<(u32, u32)>, read: io::Result<usize>) -> Check {
        judge_direct("f", &Direct { system: "ext4", is_network: false, alignment, read })
    }

    #[test]
    fn direct_reads() {
        assert_eq!(direct(Some((4, 512)), Ok(4096)).state, State::Ok);
        assert!(direct(None, Ok(100)).found.contains("not told"));
        assert_eq!(direct(Some((0, 0)), Ok(4096)).state, State::Limited);
        assert_eq!(direct(None, Ok(0)).state, State::Limited);
        let refused = direct(None, Err(io::Error::from(io::ErrorKind::InvalidInput)));
        assert!(refused.state == State::Missing && refused.fix.is_some());
    }

    #[test]
    fn the_page_cache() {
        let value = |method| Measured::Value(Residency { file_bytes: 1, resident_bytes: 0, method });
        assert!(judge_cache("x", value(ResidencyMethod::Cachestat)).found.contains("cachestat"));
        assert!(judge_cache("x", value(ResidencyMethod::Mincore)).found.contains("mincore"));
        let check = judge_cache("x", Measured::Unavailable(Reason::NotHere("secret")));
        assert!(check.state == State::Limited && check.found.contains("secret"));
    }

    #[test]
    fn a_folder_is_tried_with_its_largest_file_or_one_of_our_own() {
        let place = tempfile::tempdir().unwrap();
        match tried(place.path()) {
            Ok(own) => {
                assert!(own.name.contains("without a name"));
                assert_eq!(own.file.metadata().unwrap().len(), 1 << 20);
            }
            Err(error) => onelayer_testing::skipped(format!("no file without a name here: {error}")),
        }
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0, "nothing stays");
        fs::write(place.path().join("small"), "x").unwrap();
        fs::write(place.path().join("large"), [1; 9000]).unwrap();
        assert!(tried(place.path()).unwrap().name.ends_with("large"));
        assert!(tried(&place.path().join("gone")).is_err());
        rustix::fs::mkfifoat(rustix::fs::CWD, place.path().join("pipe"), Mode::RUSR | Mode::WUSR).unwrap();
        assert!(tried(&place.path().join("pipe")).is_err(), "and does not wait for a writer");
        let checks = files(&place.path().join("gone"));
        assert!(checks.iter().all(|check| check.state == State::Missing));
    }
}
