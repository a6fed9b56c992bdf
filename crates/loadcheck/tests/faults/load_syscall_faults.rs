//! A load whose system calls fail, at every call that it makes on its checkpoint, with every
//! source: either what was delivered is right, byte by byte, or the program ends with an error that
//! says what and where. A call that is killed leaves nothing behind.
//!
//! The tests that run always take one error for each call; `--ignored` takes every error, once and
//! from then on, on each path apart. What has no path (queues of reads, the copy out of a mapping,
//! advice about memory) is met over the whole program.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::print_stdout,
    reason = "a test that cannot go on panics, and says what it counted"
)]

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::load_support::{End, SOURCES, World};
use crate::support::strace::{self, Consequence, Counts, Fault, Found, Seen, points};
use crate::support::{json, stderr};

/// Calls on a checkpoint, and the errors that each may answer with. The first error is the one that
/// the short sweep takes. `ESTALE` and `ENOTCONN` are what network file systems and those in user
/// space say when the other side has gone.
const READING: [(&str, &[&str]); 14] = [
    ("open", &["EIO", "EMFILE", "EACCES", "EINTR", "ESTALE", "ENOTCONN"]),
    ("openat", &["EIO", "EMFILE", "ENOMEM", "EACCES", "EINTR", "ESTALE", "ENOTCONN"]),
    ("read", &["EIO", "EINTR", "EAGAIN", "ESTALE"]),
    ("pread64", &["EIO", "EINTR", "EAGAIN", "ENOMEM", "EINVAL", "ESTALE", "ENOTCONN"]),
    ("preadv2", &["EIO", "EINTR", "EAGAIN", "EOPNOTSUPP", "ENOSYS", "EPERM", "ESTALE"]),
    ("statx", &["EIO", "ENOMEM", "EACCES", "ENOSYS", "ESTALE", "ENOTCONN"]),
    ("newfstatat", &["EIO", "EACCES", "ESTALE", "ENOTCONN"]),
    ("fstatfs", &["EIO", "ENOSYS"]),
    ("getdents64", &["EIO", "ENOMEM", "ENOTCONN"]),
    ("fcntl", &["EINVAL", "EPERM"]),
    ("fadvise64", &["EINVAL", "ESPIPE", "ENOSYS"]),
    ("mmap", &["ENODEV", "ENOMEM", "EAGAIN", "EPERM", "EACCES"]),
    ("munmap", &["EINVAL"]),
    ("close", &["EIO", "EINTR"]),
];

/// Calls without a path, anywhere in the program.
const ELSEWHERE: [(&str, &[&str]); 5] = [
    ("process_vm_readv", &["EPERM", "ENOSYS", "EFAULT", "EINTR", "ENOMEM", "ESRCH"]),
    ("io_uring_setup", &["ENOSYS", "EPERM", "ENOMEM", "EMFILE"]),
    ("io_uring_register", &["ENOMEM", "EOPNOTSUPP", "EINVAL", "EFAULT"]),
    ("io_uring_enter", &["EINTR", "EAGAIN", "EBUSY", "ENOMEM", "EIO", "EBADF"]),
    ("madvise", &["ENOMEM", "EINVAL", "EAGAIN"]),
];

/// Calls that are not about reading: they start the program.
const OTHERS: [&str; 2] = ["execve", "readlink"];

/// True for failures that a load must come through: it tries again, does without, or reads in
/// another way and says so.
fn is_bearable(fault: &Fault, error: &str) -> bool {
    let is_for_ever = matches!(fault.consequence, Consequence::Errors(_));
    match fault.call.as_str() {
        "fadvise64" | "madvise" | "close" | "mmap" | "munmap" | "io_uring_setup" | "io_uring_register" => {
            true
        }
        "read" | "pread64" | "process_vm_readv" | "open" | "openat" | "io_uring_enter"
            if error == "EINTR" =>
        {
            true
        }
        "process_vm_readv" => matches!(error, "EPERM" | "ENOSYS" | "EFAULT"),
        "preadv2" => matches!(error, "EINTR" | "EOPNOTSUPP" | "ENOSYS" | "EPERM"),
        // A kernel that never has time for a queue is told of.
        "io_uring_enter" => matches!(error, "EAGAIN" | "EBUSY") && !is_for_ever,
        "fstatfs" => true,
        _ => false,
    }
}

/// True for failures of which the program has to tell: nothing could be right without that call.
fn is_fatal(fault: &Fault) -> bool {
    match fault.consequence {
        Consequence::Error("EIO" | "ESTALE" | "ENOTCONN") => fault.call == "pread64",
        Consequence::Errors("EIO" | "ESTALE" | "ENOTCONN") => {
            matches!(fault.call.as_str(), "pread64" | "openat" | "statx") && fault.nth <= 2
        }
        _ => false,
    }
}

/// Everything that a load does with its checkpoint. Fails if it makes a call that this test knows
/// nothing about.
fn record(world: &World, io: &str) -> Seen {
    let scratch = world.path("logs");
    fs::create_dir(&scratch).unwrap();
    let place = world.place("recorded");
    let seen = strace::record(&world.load(io, &place), &world.model, &scratch);
    fs::remove_dir(&scratch).unwrap();
    for call in seen.counts.keys() {
        let is_known = READING.iter().any(|(name, _)| name == call) || OTHERS.contains(&call.as_str());
        assert!(is_known, "{call} is made on the checkpoint. Seen: {:?}", seen.counts);
    }
    assert!(seen.counts.contains_key("pread64") && seen.counts.contains_key("statx"), "{:?}", seen.counts);
    seen
}

fn errors_of<'a>(table: &[(&str, &'a [&'a str])], call: &str) -> Option<&'a [&'a str]> {
    table.iter().find(|(name, _)| *name == call).map(|(_, errors)| *errors)
}

/// The first error of each call, once.
fn first_errors(counts: &Counts, table: &[(&str, &'static [&'static str])]) -> Vec<Fault> {
    points(counts, |call| Some(vec![Consequence::Error(errors_of(table, call)?[0])]))
}

/// Every error of each call, once; and from then on, unless that would be for ever.
fn all_errors(counts: &Counts, table: &[(&str, &'static [&'static str])]) -> Vec<Fault> {
    points(counts, |call| {
        let errors = errors_of(table, call)?;
        let once = errors.iter().map(|&error| Consequence::Error(error));
        let ever = errors.iter().filter(|&&error| error != "EINTR").map(|&error| Consequence::Errors(error));
        Some(once.chain(ever).collect())
    })
}

fn kills(counts: &Counts) -> Vec<Fault> {
    points(counts, |call| errors_of(&READING, call).map(|_| vec![Consequence::Kill]))
}

/// True for calls that only this source makes on the files: until it reads tensors, each does the
/// same.
fn is_own(io: &str, call: &str) -> bool {
    match io {
        "auto" => matches!(call, "preadv2" | "fadvise64" | "fstatfs"),
        "buffered" => call == "pread64",
        "mmap" => call == "mmap",
        "direct" => matches!(call, "pread64" | "fcntl"),
        _ => false,
    }
}

/// Every fault in a load of its own, two at a time.
fn sweep(world: &World, io: &str, seen: &Seen, paths: &[&str], faults: &[Fault], found: &Found) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for worker in 0..2 {
            let next = &next;
            scope.spawn(move || {
                let place = world.place(&format!("{io}-{worker}"));
                while let Some(fault) = faults.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(problem) = disturb(world, io, seen, paths, fault, &place, found) {
                        found.wrong.lock().unwrap().push(format!("{io}, {paths:?}, {fault}: {problem}"));
                    }
                }
            });
        }
    });
}

/// How often a fault is tried until it is reached.
const ATTEMPTS: usize = 3;

/// Loads with one fault, and looks at what came of it.
fn disturb(
    world: &World,
    io: &str,
    seen: &Seen,
    paths: &[&str],
    fault: &Fault,
    place: &Path,
    found: &Found,
) -> Result<(), String> {
    let command = world.load(io, place);
    // The folder that paths are in must not be the one that is removed with the log of another fault.
    let attempt = || strace::inject_in(&command, seen, paths, &world.model, fault, place);
    // Threads share the calls by chance, so in one run none of them may make the nth.
    let (output, is_reached) =
        (1..ATTEMPTS).map(|_| attempt()).find(|(_, is_reached)| *is_reached).unwrap_or_else(attempt);
    found.points.fetch_add(1, Ordering::Relaxed);
    found.reached.fetch_add(usize::from(is_reached), Ordering::Relaxed);
    let end = world.judge(&output)?;
    let left = World::leftovers(place);
    if !left.is_empty() {
        return Err(format!("{left:?} stays"));
    }
    let error = match fault.consequence {
        Consequence::Kill if is_reached => {
            return if end == End::Delivered { Err("killed, and a success".into()) } else { Ok(()) };
        }
        Consequence::Error(error) | Consequence::Errors(error) if is_reached => error,
        _ if end == End::Delivered => return Ok(()),
        _ => return Err(format!("nothing was disturbed, and it failed: {}", stderr(&output))),
    };
    match end {
        End::Delivered if is_fatal(fault) => Err("success is reported".into()),
        End::Delivered => Ok(()),
        End::Told if is_bearable(fault, error) => Err(format!("it is told: {}", stderr(&output))),
        End::Told => names_the_place(world, &stderr(&output)),
        other => Err(format!("it ends as {other:?}: {}", stderr(&output))),
    }
}

/// An error of the checkpoint names it.
fn names_the_place(world: &World, text: &str) -> Result<(), String> {
    match text.contains(world.model.to_str().unwrap()) || text.contains("queued reads") {
        true => Ok(()),
        false => Err(format!("the message does not say where: {text}")),
    }
}

#[test]
fn an_error_of_any_call_is_told_or_what_is_delivered_is_right() {
    if !strace::is_there() {
        return;
    }
    let world = World::new();
    let found = Found::default();
    for io in SOURCES {
        let seen = record(&world, io);
        let mut faults = first_errors(&seen.counts, &READING);
        faults.retain(|fault| io == "direct" || is_own(io, &fault.call));
        sweep(&world, io, &seen, &seen.paths(), &faults, &found);
        sweep(&world, io, &seen, &[], &first_errors(&seen.anywhere, &ELSEWHERE[..4]), &found);
    }
    found.conclude("errors of loads", 100);
}

#[test]
fn a_load_that_is_killed_at_any_read_leaves_nothing() {
    if !strace::is_there() {
        return;
    }
    let world = World::new();
    let found = Found::default();
    for io in SOURCES {
        let seen = record(&world, io);
        let mut faults = kills(&seen.counts);
        faults.retain(|fault| is_own(io, &fault.call));
        sweep(&world, io, &seen, &seen.paths(), &faults, &found);
    }
    found.conclude("kills of loads", 20);
}

/// Ways of reading that a kernel, a sandbox or a file system refuses: the load goes another way,
/// and the report says which and why.
#[test]
fn a_way_that_is_refused_is_gone_otherwise_and_named() {
    if !strace::is_there() {
        return;
    }
    let world = World::new();
    let place = world.place("refused");
    for (io, call, error, told) in [
        ("uring", "io_uring_setup", "ENOSYS", "io_uring_setup was refused: Function not implemented"),
        ("uring", "io_uring_setup", "EPERM", "io_uring_setup was refused: Operation not permitted"),
        ("uring", "io_uring_register", "ENOMEM", "Cannot allocate memory"),
        ("mmap", "mmap", "ENODEV", "No such device"),
        ("mmap", "process_vm_readv", "EPERM", "process_vm_readv"),
        ("mmap", "process_vm_readv", "ENOSYS", "process_vm_readv"),
        ("direct", "fcntl", "EINVAL", "O_DIRECT was refused: Invalid argument"),
        ("uring", "fcntl", "EINVAL", "O_DIRECT was refused: Invalid argument"),
    ] {
        let seen = record(&world, io);
        let shards: Vec<_> = seen.paths().into_iter().filter(|path| path.ends_with("safetensors")).collect();
        let has_path = READING.iter().any(|(name, _)| *name == call);
        let paths = if has_path { &shards[..] } else { &[] };
        // Of calls that checking headers makes as well, those of the load come last: at one of them it is
        // told.
        let most = seen.anywhere[call];
        let consequence = |error| match has_path {
            true => Consequence::Error(error),
            false => Consequence::Errors(error),
        };
        let places = (1..=if has_path { most } else { 1 }).collect();
        let reports = onelayer_testing::sample(places, 3).into_iter().filter_map(|nth| {
            let fault = Fault { call: call.into(), nth, consequence: consequence(error) };
            let (output, is_reached) =
                strace::inject_in(&world.load(io, &place), &seen, paths, &world.model, &fault, &place);
            let end = world.judge(&output).unwrap_or_else(|problem| panic!("{io}, {fault}: {problem}"));
            (end == End::Delivered && is_reached).then(|| json(&output).to_string())
        });
        let reports: Vec<_> = reports.collect();
        assert!(reports.iter().any(|run| run.contains(told)), "{io}, {call}, {error}: {reports:?}");
    }
}

/// A network file system whose server has gone, one in user space whose program has.
#[test]
fn a_file_system_that_goes_away_is_told() {
    if !strace::is_there() {
        return;
    }
    let world = World::new();
    let found = Found::default();
    for io in SOURCES {
        let seen = record(&world, io);
        let mut faults = Vec::new();
        for call in ["openat", "statx", "pread64"] {
            for error in ["ESTALE", "ENOTCONN"] {
                let consequence = Consequence::Errors(error);
                faults.extend([1, 2].map(|nth| Fault { call: call.into(), nth, consequence }));
            }
        }
        sweep(&world, io, &seen, &["model-00002-of-00002.safetensors"], &faults, &found);
    }
    found.conclude("file systems that go away", 50);
}

#[test]
#[ignore = "takes minutes"]
fn every_error_on_each_path_apart() {
    if !strace::is_there() {
        return;
    }
    let found = Found::default();
    for io in SOURCES {
        let world = World::new();
        let seen = record(&world, io);
        for (path, counts) in &seen.by_path {
            sweep(&world, io, &seen, &[path], &all_errors(counts, &READING), &found);
        }
        sweep(&world, io, &seen, &[], &all_errors(&seen.anywhere, &ELSEWHERE), &found);
    }
    found.conclude("every error of loads", 2000);
}

#[test]
#[ignore = "takes minutes"]
fn every_kill_on_each_path_apart() {
    if !strace::is_there() {
        return;
    }
    let found = Found::default();
    for io in SOURCES {
        let world = World::new();
        let seen = record(&world, io);
        for (path, counts) in &seen.by_path {
            sweep(&world, io, &seen, &[path], &kills(counts), &found);
        }
    }
    found.conclude("every kill of loads", 300);
}
