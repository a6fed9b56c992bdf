//! When queued work runs, and in which order: streams, events, waits, queries, pinned and pageable
//! memory.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use support::{Driver, at, made, overwrite};

const LEN: usize = 4096;

/// Sends blocks through a ring of two slots. `waits`: waits for a slot before refilling it. Returns
/// the number of wrong blocks.
fn wrong_blocks(settings: &str, waits: bool) -> (Driver, usize) {
    const BLOCKS: usize = 16;
    let driver = Driver::new(settings);
    let mut ring = vec![0_u8; 2 * LEN];
    let (start, stream) = (driver.pin(&mut ring), driver.stream());
    let target = driver.plain(BLOCKS * LEN);
    let events = [driver.event(), driver.event()];
    for block in 0..BLOCKS {
        let slot = block % 2;
        if waits && block >= 2 {
            assert_eq!(driver.cuEventSynchronize(events[slot]), 0);
        }
        overwrite(start + slot * LEN, u8::try_from(block + 1).unwrap(), LEN);
        let address = target + u64::try_from(block * LEN).unwrap();
        assert_eq!(driver.cuMemcpyHtoDAsync_v2(address, start + slot * LEN, LEN, stream), 0);
        assert_eq!(driver.cuEventRecord(events[slot], stream), 0);
    }
    let bytes = driver.bytes(target, BLOCKS * LEN);
    let is_wrong =
        |&(block, bytes): &(usize, &[u8])| bytes.iter().any(|&byte| usize::from(byte) != block + 1);
    let wrong = bytes.chunks(LEN).enumerate().filter(is_wrong).count();
    assert_eq!(driver.cuMemHostUnregister(start), 0);
    (driver, wrong)
}

#[test]
fn a_ring_that_forgets_to_wait_sends_wrong_bytes_and_is_told_so() {
    let (driver, wrong) = wrong_blocks("MODE=lazy", false);
    assert_eq!(wrong, 14, "all but the last of each slot");
    assert_eq!(driver.kinds(), vec!["source_changed"; 14]);
    let (driver, wrong) = wrong_blocks("MODE=eager", false);
    assert_eq!((wrong, driver.kinds().len()), (0, 0), "an obedient driver hides it");
}

#[test]
fn a_ring_that_waits_is_right_in_every_mode() {
    for mode in ["lazy", "thread", "eager"] {
        for seed in 0..4 {
            let (driver, wrong) = wrong_blocks(&format!("MODE={mode}\nSEED={seed}\nDELAY_US=50"), true);
            assert_eq!(wrong, 0);
            assert_eq!(driver.kinds(), [""; 0]);
        }
    }
}

#[test]
fn nothing_runs_before_something_waits_and_no_more_than_that_needs() {
    let driver = Driver::new("");
    let (first, second, other) = (driver.stream(), driver.stream(), driver.stream());
    let address = driver.plain(4 * LEN);
    let done = || driver.report().number("copies.fill.run");
    let part = |index: u64| address + index * u64::try_from(LEN).unwrap();
    let event = driver.event();
    assert_eq!(driver.cuMemsetD8Async(part(0), 1, LEN, first), 0);
    assert_eq!(driver.cuEventRecord(event, first), 0);
    assert_eq!(driver.cuMemsetD8Async(part(1), 1, LEN, first), 0);
    assert_eq!(driver.cuStreamWaitEvent(second, event, 0), 0);
    assert_eq!(driver.cuMemsetD8Async(part(2), 1, LEN, second), 0);
    assert_eq!(driver.cuMemsetD8Async(part(3), 1, LEN, other), 0);
    assert_eq!(done(), 0);
    assert_eq!(driver.cuStreamSynchronize(second), 0);
    assert_eq!(
        done(),
        2,
        "its own and what it waits for; not what comes behind the event, nor other streams"
    );
    assert_eq!(driver.cuCtxSynchronize(), 0);
    assert_eq!(done(), 4);
}

/// Each step reads the result of the previous one, over two streams that wait for each other.
#[test]
fn waits_keep_the_order_of_two_streams_under_every_schedule() {
    for mode in ["lazy", "thread"] {
        for seed in 0..20 {
            let driver = Driver::new(&format!("MODE={mode}\nSEED={seed}"));
            let streams = [driver.stream(), driver.stream()];
            let address = driver.plain(32 * 256);
            let event = driver.event();
            assert_eq!(driver.cuMemsetD8Async(address, 7, 256, streams[0]), 0);
            for step in 1..32_u64 {
                let stream = streams[usize::try_from(step % 2).unwrap()];
                // One event, recorded many times: a wait uses the last record at the time it was
                // queued.
                let other = streams[usize::try_from((step + 1) % 2).unwrap()];
                assert_eq!(driver.cuEventRecord(event, other), 0);
                assert_eq!(driver.cuStreamWaitEvent(stream, event, 0), 0);
                let target = address + step * 256;
                assert_eq!(driver.cuMemcpyDtoDAsync_v2(target, target - 256, 256, stream), 0);
            }
            assert_eq!(driver.bytes(address, 32 * 256), vec![7; 32 * 256]);
            assert_eq!(driver.kinds(), [""; 0]);
        }
    }
}

#[test]
fn an_event_marks_its_last_record_and_counts_as_over_before_the_first() {
    let driver = Driver::new("");
    let (stream, event, address) = (driver.stream(), driver.event(), driver.plain(LEN));
    assert_eq!(driver.cuEventQuery(event), 0);
    assert_eq!(driver.cuEventSynchronize(event), 0);
    assert_eq!(driver.cuEventRecord(event, stream), 0);
    assert_eq!(driver.cuMemsetD8Async(address, 1, LEN, stream), 0);
    assert_eq!(driver.cuEventSynchronize(event), 0);
    assert_eq!(driver.report().number("copies.fill.run"), 0, "recorded before the fill");
    assert_eq!(driver.cuEventRecord(event, stream), 0);
    assert_eq!(driver.cuEventSynchronize(event), 0);
    assert_eq!(driver.report().number("copies.fill.run"), 1);
}

#[test]
fn a_query_says_not_ready_and_one_who_asks_on_gets_an_end() {
    let mut not_ready = 0;
    for seed in 0..20 {
        let driver = Driver::new(&format!("SEED={seed}"));
        let (stream, event) = (driver.stream(), driver.event());
        assert_eq!(driver.cuMemsetD8Async(driver.plain(LEN), 1, LEN, stream), 0);
        assert_eq!(driver.cuEventRecord(event, stream), 0);
        let answers: Vec<u32> = (0..9).map(|_| driver.cuEventQuery(event)).collect();
        assert!(answers.iter().all(|&answer| answer == 0 || answer == 600));
        assert_eq!(answers.last(), Some(&0));
        not_ready += answers.iter().filter(|&&answer| answer == 600).count();
    }
    assert!(not_ready > 20, "{not_ready}");
}

#[test]
fn a_destroyed_stream_finishes_its_work() {
    let driver = Driver::new("");
    let (stream, event, address) = (driver.stream(), driver.event(), driver.plain(LEN));
    assert_eq!(driver.cuMemsetD8Async(address, 9, LEN, stream), 0);
    assert_eq!(driver.cuEventRecord(event, stream), 0);
    assert_eq!(driver.cuStreamDestroy_v2(stream), 0);
    assert_eq!(driver.cuEventSynchronize(event), 0);
    assert_eq!(driver.bytes(address, LEN), vec![9; LEN]);
}

#[test]
fn the_legacy_default_stream_waits_for_blocking_streams_and_not_for_others() {
    let driver = Driver::new("");
    let blocking = made(|stream| driver.cuStreamCreate(stream, 0));
    let address = driver.plain(3 * LEN);
    let part = |index: u64| address + index * u64::try_from(LEN).unwrap();
    assert_eq!(driver.cuMemsetD8Async(part(0), 1, LEN, blocking), 0);
    assert_eq!(driver.cuMemsetD8Async(part(1), 1, LEN, driver.stream()), 0);
    assert_eq!(driver.cuMemsetD8Async(part(2), 1, LEN, 0), 0);
    assert_eq!(driver.cuStreamSynchronize(0), 0);
    assert_eq!(driver.report().number("copies.fill.run"), 2);
    let context = made(|context| driver.cuStreamGetCtx(0, context));
    assert_eq!(context, driver.context);
}

#[test]
fn pageable_sources_are_read_at_once_unless_told_to_be_late() {
    for (settings, expected) in [("PAGEABLE=staged", 1), ("PAGEABLE=late", 2)] {
        for len in [LEN, 100_000] {
            let driver = Driver::new(settings);
            let (stream, address) = (driver.stream(), driver.plain(len));
            let mut bytes = vec![1_u8; len];
            let start = at(&mut bytes);
            assert_eq!(driver.cuMemcpyHtoDAsync_v2(address, start, len, stream), 0);
            overwrite(start, 2, len);
            assert_eq!(driver.bytes(address, len), vec![expected; len], "{settings} {len}");
            assert_eq!(driver.report().number("copies.host_to_device.pageable"), 1);
            let violations = usize::from(expected == 2);
            assert_eq!(driver.kinds().len(), violations);
        }
    }
}

#[test]
fn reading_back_into_pinned_memory_is_late() {
    let driver = Driver::new("");
    let start = made(|start| driver.cuMemHostAlloc(start, LEN, 0));
    let (stream, address) = (driver.stream(), driver.plain(LEN));
    let first = || {
        let byte = std::ptr::with_exposed_provenance::<u8>(start);
        #[allow(unsafe_code, reason = "reads what the driver writes")]
        // SAFETY: live memory of the driver.
        unsafe {
            byte.read_volatile()
        }
    };
    assert_eq!(first(), 0x5A);
    assert_eq!(driver.cuMemcpyDtoHAsync_v2(start, address, LEN, stream), 0);
    assert_eq!(first(), 0x5A);
    assert_eq!(driver.cuStreamSynchronize(stream), 0);
    assert_eq!(first(), 0xA5, "fresh device memory");
    assert_eq!(driver.cuMemFreeHost(start), 0);
    assert_eq!(driver.kinds(), [""; 0]);
}
