//! `compare`: every way of loading is measured beside the others, whatever becomes of it; rounds
//! take turns; the page cache is looked at before every run; what fails is a row.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    reason = "a test that cannot go on panics"
)]

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::{
    assert_code, children, eventually, is_alive, json, loadcheck, run, stderr, stdout, workplace,
    write_sparse,
};
use onelayer_probe::ChildGroup;
use onelayer_testing::skipped;
use onelayer_testing::{TestTensor, write_file};
use serde_json::Value;

const MIB: u64 = 1 << 20;
/// Bytes of the tensors of [`large`].
const LARGE_BYTES: u64 = 24 * MIB;

/// Runs `compare` on words that may hold blanks.
fn compare(place: &Path, words: &[&str]) -> Output {
    loadcheck(place).arg("compare").args(words).output().unwrap()
}

/// A place with `large/`: 24 MiB in two files, on a disk where there is one, so that its pages can
/// be dropped.
fn large() -> tempfile::TempDir {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = place.path().join("large");
    fs::create_dir(&folder).unwrap();
    for file in 0..2_u64 {
        let tensors: Vec<TestTensor> = (0..3)
            .map(|layer| {
                let name = format!("model.layers.{}.weight", 3 * file + layer);
                TestTensor::random(name, 4 << 20, 10 * file + layer)
            })
            .collect();
        write_file(&folder.join(format!("model-{:05}-of-00002.safetensors", file + 1)), &tensors, 0);
    }
    place
}

fn rows(report: &Value) -> &[Value] {
    report["comparison"].as_array().unwrap()
}

#[track_caller]
fn row<'a>(report: &'a Value, name: &str) -> &'a Value {
    rows(report).iter().find(|row| row["strategy"] == name).unwrap_or_else(|| panic!("no {name} in {report}"))
}

fn names(list: &[Value]) -> Vec<&str> {
    list.iter().map(|entry| entry["strategy"].as_str().unwrap()).collect()
}

#[test]
fn each_way_costs_what_it_keeps() {
    let place = large();
    let line =
        "compare large -s stream -s mmap -s read -s pread -s direct --runs 2 --window 1 --json --cache cold";
    let output = run(place.path(), line);
    assert_code(&output, 0);
    let report = json(&output);
    assert_eq!(names(rows(&report)), ["stream", "mmap", "read", "pread", "direct"]);
    assert_eq!(report["runs"].as_array().unwrap().len(), 10);
    let growth = |name: &str, metric: &str| row(&report, name)["peak"][metric].as_u64().unwrap();
    for name in ["read", "pread", "direct"] {
        let host_bytes = growth(name, "host_growth_bytes");
        assert!((LARGE_BYTES..LARGE_BYTES + 8 * MIB).contains(&host_bytes), "{name}: {host_bytes}");
    }
    // The mapping is resident as a whole, and none of it is the process's own.
    assert!(growth("mmap", "host_growth_bytes") < 8 * MIB);
    assert!(growth("mmap", "rss_growth_bytes") >= LARGE_BYTES);
    assert!(growth("mmap", "file_bytes") >= LARGE_BYTES);
    for row in rows(&report) {
        assert_eq!(
            (row["outcome"].as_str(), row["completed"].as_u64()),
            (Some("completed"), Some(2)),
            "{row}"
        );
        let seconds = &row["seconds"];
        assert!(seconds["min"].as_f64().unwrap() > 0.0, "{row}");
        assert!(
            seconds["min"].as_f64() <= seconds["median"].as_f64()
                && seconds["median"].as_f64() <= seconds["max"].as_f64()
        );
        assert!(row["time_ratio"].as_f64().unwrap() > 0.0 && row["bytes_per_second"].as_u64().unwrap() > 0);
        assert!(row["cpu_seconds"].as_f64().is_some(), "{row}");
        assert_eq!(row["host_ratio"].is_null(), row["strategy"] == "mmap", "{row}");
    }
    let smallest = rows(&report).iter().filter_map(|row| row["host_ratio"].as_f64()).fold(f64::MAX, f64::min);
    assert!((smallest - 1.0).abs() < 1e-9, "{smallest}");
    assert!(report["notes"].to_string().contains("nearly free"), "{}", report["notes"]);
}

#[test]
fn what_is_dropped_is_not_kept() {
    let place = large();
    let output = run(place.path(), "compare large -s pread -s direct --runs 1 --device none --json");
    assert_code(&output, 0);
    let report = json(&output);
    for row in rows(&report) {
        let host_bytes = row["peak"]["host_growth_bytes"].as_u64().unwrap();
        // Samples may miss one tensor altogether: such a load takes 20 ms.
        assert!(host_bytes < 12 * MIB, "one tensor at a time: {row}");
    }
    assert!(!report["notes"].to_string().contains("nearly free"), "nothing maps here: {}", report["notes"]);
}

#[test]
fn every_byte_that_is_selected_is_read_and_no_other_tensor() {
    let place = large();
    let line = "compare large -s mmap -s pread -s direct -s read -s stream --select layers.0 --runs 1 --json --device none";
    let report = json(&run(place.path(), line));
    let read_bytes = |name: &str| {
        let runs = report["runs"].as_array().unwrap();
        runs.iter().find(|run| run["strategy"] == name).unwrap()["io"]["read_bytes"].as_u64().unwrap()
    };
    for name in ["mmap", "pread", "direct"] {
        assert_eq!(read_bytes(name), 4 * MIB, "{name}");
    }
    let file_bytes = fs::metadata(place.path().join("large/model-00001-of-00002.safetensors")).unwrap().len();
    assert_eq!(read_bytes("read"), file_bytes, "one whole file");
}

#[test]
fn rounds_take_turns_and_warm_ups_leave_no_trace() {
    let place = workplace();
    let line = "compare model -s stream -s mmap -s read --runs 4 --warmup 1 --json";
    let report = json(&run(place.path(), line));
    let runs = report["runs"].as_array().unwrap();
    let expected = [
        ["stream", "mmap", "read"],
        ["mmap", "read", "stream"],
        ["read", "stream", "mmap"],
        ["stream", "mmap", "read"],
    ];
    assert_eq!(names(runs), expected.concat());
    let rounds: Vec<u64> = runs.iter().map(|run| run["round"].as_u64().unwrap()).collect();
    assert_eq!(rounds, [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]);
    assert!(rows(&report).iter().all(|row| row["runs"] == 4));
}

#[test]
fn a_warm_up_does_run() {
    let place = workplace();
    let words = ["model", "--cmd", "sh -c 'echo x >> log'", "--runs", "2", "--warmup", "3", "--json"];
    assert_code(&compare(place.path(), &words), 0);
    assert_eq!(fs::read_to_string(place.path().join("log")).unwrap().lines().count(), 5);
}

#[test]
fn three_ways_are_compared_if_none_is_named_and_a_command_is_one_more() {
    let place = workplace();
    let output =
        compare(place.path(), &["model", "--runs", "1", "--cmd", "cat {source}/model.safetensors", "--json"]);
    // What the command prints is not data.
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(names(rows(&report)), ["stream", "mmap", "read", "cmd"]);
    assert_eq!(row(&report, "cmd")["command"], serde_json::json!(["cat", "model/model.safetensors"]));
    assert!(row(&report, "stream")["command"].is_null());
    let runs = report["runs"].as_array().unwrap();
    assert_eq!((runs[3]["exit_code"].as_u64(), runs[3]["round"].as_u64()), (Some(0), Some(1)));
    assert!(output.stderr.len() > 500 << 10, "it went to stderr");
    assert!(report["notes"].to_string().contains("its start included"), "{}", report["notes"]);
}

#[test]
fn names_are_put_into_a_command_that_takes_them() {
    let place = workplace();
    let template = r#"sh -c 'echo "$0 $1" >> log' {strategy} {source}"#;
    let words =
        ["model", "--cmd", template, "-s", "load file", "-s", "it's", "--runs", "1", "--json", "-w", "0"];
    let output = compare(place.path(), &words);
    assert_code(&output, 0);
    let report = json(&output);
    assert_eq!(names(rows(&report)), ["load file", "it's"]);
    assert_eq!(fs::read_to_string(place.path().join("log")).unwrap(), "load file model\nit's model\n");
    for (words, expected) in [
        (["model", "--cmd", "a {strategy}"].as_slice(), "-s NAME"),
        (&["model", "-s", "steam"], "there is no strategy `steam`"),
        (&["model", "--cmd", "a 'b"], "left open"),
        (&["model", "--cmd", ""], "holds no command"),
    ] {
        let output = compare(place.path(), words);
        assert_code(&output, 2);
        assert!(stderr(&output).contains(expected), "{expected}: {}", stderr(&output));
    }
}

#[test]
fn a_command_is_not_run_by_a_shell() {
    let place = workplace();
    let words = ["model", "--runs", "1", "--cmd", "touch $(made) 'two words' ;", "--json"];
    assert_code(&compare(place.path(), &words), 0);
    let mut made: Vec<_> = fs::read_dir(place.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    made.sort();
    assert_eq!(made, ["$(made)", ";", "model", "two words"]);
}

#[test]
fn what_fails_is_a_row_and_the_others_go_on() {
    let place = workplace();
    let words = [
        "model",
        "-s",
        "mmap",
        "--runs",
        "3",
        "--json",
        "--cmd",
        "sh -c 'exit 3'",
        "--cmd",
        "sh -c 'kill -9 $$'",
        "--cmd",
        "sh -c 'echo x >> log; test $(wc -l < log) -lt 2'",
    ];
    let output = compare(place.path(), &words);
    assert_code(&output, 5);
    let report = json(&output);
    assert_eq!(row(&report, "mmap")["completed"], 3);
    let outcome = |name: &str| {
        let row = row(&report, name);
        (row["outcome"].as_str().unwrap(), row["reason"].as_str().unwrap(), row["runs"].as_u64().unwrap())
    };
    assert_eq!(outcome("cmd1"), ("failed", "exit code 3", 1));
    assert_eq!(outcome("cmd2"), ("killed", "by SIGKILL", 1));
    assert_eq!(outcome("cmd3"), ("failed", "exit code 1", 2), "once a row fails it is not run again");
    assert_eq!(row(&report, "cmd3")["completed"], 1);
    assert!(row(&report, "cmd1")["seconds"].is_null() && !row(&report, "cmd3")["seconds"].is_null());
    let places: Vec<&str> = report["errors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| problem["place"].as_str().unwrap())
        .collect();
    assert_eq!(places, ["cmd1", "cmd2", "cmd3"]);
    assert!(
        stderr(&output).contains("error[LC0504]: the command ended with exit code 3\n  --> cmd1"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_command_that_does_not_exist_is_wrong_usage_and_the_others_are_measured() {
    let place = workplace();
    let output = compare(
        place.path(),
        &["model", "-s", "mmap", "--cmd", "no-such-program {source}", "--runs", "2", "--json"],
    );
    assert_code(&output, 2);
    let report = json(&output);
    assert_eq!(
        (report["error"]["code"].as_str(), report["error"]["place"].as_str()),
        (Some("LC0209"), Some("cmd: no-such-program"))
    );
    assert_eq!(
        (row(&report, "mmap")["completed"].as_u64(), row(&report, "cmd")["runs"].as_u64()),
        (Some(2), Some(1))
    );
}

/// 4 TiB of holes: more than any machine can keep.
fn huge() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    write_sparse(&place.path().join("huge.safetensors"), 4 << 40);
    place
}

#[test]
fn what_memory_cannot_hold_is_refused_and_a_result() {
    let place = huge();
    let words = [
        "huge.safetensors",
        "-s",
        "stream",
        "-s",
        "read",
        "-s",
        "pread",
        "-s",
        "direct",
        "--cmd",
        "true",
        "--json",
    ];
    let output = compare(place.path(), &words);
    assert_code(&output, 0);
    let report = json(&output);
    for name in ["stream", "read", "pread", "direct"] {
        let row = row(&report, name);
        assert_eq!((row["outcome"].as_str(), row["runs"].as_u64()), (Some("refused"), Some(1)), "{row}");
        assert!(row["note"].as_str().unwrap().starts_with("refused: "), "{row}");
        let reason = row["reason"].as_str().unwrap();
        assert!(reason.contains("4 TiB") && reason.contains("are available"), "{reason}");
    }
    assert_eq!(row(&report, "cmd")["completed"], 5);
    assert!(report["plan"].is_null(), "nothing was planned that can be");
    // Nothing else is left of the comparison.
    let output = compare(place.path(), &["huge.safetensors", "-s", "stream", "-s", "read"]);
    assert_code(&output, 2);
    let text = stdout(&output);
    assert!(text.contains("refused: it keeps 4 TiB, and "), "{text}");
    assert!(stderr(&output).contains("LC0207"), "{}", stderr(&output));
    assert_code(&compare(place.path(), &["huge.safetensors", "-s", "stream"]), 2);
}

/// A limited control group below ours, and the words that start a command in it; `None` where there
/// can be none.
fn limited(limit_bytes: u64) -> Option<(ChildGroup, String)> {
    match ChildGroup::create(Some(limit_bytes)) {
        Ok(group) => {
            let procs = group.directory().join("cgroup.procs");
            Some((group, format!("echo 0 > '{}' && exec \"$@\"", procs.display())))
        }
        Err(error) => {
            skipped(format_args!("no control group can be made here: {error}"));
            None
        }
    }
}

/// Compares in a process that `enter` has put into a group.
fn compare_inside(enter: &str, place: &Path, flags: &[&str]) -> Output {
    let program = ["-c", enter, "sh", env!("CARGO_BIN_EXE_loadcheck"), "compare", "large", "--json"];
    Command::new("sh").args(program).args(flags).current_dir(place).output().unwrap()
}

#[test]
fn what_an_outer_limit_kills_is_a_result_and_what_it_cannot_hold_is_refused() {
    let place = large();
    let Some((group, enter)) = limited(20 * MIB) else { return };
    // Takes memory until it is killed, before anybody else is. A shell in between tells that with an
    // exit code of its own.
    let hoard = "sh -c 'echo 1000 >/proc/self/oom_score_adj; x=a; while :; do x=$x$x; done'";
    let inner = format!("sh -c \"{}; exit 7\"", hoard.replace('$', "\\$"));
    let output = compare_inside(
        &enter,
        place.path(),
        &[
            "--runs", "2", "-s", "stream", "-s", "pread", "--budget", "5MiB", "--device", "none", "--cmd",
            hoard, "--cmd", &inner,
        ],
    );
    assert_code(&output, 0);
    let report = json(&output);
    for (name, exit_code) in [("cmd1", None), ("cmd2", Some(7))] {
        let killed = row(&report, name);
        assert_eq!(
            (killed["outcome"].as_str(), killed["runs"].as_u64()),
            (Some("killed"), Some(1)),
            "{killed}"
        );
        assert!(killed["reason"].as_str().unwrap().starts_with("for want of memory"), "{killed}");
        let runs = report["runs"].as_array().unwrap();
        let run = runs.iter().find(|run| run["strategy"] == name).unwrap();
        assert_eq!(run["exit_code"].as_u64(), exit_code);
    }
    assert_eq!(
        (row(&report, "stream")["completed"].as_u64(), row(&report, "pread")["completed"].as_u64()),
        (Some(2), Some(2))
    );
    // Kept, the tensors are more than the limit.
    let flags = ["--runs", "1", "-s", "read", "-s", "pread", "-s", "mmap"];
    let output = compare_inside(&enter, place.path(), &flags);
    drop(group);
    assert_code(&output, 0);
    let report = json(&output);
    let outcomes: Vec<&str> = rows(&report).iter().map(|row| row["outcome"].as_str().unwrap()).collect();
    assert_eq!(outcomes, ["refused", "refused", "completed"], "{report}");
}

#[test]
fn the_page_cache_is_looked_at_before_every_run() {
    let place = large();
    for (state, expected) in [("cold", 0.0), ("warm", 1.0)] {
        let line = format!("compare large -s mmap -s direct -s read --runs 2 --cache {state} --json");
        let report = json(&run(place.path(), &line));
        let mut reached = 0;
        for run in report["runs"].as_array().unwrap() {
            assert_eq!(run["cache"]["asked"], state);
            match run["cache"]["cached_share"].as_f64() {
                Some(share) => {
                    // A host that takes memory back may take a few pages between reading and looking, and
                    // that is said.
                    assert!((share - expected).abs() < 0.1, "{state}: {run}");
                    reached += u64::from((share - expected).abs() < 0.01);
                }
                None => {
                    skipped("this kernel does not tell what is cached");
                    return;
                }
            }
        }
        let missed: u64 = rows(&report).iter().map(|row| row["cache_not_as_asked"].as_u64().unwrap()).sum();
        assert_eq!(reached + missed, 6, "{state}: {report}");
        assert!(reached > 0, "{state}: {report}");
    }
}

#[test]
fn a_run_that_was_not_cold_is_said() {
    let place = large();
    let path = place.path().join("large/model-00001-of-00002.safetensors");
    // Whoever maps pages keeps them in the cache.
    let python = "import mmap, sys, time\nfile = open(sys.argv[1])\nmapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n\
        sum(mapped[::4096])\nprint('mapped', flush=True)\ntime.sleep(60)";
    let started = Command::new("python3").args(["-c", python]).arg(&path).stdout(Stdio::piped()).spawn();
    let Ok(mut holder) = started else {
        skipped("there is no python3 here");
        return;
    };
    let mut line = [0; 7];
    holder.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
    let output = run(place.path(), "compare large -s direct -s read --runs 2 --cache cold --json");
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert_code(&output, 0);
    let report = json(&output);
    let share = report["runs"][0]["cache"]["cached_share"].as_f64();
    assert!(share.is_none_or(|share| share > 0.4), "{share:?}");
    for row in rows(&report) {
        assert_eq!(row["cache_not_as_asked"], 2, "{row}");
        assert!(row["note"].as_str().unwrap().contains("2 of 2 runs did not begin cold"), "{row}");
    }
}

#[test]
fn what_a_command_leaves_behind_is_not_in_the_next_runs_way() {
    let place = workplace();
    // The time is a name that no other process has.
    let left = format!("sleep 65.{}", std::process::id());
    let template = format!("sh -c '{left} >/dev/null 2>&1 &'");
    let output = compare(place.path(), &["model", "-s", "mmap", "--cmd", &template, "--runs", "2", "--json"]);
    assert_code(&output, 0);
    let all = Command::new("ps").args(["-eo", "args"]).output().unwrap();
    assert!(!String::from_utf8_lossy(&all.stdout).lines().any(|line| line == left));
}

/// Starts a comparison that takes long: 16 GiB of holes, past the page cache, piece by piece.
fn start_long(place: &Path, words: &[&str]) -> Child {
    write_sparse(&place.join("long.safetensors"), 16 << 30);
    loadcheck(place)
        .args(["compare", "--json", "long.safetensors", "-s", "direct", "--device", "none", "--runs", "20"])
        .args(words)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until a worker has been measuring for a moment.
fn measuring_worker(parent: &mut Child) -> u32 {
    let stderr = parent.stderr.as_mut().unwrap();
    let mut seen = Vec::new();
    let mut byte = [0];
    while !seen.ends_with(b"%") {
        assert_eq!(stderr.read(&mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&seen));
        seen.push(byte[0]);
    }
    eventually("the worker", || children(parent.id()).first().copied())
}

fn send(signal: &str, pid: u32) {
    assert!(Command::new("kill").args(["-s", signal, &pid.to_string()]).status().unwrap().success());
}

fn finish(mut child: Child) -> (Option<i32>, Value) {
    // A full pipe would hold it up.
    let mut messages = child.stderr.take().unwrap();
    let drain = std::thread::spawn(move || std::io::copy(&mut messages, &mut std::io::sink()));
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    let status = child.wait().unwrap();
    drain.join().unwrap().unwrap();
    (status.code(), serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

#[test]
fn an_interrupt_keeps_what_is_known() {
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let place = tempfile::tempdir().unwrap();
        let mut child = start_long(place.path(), &[]);
        let worker = measuring_worker(&mut child);
        let start = Instant::now();
        send(signal, child.id());
        let (status, report) = finish(child);
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert_eq!((status, report["error"]["code"].as_str()), (Some(code), Some("LC0507")), "{report}");
        assert!(!is_alive(worker), "nothing stays");
        let last = report["runs"].as_array().unwrap().last().unwrap();
        assert_eq!(last["outcome"], "interrupted");
        assert!(last["after_unload"]["rss_bytes"].as_u64().unwrap() > 0, "the worker ended in order: {last}");
        let row = row(&report, "direct");
        assert_eq!(row["outcome"], "interrupted");
        assert!(row["peak"]["host_bytes"].as_u64().unwrap() > 0, "{row}");
    }
}

#[test]
fn an_interrupt_reaches_a_command_and_what_was_measured_before_is_kept() {
    let place = workplace();
    let child = loadcheck(place.path())
        .args(["compare", "--json", "model", "-s", "pread", "--cmd", "sleep 66"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let sleep = eventually("the command", || {
        let pid = *children(child.id()).first()?;
        fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?.starts_with("sleep").then_some(pid)
    });
    let start = Instant::now();
    send("INT", child.id());
    let (status, report) = finish(child);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!((status, is_alive(sleep)), (Some(130), false));
    assert_eq!(
        (row(&report, "pread")["completed"].as_u64(), row(&report, "cmd")["completed"].as_u64()),
        (Some(1), Some(0))
    );
    assert_eq!(row(&report, "cmd")["outcome"], "interrupted");
}

#[test]
fn a_killed_worker_is_a_row() {
    let place = tempfile::tempdir().unwrap();
    let mut child = start_long(place.path(), &["--cmd", "true"]);
    send("KILL", measuring_worker(&mut child));
    let (status, report) = finish(child);
    assert_eq!(status, Some(5), "{report}");
    let killed = row(&report, "direct");
    assert_eq!(killed["outcome"], "killed");
    assert_eq!(killed["reason"], "by SIGKILL before it could report");
    assert!(killed["peak"]["rss_bytes"].as_u64().unwrap() > 0, "what it told before counts: {killed}");
    assert_eq!(row(&report, "cmd")["completed"], 20, "the others go on");
}

#[test]
fn what_is_wrong_is_said_at_once_and_with_its_code() {
    let place = workplace();
    for (line, code, expected) in [
        ("compare missing", 3, "LC0301"),
        ("compare missing -s steam --budget 1MiB", 3, "LC0202"),
        ("compare model --budget 1MiB", 2, "LC0201"),
        ("compare model --runs 0", 2, "0"),
        ("compare model --device cuda:0", 4, "LC0402"),
        ("compare model --select nothing", 2, "LC0208"),
        ("compare model -o model", 2, "LC0205"),
    ] {
        let output = run(place.path(), line);
        assert_code(&output, code);
        assert!(stderr(&output).contains(expected), "{line}: {}", stderr(&output));
    }
    // Only `stream` needs the device and the budget.
    assert_code(&run(place.path(), "compare model -s mmap -s read --device cuda:0 --runs 1"), 0);
}

#[test]
fn exports_hold_the_table() {
    let place = workplace();
    let words = [
        "model",
        "--runs",
        "1",
        "--cmd",
        "true 'a|b'",
        "--export-markdown",
        "c.md",
        "--export-json",
        "c.json",
        "-o",
        "c.csv",
    ];
    assert_code(&compare(place.path(), &words), 0);
    let page = fs::read_to_string(place.path().join("c.md")).unwrap();
    let table: Vec<&str> = page.lines().filter(|line| line.starts_with('|')).collect();
    assert_eq!(table.len(), 6, "{page}");
    assert!(
        table[0].starts_with("| | unreclaimable | RSS peak |") && table[2].starts_with("| stream | "),
        "{page}"
    );
    assert!(table[5].starts_with("| cmd: `true 'a\\|b'` | "), "{page}");
    let report: Value = serde_json::from_slice(&fs::read(place.path().join("c.json")).unwrap()).unwrap();
    assert_eq!(rows(&report).len(), 4);
    let csv = fs::read_to_string(place.path().join("c.csv")).unwrap();
    let cells: Vec<usize> = csv.lines().map(|line| line.split(',').count()).collect();
    assert!(csv.starts_with("strategy,command,outcome,runs") && cells[1] == cells[0], "{csv}");
    let text = stdout(&compare(place.path(), &["model", "-s", "mmap", "--runs", "2", "--format", "jsonl"]));
    let kinds: Vec<String> = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["type"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(kinds, ["run", "run", "comparison", "summary"]);
}

#[test]
fn cpu_time_is_in_every_report() {
    let place = workplace();
    assert!(json(&run(place.path(), "model --json"))["runs"][0]["cpu_seconds"].as_f64().is_some());
    // A child of the command that computes, so that its parent's own time would not do.
    let script = "(i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done); :";
    let output = loadcheck(place.path()).args(["exec", "--json", "--", "sh", "-c", script]).output().unwrap();
    let run = &json(&output)["runs"][0];
    let (cpu, wall) = (run["cpu_seconds"].as_f64().unwrap(), run["seconds"].as_f64().unwrap());
    assert!(cpu >= 0.02 && cpu <= wall + 0.05, "{cpu} of {wall}");
    let idle = loadcheck(place.path()).args(["exec", "--json", "--", "sleep", "0.3"]).output().unwrap();
    assert!(json(&idle)["runs"][0]["cpu_seconds"].as_f64().unwrap() < 0.2);
}
