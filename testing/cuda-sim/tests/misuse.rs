//! Provokes every kind of misuse once and checks that it is found. A new kind needs a test.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use support::{Driver, at, made, overwrite};

const LEN: usize = 10_000;

/// Provokes one kind of misuse.
type Provoke = fn(&Driver);

const KINDS: [(&str, Provoke); 31] = [
    ("bad_free", |driver| assert_eq!(driver.cuMemFree_v2(driver.plain(LEN) + 256), 1)),
    ("bad_release", |driver| {
        driver.cuDevicePrimaryCtxRelease_v2(0);
        assert_eq!(driver.cuDevicePrimaryCtxRelease_v2(0), 201);
    }),
    ("context_released_in_use", |driver| {
        driver.stream();
        assert_eq!(driver.cuDevicePrimaryCtxRelease_v2(0), 0);
    }),
    ("context_released_with_copies", |driver| {
        let start = made(|start| driver.cuMemHostAlloc(start, LEN, 0));
        assert_eq!(driver.cuMemcpyHtoDAsync_v2(driver.plain(LEN), start, LEN, driver.stream()), 0);
        assert_eq!(driver.cuDevicePrimaryCtxRelease_v2(0), 0);
    }),
    ("destroyed_context", |driver| {
        assert_eq!(driver.cuDevicePrimaryCtxRelease_v2(0), 0);
        assert_eq!(driver.cuCtxSynchronize(), 709);
    }),
    ("double_free", |driver| {
        let address = driver.plain(LEN);
        assert_eq!(driver.cuMemFree_v2(address), 0);
        assert_eq!(driver.cuMemFree_v2(address), 1);
    }),
    ("free_in_use", |driver| {
        let address = driver.plain(LEN);
        assert_eq!(driver.cuMemsetD8Async(address, 1, LEN, driver.stream()), 0);
        assert_eq!(driver.cuMemFree_v2(address), 0);
    }),
    ("free_not_ordered", |driver| {
        let (copies, frees) = (driver.stream(), driver.stream());
        let address = driver.pooled(LEN, driver.pool(), copies);
        let event = driver.event();
        assert_eq!(driver.cuEventRecord(event, copies), 0);
        assert_eq!(driver.cuMemsetD8Async(address, 1, LEN, copies), 0);
        assert_eq!(driver.cuStreamWaitEvent(frees, event, 0), 0);
        assert_eq!(driver.cuMemFreeAsync(address, frees), 0);
    }),
    ("free_without_wait", |driver| {
        // The work has run by chance, through another stream's wait.
        let (first, second) = (driver.stream(), driver.stream());
        let address = driver.plain(LEN);
        let event = driver.event();
        assert_eq!(driver.cuEventRecord(event, first), 0);
        assert_eq!(driver.cuMemsetD8Async(address, 1, LEN, first), 0);
        assert_eq!(driver.cuStreamWaitEvent(second, event, 0), 0);
        while driver.report().number("pending.copies") > 0 {
            std::thread::yield_now();
        }
        assert_eq!(driver.cuMemFree_v2(address), 0);
    }),
    ("host_range", |driver| {
        assert_eq!(driver.cuMemcpyHtoDAsync_v2(driver.plain(LEN), 4096, LEN, driver.stream()), 1);
    }),
    ("no_context", |driver| {
        made(|context| driver.cuCtxPopCurrent_v2(context));
        assert_eq!(driver.cuStreamCreate(&mut 0, 1), 201);
    }),
    ("not_initialised", |_| {
        let driver = Driver::raw("");
        assert_eq!(driver.cuDeviceGetCount(&mut 0), 3);
        assert_eq!(driver.kinds(), ["not_initialised"]);
    }),
    ("not_registered", |driver| assert_eq!(driver.cuMemHostUnregister(at(&mut [0; 8])), 713)),
    ("out_of_bounds", |driver| {
        let stream = driver.stream();
        assert_eq!(driver.cuMemsetD8Async(driver.plain(LEN) + 1, 0, LEN, stream), 1);
        assert_eq!(driver.cuMemsetD8Async(driver.plain(LEN) - 1, 0, 1, stream), 1);
    }),
    ("overlapping_copy", |driver| {
        let address = driver.plain(LEN);
        assert_eq!(driver.cuMemcpyDtoDAsync_v2(address, address + 256, 257, driver.stream()), 0);
    }),
    ("pinned_in_part", |driver| {
        let mut bytes = vec![0; LEN];
        driver.pin(&mut bytes[..LEN / 2]);
        assert_eq!(driver.cuMemcpyHtoDAsync_v2(driver.plain(LEN), at(&mut bytes), LEN, driver.stream()), 1);
    }),
    ("pool_destroyed_in_use", |driver| {
        let pool = driver.pool();
        driver.pooled(LEN, pool, driver.stream());
        assert_eq!(driver.cuMemPoolDestroy(pool), 0);
    }),
    ("register_overlap", |driver| {
        let mut bytes = vec![0; LEN];
        driver.pin(&mut bytes[100..200]);
        assert_eq!(driver.cuMemHostRegister_v2(at(&mut bytes), 101, 1), 712);
    }),
    ("register_unmapped", |driver| assert_eq!(driver.cuMemHostRegister_v2(4096, 4096, 1), 1)),
    ("source_changed", |driver| {
        let mut bytes = vec![1; LEN];
        let (start, stream, address) = (driver.pin(&mut bytes), driver.stream(), driver.plain(LEN));
        assert_eq!(driver.cuMemcpyHtoDAsync_v2(address, start, LEN, stream), 0);
        overwrite(start + LEN - 1, 2, 1);
        assert_eq!(driver.cuStreamSynchronize(stream), 0);
        assert_eq!(driver.bytes(address, LEN)[LEN - 1], 2);
    }),
    ("unbalanced_pop", |driver| {
        made(|context| driver.cuCtxPopCurrent_v2(context));
        assert_eq!(driver.cuCtxPopCurrent_v2(&mut 0), 201);
    }),
    ("unbalanced_push", |driver| {
        std::thread::scope(|scope| {
            // `join`, since a scope may end before the destructors of its threads' locals.
            scope.spawn(|| assert_eq!(driver.cuCtxPushCurrent_v2(driver.context), 0)).join().unwrap();
        });
    }),
    ("unknown_handle", |driver| {
        let stream = driver.stream();
        assert_eq!(driver.cuStreamDestroy_v2(stream), 0);
        assert_eq!(driver.cuStreamSynchronize(stream), 400);
    }),
    ("unmapped_in_flight", |driver| {
        // Unmapped while still registered.
        let start = map(LEN);
        assert_eq!(driver.cuMemHostRegister_v2(start, LEN, 1), 0);
        let stream = driver.stream();
        assert_eq!(driver.cuMemcpyHtoDAsync_v2(driver.plain(LEN), start, LEN, stream), 0);
        unmap(start, LEN);
        assert_eq!(driver.cuStreamSynchronize(stream), 700);
    }),
    ("unordered_access", |driver| {
        let (first, second) = (driver.stream(), driver.stream());
        let address = driver.plain(LEN);
        assert_eq!(driver.cuMemsetD8Async(address, 1, 300, first), 0);
        assert_eq!(driver.cuMemsetD8Async(address + 300, 1, 300, second), 0);
        assert_eq!(driver.kinds(), [""; 0], "parts apart need no order");
        assert_eq!(driver.cuMemcpyDtoDAsync_v2(address + 600, address, 100, second), 0);
    }),
    ("unpinned_in_flight", |driver| {
        let mut bytes = vec![1; LEN];
        let (start, stream) = (driver.pin(&mut bytes), driver.stream());
        assert_eq!(driver.cuMemcpyHtoDAsync_v2(driver.plain(LEN), start, LEN, stream), 0);
        assert_eq!(driver.cuMemHostUnregister(start), 0);
        assert_eq!(driver.cuStreamSynchronize(stream), 700);
    }),
    ("unregister_in_flight", |driver| {
        let mut bytes = vec![1; LEN];
        let start = driver.pin(&mut bytes);
        assert_eq!(driver.cuMemcpyHtoDAsync_v2(driver.plain(LEN), start, LEN, driver.stream()), 0);
        assert_eq!(driver.cuMemHostUnregister(start), 0);
    }),
    ("unregister_without_wait", |_| {
        let driver = Driver::new("MODE=eager");
        let mut bytes = vec![1; LEN];
        let start = driver.pin(&mut bytes);
        assert_eq!(driver.cuMemcpyHtoDAsync_v2(driver.plain(LEN), start, LEN, driver.stream()), 0);
        assert_eq!(driver.cuMemHostUnregister(start), 0);
        assert_eq!(driver.kinds(), ["unregister_without_wait"]);
    }),
    ("use_after_free", |driver| {
        let stream = driver.stream();
        let address = driver.pooled(LEN, driver.pool(), stream);
        assert_eq!(driver.cuMemFreeAsync(address, stream), 0);
        assert_eq!(driver.cuMemsetD8Async(address, 0, LEN, stream), 1);
        assert_eq!(driver.cuStreamSynchronize(stream), 0);
        assert_eq!(driver.cuMemsetD8Async(address, 0, LEN, stream), 1);
    }),
    ("use_not_after_allocation", |driver| {
        let address = driver.pooled(LEN, driver.pool(), driver.stream());
        assert_eq!(driver.cuMemsetD8Async(address, 0, LEN, driver.stream()), 0);
    }),
    ("wrong_context", |driver| {
        let stream = driver.stream();
        made(|context| driver.cuCtxCreate_v2(context, 0, 0));
        assert_eq!(driver.cuMemsetD8Async(driver.plain(LEN), 0, LEN, stream), 400);
    }),
];

#[test]
fn every_kind_of_misuse_is_found() {
    for (kind, provoke) in KINDS {
        let mode = if kind == "free_without_wait" { "MODE=thread" } else { "MODE=lazy" };
        let driver = Driver::new(mode);
        provoke(&driver);
        let uses_own_driver = ["not_initialised", "unregister_without_wait"].contains(&kind);
        assert!(
            uses_own_driver || driver.kinds().iter().any(|found| found == kind),
            "{kind}: {:?}",
            driver.report()
        );
    }
}

/// Finds the kinds in the source, so that a new kind needs a test.
#[test]
fn every_kind_has_its_test() {
    let mut kinds = std::collections::BTreeSet::new();
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let folders = [source.join("sim"), source];
    for entry in folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()) {
        let path = entry.unwrap().path();
        if path.is_file() {
            let text = std::fs::read_to_string(path).unwrap();
            for opening in
                ["violation(\"", "Some((\"", "Some(\"", "push((\"", "                (\"", "_ => (\""]
            {
                let parts =
                    text.split(opening).skip(1).map(|rest| rest.split('"').next().unwrap().to_owned());
                kinds.extend(parts.filter(|part| part.contains('_') && !part.starts_with("CUDA")));
            }
        }
    }
    // Names of counters in the report look like kinds.
    let sums = ["context_references", "device_bytes", "pinned_ranges", "nvml_references"];
    kinds.retain(|kind| !sums.contains(&kind.as_str()));
    let tested: Vec<&str> = KINDS.iter().map(|&(kind, _)| kind).collect();
    assert_eq!(Vec::from_iter(&kinds), tested);
}

/// Memory outside any allocator.
#[allow(unsafe_code, reason = "maps and unmaps memory")]
fn map(len: usize) -> usize {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new anonymous mapping, which touches no other memory.
    unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) }.expose_provenance()
}

#[allow(unsafe_code, reason = "maps and unmaps memory")]
fn unmap(start: usize, len: usize) {
    // SAFETY: mapped by `map`, and nothing refers to it.
    assert_eq!(unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(start), len) }, 0);
}
