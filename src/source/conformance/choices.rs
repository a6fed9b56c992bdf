//! Tests of [`Auto`](super::super::auto::Auto): its decisions, its choice at each read, and what it
//! leaves in the page cache.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::Advice;

use super::*;
use crate::plan::{CacheEffect, IoDecision, IoWays, ResidencyBy};
use crate::source::{Arrival, SourceError};
use onelayer_system::page_cache;
use onelayer_testing::skipped;

const LEN_BYTES: u64 = 8 * MIB;
const READ_BYTES: u64 = MIB;

/// A test file on a disk whose page cache this process may query and empty; `None`, and a message,
/// otherwise.
fn disk_file(folder: &Folder, len_bytes: u64) -> Option<Shard> {
    let shard = folder.shard("on_disk.safetensors", len_bytes);
    let file = File::open(&shard.path).unwrap();
    let all = range(0, len_bytes);
    if Kernel.file_system(&file).unwrap().is_memory() || Kernel.pages_by_cachestat(&file, all).is_err() {
        skipped("test files live in memory here, or the kernel does not tell what is cached");
        return None;
    }
    empty_cache(&shard);
    if cached_bytes(&shard, all) > 0 {
        skipped("the page cache is not to be emptied here");
        return None;
    }
    Some(shard)
}

fn empty_cache(shard: &Shard) {
    let file = File::open(&shard.path).unwrap();
    file.sync_all().unwrap();
    drop_all(shard, range(0, shard.identity.len_bytes));
}

/// Pages in use or under way are not dropped: so it is tried again.
fn drop_all(shard: &Shard, bytes: ByteRange) {
    let file = File::open(&shard.path).unwrap();
    for _ in 0..100 {
        Kernel.drop_pages(&file, bytes).unwrap();
        if cached_bytes(shard, bytes) == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Brings exactly these bytes into the page cache.
fn fill_cache(shard: &Shard, bytes: ByteRange) {
    let file = File::open(&shard.path).unwrap();
    rustix::fs::fadvise(&file, 0, None, Advice::Random).unwrap();
    let mut buffer = vec![0; to_usize(bytes.len_bytes())];
    file.read_exact_at(&mut buffer, bytes.start()).unwrap();
}

fn cached_bytes(shard: &Shard, bytes: ByteRange) -> u64 {
    let file = File::open(&shard.path).unwrap();
    page_cache::pages_by_cachestat(&file, bytes).unwrap() * page_bytes()
}

/// A machine short of memory may drop pages at any time. `trial` is repeated until the pages that
/// it brought in were there both before and after its check; it checks nothing otherwise.
fn undisturbed(mut trial: impl FnMut() -> Peace) {
    if !(0..20).any(|_| trial() == Peace::Kept) {
        skipped("pages are taken back again and again here");
    }
}

#[derive(PartialEq, Eq)]
enum Peace {
    Kept,
    Disturbed,
}

fn is_cached(shard: &Shard, bytes: ByteRange) -> bool {
    cached_bytes(shard, bytes) >= bytes.len_bytes()
}

/// This much, or a little less: a busy machine drops pages at any time. Never more.
fn assert_about(found_bytes: u64, expected_bytes: u64, context: &str) {
    let lost_most = LEN_BYTES / 16;
    assert!(
        found_bytes <= expected_bytes && found_bytes + lost_most >= expected_bytes,
        "{context}: {found_bytes} bytes, expected {expected_bytes}"
    );
}

fn decision(system: &Faulty, shard: &Shard) -> IoDecision {
    survey_with(system, std::slice::from_ref(shard)).unwrap().decisions[0]
}

/// Opens as decided, reads everything in steps and compares all bytes; returns the bytes of each
/// way.
fn read_all(system: &Faulty, shard: &Shard, decision: &IoDecision) -> IoWays {
    let source =
        Auto::open(system.clone(), std::slice::from_ref(shard), std::slice::from_ref(decision)).unwrap();
    read_through(&source, shard).unwrap();
    source.ways()
}

fn read_through(source: &dyn Source, shard: &Shard) -> Result<(), SourceError> {
    let mut buffer = Buffer::new(READ_BYTES);
    for start in (0..shard.identity.len_bytes).step_by(to_usize(READ_BYTES)) {
        let end = shard.identity.len_bytes.min(start + READ_BYTES);
        read_and_compare(source, &request(0, range(start, end)), &mut buffer)?;
    }
    Ok(())
}

#[test]
fn a_cold_file_is_read_past_the_page_cache_and_a_warm_one_out_of_it() {
    let folder = Folder::new();
    let Some(shard) = disk_file(&folder, LEN_BYTES) else { return };
    let system = Faulty::default();
    let cold = decision(&system, &shard);
    if cold.reason == IoReason::NoDirectIo {
        skipped("no direct I/O here");
        return;
    }
    assert_eq!((cold.mode, cold.reason), (IoMode::Direct, IoReason::Cold), "{cold:?}");
    assert_eq!((cold.resident_bytes, cold.cache_effect), (Some(0), CacheEffect::Untouched));
    let ways = read_all(&system, &shard, &cold);
    assert_eq!((ways.direct_bytes, ways.buffered_bytes, ways.corrected_bytes), (LEN_BYTES, 0, 0));
    assert_eq!(cached_bytes(&shard, range(0, LEN_BYTES)), 0, "nothing was left in the page cache");

    let all = range(0, LEN_BYTES);
    undisturbed(|| {
        fill_cache(&shard, all);
        let warm = decision(&system, &shard);
        let ways = read_all(&system, &shard, &warm);
        if warm.resident_bytes != Some(LEN_BYTES) || !is_cached(&shard, all) {
            return Peace::Disturbed;
        }
        assert_eq!((warm.mode, warm.reason), (IoMode::Buffered, IoReason::Resident), "{warm:?}");
        assert_eq!((ways.direct_bytes, ways.buffered_bytes, ways.corrected_bytes), (0, LEN_BYTES, 0));
        Peace::Kept
    });
}

/// Resident bytes are read buffered, except at their end, where the kernel would read ahead: a file
/// with a warm start would come in to its end.
#[test]
fn a_half_warm_file_is_split_by_range() {
    let folder = Folder::new();
    let len_bytes = 40 * MIB;
    let Some(shard) = disk_file(&folder, len_bytes) else { return };
    let system = Faulty::default();
    for (there, absent, buffered_bytes) in [
        (range(20 * MIB, len_bytes), range(0, 20 * MIB), 20 * MIB),
        (range(0, 20 * MIB), range(20 * MIB, len_bytes), 4 * MIB),
    ] {
        undisturbed(|| {
            empty_cache(&shard);
            read_as_others_do(&shard, there);
            drop_all(&shard, absent);
            let before = cached_bytes(&shard, range(0, len_bytes));
            let half = decision(&system, &shard);
            if half.reason == IoReason::NoDirectIo {
                skipped("no direct I/O here");
                return Peace::Kept;
            }
            let ways = read_all(&system, &shard, &half);
            if before != there.len_bytes() || !is_cached(&shard, there) {
                return Peace::Disturbed;
            }
            assert_eq!(half.reason, IoReason::PartlyResident, "{half:?}");
            assert_eq!(ways.buffered_bytes, buffered_bytes, "out of the page cache");
            assert_eq!(ways.direct_bytes + ways.buffered_bytes, len_bytes);
            assert_eq!(ways.corrected_bytes, 0, "every read went as it was to");
            assert_eq!(cached_bytes(&shard, absent), 0, "the page cache is as it was");
            Peace::Kept
        });
    }
}

/// With pages that the kernel marked for read-ahead.
fn read_as_others_do(shard: &Shard, bytes: ByteRange) {
    let file = File::open(&shard.path).unwrap();
    let mut buffer = vec![0; to_usize(READ_BYTES)];
    for start in (bytes.start()..bytes.end()).step_by(to_usize(READ_BYTES)) {
        file.read_exact_at(&mut buffer, start).unwrap();
    }
}

/// The page cache is emptied or filled between plan and load, or during the load.
#[test]
fn a_wrong_guess_is_corrected_at_the_next_read() {
    let folder = Folder::new();
    let Some(shard) = disk_file(&folder, LEN_BYTES) else { return };
    let system = Faulty::default();
    let cold = decision(&system, &shard);
    if cold.reason == IoReason::NoDirectIo {
        skipped("no direct I/O here");
        return;
    }
    let all = range(0, LEN_BYTES);
    undisturbed(|| {
        fill_cache(&shard, all);
        let warm = decision(&system, &shard);
        let on_paper_cold = read_all(&system, &shard, &cold);
        if warm.resident_bytes != Some(LEN_BYTES) || !is_cached(&shard, all) {
            return Peace::Disturbed;
        }
        assert_eq!(
            (on_paper_cold.buffered_bytes, on_paper_cold.corrected_bytes),
            (LEN_BYTES, LEN_BYTES),
            "cold on paper, warm in fact"
        );

        empty_cache(&shard);
        let on_paper_warm = read_all(&system, &shard, &warm);
        assert_eq!(
            (on_paper_warm.direct_bytes, on_paper_warm.corrected_bytes),
            (LEN_BYTES - READ_BYTES, LEN_BYTES - READ_BYTES),
            "warm on paper, cold in fact: noticed by the read that would have had to wait"
        );

        fill_cache(&shard, all);
        let source = Auto::open(system.clone(), std::slice::from_ref(&shard), &[warm]).unwrap();
        let mut buffer = Buffer::new(READ_BYTES);
        for (turn, start) in (0..LEN_BYTES).step_by(to_usize(READ_BYTES)).enumerate() {
            if turn == 3 {
                if !is_cached(&shard, all) {
                    return Peace::Disturbed;
                }
                empty_cache(&shard);
            }
            read_and_compare(&source, &request(0, range(start, start + READ_BYTES)), &mut buffer).unwrap();
        }
        let ways = source.ways();
        assert_eq!((ways.buffered_bytes, ways.direct_bytes), (4 * MIB, 4 * MIB));
        assert_eq!(ways.corrected_bytes, 4 * MIB);
        Peace::Kept
    });
}

/// Without direct I/O, a cold file is read through the page cache and leaves nothing there. Pages
/// that were there stay.
#[test]
fn reads_through_the_page_cache_leave_it_as_they_found_it() {
    let folder = Folder::new();
    let Some(shard) = disk_file(&folder, LEN_BYTES) else { return };
    let all = range(0, LEN_BYTES);
    let plain = || Faulty { support: Some(DirectSupport::None), ..Faulty::default() };
    let refusing = || Faulty {
        support: Some(DirectSupport::None),
        ..refusing(|call| call == Call::ReadUncached, Errno::OPNOTSUPP)
    };
    let mut systems = vec![("dropped behind", refusing())];
    if decision(&plain(), &shard).cache_effect == CacheEffect::Uncached {
        systems.push(("uncached", plain()));
    } else {
        skipped("RWF_DONTCACHE is not known here");
    }
    for (name, system) in systems {
        for was_there in [range(0, 0), range(2 * MIB, 4 * MIB)] {
            undisturbed(|| {
                empty_cache(&shard);
                if !was_there.is_empty() {
                    fill_cache(&shard, was_there);
                }
                let before = cached_bytes(&shard, all);
                let decided = decision(&system, &shard);
                let ways = read_all(&system, &shard, &decided);
                if before != was_there.len_bytes() || !is_cached(&shard, was_there) {
                    return Peace::Disturbed;
                }
                assert_eq!(
                    (decided.mode, decided.reason),
                    (IoMode::Buffered, IoReason::NoDirectIo),
                    "{name}"
                );
                assert_eq!((ways.direct_bytes, ways.buffered_bytes), (0, LEN_BYTES), "{name}");
                assert_eq!(cached_bytes(&shard, all), before, "{name}: nothing came, somebody's pages stay");
                let dropped = if name == "uncached" { 0 } else { LEN_BYTES - was_there.len_bytes() };
                assert_about(ways.dropped_behind_bytes, dropped, name);
                Peace::Kept
            });
        }
    }
}

/// Without dropping, the pages would stay: shows that the test above can fail.
#[test]
fn plain_reads_fill_the_page_cache() {
    let folder = Folder::new();
    let Some(shard) = disk_file(&folder, LEN_BYTES) else { return };
    let source = open_with(Kernel, IoMode::Buffered, std::slice::from_ref(&shard)).unwrap();
    let fills = || {
        read_through(source.as_ref(), &shard).unwrap();
        is_cached(&shard, range(0, LEN_BYTES))
    };
    assert!((0..20).any(|_| fills()), "it stays");
}

/// The lookups that work depend on kernel, owner and file system: each refusal leads to the next
/// lookup.
#[test]
fn those_who_refuse_to_tell_are_passed_over() {
    let folder = Folder::new();
    let shard = folder.shard("a.safetensors", LEN_BYTES);
    let told_by = |system: Faulty| {
        let decided = decision(&Faulty { resident: Some(all_pages), ..system }, &shard);
        (decided.residency_by, decided.reason)
    };
    let refuse = |refused: fn(Call) -> bool, errno| Faulty {
        file_system: Some(FileSystem::from_raw(0xEF53)),
        support: Some(DirectSupport::Unknown),
        ..refusing(refused, errno)
    };
    let resident = IoReason::Resident;
    assert_eq!(told_by(refuse(|_| false, Errno::PERM)), (Some(ResidencyBy::Cachestat), resident));
    for errno in [Errno::NOSYS, Errno::PERM] {
        let no_cachestat = refuse(|call| call == Call::Cachestat, errno);
        assert_eq!(told_by(no_cachestat), (Some(ResidencyBy::Mincore), resident));
        // A file of another owner: both lookups are refused.
        let neither = refuse(|call| matches!(call, Call::Cachestat | Call::Mincore), errno);
        assert_eq!(told_by(neither), (Some(ResidencyBy::ReadNowait), resident));
        let nobody = refuse(|call| matches!(call, Call::Cachestat | Call::Mincore | Call::ByteAtHand), errno);
        assert_eq!(told_by(nobody), (None, IoReason::ResidencyUnknown));
    }
    // cachestat answers for the wrong inode there.
    let overlay =
        Faulty { file_system: Some(FileSystem::from_raw(0x794C_7630)), ..refuse(|_| false, Errno::PERM) };
    let decided = decision(&Faulty { resident: Some(all_pages), ..overlay }, &shard);
    assert_ne!(decided.residency_by, Some(ResidencyBy::Cachestat));
}

/// No lookup works, and reads are slow: after two slow reads the file is read direct. One slow read
/// alone changes nothing.
#[test]
fn a_file_that_is_slow_out_of_the_page_cache_is_read_past_it() {
    let folder = Folder::new();
    let shard = folder.shard("a.safetensors", LEN_BYTES);
    let slow_from = |first_slow: u64, slow_every: u64| {
        let reads = AtomicU64::new(0);
        let hook = move |call: Call, _| {
            if matches!(call, Call::ReadUncached | Call::ReadAt { direct: false }) {
                let turn = reads.fetch_add(1, Ordering::SeqCst);
                if turn >= first_slow && (turn - first_slow).is_multiple_of(slow_every) {
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
            None
        };
        let mut system =
            refusing(|call| matches!(call, Call::Cachestat | Call::Mincore | Call::ByteAtHand), Errno::PERM);
        system.file_system = Some(FileSystem::from_raw(0xEF53));
        system.support = Some(DirectSupport::Unknown);
        let decided = decision(&system, &shard);
        assert_eq!((decided.mode, decided.reason), (IoMode::Buffered, IoReason::ResidencyUnknown));
        system.hook = Some(Arc::new(hook));
        // Only the planted delays should be slow.
        fill_cache(&shard, range(0, LEN_BYTES));
        read_all(&system, &shard, &decided)
    };
    let ways = slow_from(1, 1);
    assert!(ways.buffered_bytes <= 3 * MIB && ways.direct_bytes >= 5 * MIB, "{ways:?}");
    assert_eq!(ways.corrected_bytes, ways.direct_bytes);
    // A busy machine may be slow twice in a row by itself, but not every time.
    let one_slow_read = || slow_from(u64::MAX, 1).direct_bytes + slow_from(3, 1000).direct_bytes;
    assert!((0..20).any(|_| one_slow_read() == 0), "one slow read is none");
}

/// Refused direct reads go through the page cache, and leave it as it was.
#[test]
fn a_refused_direct_read_is_named_and_leaves_no_pages() {
    let folder = Folder::new();
    let Some(shard) = disk_file(&folder, LEN_BYTES) else { return };
    let all = range(0, LEN_BYTES);
    let direct_alone: fn(Call) -> bool = |call| matches!(call, Call::ReadAt { direct: true });
    // Neither a direct read nor `RWF_DONTCACHE`.
    let both: fn(Call) -> bool = |call| matches!(call, Call::ReadAt { direct: true } | Call::ReadUncached);
    for (name, refused) in [("direct", direct_alone), ("direct and uncached", both)] {
        empty_cache(&shard);
        let system = refusing(refused, Errno::INVAL);
        let decided = decision(&system, &shard);
        if decided.reason == IoReason::NoDirectIo {
            skipped("no direct I/O here");
            return;
        }
        let source = Auto::open(system, std::slice::from_ref(&shard), &[decided]).unwrap();
        read_through(&source, &shard).unwrap();
        let fallbacks = source.fallbacks();
        assert_eq!(fallbacks.len(), 1, "{name}");
        assert_eq!((fallbacks[0].from, fallbacks[0].to), (IoMode::Direct, IoMode::Buffered), "{name}");
        assert_eq!(source.ways().buffered_bytes, LEN_BYTES, "{name}");
        drop(source);
        assert_about(cached_bytes(&shard, all), 0, name);
    }
}

/// A partly resident file whose exact lookups are refused.
fn doubted(refused: fn(Call) -> bool, resident: fn(ByteRange) -> u64) -> Faulty {
    Faulty {
        file_system: Some(FileSystem::from_raw(0xEF53)),
        support: Some(DirectSupport::Unknown),
        resident: Some(resident),
        ..refusing(refused, Errno::PERM)
    }
}

/// Time spent in the callback says nothing about the page cache.
#[test]
fn what_is_done_with_the_bytes_is_not_timed() {
    let folder = Folder::new();
    let shard = folder.shard("a.safetensors", LEN_BYTES);
    let system = doubted(|call| call == Call::Cachestat, all_pages);
    let mut decided = decision(&system, &shard);
    assert_eq!(decided.residency_by, Some(ResidencyBy::Mincore));
    decided.reason = IoReason::PartlyResident;
    let direct_bytes = || {
        let source = Auto::open(system.clone(), std::slice::from_ref(&shard), &[decided]).unwrap();
        let mut buffer = Buffer::new(READ_BYTES);
        for start in (0..LEN_BYTES).step_by(to_usize(READ_BYTES)) {
            let request = request(0, range(start, start + READ_BYTES));
            let mut each = |_: &mut [u8], arrival: Arrival| {
                std::thread::sleep(Duration::from_millis(3));
                arrival.next_position_bytes()
            };
            source.read_in_pieces(&request, buffer.bytes(), &mut each).unwrap();
        }
        source.ways().direct_bytes
    };
    // A busy machine may be slow twice in a row by itself, but not every time.
    assert!((0..20).any(|_| direct_bytes() == 0), "what was there was read past the page cache");
}

/// Each missing byte brings its page in: one is enough to know that a range is not resident.
#[test]
fn a_range_that_is_missing_is_tried_by_one_byte() {
    let folder = Folder::new();
    let shard = folder.shard("a.safetensors", LEN_BYTES);
    let mut system = doubted(|call| matches!(call, Call::Cachestat | Call::Mincore), |_| 0);
    let decided = decision(&system, &shard);
    assert_eq!((decided.reason, decided.residency_by), (IoReason::Cold, Some(ResidencyBy::ReadNowait)));
    let tried = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&tried);
    system.hook = Some(Arc::new(move |call: Call, _| {
        counter.fetch_add(u64::from(call == Call::ByteAtHand), Ordering::SeqCst);
        None
    }));
    let ways = read_all(&system, &shard, &decided);
    assert_eq!((ways.direct_bytes, tried.load(Ordering::SeqCst)), (LEN_BYTES, LEN_BYTES / READ_BYTES));
}

/// The bytes that were read are resident, and hardly any other.
#[test]
fn an_estimate_that_was_wrong_shows_in_the_time() {
    let folder = Folder::new();
    let shard = folder.shard("a.safetensors", LEN_BYTES);
    let mut system = doubted(|call| matches!(call, Call::Cachestat | Call::Mincore), all_pages);
    let mut decided = decision(&system, &shard);
    decided.reason = IoReason::PartlyResident;
    system.hook = Some(Arc::new(|call: Call, _| {
        if call == (Call::ReadAt { direct: false }) {
            std::thread::sleep(Duration::from_millis(20));
        }
        None
    }));
    let ways = read_all(&system, &shard, &decided);
    assert_eq!((ways.buffered_bytes, ways.direct_bytes), (2 * MIB, 6 * MIB));
}
