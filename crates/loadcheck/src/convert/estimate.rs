//! Estimates the time of a conversion from a short measurement: the source is read for a moment in
//! the way of a conversion, and random bytes are written to an unnamed file where the target will
//! be, and synced.
//!
//! ```text
//! one device    bytes / read speed + bytes / write speed      they take turns
//! two devices   the larger of the two
//! many files    files * syncs of each * time of a sync, if that is more: a file is published while the next one is written
//! ```
//!
//! It ignores other users of the disk, caches of devices, and blocks that the kernel shares instead
//! of copying.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use onelayer::checkpoint::Checkpoint;
use onelayer::load::{LoadError, Loader};
use onelayer::units::MIB;
use onelayer::{IoMode, Target, Window};
use rustix::fs::{CWD, Mode, OFlags, fcntl_setfl, openat};

use crate::numbers::to_f64;
use crate::report::Estimate;

/// Limits of the read measurement.
const READ_BYTES_MAX: u64 = 256 * MIB;
const READ_TIME_MAX: Duration = Duration::from_millis(700);
/// Interval between checks of these limits.
const READ_LOOK: Duration = Duration::from_millis(2);
/// Size of the write measurement, and of its blocks.
const WRITE_BYTES: u64 = 64 * MIB;
const WRITE_BLOCK_BYTES: u64 = 4 * MIB;
/// Number of measured syncs.
const SYNCS: u32 = 3;
/// Syncs for each published file: its data, its folder, and two lines of the journal.
const SYNCS_OF_A_FILE: u64 = 4;
/// The smallest write that direct I/O accepts on every disk.
const SMALL_WRITE_BYTES: usize = 4096;

/// A conversion to estimate.
#[derive(Debug)]
pub(crate) struct Forecast<'a> {
    /// The source.
    pub(crate) checkpoint: &'a Checkpoint,
    /// Host budget for reading.
    pub(crate) budget_bytes: u64,
    /// The target directory; need not exist.
    pub(crate) target: &'a Path,
    /// Bytes that the conversion will read.
    pub(crate) read_bytes: u64,
    /// Bytes that it will write.
    pub(crate) write_bytes: u64,
    /// Files that it will write.
    pub(crate) files: u64,
    /// Free bytes in the target's file system.
    pub(crate) free_bytes: u64,
}

impl Forecast<'_> {
    /// Measures. Returns the estimate, and the reason if it has no time.
    pub(crate) fn measure(&self) -> (Estimate, Option<String>) {
        let mut estimate = Estimate {
            source: "estimated".to_owned(),
            seconds: None,
            read_bytes_per_second: None,
            write_bytes_per_second: None,
            sync_seconds: None,
            same_device: None,
        };
        let reason = self.measure_into(&mut estimate).err();
        (estimate, reason)
    }

    fn measure_into(&self, estimate: &mut Estimate) -> Result<(), String> {
        let folder = nearest_folder(self.target);
        let same_device = self.is_same_device(folder);
        estimate.same_device = same_device;
        let read = read_speed(self.checkpoint, self.budget_bytes)?;
        estimate.read_bytes_per_second = Some(read);
        let (write, sync) = self.write_speed(folder)?;
        estimate.write_bytes_per_second = Some(write);
        estimate.sync_seconds = Some(sync.as_secs_f64());
        let reading = to_f64(self.read_bytes) / to_f64(read.max(1));
        let writing = to_f64(self.write_bytes) / to_f64(write.max(1));
        // If unknown, assume that they share a device.
        let turns = same_device != Some(false);
        let moving = if turns { reading + writing } else { reading.max(writing) };
        let publishing = to_f64(self.files.saturating_mul(SYNCS_OF_A_FILE)) * sync.as_secs_f64();
        estimate.seconds = Some(moving.max(publishing));
        Ok(())
    }

    fn is_same_device(&self, folder: &Path) -> Option<bool> {
        let target = fs::metadata(folder).ok()?.dev();
        let mut shards = self.checkpoint.shards().iter();
        shards.try_fold(false, |same, shard| Some(same | (fs::metadata(&shard.path).ok()?.dev() == target)))
    }

    fn write_speed(&self, folder: &Path) -> Result<(u64, Duration), String> {
        if self.free_bytes < 2 * WRITE_BYTES {
            return Err("there is too little room in the target to measure how fast it is written".to_owned());
        }
        write_speed(folder)
            .map_err(|error| format!("{}: cannot measure how fast it is written: {error}", folder.display()))
    }
}

/// The target, or the nearest parent that exists.
fn nearest_folder(target: &Path) -> &Path {
    let existing = target.ancestors().find(|folder| !folder.as_os_str().is_empty() && folder.is_dir());
    existing.unwrap_or(Path::new("."))
}

/// Bytes per second of reading the source with direct I/O.
fn read_speed(checkpoint: &Checkpoint, budget_bytes: u64) -> Result<u64, String> {
    let failed = |error: &LoadError| format!("cannot measure how fast the source is read: {error}");
    let loader = Loader::builder(Target::None)
        .io(IoMode::Direct)
        .host_budget(budget_bytes)
        .window(Window::All)
        .build()
        .map_err(|error| failed(&error))?;
    let mut stream = loader.stream(checkpoint).map_err(|error| failed(&error))?;
    let (progress, cancel) = (stream.progress(), stream.cancel_handle());
    let start = Instant::now();
    let (elapsed, ended) = thread::scope(|scope| {
        let taker = scope.spawn(|| stream.by_ref().find_map(Result::err));
        while !taker.is_finished()
            && start.elapsed() < READ_TIME_MAX
            && progress.read_bytes() < READ_BYTES_MAX
        {
            thread::sleep(READ_LOOK);
        }
        let elapsed = start.elapsed();
        cancel.cancel();
        (elapsed, taker.join())
    });
    match ended {
        Ok(None | Some(LoadError::Cancelled)) => {}
        Ok(Some(error)) => return Err(failed(&error)),
        Err(_) => return Err("the measurement of how fast the source is read failed".to_owned()),
    }
    if let Some(fallback) = stream.report().fallbacks.first() {
        let path = checkpoint.shard(fallback.shard).path.display();
        return Err(format!("{path}: cannot be read past the page cache: {}", fallback.reason));
    }
    per_second(progress.read_bytes(), elapsed).ok_or_else(|| "nothing was read in time".to_owned())
}

/// Bytes per second of writing and syncing random bytes in `folder`, and the time to sync a few
/// bytes.
fn write_speed(folder: &Path) -> io::Result<(u64, Duration)> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let descriptor = openat(CWD, folder, flags | OFlags::DIRECT, mode)
        .or_else(|_| openat(CWD, folder, flags, mode))
        .map_err(|errno| match errno {
            rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR => {
                io::Error::other("the file system has no unnamed files")
            }
            errno => errno.into(),
        })?;
    let mut file = File::from(descriptor);
    // A mapping is aligned to pages, as direct I/O requires.
    let mut block = MmapMut::map_anon(usize::try_from(WRITE_BLOCK_BYTES).expect("a few MiB fit"))?;
    let mut noise = noise();
    let mut elapsed = Duration::ZERO;
    for _ in 0..WRITE_BYTES / WRITE_BLOCK_BYTES {
        noise.fill(&mut block);
        let start = Instant::now();
        if let Err(error) = file.write_all(&block) {
            // Some file systems accept O_DIRECT at open and refuse it here.
            if error.kind() != io::ErrorKind::InvalidInput {
                return Err(error);
            }
            file = through_the_page_cache(file)?;
            file.write_all(&block)?;
        }
        elapsed += start.elapsed();
    }
    let start = Instant::now();
    file.sync_all()?;
    elapsed += start.elapsed();
    let start = Instant::now();
    for _ in 0..SYNCS {
        file.write_all(&block[..SMALL_WRITE_BYTES])?;
        file.sync_all()?;
    }
    let sync = start.elapsed() / SYNCS;
    Ok((per_second(WRITE_BYTES, elapsed).unwrap_or(u64::MAX), sync))
}

fn through_the_page_cache(file: File) -> io::Result<File> {
    let descriptor = OwnedFd::from(file);
    fcntl_setfl(&descriptor, OFlags::empty())?;
    Ok(descriptor.into())
}

/// `None` if the time is too short to divide by.
fn per_second(bytes: u64, elapsed: Duration) -> Option<u64> {
    let nanoseconds = elapsed.as_nanos();
    if nanoseconds == 0 || bytes == 0 {
        return None;
    }
    u64::try_from(u128::from(bytes) * 1_000_000_000 / nanoseconds).ok()
}

/// An endless stream of random bytes, which no disk can compress or deduplicate.
fn noise() -> blake3::OutputReader {
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&now.as_nanos().to_le_bytes()).update(&std::process::id().to_le_bytes());
    hasher.finalize_xof()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_folder_exists() {
        let place = tempfile::tempdir().unwrap();
        assert_eq!(nearest_folder(&place.path().join("a/b/c")), place.path());
        assert_eq!(nearest_folder(place.path()), place.path());
        assert_eq!(nearest_folder(Path::new("no-such-folder/x")), Path::new("."));
        fs::write(place.path().join("file"), "x").unwrap();
        assert_eq!(nearest_folder(&place.path().join("file/x")), place.path());
    }

    #[test]
    fn writing_is_measured_and_leaves_nothing() {
        let place = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        match write_speed(place.path()) {
            Ok((speed, sync)) => {
                assert!(speed > 100 << 10 && sync < Duration::from_secs(10), "{speed} {sync:?}");
            }
            Err(error) => assert!(error.to_string().contains("unnamed"), "{error}"),
        }
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
        assert!(write_speed(&place.path().join("none")).is_err());
    }

    #[test]
    fn noise_does_not_repeat() {
        let mut noise = noise();
        let mut blocks = [[0_u8; 64]; 2];
        for block in &mut blocks {
            noise.fill(block);
        }
        assert_ne!(blocks[0], blocks[1]);
    }

    #[test]
    fn speeds() {
        assert_eq!(per_second(500, Duration::from_millis(250)), Some(2000));
        assert_eq!(per_second(500, Duration::ZERO), None);
        assert_eq!(per_second(0, Duration::from_secs(1)), None);
    }
}
