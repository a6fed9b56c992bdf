//! Device memory: limits, pools and their reserved memory, several devices, and NVML's numbers.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::ffi::CString;

use support::{Driver, made};

const MIB: usize = 1 << 20;
const RESERVED: u32 = 5;
const RESERVED_HIGH: u32 = 6;
const USED: u32 = 7;
const USED_HIGH: u32 = 8;

#[test]
fn a_device_has_so_much_memory_and_gets_all_of_it_back() {
    let driver = Driver::new("MEM=64M\nCONTEXT=4M\nOTHER=10M");
    assert_eq!(driver.free_bytes(), 50 * MIB);
    let address = driver.plain(49 * MIB);
    assert_eq!(driver.free_bytes(), 0, "given in grains of 2 MiB");
    assert_eq!(driver.cuMemAlloc_v2(&mut 0, 1), 2);
    assert_eq!(driver.cuMemAlloc_v2(&mut 0, usize::MAX), 2);
    assert_eq!(driver.cuMemAlloc_v2(&mut 0, 0), 1);
    assert_eq!(driver.cuMemFree_v2(address), 0);
    assert_eq!(driver.free_bytes(), 50 * MIB);
    assert_eq!(driver.kinds(), [""; 0]);
}

#[test]
fn fresh_memory_is_poisoned_and_aligned_to_256_bytes_and_no_more() {
    let driver = Driver::new("");
    for _ in 0..3 {
        let address = driver.plain(1000);
        assert_eq!(address % 512, 256);
        assert_eq!(driver.bytes(address, 1000), vec![0xA5; 1000]);
    }
}

#[test]
fn a_pool_keeps_freed_memory_until_the_free_has_run_and_the_host_has_waited() {
    let driver = Driver::new("MEM=64M\nCONTEXT=0");
    let (pool, stream) = (driver.pool(), driver.stream());
    let address = driver.pooled(9 * MIB, pool, stream);
    let number = |attribute| usize::try_from(driver.pool_number(pool, attribute)).unwrap() / MIB;
    assert_eq!((number(USED), number(RESERVED)), (9, 10));
    assert_eq!(driver.cuMemFreeAsync(address, stream), 0);
    assert_eq!((number(USED), driver.free_bytes() / MIB), (9, 54), "the free has not run");
    assert_eq!(driver.cuMemPoolTrimTo(pool, 0), 0);
    assert_eq!(driver.free_bytes() / MIB, 54, "trimming takes nothing in use");
    assert_eq!(driver.cuStreamSynchronize(stream), 0);
    assert_eq!((number(USED), number(RESERVED), driver.free_bytes() / MIB), (0, 0, 64));
    assert_eq!((number(USED_HIGH), number(RESERVED_HIGH)), (9, 10));
    let zero = 0_u64;
    assert_eq!(driver.cuMemPoolSetAttribute(pool, RESERVED_HIGH, (&raw const zero).cast()), 0);
    assert_eq!(number(RESERVED_HIGH), 0);
}

#[test]
fn a_pool_with_a_threshold_keeps_that_much_until_it_is_trimmed_or_destroyed() {
    let driver = Driver::new("MEM=64M\nCONTEXT=0");
    let (pool, stream) = (driver.pool(), driver.stream());
    let threshold = 4 * u64::try_from(MIB).unwrap();
    assert_eq!(driver.cuMemPoolSetAttribute(pool, 4, (&raw const threshold).cast()), 0);
    for _ in 0..2 {
        let address = driver.pooled(8 * MIB, pool, stream);
        assert_eq!(driver.cuMemFreeAsync(address, stream), 0);
        assert_eq!(driver.cuStreamSynchronize(stream), 0);
        assert_eq!(driver.free_bytes() / MIB, 60);
    }
    assert_eq!(driver.cuMemPoolTrimTo(pool, 2 * MIB), 0);
    assert_eq!(driver.free_bytes() / MIB, 62);
    assert_eq!(driver.cuMemPoolDestroy(pool), 0);
    assert_eq!(driver.free_bytes() / MIB, 64);
}

#[test]
fn freed_memory_serves_what_is_ordered_after_the_free_and_nothing_else() {
    let driver = Driver::new("MEM=16M\nCONTEXT=0");
    let (pool, stream, other) = (driver.pool(), driver.stream(), driver.stream());
    let address = driver.pooled(10 * MIB, pool, stream);
    assert_eq!(driver.cuMemFreeAsync(address, stream), 0);
    assert_eq!(driver.cuMemAllocFromPoolAsync(&mut 0, 10 * MIB, pool, other), 2);
    let address = driver.pooled(10 * MIB, pool, stream);
    assert_eq!(driver.pool_number(pool, RESERVED_HIGH), 10 * u64::try_from(MIB).unwrap());
    assert_eq!(driver.cuMemFreeAsync(address, stream), 0);
    let event = driver.event();
    assert_eq!(driver.cuEventRecord(event, stream), 0);
    assert_eq!(driver.cuStreamWaitEvent(other, event, 0), 0);
    let address = driver.pooled(10 * MIB, pool, other);
    assert_eq!(driver.cuMemFreeAsync(address, other), 0);
    assert_eq!(driver.cuCtxSynchronize(), 0);
    assert_eq!(driver.pool_number(pool, USED), 0);
    assert_eq!(driver.kinds(), [""; 0]);
}

#[test]
fn a_destroyed_pool_lives_until_its_last_free_has_run() {
    let driver = Driver::new("MEM=16M\nCONTEXT=0");
    let (pool, stream) = (driver.pool(), driver.stream());
    let address = driver.pooled(MIB, pool, stream);
    assert_eq!(driver.cuMemFreeAsync(address, stream), 0);
    assert_eq!(driver.cuMemPoolDestroy(pool), 0);
    assert_eq!(driver.free_bytes() / MIB, 14);
    assert_eq!(driver.cuStreamSynchronize(stream), 0);
    assert_eq!(driver.free_bytes() / MIB, 16);
    assert_eq!(driver.kinds(), [""; 0]);
}

#[test]
fn a_device_without_pools_says_so() {
    let driver = Driver::new("POOLS=0");
    assert_eq!(made(|value| driver.cuDeviceGetAttribute(value, 115, 0)), 0);
    let properties = [0; 22];
    assert_eq!(driver.cuMemPoolCreate(&mut 0, &raw const properties), 801);
    assert_eq!(driver.cuMemAllocAsync(&mut 0, 1, driver.stream()), 801);
}

#[test]
fn pinning_ends_at_its_limit_and_begins_again() {
    let driver = Driver::new("PINNED=1M");
    let mut first = vec![0; MIB];
    let mut second = vec![0; 1];
    let start = driver.pin(&mut first);
    assert_eq!(driver.cuMemHostRegister_v2(support::at(&mut second), 1, 1), 2);
    assert_eq!(driver.cuMemHostUnregister(start), 0);
    driver.pin(&mut second);
    assert_eq!(driver.report().number("peak.pinned_bytes"), 1 << 20);
}

#[test]
fn devices_have_memory_contexts_and_names_of_their_own() {
    let driver = Driver::new("DEVICES=2\nMEM=32M,64M\nCONTEXT=0");
    let second = made(|context| driver.cuDevicePrimaryCtxRetain(context, 1));
    assert_ne!(second, driver.context);
    let first_address = driver.plain(MIB);
    assert_eq!(driver.cuCtxPushCurrent_v2(second), 0);
    assert_eq!(made(|device| driver.cuCtxGetDevice(device)), 1);
    assert_eq!(driver.free_bytes() / MIB, 64);
    let second_address = driver.plain(MIB);
    assert_ne!(first_address >> 42, second_address >> 42);
    assert_eq!(made(|context| driver.cuCtxPopCurrent_v2(context)), second);
    assert_eq!(driver.free_bytes() / MIB, 30);
    let mut names = std::collections::BTreeSet::new();
    for device in 0..2 {
        let mut name = [0; 64];
        assert_eq!(driver.cuDeviceGetName(name.as_mut_ptr(), 64, device), 0);
        let name = std::ffi::CStr::from_bytes_until_nul(&name).unwrap().to_str().unwrap().to_owned();
        assert!(name.contains("simulated"), "{name}");
        names.insert(name);
        let uuid = made(|uuid: *mut [u8; 16]| driver.cuDeviceGetUuid_v2(uuid, device));
        assert_eq!(i32::from(uuid[15]), device);
    }
    assert_eq!(names.len(), 2);
    assert_eq!(driver.cuDevicePrimaryCtxRetain(&mut 0, 2), 101);
}

#[test]
fn nvml_says_what_the_driver_says() {
    let driver = Driver::new("DEVICES=2\nMEM=64M\nCONTEXT=4M\nOTHER=1M");
    let mut handle = 0_usize;
    assert_eq!(driver.nvmlDeviceGetHandleByIndex_v2(0, &raw mut handle), 1, "not initialised");
    assert_eq!(driver.nvmlInit_v2(), 0);
    assert_eq!(made(|count| driver.nvmlDeviceGetCount_v2(count)), 2);
    let mut bus_id = [0; 32];
    assert_eq!(driver.cuDeviceGetPCIBusId(bus_id.as_mut_ptr(), 32, 1), 0);
    let bus_id = CString::from(std::ffi::CStr::from_bytes_until_nul(&bus_id).unwrap());
    let second = made(|handle| driver.nvmlDeviceGetHandleByPciBusId_v2(bus_id.as_ptr().cast(), handle));
    let first = made(|handle| driver.nvmlDeviceGetHandleByIndex_v2(0, handle));
    assert_ne!(first, second);
    let mut uuid = [0; 96];
    assert_eq!(driver.nvmlDeviceGetUUID(second, uuid.as_mut_ptr(), 96), 0);
    assert!(uuid.starts_with(b"GPU-73696d75-6c61-7465-"));
    assert_eq!(made(|handle| driver.nvmlDeviceGetHandleByUUID(uuid.as_ptr().cast(), handle)), second);
    assert_eq!(driver.nvmlDeviceGetUUID(second, uuid.as_mut_ptr(), 40), 7, "no room for the end");
    driver.plain(3 * MIB);
    let bytes = u64::try_from(driver.free_bytes()).unwrap();
    let memory = made(|memory: *mut [u64; 3]| driver.nvmlDeviceGetMemoryInfo(first, memory));
    assert_eq!(memory, [64 << 20, bytes, (64 << 20) - bytes]);
    let mut count = 0;
    let mut process = [0; 3];
    let ask = |count: &mut u32, process: &mut [u64; 3], of| {
        driver.nvmlDeviceGetComputeRunningProcesses_v3(of, count, process)
    };
    assert_eq!(ask(&mut count, &mut process, first), 7);
    assert_eq!((count, ask(&mut count, &mut process, first)), (1, 0));
    assert_eq!((process[0] & 0xFFFF_FFFF, process[1]), (u64::from(std::process::id()), 8 << 20));
    assert_eq!((ask(&mut count, &mut process, second), count), (0, 0), "no context there");
    assert_eq!(driver.nvmlShutdown(), 0);
    assert_eq!(Driver::raw("NVML=0").nvmlInit_v2(), 9);
}
