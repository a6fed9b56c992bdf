//! `loadcheck leak`: what does not grow passes, whatever is planted is found, and it ends as the
//! table of exit codes says.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::support::{assert_code, children, eventually, json, loadcheck, run, stderr, stdout, workplace};
use onelayer_testing::skipped;
use onelayer_testing::{TestTensor, write_file};
use serde_json::Value;

const MIB: u64 = 1 << 20;

fn leak(place: &Path, words: &[&str]) -> Output {
    loadcheck(place).args(["leak", "--json"]).args(words).output().unwrap()
}

/// The slope of a kind.
#[track_caller]
fn slope<'a>(report: &'a Value, kind: &str) -> &'a Value {
    let slopes = report["leak"]["slopes"].as_array().unwrap();
    slopes.iter().find(|slope| slope["kind"] == kind).unwrap_or_else(|| panic!("no {kind}: {slopes:?}"))
}

/// The kinds that grow.
fn leaks(report: &Value) -> Vec<&str> {
    let slopes = report["leak"]["slopes"].as_array().unwrap().iter();
    slopes.filter(|slope| slope["verdict"] == "leak").map(|slope| slope["kind"].as_str().unwrap()).collect()
}

#[track_caller]
fn assert_a_mib(slope: &Value) {
    let value = slope["bytes_per_cycle"].as_f64().unwrap();
    assert!((value / MIB as f64 - 1.0).abs() < 0.1, "{slope}");
}

#[test]
fn loads_of_ours_leave_nothing() {
    let place = workplace();
    let output = leak(place.path(), &["model", "--cycles", "20"]);
    assert_code(&output, 0);
    let report = json(&output);
    assert_eq!((&report["command"], &report["verdict"]), (&"leak".into(), &"pass".into()));
    assert_eq!((&report["leak"]["counted"], &report["leak"]["mode"]), (&20.into(), &"process".into()));
    assert_eq!(slope(&report, "host")["points_bytes"].as_array().unwrap().len(), 20);
    for kind in ["host", "rss", "file", "pinned", "live"] {
        assert_ne!(slope(&report, kind)["verdict"], "leak", "{report}");
    }
    assert_eq!(slope(&report, "live")["points_bytes"], Value::from(vec![0; 20]));
    assert_eq!(report["limits"][0]["metric"], "slope.host");
    assert_eq!(report["runs"][0]["promise"]["kept"], true);
    let text = stdout(&run(place.path(), "leak model --cycles 8 --warmup 1 --window 1"));
    assert!(text.contains("cycles    8, after 1 to warm up: load, use, unload in one process"), "{text}");
    assert!(text.contains("PASS  nothing grows"), "{text}");
    let table = stdout(&run(place.path(), "leak model --cycles 8 --format csv"));
    assert!(table.starts_with("kind,bytes_per_cycle,") && table.lines().count() == 6, "{table}");
}

/// A pipeline of two components that differ in size.
fn pipeline(sizes: [(&str, usize); 2]) -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    for (name, len) in sizes {
        let folder = place.path().join("pipe").join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let tensors: Vec<TestTensor> = (0..4)
            .map(|layer| TestTensor::random(format!("encoder.layers.{layer}.weight"), len / 4, layer))
            .collect();
        write_file(&folder.join("model.safetensors"), &tensors, 0);
    }
    let entries = sizes.map(|(name, _)| format!("{name:?}: [\"a\", \"b\"]")).join(",");
    std::fs::write(place.path().join("pipe/model_index.json"), format!("{{{entries}}}")).unwrap();
    place
}

#[test]
fn one_component_after_the_other_takes_the_larger_never_the_sum() {
    let place = pipeline([("text_encoder", 32 << 20), ("transformer", 48 << 20)]);
    let components = ["--component", "text_encoder", "--component", "transformer"];
    let output = leak(
        place.path(),
        &[&["pipe", "--budget", "6MiB", "--cycles", "8", "--warmup", "1"][..], &components].concat(),
    );
    assert_code(&output, 0);
    let report = json(&output);
    assert_eq!(report["leak"]["loads"][0]["name"], "pipe: text_encoder");
    let promise = &report["runs"][0]["promise"];
    let (growth, limit) =
        (promise["growth_bytes"].as_u64().unwrap(), promise["limit_bytes"].as_u64().unwrap());
    let larger = report["leak"]["loads"][1]["resident_bytes"].as_u64().unwrap();
    assert_eq!(limit, larger + 22 * MIB, "{promise}");
    assert!(growth <= limit && limit < 80 * MIB && growth >= 48 * MIB, "{promise}");
    // Two sources are the same as two components.
    let output = leak(
        place.path(),
        &["pipe/text_encoder", "pipe/transformer", "--budget", "6MiB", "--cycles", "8", "--warmup", "0"],
    );
    assert_code(&output, 0);
    assert_eq!(json(&output)["runs"][0]["promise"]["limit_bytes"], limit);
}

#[test]
fn a_process_for_each_cycle_leaves_nothing_on_the_machine() {
    let place = workplace();
    let output = leak(place.path(), &["model", "--isolate", "--cycles", "8", "--warmup", "1"]);
    assert_code(&output, 0);
    let report = json(&output);
    assert_eq!((&report["leak"]["mode"], &report["leak"]["counted"]), (&"isolated".into(), &8.into()));
    assert_eq!(report["runs"].as_array().unwrap().len(), 1, "the one that took most");
    assert_ne!(slope(&report, "host")["verdict"], "leak", "{report}");
}

/// What is left in shared memory outlives every process.
#[test]
fn a_command_that_leaves_shared_memory_behind_is_found() {
    let place = workplace();
    let shared = tempfile::tempdir_in("/dev/shm").unwrap();
    let command = format!("sh -c 'head -c 1048576 /dev/zero > {}/left.$$'", shared.path().display());
    let output = leak(place.path(), &["model", "--cycles", "27", "--cmd", &command]);
    assert_code(&output, 1);
    let report = json(&output);
    assert_eq!(leaks(&report), ["host"], "{report}");
    assert_a_mib(slope(&report, "host"));
    assert_eq!(report["verdict"], "fail");
    let clean = leak(place.path(), &["model", "--cycles", "8", "--cmd", "cat {source}/model.safetensors"]);
    assert_code(&clean, 0);
    assert_eq!(json(&clean)["leak"]["left_behind"], 0);
}

#[test]
fn processes_that_a_command_leaves_behind_are_found() {
    let place = workplace();
    let output =
        leak(place.path(), &["model", "--cycles", "10", "--warmup", "0", "--cmd", "sh -c 'sleep 97 &'"]);
    assert_code(&output, 1);
    let report = json(&output);
    assert!(leaks(&report).contains(&"host"), "{report}");
    assert_eq!(report["leak"]["left_behind"], 10);
    let listed = Command::new("ps").args(["-eo", "args"]).output().unwrap();
    assert!(!stdout(&listed).lines().any(|line| line == "sleep 97"), "whoever was left behind is ended");
}

/// A server that keeps a MiB more of one kind of memory with each request.
const SERVER: &str = r#"
import ctypes, mmap, sys, time
kind, kept = sys.argv[1], []
libc = ctypes.CDLL(None, use_errno=True)
file = open("large", "w+b")
file.truncate(64 << 20)
for cycle in range(40):
    time.sleep(0.02)
    if kind == "file":
        part = mmap.mmap(file.fileno(), 1 << 20, prot=mmap.PROT_READ, offset=cycle << 20)
        kept.append((part, sum(part[::4096])))
    elif kind != "clean":
        kept.append(bytearray(b"x") * (1 << 20))
    if kind == "device-pinned":
        # What a driver pins for its device, the kernel counts as `VmPin`; buffers registered with io_uring are such pages.
        area = (ctypes.c_char * (1 << 20)).from_buffer(kept[-1])
        ring = libc.syscall(425, 1, (ctypes.c_char * 120)())
        part = (ctypes.c_size_t * 2)(ctypes.addressof(area), 1 << 20)
        if ring < 0 or libc.syscall(427, ring, 0, part, 1):
            print("cannot lock", flush=True)
            sys.exit(3)
        kept.append(area)
    if kind == "pinned":
        area = (ctypes.c_char * (1 << 20)).from_buffer(kept[-1])
        if libc.mlock(ctypes.c_void_p(ctypes.addressof(area)), ctypes.c_size_t(1 << 20)):
            print("cannot lock", flush=True)
            sys.exit(3)
        kept.append(area)
    print("request", cycle, "done", flush=True)
"#;

#[test]
fn a_server_that_goes_on_is_measured_at_each_line() {
    if Command::new("python3").arg("--version").stdout(Stdio::null()).status().is_err() {
        skipped("there is no python3");
        return;
    }
    let place = workplace();
    std::fs::write(place.path().join("server.py"), SERVER).unwrap();
    for (kind, expected) in [
        ("clean", &[][..]),
        ("host", &["host", "rss"]),
        ("file", &["rss", "file"]),
        ("pinned", &["host", "rss", "pinned"]),
        ("device-pinned", &["host", "rss", "pinned"]),
    ] {
        let command = format!("python3 server.py {kind}");
        let words = ["model", "--cycles", "27", "--cmd", &command, "--each-line", "^request [0-9]+ done$"];
        let output = leak(place.path(), &words);
        if stderr(&output).contains("cannot lock") {
            skipped(format_args!("so much memory cannot be locked here ({kind})"));
            continue;
        }
        assert_code(&output, i32::from(!expected.is_empty()));
        let report = json(&output);
        assert_eq!(leaks(&report), expected, "{kind}: {}", report["leak"]);
        assert_eq!(
            (&report["leak"]["counted"], &report["runs"][0]["outcome"]),
            (&27.into(), &"stopped".into())
        );
        if kind != "clean" {
            assert_a_mib(slope(&report, kind.trim_start_matches("device-")));
        }
    }
}

#[test]
fn it_ends_as_the_table_says() {
    let place = workplace();
    for (words, code, message) in [
        (&["model", "--cycles", "3"][..], 2, "8..=2000"),
        (&["model", "--each-line", "x"], 2, "--cmd"),
        (&["model", "model", "--cmd", "true"], 2, "cannot be used with"),
        (&["--pid", "1", "--each-line", "x"], 2, "cannot be used with"),
        (&["model", "--every", "1s"], 2, "cannot be used with"),
        (&["model", "--cmd", "load {strategy}"], 2, "{strategy}"),
        (&["model", "--cmd", "true", "--each-line", "("], 2, "LC0204"),
        (&["model", "--max-slope", "disk=1"], 2, "no kind of memory"),
        (&["model", "--max-slope", "10%"], 2, "LC0203"),
        (&["model", "--component", "vae"], 2, "no such component"),
        (&["model", "--timeline", "5"], 2, "no timelines"),
        (&["missing"], 3, "LC0301"),
        (&["model", "--cycles", "8", "--max-slope", "vram=0"], 4, "the load takes no device memory"),
        (&["model", "--device", "cuda:0"], 4, "LC0402"),
        (&["model", "--cycles", "8", "--cmd", "echo ready", "--each-line", "ready"], 4, "a slope needs 8"),
        (&["model", "--cycles", "8", "--cmd", "no-such-program"], 2, "LC0209"),
        (&["model", "--cycles", "8", "--cmd", "sh -c 'exit 7'"], 5, "exit code 7"),
    ] {
        let output = leak(place.path(), words);
        assert_code(&output, code);
        assert!(stderr(&output).contains(message), "{words:?}: {}", stderr(&output));
        assert_eq!(json(&output)["verdict"], "error", "{words:?}");
    }
}

/// A command that ends before the last line has not completed, unless it says so itself.
#[test]
fn a_command_that_ends_early_is_told_as_it_ended() {
    let place = workplace();
    let lines = "for n in 1 2 3 4 5 6 7 8 9; do sleep 0.02; echo line; done";
    for (end, code, outcome) in
        [("exit 0", 0, "completed"), ("exit 7", 5, "failed"), ("kill -KILL $$", 5, "killed")]
    {
        let command = format!("sh -c '{lines}; {end}'");
        let words = ["model", "--cycles", "20", "--warmup", "0", "--cmd", &command, "--each-line", "line"];
        let output = leak(place.path(), &words);
        assert_code(&output, code);
        let report = json(&output);
        assert_eq!(report["runs"][0]["outcome"], outcome, "{end}");
        // A line that came with the end may find nobody to measure.
        assert!(report["leak"]["counted"].as_u64().unwrap() >= 8, "{report}");
    }
    // Who is interrupted while a line is waited for has completed nothing.
    let mut command = loadcheck(place.path());
    command.args([
        "leak",
        "--json",
        "model",
        "--cmd",
        "sh -c 'echo line; touch started; sleep 60'",
        "--each-line",
        "line",
    ]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while !place.path().join("started").exists() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let killed = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let output = child.wait_with_output().unwrap();
    let report = json(&output);
    assert_eq!(report["runs"][0]["outcome"], "interrupted", "{}", stderr(&output));
}

/// The files are gone in the middle: what was measured until then is kept.
#[test]
fn cycles_that_fail_keep_what_was_measured() {
    let place = workplace();
    let command = "sh -c 'test ! -e stop || exit 9; test -e n9 && touch stop; n=0; while test -e n$n; do n=$((n+1)); done; touch n$n'";
    let output = leak(place.path(), &["model", "--cycles", "20", "--warmup", "0", "--cmd", command]);
    assert_code(&output, 5);
    let report = json(&output);
    assert_eq!((&report["leak"]["counted"], &report["error"]["place"]), (&11.into(), &"cycle 12".into()));
    assert_eq!(slope(&report, "host")["points_bytes"].as_array().unwrap().len(), 11);
}

/// The growth of a process that runs already is found, and so is that of its children.
#[test]
fn a_process_that_runs_already_is_measured_at_fixed_times() {
    let place = tempfile::tempdir().unwrap();
    let grows = "import time\nheld = []\nfor _ in range(3000):\n    held.append(bytearray(b'x' * 300_000))\n    time.sleep(0.02)";
    let mut parent = Command::new("sh").args(["-c", "python3 -c \"$0\" & wait", grows]).spawn().unwrap();
    let child = eventually("its child", || children(parent.id()).first().copied());
    let pid = parent.id().to_string();
    let output = leak(place.path(), &["--pid", &pid, "--every", "100ms", "--cycles", "12"]);
    for id in [child, parent.id()] {
        let _ = Command::new("kill").arg(id.to_string()).status();
    }
    parent.wait().unwrap();
    assert_code(&output, 1);
    let report = json(&output);
    assert_eq!(
        (report["leak"]["mode"].as_str(), report["leak"]["cycle_seconds"].as_f64()),
        (Some("times"), Some(0.1))
    );
    assert!(leaks(&report).contains(&"host"), "{report}");
    let sentence = report["answer"]["sentence"].as_str().unwrap();
    assert!(sentence.contains("out of memory after about"), "{sentence}");
}

/// What would be ignored is refused.
#[test]
fn flags_of_other_cycles_are_refused() {
    let place = workplace();
    for (line, flag) in [
        ("leak model --every 5s", "--every"),
        ("leak --cmd true --every 5s", "--every"),
        ("leak --pid 1 --each-line x", "--each-line"),
    ] {
        let output = run(place.path(), line);
        assert_code(&output, 2);
        assert!(stderr(&output).contains(flag), "{line}: {}", stderr(&output));
    }
}
