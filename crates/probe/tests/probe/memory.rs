//! Short-lived memory must be seen and attributed to its kind: anonymous, file, locked.
//!
//! The tests measure their own process, so they run one at a time (`ALONE`). Bounds are not exact,
//! since earlier tests leave memory in the allocator. One test asserts a kernel fact: a child does
//! not inherit its parent's high-water mark, although its `ru_maxrss` does.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests: failing and saying so is their job"
)]
#![allow(
    unsafe_code,
    reason = "wait4 shows the contaminated number that the probe avoids; maps its own files"
)]

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use memmap2::{Mmap, MmapMut};
use onelayer_probe::{
    Measured, PeakResetOutcome, ProcessMemory, Procfs, Reason, RssPeakMethod, Sampler, SamplerOptions,
    Summary,
};
use onelayer_system::units::{KIB, MIB};
use onelayer_testing::skipped;

/// Anonymous memory of `mib` MiB, every page written; given back to the system when dropped.
fn touched(mib: usize) -> MmapMut {
    let mut memory = MmapMut::map_anon(mib << 20).unwrap();
    for page in memory.chunks_mut(4096) {
        page[0] = 1;
    }
    memory
}

fn known<T>(measured: Measured<T>) -> T {
    match measured {
        Measured::Value(value) => value,
        Measured::Unavailable(reason) => panic!("not measured: {reason}"),
    }
}

fn growth(summary: &Summary, peak: Measured<u64>, pick: fn(&ProcessMemory) -> Measured<u64>) -> u64 {
    known(peak.growth_since(pick(&summary.baseline.memory)))
}

#[test]
fn memory_that_was_freed_before_the_end_is_in_the_peak_with_its_place() {
    if onelayer_testing::in_own_process(
        module_path!(),
        "memory_that_was_freed_before_the_end_is_in_the_peak_with_its_place",
    ) {
        return;
    }
    let sampler = Sampler::start(&SamplerOptions::default()).unwrap();
    let marker = sampler.marker();
    marker.enter_layer("model.layers.2");
    std::thread::sleep(Duration::from_millis(20));
    marker.enter_layer("model.layers.3");
    marker.enter_tensor("model.layers.3.mlp.up_proj.weight");
    let memory = touched(64);
    std::thread::sleep(Duration::from_millis(100));
    drop(memory);
    marker.enter_layer("model.layers.4");
    std::thread::sleep(Duration::from_millis(20));
    let summary = sampler.finish().unwrap();

    assert!(matches!(summary.peak_reset, PeakResetOutcome::Done(_)), "{:?}", summary.peak_reset);
    assert_eq!(summary.peak.rss_method, RssPeakMethod::HighWaterMark);
    for (name, grown_bytes) in [
        ("host", known(summary.host_growth_bytes())),
        ("rss", known(summary.rss_growth_bytes())),
        ("anon", growth(&summary, summary.peak.anon.bytes(), |memory| memory.anon_bytes)),
    ] {
        assert!((63 * MIB..70 * MIB).contains(&grown_bytes), "{name} grew by {grown_bytes}");
    }
    for peak in [summary.peak.host.clone(), summary.peak.rss.clone(), summary.peak.anon.clone()] {
        let at = known(peak).at;
        assert_eq!(at.layer.as_deref(), Some("model.layers.3"));
        assert_eq!(at.tensor.as_deref(), Some("model.layers.3.mlp.up_proj.weight"));
        assert!(at.seconds >= 0.02 && at.seconds <= summary.seconds);
    }
    let left = known(summary.after.memory.anon_bytes.growth_since(summary.baseline.memory.anon_bytes));
    assert!(left < 4 * MIB, "{left} bytes of anonymous memory after the drop");
    let highest = summary.timeline.rows().filter_map(|row| row.host_bytes).max();
    assert_eq!(highest, summary.peak.host.bytes().value());
    let missing: Vec<_> =
        summary.unavailable.iter().filter(|entry| !entry.metric.contains("cgroup")).collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(summary.sample_count >= 8, "{}", summary.sample_count);
    assert!(known(summary.activity.minor_faults) > 0);
}

#[test]
fn a_spike_between_two_samples_is_seen_by_the_mark_and_named_by_the_next_layer() {
    if onelayer_testing::in_own_process(
        module_path!(),
        "a_spike_between_two_samples_is_seen_by_the_mark_and_named_by_the_next_layer",
    ) {
        return;
    }
    let options = SamplerOptions { interval: Duration::from_secs(60), ..SamplerOptions::default() };
    let sampler = Sampler::start(&options).unwrap();
    let marker = sampler.marker();
    marker.enter_layer("quiet");
    marker.enter_layer("spike");
    drop(touched(48));
    marker.enter_layer("quiet again");
    let summary = sampler.finish().unwrap();
    let rss = known(summary.peak.rss.clone());
    assert_eq!(rss.at.layer.as_deref(), Some("spike"));
    assert!(known(summary.rss_growth_bytes()) >= 47 * MIB);
    let host = known(summary.host_growth_bytes());
    assert!(host < 8 * MIB, "no sample fell into the spike, so host cannot have seen it: {host}");
}

#[test]
fn a_peak_from_before_the_run_is_not_charged_to_it() {
    if onelayer_testing::in_own_process(module_path!(), "a_peak_from_before_the_run_is_not_charged_to_it") {
        return;
    }
    drop(touched(96));
    let unreset = SamplerOptions { reset_peak: false, ..SamplerOptions::default() };
    let summary = Sampler::start(&unreset).unwrap().finish().unwrap();
    assert_eq!(summary.peak.rss_method, RssPeakMethod::Sampled);
    assert!(known(summary.rss_growth_bytes()) < 4 * MIB);
    let summary = Sampler::start(&SamplerOptions::default()).unwrap().finish().unwrap();
    assert_eq!(summary.peak.rss_method, RssPeakMethod::HighWaterMark);
    assert!(known(summary.rss_growth_bytes()) < 4 * MIB);
}

#[test]
fn mapped_file_pages_are_file_and_rss_but_not_host() {
    if onelayer_testing::in_own_process(module_path!(), "mapped_file_pages_are_file_and_rss_but_not_host") {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().write_all(&vec![7; 32 << 20]).unwrap();
    let sampler = Sampler::start(&SamplerOptions::default()).unwrap();
    // SAFETY: the file belongs to this test alone and keeps its length while it is mapped.
    let map = unsafe { Mmap::map(file.as_file()) }.unwrap();
    let sum: u64 = map.chunks(4096).map(|page| u64::from(page[0])).sum();
    assert_eq!(sum, 7 * (32 << 20) / 4096);
    sampler.marker().sample();
    drop(map);
    let summary = sampler.finish().unwrap();
    let file_growth = growth(&summary, summary.peak.file.bytes(), |memory| memory.file_bytes);
    assert!((31 * MIB..36 * MIB).contains(&file_growth), "{file_growth}");
    assert!(known(summary.rss_growth_bytes()) >= 31 * MIB);
    let host = known(summary.host_growth_bytes());
    assert!(host < 4 * MIB, "file pages counted as host: {host}");
}

#[test]
fn locked_file_pages_are_host() {
    if onelayer_testing::in_own_process(module_path!(), "locked_file_pages_are_host") {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().write_all(&vec![7; 4 << 20]).unwrap();
    let before = Procfs::default().myself().memory();
    // SAFETY: the file belongs to this test alone and keeps its length while it is mapped.
    let map = unsafe { Mmap::map(file.as_file()) }.unwrap();
    if let Err(error) = map.lock() {
        skipped(format_args!("4 MiB cannot be locked here ({error})"));
        return;
    }
    let locked = Procfs::default().myself().memory();
    assert_eq!(known(locked.locked_bytes.growth_since(before.locked_bytes)), 4 * MIB);
    assert!(known(locked.host_bytes.growth_since(before.host_bytes)) >= 4 * MIB);
}

#[test]
fn status_and_rollup_agree_up_to_the_lag_of_the_counters() {
    if onelayer_testing::in_own_process(
        module_path!(),
        "status_and_rollup_agree_up_to_the_lag_of_the_counters",
    ) {
        return;
    }
    let memory = touched(32);
    let myself = Procfs::default().myself();
    let (status, exact) = (myself.memory(), myself.exact_memory());
    let cpus: u64 = std::thread::available_parallelism().unwrap().get().try_into().unwrap();
    let lag_bytes = cpus * (2 * cpus).max(32) * 4 * KIB + 256 * KIB;
    for (name, counted, walked) in
        [("rss", status.rss_bytes, exact.rss_bytes), ("anon", status.anon_bytes, exact.anon_bytes)]
    {
        let difference = known(counted).abs_diff(known(walked));
        println!("{name}: status and smaps_rollup are {difference} bytes apart");
        assert!(difference <= lag_bytes, "{name}: {difference} bytes apart, at most {lag_bytes} expected");
    }
    assert!(known(exact.anon_bytes) >= 32 * MIB);
    assert!(known(exact.host_share_bytes()) >= 32 * MIB);
    drop(memory);
}

#[test]
#[allow(clippy::zombie_processes, reason = "it is waited for by wait4, which clippy does not know")]
fn a_child_does_not_inherit_the_peak_of_a_fat_parent() {
    if onelayer_testing::in_own_process(module_path!(), "a_child_does_not_inherit_the_peak_of_a_fat_parent") {
        return;
    }
    let fat = touched(300);
    let mut child = Command::new("cat").arg("/proc/self/status").stdout(Stdio::piped()).spawn().unwrap();
    let mut status = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut status).unwrap();
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    let pid = libc::pid_t::try_from(child.id()).unwrap();
    // SAFETY: `usage` is valid for writes of one rusage; the child is ours and is not waited for
    // elsewhere.
    let waited = unsafe { libc::wait4(pid, std::ptr::null_mut(), 0, usage.as_mut_ptr()) };
    assert_eq!(waited, pid);
    // SAFETY: all zeros is a valid rusage, and wait4 filled it in.
    let maxrss_bytes = u64::try_from(unsafe { usage.assume_init() }.ru_maxrss).unwrap() * KIB;
    let peak_bytes = known(ProcessMemory::parse(&status).rss_peak_bytes);
    println!("child: VmHWM {peak_bytes}, ru_maxrss {maxrss_bytes} (includes the parent's)");
    assert!(peak_bytes > 0 && peak_bytes < 32 * MIB, "the child reports {peak_bytes}");
    drop(fat);
}

#[test]
fn an_unreadable_proc_is_unavailable_and_never_zero() {
    if onelayer_testing::in_own_process(module_path!(), "an_unreadable_proc_is_unavailable_and_never_zero") {
        return;
    }
    let options = SamplerOptions { procfs: Procfs::at("/nonexistent/proc"), ..SamplerOptions::default() };
    let sampler = Sampler::start(&options).unwrap();
    sampler.marker().enter_layer("model.layers.0");
    let summary = sampler.finish().unwrap();
    let reason = Reason::Unreadable { file: "/proc/<pid>", errno: libc::ENOENT };
    assert_eq!(summary.baseline.memory.host_bytes, Measured::Unavailable(reason));
    assert_eq!(summary.peak.host.reason(), Some(reason));
    assert_eq!(summary.rss_growth_bytes().reason(), Some(reason));
    assert_eq!(summary.activity.read_bytes.reason(), Some(reason));
    assert!(matches!(summary.peak_reset, PeakResetOutcome::Failed(_)));
    for metric in ["baseline.host_bytes", "peak.rss_bytes", "after.exact.pss_bytes", "peak_reset"] {
        let entry = summary.unavailable.iter().find(|entry| entry.metric == metric);
        assert!(entry.is_some_and(|entry| !entry.reason.is_empty()), "{metric}");
    }
    let json = serde_json::to_value(&summary).unwrap();
    assert!(json["peak"]["host"].is_null() && json["baseline"]["memory"]["anon_bytes"].is_null(), "{json}");
}

#[test]
fn watching_costs_little_memory_and_little_time() {
    if onelayer_testing::in_own_process(module_path!(), "watching_costs_little_memory_and_little_time") {
        return;
    }
    let names: Vec<String> = (0..1000).map(|index| format!("model.layers.{index}.weight")).collect();
    let before = known(Procfs::default().myself().exact_memory().anon_bytes);
    let options = SamplerOptions { interval: Duration::from_millis(1), ..SamplerOptions::default() };
    let sampler = Sampler::start(&options).unwrap();
    let marker = sampler.marker();
    let start = Instant::now();
    for _ in 0..100 {
        names.iter().for_each(|name| marker.enter_tensor(name));
    }
    let per_mark = start.elapsed() / 100_000;
    std::thread::sleep(Duration::from_millis(500));
    let held = known(sampler.snapshot().exact.anon_bytes).saturating_sub(before);
    let summary = sampler.finish().unwrap();
    let samples = f64::from(u32::try_from(summary.sample_count).unwrap());
    let per_sample = Duration::from_secs_f64(known(summary.sampler_cpu_seconds) / samples);
    println!(
        "{samples} samples, {per_sample:?} each; {per_mark:?} a tensor mark; {held} bytes held; growth {:?}; gap {} ms",
        summary.rss_growth_bytes(),
        summary.gap_ms_max
    );
    assert!(held < MIB, "watching holds {held} bytes");
    assert!(known(summary.rss_growth_bytes()) < 512 * KIB, "{:?}", summary.rss_growth_bytes());
    assert!(per_sample < Duration::from_millis(1), "a sample costs {per_sample:?}");
    assert!(per_mark < Duration::from_micros(50), "a tensor mark costs {per_mark:?}");
}

#[test]
fn intervals_out_of_bounds_are_refused() {
    for interval in [Duration::ZERO, Duration::from_secs(61)] {
        let options = SamplerOptions { interval, ..SamplerOptions::default() };
        let refused = Sampler::start(&options).unwrap_err();
        assert!(refused.to_string().contains("100µs..=60s"), "{refused}");
    }
}

#[test]
fn a_dropped_sampler_ends_its_thread() {
    if onelayer_testing::in_own_process(module_path!(), "a_dropped_sampler_ends_its_thread") {
        return;
    }
    let count = || {
        let named = |task: std::io::Result<std::fs::DirEntry>| {
            let mut name = String::new();
            let read = File::open(task?.path().join("comm"))?.read_to_string(&mut name);
            read.map(|_| name.starts_with("probe-sampler"))
        };
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        tasks.map(named).filter(|is_sampler| matches!(is_sampler, Ok(true))).count()
    };
    let sampler = Sampler::start(&SamplerOptions::default()).unwrap();
    let marker = sampler.marker();
    assert_eq!(count(), 1);
    drop(sampler);
    // The kernel lists a thread for a moment after it was joined.
    let deadline = Instant::now() + Duration::from_secs(5);
    while count() > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(count(), 0);
    marker.enter_layer("after the end");
}
