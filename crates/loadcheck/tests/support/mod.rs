//! What the tests of the program share: how it is started, and checkpoints to start it on.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::print_stdout, reason = "what was counted is said")]

#[path = "../../../../tests/support/group.rs"]
pub(crate) mod group;
pub(crate) mod strace;

use std::fs::File;
use std::io::{Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use onelayer_testing::skipped;
use onelayer_testing::{TestTensor, write_file};

/// The program, in `directory`, with nothing in its environment that decides about colour, caches
/// or summaries, and without a CUDA driver, whatever the machine has: what `--device auto` comes to
/// is the same everywhere.
pub(crate) fn loadcheck(directory: &Path) -> Command {
    loadcheck_at(Path::new(env!("CARGO_BIN_EXE_loadcheck")), directory)
}

/// The program where every user may run it, a copy in `directory`: cargo's folder may be closed to
/// others.
pub(crate) fn program_for_all_users(directory: &Path) -> PathBuf {
    let copy = directory.join("loadcheck");
    std::fs::copy(env!("CARGO_BIN_EXE_loadcheck"), &copy).unwrap();
    copy
}

/// As [`loadcheck`], of a copy of the program.
pub(crate) fn loadcheck_at(program: &Path, directory: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(directory).stdin(Stdio::null()).env("HOME", directory);
    command.env("LD_LIBRARY_PATH", no_driver());
    for variable in [
        "NO_COLOR",
        "CLICOLOR_FORCE",
        "CLICOLOR",
        "TERM",
        "COLUMNS",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "XDG_CACHE_HOME",
        "GITHUB_STEP_SUMMARY",
    ] {
        command.env_remove(variable);
    }
    command
}

/// A folder whose CUDA drivers are no libraries: the system's linker looks here first, and no
/// further.
fn no_driver() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-driver");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["libcuda.so", "libcuda.so.1", "libnvidia-ml.so", "libnvidia-ml.so.1"] {
        let path = folder.join(name);
        if !path.exists() {
            // Never half there: tests run side by side.
            let part = tempfile::NamedTempFile::new_in(&folder).unwrap();
            std::fs::write(part.path(), "no library\n").unwrap();
            part.persist(path).unwrap();
        }
    }
    folder
}

/// Runs it on words that hold no blanks.
pub(crate) fn run(directory: &Path, line: &str) -> Output {
    loadcheck(directory).args(line.split_whitespace()).output().unwrap()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// `inner` behind the words of a program that starts it: same arguments, environment and working
/// directory.
pub(crate) fn wrapped<'a>(outer: impl IntoIterator<Item = &'a str>, inner: &Command) -> Command {
    let mut outer = outer.into_iter();
    let mut command = Command::new(outer.next().unwrap());
    command.args(outer).arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    if let Some(directory) = inner.get_current_dir() {
        command.current_dir(directory);
    }
    command.stdin(Stdio::null());
    command
}

/// Runs it to its end, which must come within a minute.
#[track_caller]
pub(crate) fn run_command(command: &Command) -> Output {
    let output = wrapped(["timeout", "-s", "KILL", "60"], command).output().unwrap();
    assert!(output.status.code() != Some(137), "it hangs: {command:?}");
    output
}

/// Runs a script in a mount namespace of its own. `None`, said aloud, where that is not allowed.
pub(crate) fn in_own_mounts(what: &str, script: &str, place: &Path, command: &Command) -> Option<Output> {
    let allowed =
        Command::new("unshare").args(["-r", "-m", "true"]).status().is_ok_and(|status| status.success());
    if !allowed {
        skipped(format_args!("{what}: no mount namespace can be made here"));
        return None;
    }
    let words = ["unshare", "-r", "-m", "sh", "-c", script, "sh", place.to_str().unwrap()];
    Some(run_command(&wrapped(words, command)))
}

/// Runs it to its end and tells how long that took; `None` if it takes longer than `most`: then it
/// is killed, with all that it started.
pub(crate) fn output_within(command: &mut Command, most: Duration) -> Option<(Output, Duration)> {
    let start = Instant::now();
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let reader = |mut from: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            from.read_to_end(&mut bytes).map(|_| bytes).unwrap()
        })
    };
    let (stdout, stderr) = (reader(Box::new(stdout)), reader(Box::new(stderr)));
    let (status, took) = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break (Some(status), start.elapsed());
        }
        if start.elapsed() > most {
            kill_family(child.id());
            child.wait().unwrap();
            break (None, start.elapsed());
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let (stdout, stderr) = (stdout.join().unwrap(), stderr.join().unwrap());
    status.map(|status| (Output { status, stdout, stderr }, took))
}

/// Kills a process and what it has started.
fn kill_family(pid: u32) {
    for child in children(pid) {
        kill_family(child);
    }
    let _ = Command::new("kill").args(["-s", "KILL", &pid.to_string()]).status();
}

/// The exit code, with what was printed if it is another one.
#[track_caller]
pub(crate) fn assert_code(output: &Output, expected: i32) {
    assert_eq!(
        output.status.code(),
        Some(expected),
        "stdout:\n{}\nstderr:\n{}",
        stdout(output),
        stderr(output)
    );
}

/// The one JSON object on stdout.
#[track_caller]
pub(crate) fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}\nstdout:\n{}\nstderr:\n{}", stdout(output), stderr(output)))
}

/// A directory with `model/`: a small model of five layers, 600 KiB.
pub(crate) fn workplace() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model");
    std::fs::create_dir(&model).unwrap();
    let mut tensors = vec![TestTensor::random("model.embed_tokens.weight", 200 << 10, 1)];
    for layer in 0..3 {
        for (part, len) in [("mlp.down.weight", 50 << 10), ("norm.weight", 1 << 10)] {
            tensors.push(TestTensor::random(format!("model.layers.{layer}.{part}"), len, layer + 2));
        }
    }
    tensors.push(TestTensor::random("lm_head.weight", 200 << 10, 9));
    write_file(&model.join("model.safetensors"), &tensors, 0);
    directory
}

/// A place with `model/`, as [`workplace`], and what lies beside its weights.
pub(crate) fn model() -> tempfile::TempDir {
    let place = workplace();
    let folder = place.path().join("model");
    std::fs::write(folder.join("config.json"), r#"{"model_type": "test"}"#).unwrap();
    std::fs::write(folder.join("tokenizer.json"), "{}").unwrap();
    place
}

/// The files of tensors that a conversion makes of [`model`].
pub(crate) const CONVERTED_FILES: [&str; 5] = [
    "model-00001-of-00005.safetensors",
    "model-00002-of-00005.safetensors",
    "model-00003-of-00005.safetensors",
    "model-00004-of-00005.safetensors",
    "model-00005-of-00005.safetensors",
];

/// A file of one tensor and `len_bytes`, all of them a hole: takes no room and long to read.
pub(crate) fn write_sparse(path: &Path, len_bytes: u64) {
    let layers = 64;
    let each = len_bytes / layers;
    let entries: Vec<String> = (0..layers)
        .map(|layer| {
            format!(
                "\"model.layers.{layer}.weight\":{{\"dtype\":\"U8\",\"shape\":[{each}],\"data_offsets\":[{},{}]}}",
                layer * each,
                (layer + 1) * each
            )
        })
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let header_bytes = u64::try_from(header.len()).unwrap();
    let mut file = File::create(path).unwrap();
    file.write_all(&header_bytes.to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header_bytes + each * layers).unwrap();
}

/// The living children of a process.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let fields: Vec<&str> = stat[stat.rfind(')').unwrap() + 1..].split_whitespace().collect();
        if fields[1] == parent.to_string() && fields[0] != "Z" {
            found.push(pid);
        }
    }
    found
}

/// Waits for `condition`, up to half a minute: machines are busy at times.
#[track_caller]
pub(crate) fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// True if the process exists and is no zombie.
pub(crate) fn is_alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat[stat.rfind(')').unwrap() + 1..].trim_start().starts_with('Z'))
}

/// The path of a file in the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    onelayer_testing::repository().join(path)
}
