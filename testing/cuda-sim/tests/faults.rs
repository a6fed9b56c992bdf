//! Injected failures, lost contexts, and the report at the end of a process.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::time::Duration;

use support::cuda_sim::{driver_without, sim_driver};
use support::{Driver, SimRun, made};

const LEN: usize = 4096;

#[test]
fn the_call_that_a_rule_names_fails_and_does_nothing() {
    let driver = Driver::new("FAIL=cuStreamCreate:2:999,cuEventCreate@3=2");
    let streams: Vec<u32> = (0..3).map(|_| driver.cuStreamCreate(&mut 0, 1)).collect();
    let events: Vec<u32> = (0..4).map(|_| driver.cuEventCreate(&mut 0, 2)).collect();
    assert_eq!((streams, events), (vec![0, 999, 0], vec![0, 0, 2, 0]));
    let report = driver.report();
    assert_eq!((report.leaks()["streams"], report.leaks()["events"]), (2, 3));
    assert_eq!(
        (report.text("fault.0"), report.text("fault.1")),
        ("cuStreamCreate 2 999", "cuEventCreate 3 2")
    );
    assert_eq!((report.calls("cuStreamCreate"), report.calls("cuEventCreate")), (3, 4));
    assert_eq!(report.number("calls.total"), 10, "with three to begin");
}

#[test]
fn rules_count_over_all_functions_from_a_call_on_or_every_time() {
    let driver = Driver::new("FAIL=*:5:2,cuEventCreate:3+:1,cuMemAlloc_v2:*:2,cuStreamQuery:1:999~");
    let codes = [driver.cuStreamCreate(&mut 0, 1), driver.cuStreamCreate(&mut 0, 1)];
    assert_eq!(codes, [0, 2]);
    let events: Vec<u32> = (0..4).map(|_| driver.cuEventCreate(&mut 0, 2)).collect();
    assert_eq!(events, [0, 0, 1, 1]);
    assert_eq!([driver.cuMemAlloc_v2(&mut 0, 1), driver.cuMemAlloc_v2(&mut 0, 1)], [2, 2]);
}

#[test]
fn a_fatal_code_loses_the_context_drops_the_work_and_lets_everything_be_given_back() {
    for (lost, enters, releases) in [("calls", 700, 0), ("work", 0, 0), ("all", 700, 700)] {
        let driver = Driver::new(&format!("FAIL=cuEventRecord:1:700\nLOST={lost}"));
        let (stream, event, pool) = (driver.stream(), driver.event(), driver.pool());
        let mut bytes = vec![1; LEN];
        let start = driver.pin(&mut bytes);
        let address = driver.pooled(LEN, pool, stream);
        assert_eq!(driver.cuMemcpyHtoDAsync_v2(address, start, LEN, stream), 0);
        assert_eq!(driver.cuEventRecord(event, stream), 700);
        assert_eq!(driver.cuEventSynchronize(event), 700);
        assert_eq!(driver.cuStreamSynchronize(stream), 700);
        assert_eq!(driver.cuCtxPushCurrent_v2(driver.context), enters, "{lost}");
        if enters == 0 {
            assert_eq!(driver.cuCtxPopCurrent_v2(&mut 0), 0);
        }
        assert_eq!(driver.cuMemHostUnregister(start), releases);
        assert_eq!(driver.cuMemFreeAsync(address, stream), releases);
        assert_eq!(driver.cuMemPoolDestroy(pool), releases);
        assert_eq!(driver.cuEventDestroy_v2(event), releases);
        assert_eq!(driver.cuStreamDestroy_v2(stream), releases);
        assert_eq!(driver.cuCtxPopCurrent_v2(&mut 0), releases);
        assert_eq!(driver.cuDevicePrimaryCtxRelease_v2(0), releases);
        let report = driver.report();
        report.assert_clean();
        assert_eq!(report.number("copies.host_to_device.run"), 0);
        assert_eq!((report.number("dropped.copies"), report.number("device.0.lost")), (1, 700));
    }
}

#[test]
fn a_release_that_fails_fatally_is_done_and_one_that_is_refused_is_not() {
    let driver = Driver::new("FAIL=cuEventDestroy_v2:1:2,cuEventDestroy_v2:2:700");
    let event = driver.event();
    assert_eq!(driver.cuEventDestroy_v2(event), 2);
    assert_eq!(driver.report().leaks()["events"], 1);
    assert_eq!(driver.cuEventDestroy_v2(event), 700);
    assert!(!driver.report().leaks().contains_key("events"));
    assert_eq!(driver.report().number("device.0.lost"), 700);
}

#[test]
fn a_call_can_do_its_work_and_fail_nevertheless() {
    let driver = Driver::new("FAIL=cuStreamCreate:1:2~");
    assert_eq!(driver.cuStreamCreate(&mut 0, 1), 2);
    assert_eq!(driver.report().leaks()["streams"], 1);
}

#[test]
fn without_stickiness_a_fatal_code_is_one_failed_call() {
    let driver = Driver::new("FAIL=cuEventCreate:1:700\nFATAL=0");
    assert_eq!([driver.cuEventCreate(&mut 0, 2), driver.cuEventCreate(&mut 0, 2)], [700, 0]);
    let driver = Driver::new("FAIL=cuEventCreate:1:2!");
    assert_eq!([driver.cuEventCreate(&mut 0, 2), driver.cuEventCreate(&mut 0, 2)], [2, 2]);
}

#[test]
fn queued_work_that_fails_is_told_by_whoever_waits() {
    let driver = Driver::new("FAIL=work:2:700");
    let (stream, address) = (driver.stream(), driver.plain(LEN));
    for value in 0..3 {
        assert_eq!(driver.cuMemsetD8Async(address, value, LEN, stream), 0);
    }
    assert_eq!(driver.cuStreamSynchronize(stream), 700);
    assert_eq!(driver.cuMemsetD8Async(address, 1, LEN, stream), 700);
    let report = driver.report();
    assert_eq!((report.number("copies.fill.run"), report.number("dropped.copies")), (1, 1));
}

/// The process whose report the test below reads.
#[test]
#[ignore = "runs on the simulated driver, started by `a_process_that_ends_writes_its_report`"]
#[allow(unsafe_code, reason = "opens a driver as programs do")]
fn child_leaves_a_stream_behind() {
    // SAFETY: the library's initialisers do nothing.
    let library = unsafe { libloading::Library::new("libcuda.so.1") }.unwrap();
    // SAFETY: as above.
    let nvml = unsafe { libloading::Library::new("libnvidia-ml.so.1") }.unwrap();
    type Simple = unsafe extern "C" fn(u32) -> u32;
    // SAFETY: the signature of the driver API.
    let init = unsafe { library.get::<Simple>(b"cuInit") }.unwrap();
    // SAFETY: as above.
    println!("cuInit {}", unsafe { init(0) });
    // SAFETY: only looks up the name.
    println!("trim {}", unsafe { library.get::<Simple>(b"cuMemPoolTrimTo") }.is_ok());
    type Handle = unsafe extern "C" fn(*mut usize, u32) -> u32;
    // SAFETY: the signature of the driver API.
    let retain = unsafe { library.get::<Handle>(b"cuDevicePrimaryCtxRetain") }.unwrap();
    let mut context = 0;
    // SAFETY: writes one handle.
    unsafe { retain(&raw mut context, 0) };
    type Start = unsafe extern "C" fn() -> u32;
    // SAFETY: the signature of NVML.
    let start = unsafe { nvml.get::<Start>(b"nvmlInit_v2") }.unwrap();
    // SAFETY: takes nothing.
    unsafe { start() };
}

#[test]
fn a_process_that_ends_writes_its_report() {
    let outcome = SimRun::again(module_path!(), "child_leaves_a_stream_behind").set("SEED", 77).run();
    let report = outcome.assert_success().report();
    assert!(outcome.stdout.contains("cuInit 0\ntrim true"), "{}", outcome.stdout);
    assert_eq!((report.number("seed"), report.text("mode")), (77, "lazy"));
    let leaks: Vec<(String, u64)> = report.leaks().into_iter().collect();
    let expected = ["context_references", "nvml_references"].map(|what| (what.to_owned(), 1));
    assert_eq!(leaks, expected, "NVML and the driver are one library");
    assert_eq!(report.violations(), []);
}

#[test]
fn stubs_and_old_drivers() {
    let child = "child_leaves_a_stream_behind";
    let outcome = SimRun::again(module_path!(), child).on_stub().run();
    assert!(outcome.stdout.contains("cuInit 34"), "{}", outcome.stdout);
    assert!(outcome.reports.is_empty(), "it was never initialised");
    let old = driver_without(&["cuMemPoolTrimTo"]);
    assert_ne!(old, sim_driver());
    let outcome = SimRun::again(module_path!(), child).on_driver(&old).run();
    assert!(outcome.stdout.contains("trim false"), "{}", outcome.stdout);
    assert_eq!(outcome.report().number("calls.cuInit"), 1);
}

#[test]
fn a_setting_that_does_not_exist_ends_the_program() {
    let outcome = SimRun::again(module_path!(), "child_leaves_a_stream_behind").set("SEAD", 1).run();
    assert!(!outcome.status.success());
    assert!(outcome.stderr.contains("there is no setting CUDA_SIM_SEAD"), "{}", outcome.stderr);
}

#[test]
#[should_panic(expected = "still running after")]
fn a_program_that_hangs_is_a_failure() {
    let mut sleep = std::process::Command::new("sleep");
    sleep.arg("100");
    SimRun::new(sleep).timeout(Duration::from_millis(50)).run();
}

#[test]
fn a_context_stack_is_a_threads_own() {
    let driver = Driver::new("");
    std::thread::scope(|scope| {
        let other = scope.spawn(|| made(|context| driver.cuCtxGetCurrent(context)));
        assert_eq!(other.join().unwrap(), 0);
    });
    assert_eq!(made(|context| driver.cuCtxGetCurrent(context)), driver.context);
    let own = made(|context| driver.cuCtxCreate_v2(context, 0, 0));
    assert_eq!(made(|context| driver.cuCtxGetCurrent(context)), own);
    assert_eq!(driver.cuCtxDestroy_v2(own), 0);
    assert_eq!(made(|context| driver.cuCtxGetCurrent(context)), driver.context);
    assert_eq!(driver.kinds(), [""; 0]);
}
