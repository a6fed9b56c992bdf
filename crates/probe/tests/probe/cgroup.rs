//! Control groups on this machine: numbers of our group, effects of a limit.
//!
//! A test that cannot create a group says that it skipped. Each group is a child of the current one
//! and is removed.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests: failing and saying so is their job"
)]

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use crate::group::group_or_skip;
use onelayer_probe::{Measured, Procfs};
use onelayer_system::units::MIB;
use onelayer_testing::skipped;

fn known<T>(measured: Measured<T>) -> T {
    match measured {
        Measured::Value(value) => value,
        Measured::Unavailable(reason) => panic!("not measured: {reason}"),
    }
}

#[test]
fn our_own_group_is_found_and_read() {
    let group = match Procfs::default().myself().memory_group() {
        Ok(group) => group,
        Err(reason) => {
            skipped(reason);
            return;
        }
    };
    let memory = group.read();
    println!("{} -> {memory:?}", group.directory().display());
    println!("headroom {:?}", group.headroom_bytes());
    assert!(group.directory().is_dir());
    if let (Measured::Value(usage), Measured::Value(peak)) = (memory.usage_bytes, memory.peak_bytes) {
        assert!(peak >= usage / 2 && peak > 0, "peak {peak}, usage {usage}");
    }
}

#[test]
fn our_cpus_are_counted() {
    let group = match Procfs::default().myself().cpu_group() {
        Ok(group) => group,
        Err(reason) => {
            skipped(reason);
            return;
        }
    };
    let parallelism = group.parallelism().unwrap().get();
    assert!((1..=std::thread::available_parallelism().unwrap().get()).contains(&parallelism));
    assert_ne!(group.quota_millicpus(), Measured::Value(Some(0)));
}

#[test]
fn a_command_in_a_group_of_its_own_is_accounted_there_from_its_first_page() {
    let Some(group) = group_or_skip(None) else { return };
    let mut command = Command::new("dd");
    command.args(["if=/dev/zero", "of=/dev/null", "bs=48M", "count=1"]).stderr(Stdio::null());
    group.enter_on_spawn(&mut command).unwrap();
    assert!(command.status().unwrap().success());
    let memory = group.memory();
    let peak_bytes = known(memory.peak_bytes);
    assert!((48 * MIB..80 * MIB).contains(&peak_bytes), "{peak_bytes}");
    assert_eq!(memory.limit_bytes, Procfs::default().myself().memory_group().unwrap().limit_bytes());
    assert_eq!(group.pids().unwrap(), Vec::<u32>::new());
}

#[test]
fn a_process_can_be_moved_and_is_given_back() {
    let Some(group) = group_or_skip(None) else { return };
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    group.add(child.id()).unwrap();
    assert_eq!(group.pids().unwrap(), [child.id()]);
    let found = Procfs::default().process(child.id()).memory_group().unwrap();
    assert_eq!(found.directory(), group.directory());
    let directory = group.directory().to_path_buf();
    drop(group);
    assert!(!directory.exists(), "a group is removed even if a process was still in it");
    let found = Procfs::default().process(child.id()).memory_group().unwrap();
    assert_eq!(Some(found.directory()), directory.parent());
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn anonymous_memory_over_the_limit_is_killed_and_counted() {
    let Some(group) = group_or_skip(Some(64 * MIB)) else { return };
    assert_eq!(group.limit_bytes(), Some(64 * MIB));
    assert_eq!(group.memory().limit_bytes, Measured::Value(Some(64 * MIB)));
    let mut command = Command::new("dd");
    command.args(["if=/dev/zero", "of=/dev/null", "bs=128M", "count=1"]).stderr(Stdio::null());
    group.enter_on_spawn(&mut command).unwrap();
    let status = command.status().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGKILL), "{status:?}");
    let memory = group.memory();
    assert_eq!(known(memory.oom_kill_count), 1);
    assert!(known(memory.limit_hit_count) > 0);
    assert!(known(memory.peak_bytes) <= 64 * MIB);
    group.remove().unwrap();
}

#[test]
fn reading_more_than_the_limit_is_harmless_because_page_cache_can_go() {
    let Some(group) = group_or_skip(Some(48 * MIB)) else { return };
    let file = tempfile::NamedTempFile::new().unwrap();
    for _ in 0..96 {
        file.as_file().write_all(&vec![1; 1 << 20]).unwrap();
    }
    file.as_file().sync_all().unwrap();
    onelayer_probe::drop_cache(file.path()).unwrap();
    let mut command = Command::new("dd");
    command.arg(format!("if={}", file.path().display())).args(["of=/dev/null", "bs=1M"]);
    group.enter_on_spawn(command.stderr(Stdio::null())).unwrap();
    assert!(command.status().unwrap().success());
    let memory = group.memory();
    println!("{memory:?}");
    assert_eq!(known(memory.oom_kill_count), 0);
    assert!(known(memory.peak_bytes) > 24 * MIB, "page cache is charged: {:?}", memory.peak_bytes);
    assert!(known(memory.file_bytes) > 24 * MIB, "{:?}", memory.file_bytes);
}

#[test]
fn a_group_can_be_emptied() {
    let Some(group) = group_or_skip(None) else { return };
    let mut command = Command::new("sh");
    // A shell that starts another one again and again.
    command.args(["-c", "while :; do sleep 60 & sleep 0.005; done"]);
    group.enter_on_spawn(&mut command).unwrap();
    let mut child = command.spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert!(group.pids().unwrap().len() > 2, "{:?}", group.pids());
    group.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    group.remove().unwrap();
}
