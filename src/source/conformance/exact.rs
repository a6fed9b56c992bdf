//! Exactly the bytes of the file arrive, and nothing outside the extent is written.

use rustix::io::Errno;

use super::*;
use crate::source::{Fallback, SourceError};
use crate::units::GIB;
use onelayer_testing::skipped;

#[test]
fn all_sizes_and_offsets_arrive_exactly() {
    let folder = Folder::new();
    let lens = [0, 1, 511, 512, 513, 4095, 4096, 4097, 12_288, 65_536, 100_001, 1_048_593];
    let shards: Vec<Shard> =
        lens.iter().map(|len| folder.shard(&format!("{len}.safetensors"), *len)).collect();
    on_all(|variant| {
        let source = variant.open(&shards);
        assert_eq!(source.mode(), variant.mode);
        let mut buffer = Buffer::new(2 << 20);
        for (shard, len) in (0..).zip(lens) {
            let cuts = [0, 1, 511, 4095, 4096, 4097, 50_000, len / 2, len.saturating_sub(1), len];
            for start in cuts {
                for end in cuts.into_iter().filter(|end| start <= *end && *end <= len) {
                    let request = request(shard, range(start, end));
                    let extent_len = to_usize(request.extent.len_bytes());
                    buffer.bytes()[extent_len..][..4096].fill(POISON);
                    let moved_bytes = read_and_compare(source.as_ref(), &request, &mut buffer).unwrap();
                    if !matches!(variant.mode, IoMode::Direct | IoMode::Uring | IoMode::Auto) {
                        assert_eq!(moved_bytes, end - start);
                    }
                    assert!(
                        buffer.bytes()[extent_len..][..4096].iter().all(|byte| *byte == POISON),
                        "{}: wrote past the extent {}",
                        variant.name,
                        request.extent
                    );
                }
            }
        }
        check_fallbacks(variant, &source.fallbacks(), &lens);
    });
}

/// A callback sees each byte once, in order, and may change it at once.
#[test]
fn pieces_arrive_in_order_and_are_what_the_whole_is() {
    let folder = Folder::new();
    let shards = [folder.shard("a.safetensors", 1_500_000)];
    on_all(|variant| {
        let source = variant.open(&shards);
        for payload in [range(0, 0), range(5, 6), range(4095, 600_000), range(3, 1_500_000)] {
            let request = request(0, payload);
            let mut buffer = Buffer::new(2 << 20);
            let start = payload.start() - request.extent.start();
            for stays in [true, false] {
                let (mut seen, mut calls) = (Vec::new(), 0);
                let moved = source.read_in_pieces(&request, buffer.bytes(), &mut |buffer, arrival| {
                    assert_eq!(arrival.start_bytes, to_u64(seen.len()), "one behind the other");
                    let behind = if stays { arrival.start_bytes } else { 0 };
                    assert_eq!(arrival.position_bytes, start + behind, "where it was told to go");
                    let new = &mut buffer[to_usize(arrival.position_bytes)..][..to_usize(arrival.len_bytes)];
                    seen.extend_from_slice(new);
                    new.fill(POISON);
                    calls += 1;
                    if stays { arrival.next_position_bytes() } else { start }
                });
                assert!(moved.unwrap() >= payload.len_bytes());
                assert!(seen == expected_bytes(payload), "{}: {payload}", variant.name);
                assert!(buffer.payload(&request).iter().all(|&byte| byte == POISON), "nothing is read twice");
                if variant.mode == IoMode::Buffered && payload.len_bytes() > 0 {
                    assert_eq!(calls, payload.len_bytes().div_ceil(256 * KIB), "{payload}");
                }
            }
        }
    });
}

/// Memory at any address, and payloads at any offset: either the bytes arrive, or nothing was read.
#[test]
fn memory_at_any_address_is_filled_or_left_alone() {
    let folder = Folder::new();
    let shards = [folder.shard("a.safetensors", 700_000)];
    on_all(|variant| {
        let source = variant.open(&shards);
        let mut memory = vec![POISON; 710_000];
        for payload in [range(0, 0), range(5, 6), range(4095, 100_000), range(3, 700_000)] {
            for address in [0, 1, 4095] {
                memory.fill(POISON);
                let target = &mut memory[address..][..to_usize(payload.len_bytes())];
                let moved = source.read_anywhere(ShardId(0), payload, target).unwrap();
                let is_same = match moved {
                    Some(moved) => {
                        assert!(moved >= payload.len_bytes(), "{}", variant.name);
                        *target == expected_bytes(payload)
                    }
                    None => target.iter().all(|&byte| byte == POISON),
                };
                assert!(is_same, "{}: {payload} at {address}, {moved:?}", variant.name);
                let is_small = payload.len_bytes() <= 128 * KIB;
                let always = variant.mode == IoMode::Buffered || (variant.mode == IoMode::Auto && is_small);
                assert!(moved.is_some() || !always, "{}: {payload}", variant.name);
                let behind = &memory[address + to_usize(payload.len_bytes())..];
                assert!(behind.iter().all(|&byte| byte == POISON), "{}", variant.name);
            }
        }
        let beyond = source.read_anywhere(ShardId(0), range(699_999, 700_001), &mut [0; 2]);
        assert!(
            matches!(beyond, Ok(None) | Err(SourceError::EndOfFile { .. })),
            "{}: {beyond:?}",
            variant.name
        );
    });
}

/// Each file that fell back is listed once, with a reason, and no other file is.
fn check_fallbacks(variant: &Variant, fallbacks: &[Fallback], lens: &[u64]) {
    let from = variant.falls_back_from_bytes.unwrap_or(u64::MAX);
    let expected: Vec<usize> = (0..lens.len()).filter(|index| lens[*index] >= from).collect();
    let found: Vec<usize> = fallbacks.iter().map(|fallback| fallback.shard.index()).collect();
    assert_eq!(found, expected, "{}: {fallbacks:?}", variant.name);
    for fallback in fallbacks {
        // [`Auto`](super::super::auto::Auto) never requested the mode that was refused.
        let asked = if variant.mode == IoMode::Auto { IoMode::Direct } else { variant.mode };
        assert_eq!((fallback.from, fallback.to), (asked, IoMode::Buffered));
        assert!(!fallback.reason.is_empty());
    }
}

#[test]
fn fallback_reasons_name_the_system_error() {
    let folder = Folder::new();
    let shards = [folder.shard("a.safetensors", 10_000)];
    for (name, reason) in [
        ("direct, not supported", "no direct i/o"),
        ("direct, flag refused", "O_DIRECT was refused: Invalid argument"),
        ("direct, read refused", "a direct read at byte 0 was refused: Invalid argument"),
        ("direct, short inside a block", "ended inside a block at byte 4000"),
        ("mmap, refused", "mapping 0..10000 was refused: No such device"),
        ("mmap, copy refused", "(process_vm_readv) was refused: Operation not permitted"),
        ("mmap, fault without a change", "cannot be read at byte 0: Bad address"),
    ] {
        let variant = variants().into_iter().find(|variant| variant.name == name).unwrap();
        let source = variant.open(&shards);
        read_and_compare(source.as_ref(), &request(0, range(0, 10_000)), &mut Buffer::new(1 << 20)).unwrap();
        let fallbacks = source.fallbacks();
        assert!(fallbacks[0].reason.contains(reason), "{name}: {fallbacks:?}");
    }
}

#[test]
fn files_past_2_and_4_gib_arrive_exactly() {
    let folder = Folder::new();
    let path = folder.path("large.safetensors");
    let file = File::create(&path).unwrap();
    let len_bytes = 5 * GIB + 77;
    file.set_len(len_bytes).unwrap();
    let places: Vec<ByteRange> = [2 * GIB, 4 * GIB, len_bytes - 2000]
        .into_iter()
        .map(|middle| range(middle - 3000, middle + 2000))
        .collect();
    for place in &places {
        write_at(&file, *place);
    }
    drop(file);
    let shards = [check(&path)];
    on_all(|variant| {
        let source = variant.open(&shards);
        let mut buffer = Buffer::new(256 << 10);
        for place in &places {
            read_and_compare(source.as_ref(), &request(0, *place), &mut buffer).unwrap();
        }
    });
}

/// One system call moves at most 2 GiB less a page; the loops continue from there.
#[test]
#[ignore = "needs 2.2 GiB of memory; run by hand after a change of the loops"]
fn a_read_of_more_than_2_gib_arrives() {
    let folder = Folder::new();
    let path = folder.path("large.safetensors");
    let file = File::create(&path).unwrap();
    let payload = range(10, 2 * GIB + 100_000);
    file.set_len(payload.end()).unwrap();
    let tail = range(payload.end() - 5000, payload.end());
    write_at(&file, tail);
    let shards = [check(&path)];
    let request = request(0, payload);
    for mode in [IoMode::Auto, IoMode::Buffered, IoMode::Direct, IoMode::Mmap] {
        let source = open_with(Kernel, mode, &shards).unwrap();
        let mut buffer = Buffer::new(request.extent.len_bytes());
        source.read(&request, buffer.bytes()).unwrap();
        let bytes = buffer.payload(&request);
        assert!(bytes[bytes.len() - 5000..] == expected_bytes(tail), "{mode:?}");
        assert_eq!(bytes[..bytes.len() - 5000].iter().position(|byte| *byte != 0), None, "{mode:?}");
        assert_eq!(source.fallbacks(), []);
    }
}

#[test]
fn a_payload_past_the_end_is_an_error_not_zeros() {
    let folder = Folder::new();
    let shards = [folder.shard("a.safetensors", 5000)];
    on_all(|variant| {
        let source = variant.open(&shards);
        for payload in [range(0, 5001), range(4000, 20_000), range(8192, 9000)] {
            match source.read(&request(0, payload), Buffer::new(64 << 10).bytes()) {
                Err(SourceError::EndOfFile { path, expected_end_bytes, found_end_bytes }) => {
                    assert_eq!(path, shards[0].path);
                    assert_eq!((expected_end_bytes, found_end_bytes), (payload.end(), 5000));
                }
                other => panic!("{}: {other:?}", variant.name),
            }
        }
    });
}

#[test]
fn a_failed_read_names_path_and_offset() {
    let folder = Folder::new();
    let shards = [folder.shard("a.safetensors", 300_000)];
    on_all(|variant| {
        // Every call that moves bytes fails, at once or after the first 100 000 bytes.
        for fail_from in [0, 1] {
            let moves = std::sync::atomic::AtomicU64::new(0);
            let mut variant = variant.with_hook(move |call, _| {
                let done = || moves.fetch_add(1, std::sync::atomic::Ordering::SeqCst) >= fail_from;
                (call.moves_bytes() && done()).then_some(Errno::IO)
            });
            variant.system.short_bytes = &[69_632];
            variant.system.interrupt_every = None;
            let source = variant.open(&shards);
            let error =
                source.read(&request(0, range(4096, 300_000)), Buffer::new(512 << 10).bytes()).unwrap_err();
            match &error {
                SourceError::Read { path, offset_bytes, source } => {
                    assert_eq!(path, &shards[0].path);
                    assert_eq!(Errno::from_io_error(source), Some(Errno::IO));
                    // A mapping that faults is read again from the start of the payload.
                    let farthest = 4096 + fail_from * 69_632;
                    assert!((0..=farthest).contains(offset_bytes), "{}: {offset_bytes}", variant.name);
                    if variant.name == "buffered" {
                        assert_eq!(*offset_bytes, farthest);
                    }
                }
                other => panic!("{}: {other:?}", variant.name),
            }
            let message = error.to_string();
            assert!(message.contains("a.safetensors") && message.contains("at byte"), "{message}");
        }
    });
}

/// tmpfs takes `O_DIRECT` since Linux 6.6 and has no alignment to report; before, it refuses.
#[test]
fn tmpfs_is_read_exactly() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        skipped("no /dev/shm to write to");
        return;
    };
    let folder = Folder(folder);
    let shards = [folder.shard("a.safetensors", 100_001)];
    on_all(|variant| {
        let source = variant.open(&shards);
        let mut buffer = Buffer::new(256 << 10);
        for payload in [range(0, 100_001), range(4097, 100_000), range(99_999, 100_001)] {
            read_and_compare(source.as_ref(), &request(0, payload), &mut buffer).unwrap();
        }
    });
}

#[test]
fn the_coarsest_alignment_counts() {
    let folder = Folder::new();
    let shard = folder.shard("a.safetensors", 10);
    let paths = || std::iter::once(shard.path.as_path());
    let coarse = Alignment::new(128 * KIB).unwrap();
    for (support, expected) in [
        (DirectSupport::Aligned { memory: Alignment::ONE, offset: coarse }, coarse),
        (DirectSupport::Aligned { memory: coarse, offset: Alignment::ONE }, coarse),
        (DirectSupport::None, Alignment::PAGE),
        (DirectSupport::Unknown, Alignment::PAGE),
    ] {
        let system = Faulty { support: Some(support), ..Faulty::default() };
        assert_eq!(super::super::alignment_of(&system, paths()).unwrap(), expected, "{support:?}");
    }
}
