//! A conversion is killed, or a system call fails, at every call that it makes on its target. No
//! file with a final name is ever wrong, index and manifest come last, errors are reported, and the
//! same command goes on and writes at most one file again.
//!
//! The tests that run always take every kill point and one error for each call; `--ignored` takes
//! every error, and the calls on each path apart.
#![allow(clippy::print_stdout, reason = "a test says what it counted")]
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    reason = "a test that cannot go on panics"
)]

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::convert_support::{World, differences, tree};
use crate::support::strace::{self, Consequence, Counts, Fault, Found, Seen, points};
use crate::support::{json, stderr};

/// The name of the target. Its folder may have another name in each run.
const TARGET: &str = "target";

/// Calls that change the disk or a lock, and the errors that each may return. The short sweep takes
/// the first error.
const CHANGING: [(&str, &[&str]); 23] = [
    ("open", &["ENOSPC", "EACCES", "EMFILE", "EDQUOT", "EROFS"]),
    ("openat", &["ENOSPC", "EACCES", "EMFILE", "EDQUOT", "EROFS"]),
    ("openat2", &["ENOSPC", "EACCES", "EMFILE", "EDQUOT", "EROFS"]),
    ("mkdirat", &["ENOSPC", "EACCES", "EDQUOT"]),
    ("mkdir", &["ENOSPC", "EACCES", "EDQUOT"]),
    ("write", &["ENOSPC", "EIO", "EDQUOT"]),
    ("writev", &["ENOSPC", "EIO", "EDQUOT"]),
    ("pwrite64", &["ENOSPC", "EIO", "EDQUOT"]),
    ("pwritev", &["ENOSPC", "EIO", "EDQUOT"]),
    ("pwritev2", &["ENOSPC", "EIO", "EDQUOT"]),
    ("copy_file_range", &["EIO", "ENOSPC", "EXDEV", "EOPNOTSUPP"]),
    ("ioctl", &["EOPNOTSUPP", "EIO", "ENOSPC"]),
    ("fallocate", &["ENOSPC", "EOPNOTSUPP", "EIO"]),
    ("ftruncate", &["EIO", "ENOSPC"]),
    ("fsync", &["EIO", "ENOSPC", "EDQUOT"]),
    ("fdatasync", &["EIO", "ENOSPC", "EDQUOT"]),
    ("renameat", &["EIO", "ENOSPC", "EACCES", "EDQUOT"]),
    ("renameat2", &["EIO", "ENOSPC", "EACCES", "EDQUOT"]),
    ("linkat", &["EIO", "ENOSPC", "EACCES"]),
    ("unlinkat", &["EIO", "EACCES"]),
    ("flock", &["EAGAIN", "ENOLCK"]),
    ("fchmod", &["EPERM"]),
    ("close", &["EIO"]),
];

/// Calls that only read or advise.
const LOOKING: [&str; 19] = [
    "execve",
    "statx",
    "fstat",
    "newfstatat",
    "lstat",
    "stat",
    "statfs",
    "fstatfs",
    "getdents64",
    "read",
    "pread64",
    "lseek",
    "fcntl",
    "readlink",
    "readlinkat",
    "access",
    "faccessat2",
    "fadvise64",
    "sync_file_range",
];

/// Failures after which a conversion may go on, if its files are right: a file on the disk may fail
/// to close, bytes that the kernel cannot copy are written, a full disk is noticed later if space
/// cannot be reserved, a file system may have no locks.
const BEARABLE: [(&str, &[&str]); 6] = [
    ("close", &["EIO"]),
    ("copy_file_range", &["EXDEV", "EOPNOTSUPP"]),
    ("ioctl", &["EOPNOTSUPP", "EIO"]),
    ("fallocate", &["EOPNOTSUPP"]),
    ("unlinkat", &["EIO", "EACCES"]),
    ("flock", &["ENOLCK"]),
];

fn is_bearable(call: &str, error: &str) -> bool {
    BEARABLE.iter().any(|(name, errors)| *name == call && errors.contains(&error))
}

/// Every call of a conversion on its target. Fails if this test does not know a call.
fn record(world: &World) -> Seen {
    let (place, scratch) = (world.path("recorded"), world.path("logs"));
    fs::create_dir(&scratch).unwrap();
    fs::create_dir(&place).unwrap();
    let target = place.join(TARGET);
    let seen = strace::record(&world.convert(&target), &place, &scratch);
    for call in seen.counts.keys() {
        let is_known = CHANGING.iter().any(|(name, _)| name == call) || LOOKING.contains(&call.as_str());
        assert!(is_known, "{call} is made on the target: does it change something? Seen: {:?}", seen.counts);
    }
    assert_eq!(tree(&target), world.golden);
    seen
}

fn kill_points(counts: &Counts) -> Vec<Fault> {
    points(counts, |call| CHANGING.iter().any(|(name, _)| *name == call).then_some(vec![Consequence::Kill]))
}

/// The first error of each call, once.
fn first_errors(counts: &Counts) -> Vec<Fault> {
    points(counts, |call| {
        let (_, errors) = CHANGING.iter().find(|(name, _)| *name == call)?;
        Some(vec![Consequence::Error(errors[0])])
    })
}

/// Every error of each call, once and from then on.
fn all_errors(counts: &Counts) -> Vec<Fault> {
    points(counts, |call| {
        let (_, errors) = CHANGING.iter().find(|(name, _)| *name == call)?;
        Some(
            errors
                .iter()
                .flat_map(|&error| [Consequence::Error(error), Consequence::Errors(error)])
                .collect(),
        )
    })
}

/// Tries every fault in its own target, two at a time.
fn sweep(world: &World, seen: &Seen, paths: &[&str], faults: &[Fault], found: &Found) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for worker in 0..2 {
            let next = &next;
            scope.spawn(move || {
                let place = world.path(&format!("sweep-{worker}"));
                while let Some(fault) = faults.get(next.fetch_add(1, Ordering::Relaxed)) {
                    fs::create_dir_all(&place).unwrap();
                    for problem in disturb(world, seen, paths, fault, &place, found) {
                        found.wrong.lock().unwrap().push(format!("{fault}: {problem}"));
                    }
                    fs::remove_dir_all(&place).unwrap();
                }
            });
        }
    });
}

/// Converts with one fault, checks the target, and lets the next run finish.
fn disturb(
    world: &World,
    seen: &Seen,
    paths: &[&str],
    fault: &Fault,
    place: &Path,
    found: &Found,
) -> Vec<String> {
    let target = place.join(TARGET);
    let (output, is_reached) = strace::inject(&world.convert(&target), seen, paths, place, fault);
    found.points.fetch_add(1, Ordering::Relaxed);
    found.reached.fetch_add(usize::from(is_reached), Ordering::Relaxed);
    let (mut wrong, published) = world.assess(&target);
    match fault.consequence {
        Consequence::Error(error) | Consequence::Errors(error) if is_reached => {
            wrong.extend(answer(world, fault, error, &output, &target));
        }
        Consequence::Kill if is_reached => {}
        _ if output.status.success() => {}
        _ => wrong.push(format!("nothing was disturbed, and it failed: {}", stderr(&output))),
    }
    wrong.extend(world.resume(&target, published));
    wrong
}

/// The faults in the response of a conversion to an error.
fn answer(
    world: &World,
    fault: &Fault,
    error: &str,
    output: &std::process::Output,
    target: &Path,
) -> Vec<String> {
    let text = stderr(output);
    let mut wrong = Vec::new();
    match output.status.code() {
        Some(0) if is_bearable(&fault.call, error) => {
            wrong.extend(differences(&tree(target), &world.golden));
        }
        Some(0) => wrong.push("success is reported".into()),
        Some(_) => {
            let is_told =
                text.contains("error[LC") && text.contains(target.parent().unwrap().to_str().unwrap());
            if !is_told || text.contains("panicked") {
                wrong.push(format!("the message does not say what and where: {text}"));
            }
            let left: Vec<String> = if target.exists() {
                tree(target).into_keys().filter(|name| name.ends_with(".partial")).collect()
            } else {
                Vec::new()
            };
            if !left.is_empty() && fault.call != "unlinkat" {
                wrong.push(format!("{left:?} stays and takes room"));
            }
        }
        None => wrong.push(format!("it ends with {}: {text}", output.status)),
    }
    wrong
}

#[test]
fn a_conversion_that_is_killed_at_any_call_leaves_nothing_wrong_and_goes_on() {
    if !strace::is_there() {
        return;
    }
    let world = World::new(&[]);
    let seen = record(&world);
    let found = Found::default();
    sweep(&world, &seen, &seen.paths(), &kill_points(&seen.counts), &found);
    found.conclude("kills", 60);
}

#[test]
fn an_error_of_any_call_is_told_and_the_next_run_goes_on() {
    if !strace::is_there() {
        return;
    }
    let world = World::new(&[]);
    let seen = record(&world);
    let found = Found::default();
    sweep(&world, &seen, &seen.paths(), &first_errors(&seen.counts), &found);
    found.conclude("errors", 60);
}

/// A source that cannot be read at some call: the error is reported or did not matter, and no file
/// of the target is wrong.
#[test]
fn an_error_of_the_source_is_told_and_the_next_run_goes_on() {
    if !strace::is_there() {
        return;
    }
    let world = World::new(&[]);
    let (place, scratch) = (world.path("place"), world.path("logs"));
    fs::create_dir(&scratch).unwrap();
    fs::create_dir(&place).unwrap();
    let target = place.join(TARGET);
    let seen = strace::record(&world.convert(&target), &world.source, &scratch);
    assert!(seen.counts.contains_key("pread64") && seen.counts.contains_key("openat"), "{:?}", seen.counts);
    let reading = ["openat", "open", "read", "pread64", "getdents64", "newfstatat"];
    let faults =
        points(&seen.counts, |call| reading.contains(&call).then(|| vec![Consequence::Error("EIO")]));
    let (mut told, mut wrong) = (0, Vec::new());
    for fault in &faults {
        fs::remove_dir_all(&place).unwrap();
        fs::create_dir(&place).unwrap();
        let source = &world.source;
        let (output, _) = strace::inject(&world.convert(&target), &seen, &seen.paths(), source, fault);
        let (mut problems, published) = world.assess(&target);
        if output.status.success() {
            problems.extend(differences(&tree(&target), &world.golden));
        } else {
            told += 1;
            let text = stderr(&output);
            if !text.contains("error[LC") || text.contains("panicked") || output.status.code().is_none() {
                problems.push(format!("it ends with {}: {text}", output.status));
            }
        }
        problems.extend(world.resume(&target, published));
        wrong.extend(problems.iter().map(|problem| format!("{fault}: {problem}")));
    }
    println!("errors of the source: {} points, {told} told, {} wrong", faults.len(), wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(told > onelayer_testing::at_least(20, 5), "{told} of {}", faults.len());
}

/// File systems without direct writes or without reserved space, and signals: none is an error, and
/// the report names the other way.
#[test]
fn what_a_file_system_cannot_do_is_done_otherwise_and_named() {
    if !strace::is_there() {
        return;
    }
    let world = World::new(&[]);
    let seen = record(&world);
    for (number, (call, consequence, mode)) in (0..).zip([
        ("pwrite64", Consequence::Error("EINVAL"), "drop_behind"),
        ("fallocate", Consequence::Errors("EOPNOTSUPP"), "direct"),
        ("fallocate", Consequence::Errors("ENOSYS"), "direct"),
        ("pwrite64", Consequence::Error("EINTR"), "direct"),
        ("write", Consequence::Error("EINTR"), "direct"),
        ("flock", Consequence::Errors("ENOLCK"), "direct"),
    ]) {
        let place = world.path(&format!("otherwise-{number}"));
        fs::create_dir(&place).unwrap();
        let target = place.join(TARGET);
        let fault = Fault { call: call.into(), nth: 1, consequence };
        let (output, is_reached) =
            strace::inject(&world.convert(&target), &seen, &seen.paths(), &place, &fault);
        assert!(output.status.success(), "{fault}: {}", stderr(&output));
        assert!(is_reached, "{fault}");
        assert_eq!(differences(&tree(&target), &world.golden), [""; 0], "{fault}");
        let result = &json(&output)["convert"]["result"];
        assert_eq!(result["write_mode"], mode, "{fault}: {result}");
        assert_eq!(result["write_mode_reason"].is_string(), mode == "drop_behind", "{fault}: {result}");
    }
}

/// With more threads, more files are written at once. Each path has its own faults, so that calls
/// of one thread do not hide those of another.
#[test]
#[ignore = "takes minutes"]
fn kills_and_every_error_on_each_path_apart() {
    if !strace::is_there() {
        return;
    }
    for jobs in ["1", "2"] {
        let world = World::new(&["--jobs", jobs]);
        let seen = record(&world);
        let (kills, errors) = (Found::default(), Found::default());
        for (path, counts) in &seen.by_path {
            sweep(&world, &seen, &[path], &kill_points(counts), &kills);
            sweep(&world, &seen, &[path], &all_errors(counts), &errors);
        }
        kills.conclude(&format!("kills on each path, --jobs {jobs}"), 100);
        errors.conclude(&format!("errors on each path, --jobs {jobs}"), 300);
    }
}
