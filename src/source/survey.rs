//! What the system says of each file before a load is planned, and the decision that follows.
//!
//! A survey makes a handful of system calls per file, and reads almost nothing. A decision may be
//! out of date when a range is read; `auto` looks again.
//!
//! ```text
//! statfs, statx, O_DIRECT --+
//! cachestat on samples -----+--> Facts --decide--> IoDecision
//!   else mincore, else reads of single bytes that must not wait
//! ```

use std::fs::File;

use rustix::fs::Advice;

use super::system::{DirectSupport, System};
use super::{IoDecision, IoMode, SourceError, alignment_least, direct_support};
use crate::checkpoint::{Checkpoint, Shard, ShardId};
use crate::plan::{CacheEffect, IoReason, ResidencyBy};
use crate::units::{Alignment, ByteRange, MIB};
use onelayer_system::file_system::FileSystem;
use onelayer_system::page_cache::page_bytes;

use super::system::Kernel;

/// Files up to this size take one or two reads: nothing to decide.
const SMALL_FILE_BYTES: u64 = 4 * MIB;
/// Files up to this size are looked up as a whole, larger ones by samples.
const ASKED_WHOLE_BYTES: u64 = 64 * MIB;
/// Number of samples of a larger file, and the size of each.
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = MIB;
/// Single bytes that are read to estimate the resident part of a range.
const BYTES_TRIED: u64 = 8;

/// The result of [`survey`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Survey {
    /// As [`alignment`](super::alignment).
    pub alignment: Alignment,
    /// How each file is to be read, in the order of the files.
    pub decisions: Vec<IoDecision>,
}

/// Looks at each file of a checkpoint and decides how to read it.
///
/// # Errors
/// As [`alignment`](super::alignment). Facts that the system does not tell are no error; the
/// decision takes that into account.
pub fn survey(checkpoint: &Checkpoint) -> Result<Survey, SourceError> {
    survey_with(&Kernel, checkpoint.shards())
}

pub(super) fn survey_with<S: System>(system: &S, shards: &[Shard]) -> Result<Survey, SourceError> {
    let mut survey = Survey { alignment: alignment_least(), decisions: Vec::with_capacity(shards.len()) };
    for (index, shard) in (0..).zip(shards) {
        let path = &shard.path;
        let (file, identity) = system.open(path).map_err(|fault| SourceError::from_open(path, fault))?;
        let support = direct_support(system, &file, path)?;
        survey.alignment = survey.alignment.max(support.alignment());
        let facts = Facts::gather(system, &file, identity.len_bytes, support);
        survey.decisions.push(decide(ShardId(index), &facts));
    }
    Ok(survey)
}

/// The facts about one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Facts {
    file_bytes: u64,
    file_system: Option<FileSystem>,
    /// Direct I/O was not refused.
    has_direct_io: bool,
    /// Bytes of it in the page cache, and how they were found.
    resident: Option<(ResidencyBy, u64)>,
    /// The kernel supports `RWF_DONTCACHE` on it.
    has_uncached_reads: bool,
}

impl Facts {
    fn gather<S: System>(system: &S, file: &File, file_bytes: u64, support: DirectSupport) -> Self {
        let file_system = system.file_system(file).ok();
        let mut facts = Self {
            file_bytes,
            file_system,
            has_direct_io: support != DirectSupport::None && can_be_direct(system, file),
            resident: None,
            has_uncached_reads: false,
        };
        if file_system.is_some_and(FileSystem::is_memory) {
            return facts;
        }
        advise_random(file);
        let all = ByteRange::with_len(0, file_bytes).expect("a range that begins at zero");
        let by = residency_lookup(system, file, file_system);
        facts.resident = by.and_then(|by| Some((by, resident_in_samples(system, by, file, all)?)));
        facts.has_uncached_reads = file_bytes > 0 && system.read_uncached(file, &mut [0], 0).is_ok();
        facts
    }
}

/// Some file systems do not report direct I/O and refuse the flag.
fn can_be_direct<S: System>(system: &S, file: &File) -> bool {
    let accepts = system.set_direct(file, true).is_ok();
    // Cleared again: single bytes are read next.
    accepts && system.set_direct(file, false).is_ok()
}

/// Tells the kernel not to read ahead: such reads find their pages in the page cache, or must not
/// bring any in.
pub(super) fn advise_random(file: &File) {
    let _ = rustix::fs::fadvise(file, 0, None, Advice::Random);
}

/// The first way of finding resident pages that works on this file.
fn residency_lookup<S: System>(
    system: &S,
    file: &File,
    file_system: Option<FileSystem>,
) -> Option<ResidencyBy> {
    let first = ByteRange::new(0, 1)?;
    let is_overlay = file_system.is_some_and(FileSystem::is_overlay);
    if !is_overlay && system.pages_by_cachestat(file, first).is_ok() {
        Some(ResidencyBy::Cachestat)
    } else if system.pages_by_mincore(file, first).is_ok() {
        Some(ResidencyBy::Mincore)
    } else {
        system.is_byte_at_hand(file, 0).ok().map(|_| ResidencyBy::ReadNowait)
    }
}

/// Bytes of the range in the page cache, at most the range; `None` if the lookup fails. The range
/// must lie inside the file.
pub(super) fn resident_bytes<S: System>(
    system: &S,
    by: ResidencyBy,
    file: &File,
    bytes: ByteRange,
) -> Option<u64> {
    let pages = match by {
        ResidencyBy::Cachestat => system.pages_by_cachestat(file, bytes),
        ResidencyBy::Mincore => system.pages_by_mincore(file, bytes),
        ResidencyBy::ReadNowait => return resident_by_bytes(system, file, bytes),
    };
    Some(pages.ok()?.saturating_mul(page_bytes()).min(bytes.len_bytes()))
}

/// An estimate from single bytes, spread evenly, up to the first one that is missing: each missing
/// byte makes the kernel bring its page in.
fn resident_by_bytes<S: System>(system: &S, file: &File, bytes: ByteRange) -> Option<u64> {
    let last = bytes.len_bytes().checked_sub(1)?;
    let mut at_hand = 0;
    for turn in 0..BYTES_TRIED {
        let offset_bytes = bytes.start() + last / (BYTES_TRIED - 1) * turn;
        if !system.is_byte_at_hand(file, offset_bytes).ok()? {
            break;
        }
        at_hand += 1;
    }
    // Divided first: the product could overflow.
    Some(if at_hand == BYTES_TRIED { bytes.len_bytes() } else { bytes.len_bytes() / BYTES_TRIED * at_hand })
}

fn resident_in_samples<S: System>(system: &S, by: ResidencyBy, file: &File, all: ByteRange) -> Option<u64> {
    if all.is_empty() {
        return Some(0);
    }
    if all.len_bytes() <= ASKED_WHOLE_BYTES {
        return resident_bytes(system, by, file, all);
    }
    let stride_bytes = all.len_bytes() / SAMPLES;
    let mut resident = 0;
    for sample in 0..SAMPLES {
        let start = (sample * stride_bytes).next_multiple_of(page_bytes());
        let asked = ByteRange::with_len(start, SAMPLE_BYTES)?.intersect(all)?;
        resident += resident_bytes(system, by, file, asked)?;
    }
    let asked_bytes = u128::from(SAMPLES * SAMPLE_BYTES);
    let scaled = u128::from(all.len_bytes()) * u128::from(resident) / asked_bytes;
    Some(u64::try_from(scaled).unwrap_or(u64::MAX).min(all.len_bytes()))
}

/// The decision, from the facts alone.
fn decide(shard: ShardId, facts: &Facts) -> IoDecision {
    let (mode, reason) = mode_and_reason(facts);
    let tells_exactly = matches!(facts.resident, Some((ResidencyBy::Cachestat | ResidencyBy::Mincore, _)));
    let cache_effect = match reason {
        IoReason::Memory | IoReason::Cold | IoReason::Resident => CacheEffect::Untouched,
        _ if facts.has_uncached_reads => CacheEffect::Uncached,
        // Its buffered reads find all their pages: see `auto`.
        IoReason::PartlyResident => CacheEffect::Untouched,
        IoReason::ResidencyUnknown => CacheEffect::Kept,
        _ if tells_exactly => CacheEffect::DroppedBehind,
        _ => CacheEffect::Kept,
    };
    IoDecision {
        shard,
        mode,
        reason,
        file_bytes: facts.file_bytes,
        resident_bytes: facts.resident.map(|(_, bytes)| bytes),
        residency_by: facts.resident.map(|(by, _)| by),
        file_system: facts.file_system,
        cache_effect,
    }
}

fn mode_and_reason(facts: &Facts) -> (IoMode, IoReason) {
    let is = |question: fn(FileSystem) -> bool| facts.file_system.is_some_and(question);
    if is(FileSystem::is_memory) {
        (IoMode::Buffered, IoReason::Memory)
    } else if is(FileSystem::is_network) {
        (IoMode::Buffered, IoReason::Network)
    } else if is(FileSystem::is_program) {
        (IoMode::Buffered, IoReason::Program)
    } else if !facts.has_direct_io {
        (IoMode::Buffered, IoReason::NoDirectIo)
    } else if facts.file_bytes <= SMALL_FILE_BYTES {
        (IoMode::Buffered, IoReason::Small)
    } else {
        match facts.resident {
            None => (IoMode::Buffered, IoReason::ResidencyUnknown),
            Some((_, bytes)) => by_residency(bytes, facts.file_bytes),
        }
    }
}

/// Up to a twentieth counts as nothing, and all but a twentieth as all: samples are not more exact.
fn by_residency(resident_bytes: u64, file_bytes: u64) -> (IoMode, IoReason) {
    let twentieth = file_bytes / 20;
    if resident_bytes <= twentieth {
        (IoMode::Direct, IoReason::Cold)
    } else if resident_bytes >= file_bytes - twentieth {
        (IoMode::Buffered, IoReason::Resident)
    } else if resident_bytes >= file_bytes / 2 {
        (IoMode::Buffered, IoReason::PartlyResident)
    } else {
        (IoMode::Direct, IoReason::PartlyResident)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXT4: i64 = 0xEF53;

    fn facts() -> Facts {
        Facts {
            file_bytes: 1000 * MIB,
            file_system: Some(FileSystem::from_raw(EXT4)),
            has_direct_io: true,
            resident: Some((ResidencyBy::Cachestat, 0)),
            has_uncached_reads: true,
        }
    }

    fn held_by(magic: i64) -> Facts {
        Facts { file_system: Some(FileSystem::from_raw(magic)), ..facts() }
    }

    fn resident(mib: u64) -> Facts {
        Facts { resident: Some((ResidencyBy::Cachestat, mib * MIB)), ..facts() }
    }

    #[test]
    fn every_kind_of_file_has_its_way() {
        use CacheEffect::{DroppedBehind, Kept, Uncached, Untouched};
        use IoMode::{Buffered, Direct};
        let old = |facts: Facts| Facts { has_uncached_reads: false, ..facts };
        let estimated = |facts: Facts| Facts { resident: Some((ResidencyBy::ReadNowait, 0)), ..facts };
        let refused = Facts { has_direct_io: false, ..facts() };
        let unknown = Facts { resident: None, ..facts() };
        let small = Facts { file_bytes: SMALL_FILE_BYTES, ..facts() };
        let nameless = Facts { file_system: None, ..facts() };
        for (facts, mode, reason, cache_effect) in [
            (facts(), Direct, IoReason::Cold, Untouched),
            (nameless, Direct, IoReason::Cold, Untouched),
            (resident(50), Direct, IoReason::Cold, Untouched),
            (resident(51), Direct, IoReason::PartlyResident, Uncached),
            (resident(499), Direct, IoReason::PartlyResident, Uncached),
            (resident(500), Buffered, IoReason::PartlyResident, Uncached),
            (old(resident(500)), Buffered, IoReason::PartlyResident, Untouched),
            (resident(949), Buffered, IoReason::PartlyResident, Uncached),
            (resident(950), Buffered, IoReason::Resident, Untouched),
            (resident(1000), Buffered, IoReason::Resident, Untouched),
            (unknown, Buffered, IoReason::ResidencyUnknown, Uncached),
            (old(unknown), Buffered, IoReason::ResidencyUnknown, Kept),
            (small, Buffered, IoReason::Small, Uncached),
            (old(small), Buffered, IoReason::Small, DroppedBehind),
            (refused, Buffered, IoReason::NoDirectIo, Uncached),
            (old(refused), Buffered, IoReason::NoDirectIo, DroppedBehind),
            (old(estimated(refused)), Buffered, IoReason::NoDirectIo, Kept),
            (held_by(0x0102_1994), Buffered, IoReason::Memory, Untouched),
            (held_by(0x6969), Buffered, IoReason::Network, Uncached),
            (old(held_by(0x6969)), Buffered, IoReason::Network, DroppedBehind),
            (old(held_by(0x6573_5546)), Buffered, IoReason::Program, DroppedBehind),
            (held_by(0x794C_7630), Direct, IoReason::Cold, Untouched),
        ] {
            let decided = decide(ShardId(3), &facts);
            assert_eq!(
                (decided.mode, decided.reason, decided.cache_effect),
                (mode, reason, cache_effect),
                "{facts:?}"
            );
            assert_eq!((decided.shard, decided.file_bytes), (ShardId(3), facts.file_bytes));
        }
    }

    #[test]
    fn an_empty_file_is_small() {
        let empty = Facts { file_bytes: 0, ..facts() };
        assert_eq!(decide(ShardId(0), &empty).reason, IoReason::Small);
        assert_eq!(decide(ShardId(0), &empty).resident_share(), Some(0.0));
    }
}
