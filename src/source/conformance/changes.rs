//! A file that changes during a load is an error in every source: no signal, no zeros, no mixed
//! bytes.

use std::io::{Seek, SeekFrom};
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::source::SourceError;

const LEN_BYTES: u64 = 40_000;

/// A change of a file by another program.
#[derive(Clone, Copy, Debug)]
enum Change {
    TruncateToNothing,
    TruncateInsidePage,
    TruncateAndRegrow,
    RewriteSameSize,
    RewriteSameBytes,
    Append,
    ReplaceByRename,
    Remove,
}

const CHANGES: [Change; 8] = [
    Change::TruncateToNothing,
    Change::TruncateInsidePage,
    Change::TruncateAndRegrow,
    Change::RewriteSameSize,
    Change::RewriteSameBytes,
    Change::Append,
    Change::ReplaceByRename,
    Change::Remove,
];

fn apply(change: Change, path: &Path) {
    let open = || std::fs::OpenOptions::new().write(true).open(path).unwrap();
    match change {
        Change::TruncateToNothing => open().set_len(0).unwrap(),
        Change::TruncateInsidePage => open().set_len(LEN_BYTES - 100).unwrap(),
        Change::TruncateAndRegrow => {
            let file = open();
            file.set_len(5000).unwrap();
            file.set_len(LEN_BYTES).unwrap();
        }
        Change::RewriteSameSize => open().write_all(&vec![0x55; to_usize(LEN_BYTES)]).unwrap(),
        Change::RewriteSameBytes => open().write_all(&expected_bytes(range(0, LEN_BYTES))).unwrap(),
        Change::Append => {
            let mut file = open();
            file.seek(SeekFrom::End(0)).unwrap();
            file.write_all(b"more").unwrap();
        }
        Change::ReplaceByRename => {
            let other = path.with_extension("new");
            std::fs::write(&other, vec![0x55; to_usize(LEN_BYTES)]).unwrap();
            std::fs::rename(&other, path).unwrap();
        }
        Change::Remove => std::fs::remove_file(path).unwrap(),
    }
}

fn assert_changed(result: Result<u64, SourceError>, shard: &Shard, context: &str) {
    match result {
        Err(SourceError::FileChanged { path, was, now }) => {
            assert_eq!(path, shard.path, "{context}");
            assert_eq!(*was, shard.identity, "{context}");
            assert_ne!(*now, shard.identity, "{context}");
        }
        other => panic!("{context}: {other:?}"),
    }
}

/// [`Auto`](super::super::auto::Auto) opens a file again by its path at the first direct read: a
/// removed file is not found then.
fn assert_found(
    variant: &Variant,
    change: Change,
    result: Result<u64, SourceError>,
    shard: &Shard,
    context: &str,
) {
    match (&result, change) {
        (Err(SourceError::Open { path, source }), Change::Remove) if variant.mode == IoMode::Auto => {
            assert_eq!((path, source.kind()), (&shard.path, std::io::ErrorKind::NotFound), "{context}");
        }
        _ => assert_changed(result, shard, context),
    }
}

/// A write after the first piece was seen: the read reports it at its end.
#[test]
fn a_change_between_two_pieces_is_found() {
    for change in [Change::RewriteSameSize, Change::Append, Change::ReplaceByRename, Change::Remove] {
        on_all(|variant| {
            let folder = Folder::new();
            let shard = folder.shard("a.safetensors", 1_500_000);
            let source = variant.open(std::slice::from_ref(&shard));
            let mut is_changed = false;
            let request = request(0, range(3, 1_499_999));
            let read = source.read_in_pieces(&request, Buffer::new(2 << 20).bytes(), &mut |_, arrival| {
                if !is_changed && arrival.end_bytes() < request.payload.len_bytes() {
                    apply(change, &shard.path);
                    is_changed = true;
                }
                arrival.next_position_bytes()
            });
            match is_changed {
                true => assert_changed(read, &shard, &format!("{}, {change:?}", variant.name)),
                // All at once, and verified before it was shown.
                false => assert_ne!(variant.mode, IoMode::Buffered),
            }
        });
    }
}

#[test]
fn a_change_between_check_and_open_is_found_when_opening() {
    let folder = Folder::new();
    for (index, change) in CHANGES.into_iter().enumerate() {
        let shard = folder.shard(&format!("{index}.safetensors"), LEN_BYTES);
        apply(change, &shard.path);
        for mode in [IoMode::Auto, IoMode::Buffered, IoMode::Direct, IoMode::Mmap] {
            match open_with(Kernel, mode, std::slice::from_ref(&shard)).map(|_| ()) {
                Err(SourceError::Open { path, source }) if matches!(change, Change::Remove) => {
                    assert_eq!((path, source.kind()), (shard.path.clone(), std::io::ErrorKind::NotFound));
                }
                Err(SourceError::FileChanged { .. }) => {}
                other => panic!("{mode:?} after {change:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_change_between_open_and_read_or_two_reads_is_found() {
    let folder = Folder::new();
    on_all(|variant| {
        for change in CHANGES {
            for reads_before in [0, 1] {
                let shard = folder.shard("a.safetensors", LEN_BYTES);
                let source = variant.open(std::slice::from_ref(&shard));
                let mut buffer = Buffer::new(128 << 10);
                for _ in 0..reads_before {
                    read_and_compare(source.as_ref(), &request(0, range(0, 9000)), &mut buffer).unwrap();
                }
                apply(change, &shard.path);
                let context = format!("{}, {change:?} after {reads_before} reads", variant.name);
                for payload in [range(0, 100), range(9000, LEN_BYTES), range(5, 5)] {
                    let result = source.read(&request(0, payload), buffer.bytes());
                    assert_found(variant, change, result, &shard, &context);
                }
            }
        }
    });
}

/// A change right before the n-th system call of a read, for every n: before and between the calls
/// that move bytes, and between the last of them and the comparison.
#[test]
fn a_change_before_any_call_of_a_read_is_found() {
    let folder = Folder::new();
    on_all(|variant| {
        for change in CHANGES {
            for position in 0.. {
                let shard = folder.shard("a.safetensors", LEN_BYTES);
                let armed = Arc::new(AtomicBool::new(false));
                let first = Arc::new(OnceLock::new());
                let fired = Arc::new(AtomicBool::new(false));
                let hook = {
                    let (armed, first, fired, path) =
                        (Arc::clone(&armed), Arc::clone(&first), Arc::clone(&fired), shard.path.clone());
                    move |_: Call, count: u64| {
                        if armed.load(Ordering::SeqCst)
                            && count - first.get_or_init(|| count) >= position
                            && !fired.swap(true, Ordering::SeqCst)
                        {
                            apply(change, &path);
                        }
                        None
                    }
                };
                let mut variant = variant.with_hook(hook);
                if variant.system.short_bytes.first().is_some_and(|bytes| *bytes < 4096) {
                    // Few calls, each of a different size.
                    variant.system.short_bytes = &[7777, 1, 20_000];
                }
                let source = variant.open(std::slice::from_ref(&shard));
                armed.store(true, Ordering::SeqCst);
                let mut buffer = Buffer::new(128 << 10);
                let result = source.read(&request(0, range(0, LEN_BYTES)), buffer.bytes());
                if !fired.load(Ordering::SeqCst) {
                    assert!(position >= 2, "{}: a read has at least two calls", variant.name);
                    result.unwrap();
                    break;
                }
                let context = format!("{}, {change:?} before call {position}", variant.name);
                assert_found(&variant, change, result, &shard, &context);
            }
        }
    });
}

/// Evicted files are opened again by path, so a replaced file shows another inode.
#[test]
fn a_replaced_file_is_found_when_it_is_opened_again() {
    let folder = Folder::new();
    for mode in [IoMode::Auto, IoMode::Buffered, IoMode::Direct, IoMode::Mmap] {
        for change in [Change::ReplaceByRename, Change::Remove] {
            let shards: Vec<Shard> =
                (0..20).map(|index| folder.shard(&format!("{index}"), LEN_BYTES)).collect();
            let source = open_with(Kernel, mode, &shards).unwrap();
            let mut buffer = Buffer::new(128 << 10);
            // Enough files to evict all 16 descriptors, whichever of two equally old files goes
            // first.
            for shard in (1..20).cycle().take(19 * 3) {
                read_and_compare(source.as_ref(), &request(shard, range(0, 100)), &mut buffer).unwrap();
            }
            apply(change, &shards[0].path);
            match source.read(&request(0, range(0, 100)), buffer.bytes()) {
                Err(SourceError::FileChanged { was, now, .. })
                    if matches!(change, Change::ReplaceByRename) =>
                {
                    assert_ne!(was.inode, now.inode);
                }
                Err(SourceError::Open { source, .. }) if matches!(change, Change::Remove) => {
                    assert_eq!(source.kind(), std::io::ErrorKind::NotFound);
                }
                other => panic!("{mode:?}, {change:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn something_else_than_a_file_in_its_place_is_named() {
    let folder = Folder::new();
    let shard = folder.shard("a.safetensors", LEN_BYTES);
    std::fs::remove_file(&shard.path).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &shard.path, rustix::fs::Mode::RUSR).unwrap();
    match open_with(Kernel, IoMode::Mmap, std::slice::from_ref(&shard)).map(|_| ()) {
        Err(error @ SourceError::NotRegular { .. }) => {
            assert!(error.to_string().contains("expected a regular file, found a named pipe"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

/// A thread truncates at a random moment while another reads: every successful read is exact, the
/// first failure names the change, and the process survives.
#[test]
fn a_truncating_thread_never_kills_or_feeds_zeros() {
    const RACES: u64 = 120;
    const RACE_LEN_BYTES: u64 = 1 << 20;
    let folder = Folder::new();
    let expected = expected_bytes(range(0, RACE_LEN_BYTES));
    let path = folder.path("race.safetensors");
    let mut caught_during_a_read = 0;
    for mode in [IoMode::Auto, IoMode::Mmap, IoMode::Buffered, IoMode::Direct] {
        for race in 0..RACES {
            std::fs::write(&path, &expected).unwrap();
            let shard = check(&path);
            let source = open_with(Kernel, mode, std::slice::from_ref(&shard)).unwrap();
            let request = request(0, range(0, RACE_LEN_BYTES));
            let mut buffer = Buffer::new(RACE_LEN_BYTES);
            let started = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !started.load(Ordering::SeqCst) {
                        std::hint::spin_loop();
                    }
                    for _ in 0..race * 50 {
                        std::hint::spin_loop();
                    }
                    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
                    file.set_len(if race % 2 == 0 { 0 } else { 500_001 }).unwrap();
                    if race % 3 == 0 {
                        file.set_len(RACE_LEN_BYTES).unwrap();
                    }
                });
                started.store(true, Ordering::SeqCst);
                let mut reads = 0;
                let result = loop {
                    match source.read(&request, buffer.bytes()) {
                        Ok(_) => {
                            assert!(buffer.payload(&request) == expected, "{mode:?}: wrong bytes as success")
                        }
                        Err(error) => break Err(error),
                    }
                    reads += 1;
                };
                caught_during_a_read += u64::from(reads > 0);
                assert_changed(result, &shard, &format!("{mode:?}, race {race}"));
            });
            assert_eq!(source.fallbacks(), [], "{mode:?}: a truncation is not a fallback");
        }
    }
    assert!(caught_during_a_read > 0, "no race began with a good read; the test shows nothing");
}
