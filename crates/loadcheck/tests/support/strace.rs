//! The program under strace: which system calls it makes on the paths of a folder, and what becomes
//! of it when one of them fails or is the last thing it does.
//!
//! strace counts calls per thread, so "the Nth write" is each thread's own. A sweep over all N up
//! to the highest count of any thread meets each call of a program with one thread, and nearly each
//! of one with several.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use super::{children, eventually, output_within, wrapped};
use onelayer_testing::skipped;

/// How long a program may take that somebody disturbs.
const PATIENCE: Duration = Duration::from_secs(60);

/// What happens at a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Consequence {
    /// The process is killed instead of making it.
    Kill,
    /// It is not made, and answers with this error.
    Error(&'static str),
    /// The same for all later calls of that name, as on a disk that is full or gone.
    Errors(&'static str),
}

/// One thing that goes wrong: at the `nth` call of that name, in whichever thread gets there first.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) call: String,
    pub(crate) nth: u32,
    pub(crate) consequence: Consequence,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.consequence {
            Consequence::Kill => write!(f, "killed at {} number {}", self.call, self.nth),
            Consequence::Error(error) => write!(f, "{error} at {} number {}", self.call, self.nth),
            Consequence::Errors(error) => write!(f, "{error} from {} number {} on", self.call, self.nth),
        }
    }
}

/// Calls that were seen in a folder.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// How often each was made by the thread that made it most often.
    pub(crate) counts: Counts,
    /// The same for each path, which is relative to the folder, apart.
    pub(crate) by_path: BTreeMap<String, Counts>,
    /// The same for all calls, wherever they were made.
    pub(crate) anywhere: Counts,
    names: BTreeMap<String, BTreeSet<String>>,
}

/// Counts by the name of a call.
pub(crate) type Counts = BTreeMap<String, u32>;

impl Seen {
    /// Every path that was seen.
    pub(crate) fn paths(&self) -> Vec<&str> {
        self.by_path.keys().map(String::as_str).collect()
    }

    /// What strace has to be told to see the calls on `paths` below `folder`: the paths for
    /// descriptors, and for texts the names as they were given beside the descriptor of a
    /// directory.
    fn filters(&self, paths: &[&str], folder: &Path) -> Vec<String> {
        let mut flags = Vec::new();
        for path in paths {
            let whole = if path.is_empty() { folder.to_owned() } else { folder.join(path) };
            flags.extend(["-P".to_owned(), whole.to_str().unwrap().to_owned()]);
            for name in self.names.get(*path).into_iter().flatten() {
                flags.extend(["-P".to_owned(), name.clone()]);
            }
        }
        flags
    }
}

/// What a sweep found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) points: AtomicUsize,
    pub(crate) reached: AtomicUsize,
    pub(crate) wrong: Mutex<Vec<String>>,
}

impl Found {
    /// Prints the figures, and fails if anything is wrong or too little was reached.
    #[track_caller]
    pub(crate) fn conclude(self, what: &str, points_min: usize) {
        let (points, reached) = (self.points.into_inner(), self.reached.into_inner());
        let wrong = self.wrong.into_inner().unwrap();
        println!("{what}: {points} points, {reached} reached, {} wrong", wrong.len());
        assert!(
            wrong.is_empty(),
            "{} are wrong; the first:\n{}",
            wrong.len(),
            wrong[..wrong.len().min(10)].join("\n")
        );
        // Threads that race may make a call less in one run; most runs must have met their fault.
        assert!(
            reached >= onelayer_testing::at_least(points_min, SAMPLED) && reached * 10 >= points * 9,
            "{reached} of {points} points were reached"
        );
    }
}

/// The quick check tries every so many of the calls of one name.
const SAMPLED: usize = 5;

/// A fault at each call, up to how often it was made, for each of the consequences that it may
/// have.
pub(crate) fn points(counts: &Counts, consequences: impl Fn(&str) -> Option<Vec<Consequence>>) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (call, &count) in counts {
        for consequence in consequences(call).unwrap_or_default() {
            let all = (1..=count).map(|nth| Fault { call: call.clone(), nth, consequence });
            faults.extend(onelayer_testing::sample(all.collect(), SAMPLED));
        }
    }
    faults
}

/// True if strace is there and may trace; says aloud if not.
pub(crate) fn is_there() -> bool {
    let runs = Command::new("strace")
        .args(["-qq", "-o", "/dev/null", "true"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !runs {
        skipped("strace is not there, or may not trace: no system call was made to fail");
    }
    runs
}

/// `command` under strace with those flags.
fn traced(command: &Command, flags: &[String]) -> Command {
    let words = ["strace", "-qq", "-e", "signal=none"].map(String::from);
    wrapped(words.iter().chain(flags).map(String::as_str).chain(["--"]), command)
}

/// Starts `command` so that it stops, as by SIGSTOP, right after the `nth` call of that name, and
/// waits until it has stopped. The first value is strace, which ends as the process does; the
/// second is the process, which goes on at SIGCONT. `log` must not exist.
pub(crate) fn start_and_stop(command: &Command, call: &str, nth: u32, log: &Path) -> (Child, u32) {
    let (trace, inject) = (format!("trace={call}"), format!("inject={call}:signal=SIGSTOP:when={nth}"));
    let flags = ["strace", "-qq", "-f", "-o", log.to_str().unwrap(), "-e", &trace, "-e", &inject, "--"];
    let mut strace = wrapped(flags, command);
    let strace = strace.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let process = eventually("a stop", || {
        let process = children(strace.id()).first().copied()?;
        let threads = fs::read_dir(format!("/proc/{process}/task")).ok()?.count();
        let stopped = fs::read_to_string(log).ok()?.matches("--- stopped by SIGSTOP ---").count();
        (stopped == threads).then_some(process)
    });
    fs::remove_file(log).unwrap();
    (strace, process)
}

/// Runs `command` until the `nth` call of that name, which is not made: the process is killed.
pub(crate) fn kill_at(command: &Command, call: &str, nth: u32) {
    let fault = format!("inject={call}:signal=SIGKILL:when={nth}");
    let flags = ["-f", "-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &fault].map(String::from);
    let output = traced(command, &flags).output().unwrap();
    assert_eq!(output.status.code(), None, "{}", String::from_utf8_lossy(&output.stderr));
}

/// Runs `command` to its end and tells what it did in and with `folder`. `scratch` is an empty
/// folder for the logs.
pub(crate) fn record(command: &Command, folder: &Path, scratch: &Path) -> Seen {
    let log = scratch.join("log");
    let flags = ["-ff", "-y", "-s", "4096", "-o", log.to_str().unwrap()].map(String::from);
    let output = traced(command, &flags).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut seen = Seen::default();
    for entry in fs::read_dir(scratch).unwrap() {
        let log = entry.unwrap().path();
        let text = fs::read(&log).unwrap();
        let (mut of_thread, mut of_path) = (Counts::new(), BTreeMap::<String, Counts>::new());
        let mut anywhere = Counts::new();
        for line in String::from_utf8_lossy(&text).lines() {
            let Some((call, rest)) = line.split_once('(') else { continue };
            *anywhere.entry(call.into()).or_default() += 1;
            let paths = paths_below(call, rest, folder);
            if !paths.is_empty() {
                *of_thread.entry(call.into()).or_default() += 1;
            }
            for (path, names) in paths {
                *of_path.entry(path.clone()).or_default().entry(call.into()).or_default() += 1;
                seen.names.entry(path).or_default().extend(names);
            }
        }
        keep_highest(&mut seen.counts, of_thread);
        keep_highest(&mut seen.anywhere, anywhere);
        for (path, counts) in of_path {
            keep_highest(seen.by_path.entry(path).or_default(), counts);
        }
        fs::remove_file(log).unwrap();
    }
    seen
}

fn keep_highest(highest: &mut Counts, counts: Counts) {
    for (call, count) in counts {
        let known = highest.entry(call).or_default();
        *known = count.max(*known);
    }
}

/// The paths of a call that are `folder` or below it, from descriptors (`7</folder/name>`) and from
/// texts, relative to it, with the names that they were given by.
fn paths_below(call: &str, arguments: &str, folder: &Path) -> BTreeMap<String, BTreeSet<String>> {
    // What is read and written is no name.
    let has_bytes = call.contains("read") || call.contains("write");
    let has_bytes = has_bytes && !call.starts_with("readlink");
    let arguments = if has_bytes { arguments.split('"').next().unwrap() } else { arguments };
    let mut found = BTreeMap::<String, BTreeSet<String>>::new();
    let mut directory = PathBuf::new();
    let mut rest = arguments;
    while let Some(at) = rest.find(['<', '"']) {
        let end = if rest.as_bytes()[at] == b'<' { '>' } else { '"' };
        let Some(length) = rest[at + 1..].find(end) else { break };
        let name = &rest[at + 1..at + 1 + length];
        rest = &rest[at + length + 2..];
        let path = if end == '>' { PathBuf::from(name) } else { directory.join(name) };
        if let Ok(below) = path.strip_prefix(folder) {
            let names = found.entry(below.to_str().unwrap().to_owned()).or_default();
            // A descriptor that is asked about itself is known already.
            if end == '"' && !name.starts_with('/') && !matches!(name, "" | ".") {
                names.insert(name.to_owned());
            }
        }
        if end == '>' {
            directory = path;
        }
    }
    found
}

/// Runs `command` with a fault at one of its calls on `paths` below `folder`, or anywhere if there
/// are none. The second value is true if the fault was reached.
pub(crate) fn inject(
    command: &Command,
    seen: &Seen,
    paths: &[&str],
    folder: &Path,
    fault: &Fault,
) -> (Output, bool) {
    inject_in(command, seen, paths, folder, fault, folder)
}

/// [`inject`], with a log beside `place`: for several at once on one folder.
pub(crate) fn inject_in(
    command: &Command,
    seen: &Seen,
    paths: &[&str],
    folder: &Path,
    fault: &Fault,
    place: &Path,
) -> (Output, bool) {
    let log = place.with_extension("strace");
    // Not `--seccomp-bpf`: strace 6.1 forgets the signals then.
    let mut flags: Vec<String> = ["-f", "-o", log.to_str().unwrap()].map(String::from).to_vec();
    flags.extend(seen.filters(paths, folder));
    let consequence = match fault.consequence {
        Consequence::Kill => format!("signal=SIGKILL:when={}", fault.nth),
        Consequence::Error(error) => format!("error={error}:when={}", fault.nth),
        Consequence::Errors(error) => format!("error={error}:when={}+", fault.nth),
    };
    flags.extend(["-e".into(), format!("trace={}", fault.call)]);
    flags.extend(["-e".into(), format!("inject={}:{consequence}", fault.call)]);
    let ended = output_within(&mut traced(command, &flags), PATIENCE);
    let (output, _) = ended.unwrap_or_else(|| panic!("{fault}: it hangs: {command:?}"));
    let text =
        fs::read(&log).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    fs::remove_file(log).unwrap();
    let reached = match fault.consequence {
        // It may have been a child of it.
        Consequence::Kill => output.status.code().is_none() || is_made(&text, fault),
        Consequence::Error(_) | Consequence::Errors(_) => {
            String::from_utf8_lossy(&text).contains("(INJECTED)")
        }
    };
    (output, reached)
}

/// True if some thread has made the call as often as the fault says.
fn is_made(log: &[u8], fault: &Fault) -> bool {
    let mut counts = BTreeMap::<&str, u32>::new();
    let text = String::from_utf8_lossy(log);
    for line in text.lines() {
        let Some((thread, call)) = line.split_once(' ') else { continue };
        if call.trim_start().split('(').next() == Some(&fault.call) {
            *counts.entry(thread).or_default() += 1;
        }
    }
    counts.values().any(|&count| count >= fault.nth)
}
