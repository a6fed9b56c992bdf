//! A tree of real processes: children, grandchildren, orphans, shared pages.
//!
//! The processes are this test program, started again with a role in an environment variable
//! (`role`, an ignored test). Subreaping applies to the whole process, so the tests run one at a
//! time.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests: failing and saying so is their job"
)]
#![allow(unsafe_code, reason = "maps a file that the test owns")]

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use onelayer_probe::{
    ChildGroup, Measured, Procfs, TreeMethod, TreeOptions, TreePeak, TreeSampler, TreeSummary,
};
use onelayer_system::units::MIB;
use onelayer_testing::skipped;

const ROLE: &str = "PROBE_TREE_ROLE";

fn known<T>(measured: Measured<T>) -> T {
    match measured {
        Measured::Value(value) => value,
        Measured::Unavailable(reason) => panic!("not measured: {reason}"),
    }
}

fn bytes(peak: Measured<TreePeak>) -> u64 {
    known(peak).bytes
}

/// A command that plays `role`: words separated by spaces.
fn playing(role: &str) -> Command {
    let mut command = onelayer_testing::again(module_path!(), "role");
    command.arg("--ignored");
    command.env(ROLE, role).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

fn touch(memory: &mut [u8]) {
    memory.chunks_mut(4096).for_each(|page| page[0] = 1);
}

/// `hold MIB MS`: holds anonymous memory. `share PATH MS`: maps a file and touches it. `family MIB
/// MS`: two children that hold, and a little of its own. `orphan MIB MS`: starts a child that
/// holds, and ends at once.
#[test]
#[ignore = "not a test: the other tests start it as a child"]
fn role() {
    let role = std::env::var(ROLE).unwrap_or_default();
    let words: Vec<&str> = role.split(' ').collect();
    let pause = |ms: &str| std::thread::sleep(Duration::from_millis(ms.parse().unwrap()));
    let wait = |mut child: Child| assert!(child.wait().unwrap().success());
    match words[..] {
        ["hold", mib, ms] => {
            let mut memory = MmapMut::map_anon(mib.parse::<usize>().unwrap() << 20).unwrap();
            touch(&mut memory);
            pause(ms);
        }
        ["share", path, ms] => {
            let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
            // SAFETY: the file keeps its length while the tests run, and no one reads through the
            // mapping.
            let mut memory = unsafe { MmapMut::map_mut(&file) }.unwrap();
            touch(&mut memory);
            pause(ms);
        }
        ["family", mib, ms] => {
            let children = [(); 2].map(|()| playing(&format!("hold {mib} {ms}")).spawn().unwrap());
            children.into_iter().for_each(wait);
        }
        ["sharers", path, ms] => {
            let children = [(); 2].map(|()| playing(&format!("share {path} {ms}")).spawn().unwrap());
            children.into_iter().for_each(wait);
        }
        ["orphan", mib, ms] => drop(playing(&format!("hold {mib} {ms}")).spawn().unwrap()),
        _ => panic!("unknown role {role:?}"),
    }
}

/// Starts `role` and measures it until no process is left (with adopted orphans).
fn measure(role: &str, options: &TreeOptions) -> TreeSummary {
    let mut root = playing(role).spawn().unwrap();
    let sampler = TreeSampler::start(root.id(), options).unwrap();
    assert!(root.wait().unwrap().success());
    let deadline = Instant::now() + Duration::from_secs(20);
    while sampler.live_count() > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(sampler.live_count(), 0, "somebody is still alive");
    let summary = sampler.finish().unwrap();
    println!(
        "{role}: host {:?} ({:?}), plain sum {:?}, rss {:?}, {} processes, gap {:.1} ms, shared-once gap {:.1} ms",
        summary.host,
        summary.host_method,
        summary.host_sum,
        summary.rss,
        summary.process_count,
        summary.gap_ms_max,
        summary.shared_once_gap_ms_max
    );
    summary
}

#[test]
fn one_process_has_the_kernels_own_peak() {
    if onelayer_testing::in_own_process(module_path!(), "one_process_has_the_kernels_own_peak") {
        return;
    }
    let summary = measure("hold 40 300", &TreeOptions::default());
    assert_eq!(
        (summary.host_method, summary.rss_method),
        (TreeMethod::SingleProcess, TreeMethod::SingleProcess)
    );
    assert!((40 * MIB..46 * MIB).contains(&bytes(summary.host)));
    let record = &summary.processes[0];
    assert!(record.has_ended);
    assert_eq!(Measured::Value(bytes(summary.rss)), record.rss_peak_bytes);
    assert!(bytes(summary.rss) >= 40 * MIB);
    assert_eq!((summary.process_count, summary.ended_count), (1, 1));
}

#[test]
fn children_are_found_and_summed() {
    if onelayer_testing::in_own_process(module_path!(), "children_are_found_and_summed") {
        return;
    }
    let summary = measure("family 32 300", &TreeOptions::default());
    assert_eq!((summary.process_count, summary.process_count_peak, summary.ended_count), (3, 3, 3));
    assert!((64 * MIB..80 * MIB).contains(&bytes(summary.host)), "{:?}", summary.host);
    assert_eq!(known(summary.host).process_count, 3);
    let root_pid = summary.processes[0].pid;
    for record in &summary.processes[1..] {
        assert_eq!(record.parent_pid, root_pid);
        assert!(known(record.rss_peak_bytes) >= 32 * MIB && known(record.host_peak_bytes) >= 32 * MIB);
    }
    let highest = summary.timeline.rows().filter_map(|row| row.host_bytes).max();
    assert_eq!(highest, Some(bytes(summary.host_sum)));
}

#[test]
fn pages_that_two_children_share_count_once() {
    if onelayer_testing::in_own_process(module_path!(), "pages_that_two_children_share_count_once") {
        return;
    }
    let Ok(file) = tempfile::NamedTempFile::new_in("/dev/shm") else {
        skipped("no /dev/shm here");
        return;
    };
    file.as_file().set_len(48 * MIB).unwrap();
    let summary = measure(&format!("sharers {} 300", file.path().display()), &TreeOptions::default());
    assert_eq!(summary.host_method, TreeMethod::SharedOnce, "{:?}", summary.unavailable);
    assert!((48 * MIB..64 * MIB).contains(&bytes(summary.host)), "{:?}", summary.host);
    assert!(
        bytes(summary.host_sum) >= 96 * MIB && bytes(summary.shmem_sum) >= 96 * MIB,
        "{:?}",
        summary.host_sum
    );
}

#[test]
fn an_orphan_is_adopted_watched_and_reaped() {
    if onelayer_testing::in_own_process(module_path!(), "an_orphan_is_adopted_watched_and_reaped") {
        return;
    }
    let options = TreeOptions { adopt_orphans: true, ..TreeOptions::default() };
    let mut bystander = Command::new("sleep").arg("60").spawn().unwrap();
    let summary = measure("orphan 48 400", &options);
    assert!((48 * MIB..56 * MIB).contains(&bytes(summary.host)), "{:?}", summary.host);
    assert_eq!((summary.process_count, summary.ended_count), (2, 2));
    let orphan = &summary.processes[1];
    assert!(orphan.has_ended && orphan.last_seen_seconds > summary.processes[0].last_seen_seconds);
    let left = Procfs::default().process(orphan.pid).memory().rss_bytes;
    assert!(left.reason().is_some() && !std::path::Path::new(&format!("/proc/{}", orphan.pid)).exists());
    assert!(
        summary.processes.iter().all(|record| record.pid != bystander.id()),
        "a child from before is no orphan"
    );
    assert!(bystander.try_wait().unwrap().is_none());
    bystander.kill().unwrap();
    bystander.wait().unwrap();
}

#[test]
fn a_group_holds_on_to_orphans_without_adoption() {
    if onelayer_testing::in_own_process(module_path!(), "a_group_holds_on_to_orphans_without_adoption") {
        return;
    }
    let Ok(group) = ChildGroup::create(None) else {
        skipped("no control group can be created here");
        return;
    };
    let options = TreeOptions { group: Some(group.directory().to_path_buf()), ..TreeOptions::default() };
    let mut command = playing("orphan 40 400");
    group.enter_on_spawn(&mut command).unwrap();
    let mut root = command.spawn().unwrap();
    let sampler = TreeSampler::start(root.id(), &options).unwrap();
    assert!(root.wait().unwrap().success());
    let deadline = Instant::now() + Duration::from_secs(20);
    while sampler.live_count() > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(sampler.live_count(), 0, "somebody is still alive");
    let summary = sampler.finish().unwrap();
    assert!(bytes(summary.host) >= 40 * MIB, "{:?}", summary.host);
    let peak_bytes = known(group.memory().peak_bytes);
    assert!(peak_bytes >= 40 * MIB, "the kernel's own peak of the group: {peak_bytes}");
}

#[test]
fn a_process_that_has_ended_cannot_be_watched() {
    if onelayer_testing::in_own_process(module_path!(), "a_process_that_has_ended_cannot_be_watched") {
        return;
    }
    let mut child = Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    let refused = TreeSampler::start(child.id(), &TreeOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("the process has ended"), "{refused}");
}
