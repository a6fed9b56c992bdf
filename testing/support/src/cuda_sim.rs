//! Runs programs on the simulated CUDA driver (`testing/cuda-sim`), and reads what it reports.
//!
//! The driver is a library that nothing links: cargo gives tests no path to one, and builds none
//! for them. So it is built here, once, by the cargo that runs the tests, into a target folder of
//! its own (the outer cargo may hold a lock on the other). It needs only what the workspace's lock
//! file names and the tests' own build has fetched.
//!
//! The library path is read when a process starts: what is to see the driver is a child process. A
//! test that needs the driver in its own code has itself started again: [`SimRun::again`].
//!
//! The files called libcuda are in a folder that cargo never puts on a library path, so that
//! nothing else runs on them.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The ways in which queued work is executed: as late as can be, at random moments, at once.
pub const MODES: [&str; 3] = ["lazy", "thread", "eager"];

/// Names that programs look for: the first is tried first by cudarc. All are one file, so that a
/// process that opens two of them has one driver.
const NAMES: [&str; 4] = ["libcuda.so", "libcuda.so.1", "libnvidia-ml.so", "libnvidia-ml.so.1"];

/// What a child must not take from whoever runs the tests.
const PREFIX: &str = "CUDA_SIM_";

/// Where cargo lets tests keep files. Told by where the tests themselves are,
/// `<target>/<profile>/deps`, since unit tests are not told.
fn scratch() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let folder = tests.ancestors().nth(3).unwrap().join("tmp");
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The library as built, under its own name.
pub fn built_library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let built = Command::new(env!("CARGO"))
            .current_dir(crate::repository())
            .args(["build", "--quiet", "--locked", "--package", "cuda-sim"])
            .args(["--message-format", "json-render-diagnostics", "--target-dir"])
            .arg(scratch().join("cuda-sim-build"))
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        assert!(built.status.success(), "the simulated driver does not build");
        // Which folder it is in depends on whether a target was chosen: cargo says so.
        let messages = String::from_utf8(built.stdout).unwrap();
        PathBuf::from(messages.split('"').find(|text| text.ends_with("/libcuda_sim.so")).unwrap())
    })
}

/// A folder for a library path: the simulated driver under the names of a real one.
pub fn sim_driver() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| driver_folder(&fs::read(built_library()).unwrap()))
}

/// As [`sim_driver`], without some functions: what an old driver looks like.
pub fn driver_without(symbols: &[&str]) -> PathBuf {
    let mut library = fs::read(built_library()).unwrap();
    for symbol in symbols {
        // The loader finds functions by comparing names: one that reads differently is not there.
        let entry = [b"\0", symbol.as_bytes(), b"\0"].concat();
        let mut found = 0;
        while let Some(at) = library.windows(entry.len()).position(|window| window == entry) {
            library[at + symbol.len()] = b'#';
            found += 1;
        }
        assert!(found > 0, "the simulated driver never had {symbol}");
    }
    driver_folder(&library)
}

/// The folder of a library with these bytes. Made under another name and renamed: several test
/// binaries may make it at once.
fn driver_folder(library: &[u8]) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    library.hash(&mut hasher);
    let parent = scratch();
    let folder = parent.join(format!("sim-driver-{:016x}", hasher.finish()));
    if folder.is_dir() {
        return folder;
    }
    let made = tempfile::tempdir_in(&parent).unwrap();
    let first = made.path().join(NAMES[0]);
    fs::write(&first, library).unwrap();
    for name in &NAMES[1..] {
        fs::hard_link(&first, made.path().join(name)).unwrap();
    }
    if fs::rename(made.path(), &folder).is_err() {
        assert!(folder.is_dir(), "cannot make {}", folder.display());
    }
    folder
}

/// A program to be run on the simulated driver.
#[derive(Debug)]
pub struct SimRun {
    command: Command,
    driver: PathBuf,
    timeout: Duration,
}

impl SimRun {
    /// Runs `command`, whose arguments are complete. Its output is captured.
    pub fn new(mut command: Command) -> Self {
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with(PREFIX) {
                command.env_remove(name);
            }
        }
        // A process group of its own: when time is up, its children go too.
        command.process_group(0);
        Self { command, driver: sim_driver().to_path_buf(), timeout: Duration::from_secs(60) }
    }

    /// Runs a test of the same test binary, which is marked `#[ignore]` since it only works on the
    /// simulated driver.
    pub fn again(module: &str, test: &str) -> Self {
        let mut command = crate::again(module, test);
        command.arg("--ignored");
        Self::new(command)
    }

    /// A setting of the driver, without its prefix: `set("SEED", 3)`.
    pub fn set(mut self, name: &str, value: impl ToString) -> Self {
        self.command.env(format!("{PREFIX}{name}"), value.to_string());
        self
    }

    /// An environment variable.
    pub fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Calls that fail: `function:n:code`, separated by commas.
    pub fn fail(self, rules: &str) -> Self {
        self.set("FAIL", rules)
    }

    /// The stub that comes with CUDA toolkits: `cuInit` answers 34.
    pub fn on_stub(self) -> Self {
        self.set("INIT", 34)
    }

    /// Another driver: a folder of [`driver_without`].
    pub fn on_driver(mut self, folder: &Path) -> Self {
        self.driver = folder.to_path_buf();
        self
    }

    /// The longest time that it may take; 60 seconds unless said.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Runs it to its end.
    ///
    /// # Panics
    /// If it takes longer than it may: a hang is a failure.
    pub fn run(mut self) -> SimOutcome {
        let folder = tempfile::tempdir().unwrap();
        let [stdout, stderr] = ["stdout", "stderr"].map(|name| folder.path().join(name));
        let mut library_path = self.driver.clone().into_os_string();
        if let Some(others) = std::env::var_os("LD_LIBRARY_PATH") {
            library_path.push(":");
            library_path.push(others);
        }
        self.command
            .env("LD_LIBRARY_PATH", library_path)
            .env(format!("{PREFIX}REPORT"), folder.path().join("report-%p"))
            .stdin(Stdio::null())
            .stdout(fs::File::create(&stdout).unwrap())
            .stderr(fs::File::create(&stderr).unwrap());
        let mut child = self.command.spawn().unwrap();
        let start = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            if start.elapsed() > self.timeout {
                let group = format!("-{}", child.id());
                let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
                child.wait().unwrap();
                break None;
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let text = |path: &Path| String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned();
        let (stdout, stderr) = (text(&stdout), text(&stderr));
        let Some(status) = status else {
            panic!("still running after {:?}: {:?}\n{stdout}\n{stderr}", self.timeout, self.command)
        };
        SimOutcome { status, stdout, stderr, reports: read_reports(folder.path()) }
    }
}

fn read_reports(folder: &Path) -> Vec<SimReport> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        files.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("report-")).collect();
    files.sort();
    files.iter().map(|path| SimReport::parse(&fs::read_to_string(path).unwrap())).collect()
}

/// What became of a [`SimRun`].
#[derive(Debug)]
pub struct SimOutcome {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
    /// One for each process that has initialised the driver and ended by itself.
    pub reports: Vec<SimReport>,
}

impl SimOutcome {
    /// The report of the one process that used the driver.
    ///
    /// # Panics
    /// If none did, or more, or if it was killed.
    pub fn report(&self) -> &SimReport {
        match &self.reports[..] {
            [report] => report,
            reports => {
                panic!("{} reports, {:?}\n{}\n{}", reports.len(), self.status, self.stdout, self.stderr)
            }
        }
    }

    /// # Panics
    /// If the program has failed.
    #[track_caller]
    pub fn assert_success(&self) -> &Self {
        assert!(self.status.success(), "{:?}\n{}\n{}", self.status, self.stdout, self.stderr);
        self
    }
}

/// A report, as lines of `key value`.
#[derive(Clone, Debug)]
pub struct SimReport {
    lines: BTreeMap<String, String>,
    text: String,
}

/// Misuse that the driver has seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimViolation {
    pub kind: String,
    /// Number of the call that it was seen in, over all functions.
    pub call: u64,
    /// Faults that were injected before.
    pub faults: u64,
    pub text: String,
}

impl SimReport {
    /// # Panics
    /// If the text is not a whole report of a device that says that it is simulated.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().map(|line| {
            let (key, value) = line.split_once(' ').unwrap_or_else(|| panic!("no report line: {line}"));
            (key.to_owned(), value.to_owned())
        });
        let report = Self { lines: lines.collect(), text: text.to_owned() };
        assert_eq!(report.number("report.version"), 1);
        assert_eq!(report.number("end"), 1, "a report without its end");
        assert!(report.text("driver.name").contains("simulated"), "{text}");
        report
    }

    /// # Panics
    /// If there is no such line.
    #[track_caller]
    pub fn text(&self, key: &str) -> &str {
        self.lines.get(key).unwrap_or_else(|| panic!("no {key} in the report:\n{}", self.text))
    }

    /// # Panics
    /// If there is no such line, or if it holds no number.
    #[track_caller]
    pub fn number(&self, key: &str) -> u64 {
        self.text(key).parse().unwrap_or_else(|_| panic!("{key} is no number: {}", self.text(key)))
    }

    /// How often a function was called; `work` for copies and fills that ran.
    pub fn calls(&self, function: &str) -> u64 {
        self.calls_of_all().get(function).copied().unwrap_or(0)
    }

    /// How often each function was called.
    pub fn calls_of_all(&self) -> BTreeMap<String, u64> {
        let calls = self.lines.iter().filter_map(|(key, value)| Some((key.strip_prefix("calls.")?, value)));
        let calls = calls.filter(|&(function, _)| function != "total");
        calls.map(|(function, value)| (function.to_owned(), value.parse().unwrap())).collect()
    }

    /// What was not given back, by kind; empty if nothing.
    pub fn leaks(&self) -> BTreeMap<String, u64> {
        let leaks = self.lines.iter().filter_map(|(key, value)| Some((key.strip_prefix("leaks.")?, value)));
        let leaks = leaks.map(|(what, value)| (what.to_owned(), value.parse::<u64>().unwrap()));
        leaks.filter(|&(_, count)| count > 0).collect()
    }

    /// Misuse, in the order it was seen.
    pub fn violations(&self) -> Vec<SimViolation> {
        let count = self.number("violations.total").min(200);
        let parse = |index: u64| {
            let line = self.text(&format!("violation.{index}"));
            let mut parts = line.splitn(4, ' ');
            let mut part = || parts.next().unwrap_or_else(|| panic!("no violation: {line}"));
            let kind = part().to_owned();
            let call = part().strip_prefix("call=").unwrap().parse().unwrap();
            let faults = part().strip_prefix("faults=").unwrap().parse().unwrap();
            SimViolation { kind, call, faults, text: part().to_owned() }
        };
        (0..count).map(parse).collect()
    }

    /// # Panics
    /// If there was any misuse, or if anything was not given back.
    #[track_caller]
    pub fn assert_clean(&self) -> &Self {
        assert!(self.violations().is_empty() && self.leaks().is_empty(), "{}", self.text);
        self
    }
}
