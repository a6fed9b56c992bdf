//! Limits: descriptors and resident windows. Tests about the whole process run in a separate
//! process.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::*;
use crate::plan::io::window_bytes;
use crate::source::files::FileSet;
use onelayer_testing::{all_or, in_own_process};

/// Limit of a source's descriptors.
const DESCRIPTORS: usize = 16;

fn open_files_in(folder: &Path) -> usize {
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter(|target| target.starts_with(folder))
        .count()
}

#[test]
fn hundreds_of_shards_need_few_descriptors() {
    if in_own_process(module_path!(), "hundreds_of_shards_need_few_descriptors") {
        return;
    }
    let count = all_or(300, 100);
    let limit = rustix::process::Rlimit { current: Some(32), maximum: Some(32) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let folder = Folder::new();
    let shards: Vec<Shard> =
        (0..count).map(|index| folder.shard(&format!("{index}"), 5000 + u64::from(index))).collect();
    let real_folder = folder.0.path().canonicalize().unwrap();
    on_all(|variant| {
        let source = variant.open(&shards);
        // Auto has two sets of half as many, and opens the direct one at the first direct read.
        let half = if variant.mode == IoMode::Auto { 2 } else { 1 };
        assert_eq!(open_files_in(&real_folder), DESCRIPTORS / half);
        let mut buffer = Buffer::new(128 << 10);
        // Forwards and backwards: the second pass meets open and closed files.
        for index in (0..count).chain((0..count).rev()) {
            let request = request(index, range(17, 5000 + u64::from(index)));
            read_and_compare(source.as_ref(), &request, &mut buffer).unwrap();
            assert!(open_files_in(&real_folder) <= DESCRIPTORS);
        }
        drop(source);
        assert_eq!(open_files_in(&real_folder), 0);
    });
}

/// More readers than descriptors, each with its own file: they wait for each other and all finish,
/// in a process with no spare descriptor.
#[test]
fn more_readers_than_descriptors_share_them() {
    const READERS: u32 = 24;
    if in_own_process(module_path!(), "more_readers_than_descriptors_share_them") {
        return;
    }
    let folder = Folder::new();
    let shards: Vec<Shard> = (0..40).map(|index| folder.shard(&format!("{index}"), 9000)).collect();
    let _taken = leave_descriptors(DESCRIPTORS);
    let (held, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    on_all(|variant| {
        if variant.is_queued() {
            return; // a queue is a descriptor itself, and here is none for it
        }
        let variant = variant.with_hook({
            let (held, most) = (Arc::clone(&held), Arc::clone(&most));
            move |call, _| {
                if call.moves_bytes() {
                    // Sleeps with the file, so that other readers queue up.
                    most.fetch_max(held.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(std::time::Duration::from_micros(200));
                    held.fetch_sub(1, Ordering::SeqCst);
                }
                None
            }
        });
        let source = variant.open(&shards);
        std::thread::scope(|scope| {
            for reader in 0..READERS {
                let source = source.as_ref();
                scope.spawn(move || {
                    let mut buffer = Buffer::new(128 << 10);
                    for turn in 0..12 {
                        let request = request((reader + turn * 7) % 40, range(1, 9000));
                        read_and_compare(source, &request, &mut buffer).unwrap();
                    }
                });
            }
        });
    });
    assert!(most.load(Ordering::SeqCst) > DESCRIPTORS / 2, "readers did not pile up: {most:?}");
}

/// A thread that evicts a file may lose its place to another thread; the notification about its own
/// file, which can be evicted next, must not be lost. Each round ends at once, so no later event
/// can help.
#[test]
fn a_reader_whose_place_was_taken_tries_again() {
    const READERS: u32 = 8;
    let folder = Folder::new();
    let count = u32::try_from(DESCRIPTORS).unwrap() + 3 * READERS;
    let shards: Vec<Shard> = (0..count).map(|index| folder.shard(&format!("{index}"), 10)).collect();
    let files = Arc::new(FileSet::new(Faulty::default(), &shards));
    let (sender, receiver) = std::sync::mpsc::channel();
    let start = Arc::new(std::sync::Barrier::new(usize::try_from(READERS).unwrap() + 1));
    for reader in 0..READERS {
        let (files, sender, start) = (Arc::clone(&files), sender.clone(), Arc::clone(&start));
        // A stuck reader must not keep the test from failing.
        std::thread::spawn(move || {
            for turn in 0..10_000 {
                start.wait();
                let shard = ShardId((turn * READERS + reader) % count);
                sender.send(files.acquire(shard, |_| {}).is_ok()).unwrap();
            }
        });
    }
    for turn in 0..10_000 {
        start.wait();
        for _ in 0..READERS {
            let answer = receiver.recv_timeout(std::time::Duration::from_secs(20));
            assert_eq!(answer, Ok(true), "turn {turn}");
        }
    }
}

/// While all descriptors are being opened, none can be evicted; a waiting thread must learn of the
/// first that can.
#[test]
fn a_reader_that_finds_all_descriptors_being_opened_comes_through() {
    let folder = Folder::new();
    let count = u32::try_from(DESCRIPTORS + 1).unwrap();
    let shards: Vec<Shard> = (0..count).map(|index| folder.shard(&format!("{index}"), 10)).collect();
    let hook = |call, _| {
        if call == Call::Open {
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        None
    };
    let system = Faulty { hook: Some(Arc::new(hook)), ..Faulty::default() };
    let files = Arc::new(FileSet::new(system, &shards));
    let (sender, receiver) = std::sync::mpsc::channel();
    for index in 0..count {
        let (files, sender) = (Arc::clone(&files), sender.clone());
        std::thread::spawn(move || sender.send(files.acquire(ShardId(index), |_| {}).is_ok()).unwrap());
    }
    for _ in 0..count {
        assert_eq!(receiver.recv_timeout(std::time::Duration::from_secs(20)), Ok(true));
    }
}

/// Takes all descriptors but `count` while the result lives.
fn leave_descriptors(count: usize) -> Vec<File> {
    let limit = rustix::process::Rlimit { current: Some(256), maximum: Some(256) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let mut taken: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    taken.truncate(taken.len() - count);
    taken
}

/// A field of `/proc/self/status`, in bytes.
fn status_bytes(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * KIB
}

/// Reads a range of the first file.
fn read_range(source: &dyn Source, payload: ByteRange, buffer: &mut Buffer) -> ReadRequest {
    let extent = payload.align_outward(Alignment::PAGE).unwrap();
    let request = ReadRequest { shard: ShardId(0), extent, payload };
    source.read(&request, buffer.bytes()).unwrap();
    request
}

#[test]
fn mapped_windows_never_pile_up() {
    const LEN_BYTES: u64 = 512 * MIB;
    const READ_BYTES: u64 = 4 * MIB;
    const READERS: u64 = 4;
    if in_own_process(module_path!(), "mapped_windows_never_pile_up") {
        return;
    }
    let folder = Folder::new();
    let path = folder.path("large.safetensors");
    let file = File::create(&path).unwrap();
    let block = expected_bytes(range(0, READ_BYTES));
    for index in 0..LEN_BYTES / READ_BYTES {
        file.write_all_at(&block, index * READ_BYTES).unwrap();
    }
    drop((file, block));
    let shards = [check(&path)];
    let source = open_with(Kernel, IoMode::Mmap, &shards).unwrap();
    let mut buffers: Vec<Buffer> = (0..READERS).map(|_| Buffer::new(READ_BYTES + 64 * KIB)).collect();
    let (next, done) = (AtomicU64::new(0), AtomicBool::new(false));
    // The program's own code is file pages too: the measured code runs once before.
    std::thread::scope(|scope| {
        let (source, buffer) = (&source, &mut buffers[0]);
        let first = scope.spawn(move || {
            read_range(source.as_ref(), range(123, 123 + READ_BYTES), buffer);
            status_bytes("VmPTE:")
        });
        first.join().unwrap()
    });
    let (file_before, tables_before) = (status_bytes("RssFile:"), status_bytes("VmPTE:"));
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status_bytes("VmHWM:");
    let (file_peak, tables_peak) = std::thread::scope(|scope| {
        let sampler = scope.spawn(|| {
            let mut peaks = (0, 0);
            while !done.load(Ordering::SeqCst) {
                peaks = (peaks.0.max(status_bytes("RssFile:")), peaks.1.max(status_bytes("VmPTE:")));
            }
            peaks
        });
        let readers: Vec<_> = buffers
            .iter_mut()
            .map(|buffer| {
                let (source, next) = (source.as_ref(), &next);
                scope.spawn(move || {
                    loop {
                        // Unaligned, as tensors are.
                        let start = next.fetch_add(READ_BYTES, Ordering::SeqCst) + 123;
                        if start >= LEN_BYTES {
                            return;
                        }
                        let payload = range(start, LEN_BYTES.min(start + READ_BYTES - 8192));
                        let request = read_range(source, payload, buffer);
                        assert_eq!(buffer.payload(&request)[0], expected_byte(123));
                    }
                })
            })
            .collect();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        done.store(true, Ordering::SeqCst);
        sampler.join().unwrap()
    });
    let peak = status_bytes("VmHWM:") - before;
    let windows = window_bytes(IoMode::Mmap, READERS, READ_BYTES);
    let (file_growth, tables_growth) = (file_peak - file_before, tables_peak.saturating_sub(tables_before));
    println!("windows {windows}, peak {peak}, file pages {file_growth}, page tables {tables_growth} bytes");
    assert_eq!(source.fallbacks(), []);
    // Windows show up in the sampled file pages: shows that the test can fail.
    assert!(file_growth > 0 && file_growth <= windows + MIB, "{file_growth} bytes of file pages");
    assert!(peak <= windows + 2 * MIB, "{peak} bytes at the peak, the windows are {windows}");
    assert!(tables_growth <= MIB, "{tables_growth} bytes of page tables");
    assert!(status_bytes("RssFile:") <= file_before + MIB, "windows stayed");
}
