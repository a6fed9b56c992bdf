//! How files are read: the modes, one read as the plan lists it, and the decision for each file
//! where the choice is left to the loader.
//!
//! The `source` stage makes the decisions, from what the system says of each file. The plan carries
//! them, so that they can be inspected before a byte is read and compared with what was done.

use std::fmt;

use crate::checkpoint::ShardId;
use crate::units::{ByteRange, HumanBytes};
pub use onelayer_system::file_system::FileSystem;

/// How files are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IoMode {
    /// For each file, and for each read of a partly resident file, the fastest of the other modes
    /// that leaves the page cache as it was; see [`IoDecision`]. Where most bytes are read direct
    /// and then cast or copied by the CPU, reads go through queues as in [`Self::Uring`].
    Auto,
    /// Mapped windows of the file, copied out by the kernel and unmapped after each read.
    Mmap,
    /// `pread` through the page cache.
    Buffered,
    /// `pread` past the page cache (`O_DIRECT`).
    Direct,
    /// The same, by queues of reads (io_uring) instead of one thread per read in flight. Where the
    /// kernel refuses queues, as [`Self::Direct`];
    /// [`LoadReport::queueing`](crate::LoadReport::queueing) tells.
    Uring,
}

/// One read, as the plan lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// The file.
    pub shard: ShardId,
    /// The bytes that an aligned source reads. Both ends are multiples of the plan's alignment; the
    /// end may be past the end of the file. Byte `extent.start()` of the file goes to byte 0 of the
    /// buffer.
    pub extent: ByteRange,
    /// The bytes that must arrive, inside `extent` and inside the file. Other bytes of the buffer
    /// may hold anything.
    pub payload: ByteRange,
}

impl fmt::Display for IoMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Mmap => "mmap",
            Self::Buffered => "buffered",
            Self::Direct => "direct",
            Self::Uring => "uring",
        })
    }
}

/// Host memory that a source holds beside the ring, in bytes, with `readers` threads that read at
/// most `read_bytes_max` at a time: one mapped window per reader, unmapped when its read ends. A
/// term of every plan. (Page tables are not counted: two pages per window, and one per 2 MiB of
/// it.)
#[must_use]
pub(crate) fn window_bytes(mode: IoMode, readers: u64, read_bytes_max: u64) -> u64 {
    match mode {
        IoMode::Mmap => readers.saturating_mul(read_bytes_max),
        IoMode::Auto | IoMode::Buffered | IoMode::Direct | IoMode::Uring => 0,
    }
}

/// How one file is to be read, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IoDecision {
    /// The file.
    pub shard: ShardId,
    /// [`IoMode::Direct`] or [`IoMode::Buffered`]. For a partly resident file, the mode of most of
    /// its bytes: each read is decided on its own.
    pub mode: IoMode,
    /// Why.
    pub reason: IoReason,
    /// Its length in bytes.
    pub file_bytes: u64,
    /// Bytes of it in the page cache, estimated from samples; `None` if unknown or irrelevant.
    pub resident_bytes: Option<u64>,
    /// How that was found; `None` as above.
    pub residency_by: Option<ResidencyBy>,
    /// Its file system; `None` if the system does not say.
    pub file_system: Option<FileSystem>,
    /// What happens to pages that its reads bring into the page cache.
    pub cache_effect: CacheEffect,
}

impl IoDecision {
    /// Share of the file in the page cache, 0 to 1, if known.
    #[must_use]
    pub fn resident_share(&self) -> Option<f64> {
        let share_of = |bytes: u64| {
            // In thousandths: samples are no more exact.
            let thousandths = u128::from(bytes) * 1000 / u128::from(self.file_bytes.max(1));
            f64::from(u32::try_from(thousandths).unwrap_or(1000).min(1000)) / 1000.0
        };
        self.resident_bytes.map(share_of)
    }

    fn is_like(&self, other: &Self) -> bool {
        (self.mode, self.reason, self.file_system, self.cache_effect, self.residency_by)
            == (other.mode, other.reason, other.file_system, other.cache_effect, other.residency_by)
    }
}

/// Files that are read the same way for the same reason: one line of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IoGroup {
    /// The decision; its bytes are the sum over all files.
    pub all: IoDecision,
    /// Number of files.
    pub files: u64,
}

impl IoGroup {
    /// The groups, in the order of their first files.
    #[must_use]
    pub fn of(decisions: &[IoDecision]) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for decision in decisions {
            match groups.iter_mut().find(|group| group.all.is_like(decision)) {
                Some(group) => {
                    group.files += 1;
                    group.all.file_bytes = group.all.file_bytes.saturating_add(decision.file_bytes);
                    group.all.resident_bytes = group
                        .all
                        .resident_bytes
                        .zip(decision.resident_bytes)
                        .map(|(all, more)| all.saturating_add(more));
                }
                None => groups.push(Self { all: *decision, files: 1 }),
            }
        }
        groups
    }
}

/// `direct: 4 files, 15.9 GiB on ext4: not in the page cache; page cache untouched`
impl fmt::Display for IoGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let IoDecision { mode, reason, file_bytes, file_system, cache_effect, .. } = self.all;
        let files = if self.files == 1 { "file" } else { "files" };
        write!(f, "{mode}: {} {files}, {}", self.files, HumanBytes(file_bytes))?;
        if let Some(file_system) = file_system {
            write!(f, " on {file_system}")?;
        }
        write!(f, ": {reason}")?;
        match self.all.resident_share() {
            Some(share) if reason == IoReason::PartlyResident => write!(f, " ({:.0} %)", 100.0 * share)?,
            _ => {}
        }
        write!(f, "; {cache_effect}")
    }
}

/// Why a file is read as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum IoReason {
    /// Hardly any of it is in the page cache.
    Cold,
    /// Nearly all of it is in the page cache.
    Resident,
    /// A part of it is in the page cache: each read goes the way that suits its bytes.
    PartlyResident,
    /// Its file system is memory: the page cache is the file.
    Memory,
    /// One read takes the whole file.
    Small,
    /// Its bytes come over a network, where the kernel's read-ahead is worth more than a saved
    /// copy.
    Network,
    /// A program serves its bytes (FUSE), and may have its own cache.
    Program,
    /// Its file system refuses direct I/O.
    NoDirectIo,
    /// The page cache cannot be asked: buffered reads are tried and timed.
    ResidencyUnknown,
}

impl IoReason {
    /// Its name in reports, such as `partly_resident`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Resident => "resident",
            Self::PartlyResident => "partly_resident",
            Self::Memory => "memory",
            Self::Small => "small",
            Self::Network => "network",
            Self::Program => "program",
            Self::NoDirectIo => "no_direct_io",
            Self::ResidencyUnknown => "residency_unknown",
        }
    }
}

impl fmt::Display for IoReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Cold => "not in the page cache",
            Self::Resident => "in the page cache",
            Self::PartlyResident => "partly in the page cache, split by range",
            Self::Memory => "in memory",
            Self::Small => "small",
            Self::Network => "comes over a network",
            Self::Program => "served by a program (FUSE)",
            Self::NoDirectIo => "no direct i/o",
            Self::ResidencyUnknown => "unknown what is in the page cache",
        })
    }
}

/// How the pages of a file in the page cache are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ResidencyBy {
    /// `cachestat`, by descriptor.
    Cachestat,
    /// `mincore`, on a mapping.
    Mincore,
    /// Reads of single bytes with `RWF_NOWAIT`: an estimate.
    ReadNowait,
}

impl ResidencyBy {
    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cachestat => "cachestat",
            Self::Mincore => "mincore",
            Self::ReadNowait => "read_nowait",
        }
    }
}

/// What happens to pages that reads bring into the page cache. Pages that were there before always
/// stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum CacheEffect {
    /// No page is brought in: reads bypass the page cache, or find their bytes there.
    Untouched,
    /// The kernel drops them when the read ends (`RWF_DONTCACHE`).
    Uncached,
    /// The loader drops them after each read (`POSIX_FADV_DONTNEED`).
    DroppedBehind,
    /// They stay, since they cannot be told from pages that were there before.
    Kept,
}

impl CacheEffect {
    /// Its name in reports, such as `dropped_behind`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Untouched => "untouched",
            Self::Uncached => "uncached",
            Self::DroppedBehind => "dropped_behind",
            Self::Kept => "kept",
        }
    }
}

impl fmt::Display for CacheEffect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Untouched => "page cache untouched",
            Self::Uncached => "new pages forgotten by the kernel",
            Self::DroppedBehind => "new pages dropped behind",
            Self::Kept => "new pages stay in the page cache",
        })
    }
}

/// Bytes of a load by the way they were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IoWays {
    /// Past the page cache.
    pub direct_bytes: u64,
    /// Through the page cache.
    pub buffered_bytes: u64,
    /// Through windows of a mapping.
    pub mapped_bytes: u64,
    /// Of these, bytes that went another way than planned, because the page cache had changed.
    pub corrected_bytes: u64,
    /// Bytes that were dropped from the page cache after reads, in whole pages. Pages that the
    /// kernel drops by itself do not count.
    pub dropped_behind_bytes: u64,
}

/// True if most of the bytes are to be read direct.
pub(crate) fn is_mostly_direct(io: IoMode, decisions: &[IoDecision]) -> bool {
    match io {
        IoMode::Direct | IoMode::Uring => true,
        IoMode::Mmap | IoMode::Buffered => false,
        IoMode::Auto => is_most(decisions, |decision| decision.mode == IoMode::Direct),
    }
}

/// True if the files for which `is_meant` is true have more than half of all bytes.
pub(crate) fn is_most(decisions: &[IoDecision], is_meant: impl Fn(&IoDecision) -> bool) -> bool {
    let bytes = |decision: &IoDecision| decision.file_bytes;
    let meant_bytes: u64 = decisions.iter().filter(|decision| is_meant(decision)).map(bytes).sum();
    meant_bytes > decisions.iter().map(bytes).sum::<u64>() / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_told_in_thousandths_and_end_at_the_whole() {
        let share = |resident_bytes, file_bytes| {
            let decision = IoDecision {
                shard: ShardId(0),
                mode: IoMode::Buffered,
                reason: IoReason::Resident,
                file_bytes,
                resident_bytes,
                residency_by: None,
                file_system: None,
                cache_effect: CacheEffect::Kept,
            };
            decision.resident_share()
        };
        assert_eq!(share(None, 100), None);
        let known = [(0, 100, 0.0), (1, 3, 0.333), (50, 100, 0.5), (99_999, 100_000, 0.999), (100, 100, 1.0)];
        for (resident_bytes, file_bytes, expected) in known {
            assert_eq!(share(Some(resident_bytes), file_bytes), Some(expected));
        }
        assert_eq!(share(Some(4096), 100), Some(1.0), "a page is more than the file");
        assert_eq!(share(Some(0), 0), Some(0.0));
        assert_eq!(share(Some(u64::MAX / 2), u64::MAX), Some(0.499));
    }

    #[test]
    fn programs_know_these_words() {
        let residency = [ResidencyBy::Cachestat, ResidencyBy::Mincore, ResidencyBy::ReadNowait];
        assert_eq!(residency.map(ResidencyBy::name), ["cachestat", "mincore", "read_nowait"]);
        let cache_effect =
            [CacheEffect::Untouched, CacheEffect::Uncached, CacheEffect::DroppedBehind, CacheEffect::Kept];
        assert_eq!(cache_effect.map(CacheEffect::name), ["untouched", "uncached", "dropped_behind", "kept"]);
    }
}
