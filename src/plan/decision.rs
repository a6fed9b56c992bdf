//! How one file is to be read where the choice is left to the loader, and why.
//!
//! The stage below makes these from what the system says of each file; the plan carries them, so
//! that they can be looked at before a byte is read and compared afterwards with what was done.

use std::fmt;

use super::IoMode;
use crate::checkpoint::ShardId;
use crate::units::HumanBytes;
pub use onelayer_system::file_system::FileSystem;

/// How one file is to be read, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IoDecision {
    /// The file.
    pub shard: ShardId,
    /// How it is read: [`IoMode::Direct`] or [`IoMode::Buffered`]. Of a file that is partly
    /// resident, how most of it is: each of its reads is decided on its own.
    pub mode: IoMode,
    /// Why.
    pub reason: IoReason,
    /// Its length in bytes.
    pub file_bytes: u64,
    /// How much of it is in the page cache, in bytes, as samples tell; `None` where nobody tells,
    /// or where it does not matter.
    pub resident_bytes: Option<u64>,
    /// Who told; `None` as above.
    pub residency_by: Option<ResidencyBy>,
    /// What holds it; `None` if the system does not say.
    pub file_system: Option<FileSystem>,
    /// What becomes of pages that its reads bring into the page cache.
    pub manners: CacheManners,
}

impl IoDecision {
    /// What share of the file is in the page cache, 0 to 1, as far as it is known.
    #[must_use]
    pub fn resident_share(&self) -> Option<f64> {
        let share_of = |bytes: u64| {
            // In thousandths: a sample tells no more.
            let thousandths = u128::from(bytes) * 1000 / u128::from(self.file_bytes.max(1));
            f64::from(u32::try_from(thousandths).unwrap_or(1000).min(1000)) / 1000.0
        };
        self.resident_bytes.map(share_of)
    }

    fn is_like(&self, other: &Self) -> bool {
        (self.mode, self.reason, self.file_system, self.manners, self.residency_by)
            == (other.mode, other.reason, other.file_system, other.manners, other.residency_by)
    }
}

/// Files that are read alike, for the same reason: what text says in one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IoGroup {
    /// One of them; its bytes are those of all.
    pub all: IoDecision,
    /// How many there are.
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
        let IoDecision { mode, reason, file_bytes, file_system, manners, .. } = self.all;
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
        write!(f, "; {manners}")
    }
}

/// Why a file is read as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum IoReason {
    /// Hardly anything of it is in the page cache.
    Cold,
    /// Nearly all of it is in the page cache.
    Resident,
    /// A part of it is in the page cache: each read goes the way that suits its bytes.
    PartlyResident,
    /// Its file system is memory: there is nothing beside the page cache.
    Memory,
    /// One read takes it whole.
    Small,
    /// Its bytes come over a network, where the kernel's reading ahead is worth more than a saved
    /// copy.
    Network,
    /// A program gets its bytes, and may have a cache of its own.
    Program,
    /// Its file system refuses direct I/O.
    NoDirectIo,
    /// Nobody tells what of it is in the page cache: it is tried.
    ResidencyUnknown,
}

impl IoReason {
    /// A word for programs, such as `partly_resident`.
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
            Self::Memory => "made of memory",
            Self::Small => "small",
            Self::Network => "comes over a network",
            Self::Program => "a program gets the bytes",
            Self::NoDirectIo => "no direct i/o",
            Self::ResidencyUnknown => "nobody tells what is in the page cache",
        })
    }
}

/// Who tells what of a file is in the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ResidencyBy {
    /// `cachestat`, by descriptor.
    Cachestat,
    /// `mincore`, on a mapping.
    Mincore,
    /// Reads of single bytes that must not wait: an estimate.
    ReadNowait,
}

impl ResidencyBy {
    /// A word for programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cachestat => "cachestat",
            Self::Mincore => "mincore",
            Self::ReadNowait => "read_nowait",
        }
    }
}

/// What becomes of pages that reads bring into the page cache. Pages that were there before always
/// stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum CacheManners {
    /// None are brought in: reads go past the page cache, or find there what they want.
    Untouched,
    /// The kernel forgets them when the read is over (`RWF_DONTCACHE`).
    Uncached,
    /// They are dropped behind the reads (`POSIX_FADV_DONTNEED`).
    DroppedBehind,
    /// They stay: nobody tells them from those that were there before.
    Kept,
}

impl CacheManners {
    /// A word for programs, such as `dropped_behind`.
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

impl fmt::Display for CacheManners {
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
    /// Of these, bytes that went another way than the plan said, because the page cache was not as
    /// the plan found it.
    pub corrected_bytes: u64,
    /// Bytes of the page cache that were dropped behind reads, whole pages; what the kernel forgets
    /// by itself is not counted.
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

/// True if the files that are meant have more than half of the bytes.
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
                manners: CacheManners::Kept,
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
        let manners = [
            CacheManners::Untouched,
            CacheManners::Uncached,
            CacheManners::DroppedBehind,
            CacheManners::Kept,
        ];
        assert_eq!(manners.map(CacheManners::name), ["untouched", "uncached", "dropped_behind", "kept"]);
    }
}
