//! Every case of `fixtures/hostile/make.py`, through the library and the program: the expected
//! verdict, in time, within memory that the kernel enforces, with a message that names the file,
//! and never a signal.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use onelayer::checkpoint::Checkpoint;
use onelayer_testing::skipped;

const PROGRAM: &str = env!("CARGO_BIN_EXE_loadcheck");
/// Seconds of processor time that a case may take, for a build as it is shipped and for one without
/// optimisation. The slowest are twenty thousand layers that are listed, which take 0.3 s and some
/// 3. Other programs on the machine do not count.
const CPU_SECONDS_MAX: u32 = if cfg!(debug_assertions) { 10 } else { 1 };
/// Whoever takes longer waits for something that never comes.
const PATIENCE: Duration = Duration::from_secs(120);
/// Memory that a process may write to, in KiB, as `ulimit -d` has it: heap, mappings of its own,
/// and the stacks of its threads.
const DATA_KIB_MAX: u32 = 64 << 10;
/// The specified set.
const CASES_MIN: usize = 250;

struct Case {
    path: String,
    is_accepted: bool,
    why: String,
}

struct Corpus {
    folder: tempfile::TempDir,
    cases: Vec<Case>,
}

impl Corpus {
    /// Makes the corpus; `None`, and said, where there is no Python.
    fn make() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("corpus");
        let script = onelayer_testing::repository().join("fixtures/hostile/make.py");
        let Ok(made) = Command::new("python3").arg(script).arg(&root).output() else {
            skipped("no python3 makes the corpus");
            return None;
        };
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let table = std::fs::read_to_string(root.join("cases.tsv")).unwrap();
        let lines = table.lines().skip(1).filter(|line| !line.starts_with('#'));
        let cases: Vec<Case> = lines
            .map(|line| {
                let columns: Vec<&str> = line.split('\t').collect();
                let [path, _, verdict, _, why] = columns[..] else { panic!("{line}") };
                assert!(["accepted", "refused"].contains(&verdict), "{line}");
                Case { path: path.to_owned(), is_accepted: verdict == "accepted", why: why.to_owned() }
            })
            .collect();
        assert!(cases.len() >= CASES_MIN, "{} cases", cases.len());
        Some(Self { folder, cases })
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("corpus")
    }

    /// Asks for the fault of every case, by two threads; all faults together.
    fn check(&self, fault_of: impl Fn(&Case) -> Option<String> + Sync) {
        let (left, right) = self.cases.split_at(self.cases.len() / 2);
        let faults: Vec<String> = thread::scope(|scope| {
            let halves = [left, right].map(|half| {
                let fault_of = &fault_of;
                scope.spawn(move || {
                    let fault = |case: &Case| {
                        fault_of(case).map(|fault| format!("{} ({}): {fault}", case.path, case.why))
                    };
                    half.iter().filter_map(fault).collect::<Vec<_>>()
                })
            });
            halves.into_iter().flat_map(|half| half.join().unwrap()).collect()
        });
        assert!(faults.is_empty(), "{} of {}:\n{}", faults.len(), self.cases.len(), faults.join("\n"));
    }
}

#[test]
fn the_library_gives_the_expected_verdict() {
    let Some(corpus) = Corpus::make() else { return };
    let root = corpus.root();
    corpus.check(|case| {
        let path = root.join(&case.path);
        let start = Instant::now();
        let opened = Checkpoint::open(&path);
        if start.elapsed() > PATIENCE {
            return Some(format!("took {:?}", start.elapsed()));
        }
        match opened {
            Ok(_) if case.is_accepted => None,
            Ok(checkpoint) => Some(format!("accepted, with {} tensors", checkpoint.tensor_count())),
            Err(error) if case.is_accepted => Some(error.to_string()),
            Err(error) => {
                let text = error.to_string();
                let is_named = text.contains(path.to_str().unwrap());
                let is_short = text.len() <= 500 + 2 * path.as_os_str().len() && !text.contains('\n');
                (!is_named || !is_short || !(error.is_invalid() || error.is_missing() || is_io(&error)))
                    .then_some(text)
            }
        }
    });
}

/// What the system itself refuses: a link to itself, a device.
fn is_io(error: &onelayer::checkpoint::CheckpointError) -> bool {
    matches!(error, onelayer::checkpoint::CheckpointError::Io { .. })
}

/// `loadcheck COMMAND PATH FLAGS`, under the limits of memory and time.
fn loadcheck(root: &Path, command: &str, path: &str, flags: &[&str], data_kib: u32) -> Output {
    let patience = PATIENCE.as_secs();
    let shell = format!(
        "ulimit -d {data_kib} && ulimit -t {CPU_SECONDS_MAX} && exec timeout -s KILL {patience} \"$@\""
    );
    Command::new("sh")
        .args(["-c", &shell, "sh", PROGRAM, command, path])
        .args(flags)
        .current_dir(root)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// What is wrong with how the program ended.
fn fault_of(case: &Case, output: &Output) -> Option<String> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let expected = if case.is_accepted { 0 } else { 3 };
    if output.status.code() != Some(expected) {
        return Some(format!("{}, expected {expected}: {stderr}", output.status));
    }
    // Nobody's terminal is at the mercy of a name.
    let printed = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8_lossy(&printed);
    let is_foul =
        |letter: char| letter.is_control() && letter != '\n' || ('\u{202a}'..='\u{202e}').contains(&letter);
    if let Some(letter) = text.chars().find(|&letter| is_foul(letter)) {
        return Some(format!("prints {letter:?}: {text:?}"));
    }
    let file = Path::new(&case.path).file_name().unwrap().to_str().unwrap();
    let is_told = stderr.contains(file) && stderr.starts_with("error[LC03") && stderr.len() <= 1000;
    (!case.is_accepted && !is_told).then(|| format!("says: {stderr}"))
}

#[test]
fn the_program_gives_the_expected_verdict_within_its_memory() {
    let Some(corpus) = Corpus::make() else { return };
    let root = corpus.root();
    corpus.check(|case| fault_of(case, &loadcheck(&root, "inspect", &case.path, &[], DATA_KIB_MAX)));
}

#[test]
fn what_is_accepted_can_be_loaded() {
    let Some(corpus) = Corpus::make() else { return };
    let root = corpus.root();
    corpus.check(|case| {
        let flags = ["--device", "none", "--budget", "32MiB", "--quiet"];
        let load = || loadcheck(&root, "run", &case.path, &flags, 2 * DATA_KIB_MAX);
        case.is_accepted.then(load).and_then(|output| fault_of(case, &output))
    });
}

#[test]
fn the_limits_are_limits() {
    let output = Command::new("sh")
        .args(["-c", "ulimit -t 1 && exec timeout -s KILL 120 sh -c 'while :; do :; done'"])
        .output()
        .unwrap();
    assert!(!output.status.success(), "it goes round for ever");

    let output = Command::new("sh")
        .args(["-c", &format!("ulimit -d {DATA_KIB_MAX} && exec python3 -c 'x = bytearray(100 << 20)'")])
        .stderr(Stdio::null())
        .output()
        .unwrap();
    assert!(!output.status.success(), "100 MiB fit into 64");
}
