//! A load runs in a process of its own: it can be interrupted, killed and orphaned, and each of
//! these leaves a partial report, the right exit code and nothing else.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    reason = "a test that cannot go on panics"
)]

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{
    assert_code, children, eventually, is_alive, json, loadcheck, run, stderr, workplace, write_sparse,
};

const GIB: u64 = 1 << 30;

/// A place with `large.safetensors`: 256 GiB of holes, long to read and no room on the disk.
fn large() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    write_sparse(&place.path().join("large.safetensors"), 256 * GIB);
    place
}

fn start_large(place: &Path, flags: &[&str]) -> Child {
    loadcheck(place)
        .args(["large.safetensors", "--device", "none", "--io", "direct", "--runs", "100", "--json"])
        .args(flags)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until the worker that measures has been at it for a moment.
fn measuring_worker(parent: &mut Child) -> u32 {
    let mut stderr = parent.stderr.take().unwrap();
    let mut seen = Vec::new();
    let mut byte = [0];
    while !seen.ends_with(b"%") {
        assert_eq!(stderr.read(&mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&seen));
        seen.push(byte[0]);
    }
    parent.stderr = Some(stderr);
    eventually("the worker", || children(parent.id()).first().copied())
}

fn send(signal: &str, pid: u32) {
    assert!(Command::new("kill").args(["-s", signal, &pid.to_string()]).status().unwrap().success());
}

fn finish(mut child: Child) -> (Option<i32>, serde_json::Value) {
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    let status = child.wait().unwrap();
    (status.code(), serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

#[test]
fn an_interrupt_ends_it_within_two_seconds_with_a_partial_report() {
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let place = large();
        let mut parent = start_large(place.path(), &[]);
        let worker = measuring_worker(&mut parent);
        let start = Instant::now();
        send(signal, parent.id());
        let (status, report) = finish(parent);
        assert!(start.elapsed() < Duration::from_secs(2), "{signal} took {:?}", start.elapsed());
        assert_eq!(status, Some(code));
        assert!(!is_alive(worker), "no worker stays");
        assert_eq!(
            (report["verdict"].as_str(), report["error"]["code"].as_str()),
            (Some("error"), Some("LC0507"))
        );
        let last = report["runs"].as_array().unwrap().last().unwrap();
        assert_eq!(last["outcome"], "interrupted");
        assert!(last["peak"]["rss_bytes"].as_u64().unwrap() > 0, "what is known is kept: {last}");
        assert!(last["after_unload"]["rss_bytes"].as_u64().unwrap() > 0, "the worker ended in order: {last}");
        assert!(report["source"]["tensors"] == 64);
        let left: Vec<_> =
            std::fs::read_dir(place.path()).unwrap().flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(left, ["large.safetensors"]);
    }
}

#[test]
fn a_second_interrupt_ends_it_at_once() {
    let place = large();
    let mut parent = start_large(place.path(), &[]);
    let worker = measuring_worker(&mut parent);
    // A stopped worker cannot react to the first one.
    send("STOP", worker);
    send("INT", parent.id());
    std::thread::sleep(Duration::from_millis(100));
    assert!(is_alive(parent.id()), "the first one waits for the worker");
    let start = Instant::now();
    send("INT", parent.id());
    let status = parent.wait().unwrap();
    assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
    assert_eq!(status.code(), Some(130));
    assert!(eventually("the end of the worker", || (!is_alive(worker)).then_some(true)));
}

#[test]
fn a_stopped_worker_does_not_hold_up_an_interrupt() {
    let place = large();
    let mut parent = start_large(place.path(), &[]);
    let worker = measuring_worker(&mut parent);
    send("STOP", worker);
    let start = Instant::now();
    send("INT", parent.id());
    let (status, report) = finish(parent);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!((status, report["runs"][0]["outcome"].as_str()), (Some(130), Some("interrupted")));
    assert!(!is_alive(worker));
}

#[test]
fn a_killed_worker_is_exit_code_five_with_what_is_known() {
    let place = large();
    let mut parent = start_large(place.path(), &[]);
    let worker = measuring_worker(&mut parent);
    send("KILL", worker);
    let mut messages = parent.stderr.take().unwrap();
    let (status, report) = finish(parent);
    assert_eq!((status, report["error"]["code"].as_str()), (Some(5), Some("LC0502")));
    let run = &report["runs"][0];
    assert_eq!(run["outcome"], "killed");
    assert!(run["baseline"]["rss_bytes"].as_u64().unwrap() > 0, "{run}");
    let mut text = String::new();
    messages.read_to_string(&mut text).unwrap();
    assert!(text.contains("SIGKILL") && text.contains("out-of-memory"), "{text}");
}

/// Half a load is no success, whoever ended it.
#[test]
fn a_worker_that_is_interrupted_alone_is_exit_code_five() {
    let place = large();
    let mut parent = start_large(place.path(), &[]);
    send("INT", measuring_worker(&mut parent));
    let (code, report) = finish(parent);
    assert_eq!((code, report["verdict"].as_str()), (Some(5), Some("error")), "{}", report["error"]);
    assert_eq!(report["error"]["code"], "LC0507");
    assert_eq!(report["runs"][0]["outcome"], "interrupted");
}

#[test]
fn a_worker_dies_with_its_parent() {
    let place = large();
    let mut parent = start_large(place.path(), &[]);
    let worker = measuring_worker(&mut parent);
    let start = Instant::now();
    send("KILL", parent.id());
    parent.wait().unwrap();
    eventually("the end of the worker", || (!is_alive(worker)).then_some(()));
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "it did not just come to its end: {:?}",
        start.elapsed()
    );
}

#[test]
fn the_worker_is_no_command_for_people() {
    let place = workplace();
    let output = run(place.path(), "__worker");
    assert_code(&output, 2);
    assert!(stderr(&output).contains("internal"), "{}", stderr(&output));
    // Nor does it work for a parent that is not its own.
    let mut child =
        loadcheck(place.path()).arg("__worker").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let job = r#"{"parent_pid":1,"task":{"prepare":{"load":{"path":"model","budget":{"Bytes":67108864},"io":"buffered",
        "device_budget":null,"device_reserve":{"Bytes":0},"device":"none","device_map":null,"dtype":null,"quantise":null,"quantise_only":null,
        "window":null,"window_bytes":null,"passes":{"passes":1,"keep":"Nothing"},"engine_time":{"secs":0,"nanos":0},"prefetch":2,
        "readers":null,"select":null,"ranks":{"tp":null,"tp_rule":[],"read_through":null},"hash":false,"verify":false,"layers":null,"opening":{"prefix":null,"opaque_dtypes":false}},
        "has_source":true,"cache":null}}}"#;
    child.stdin.take().unwrap().write_all(job.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(143), 0));
}

#[test]
fn a_file_that_changes_during_the_load_is_exit_code_five() {
    let place = large();
    let mut parent = start_large(place.path(), &["--hash"]);
    measuring_worker(&mut parent);
    let file = std::fs::OpenOptions::new().write(true).open(place.path().join("large.safetensors")).unwrap();
    file.set_len(GIB).unwrap();
    let (status, report) = finish(parent);
    assert_eq!(status, Some(5), "{report}");
    assert_eq!(report["error"]["code"], "LC0506");
    assert_eq!(report["runs"].as_array().unwrap().last().unwrap()["outcome"], "failed");
}

#[test]
fn growth_does_not_depend_on_what_the_caller_holds() {
    // ru_maxrss would: it is inherited through fork and exec.
    let place = workplace();
    let hold = vec![1_u8; 300 << 20];
    let report = json(&run(place.path(), "model --window 1 --json"));
    assert_eq!(hold.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 300 << 20);
    let rss_bytes = report["runs"][0]["peak"]["rss_bytes"].as_u64().unwrap();
    assert!(rss_bytes < 200 << 20, "{rss_bytes}");
    assert_eq!(report["runs"][0]["promise"]["kept"], true);
}

#[test]
fn every_run_is_a_process_of_its_own_and_hashes_are_those_of_the_bytes() {
    let place = workplace();
    let report = json(&run(place.path(), "model --runs 3 --warmup 1 --hash --json --device none"));
    assert_eq!(report["runs"].as_array().unwrap().len(), 3, "a warm-up leaves no trace");
    let hashes = report["hashes"].as_array().unwrap();
    let hash_of = |name: &str| {
        let found = hashes.iter().find(|hash| hash["name"] == name).unwrap();
        found["blake3"].as_str().unwrap().to_owned()
    };
    assert_eq!(hashes.len(), 8);
    let expected = blake3::hash(&onelayer_testing::random_bytes(200 << 10, 9)).to_hex().to_string();
    assert_eq!(hash_of("lm_head.weight"), expected);
    let on_host = json(&run(place.path(), "model --hash --json --io mmap --window 1"));
    let mut pairs =
        [report["hashes"].as_array().unwrap().clone(), on_host["hashes"].as_array().unwrap().clone()];
    pairs.iter_mut().for_each(|list| list.sort_by_key(|hash| hash["name"].as_str().unwrap().to_owned()));
    assert_eq!(pairs[0], pairs[1], "host and none, buffered and mmap deliver the same bytes");
}

#[test]
fn memory_is_given_back() {
    let place = workplace();
    let report = json(&run(place.path(), "model --json"));
    let run = &report["runs"][0];
    let bytes = |point: &str, kind: &str| run[point][kind].as_u64().unwrap();
    // Not RSS: beside a model this small, pages of the program itself count that come in meanwhile.
    assert!(bytes("after_unload", "host_bytes") <= bytes("baseline", "host_bytes") + (1 << 20), "{run}");
    assert!(bytes("after_load", "host_bytes") > bytes("after_unload", "host_bytes"), "{run}");
    // Ours, as the list of allocations has it: the layers and the ring, and then nothing.
    let ours = |point: &str| run[point]["split"]["ours_host_bytes"].as_u64().unwrap();
    assert!(ours("after_load") >= run["resident_bytes"].as_u64().unwrap(), "{run}");
    assert_eq!(ours("after_unload"), 0, "{run}");
    assert_eq!(run["after_unload"]["split"]["other_host_bytes"], run["after_unload"]["host_bytes"]);
}

#[test]
fn what_is_known_about_many_tensors_is_given_back_too() {
    let place = tempfile::tempdir().unwrap();
    let tensors: Vec<_> = (0..150_000_u64)
        .map(|number| {
            let (layer, part) = (number / 200, number % 200);
            onelayer_testing::TestTensor::random(
                format!("model.layers.{layer}.experts.{part}.weight"),
                1,
                number,
            )
        })
        .collect();
    onelayer_testing::write_file(&place.path().join("many.safetensors"), &tensors, 0);
    let report = json(&run(place.path(), "many.safetensors --device none --json"));
    let run = &report["runs"][0];
    // Without pages of the program, which come in as it goes on.
    let host = |point: &str| run[point]["host_bytes"].as_u64().unwrap();
    assert!(host("peak") > host("baseline") + (16 << 20), "{run}");
    assert!(host("after_unload") <= host("baseline") + (1 << 20), "{run}");
}

#[test]
fn an_interrupted_synth_leaves_nothing() {
    let place = tempfile::tempdir().unwrap();
    let mut child = loadcheck(place.path())
        .args(["synth", "llama-3-8b", "made", "--layers", "8", "--json", "--progress", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("the first file", || place.path().join("made").exists().then_some(()));
    std::thread::sleep(Duration::from_millis(100));
    let start = Instant::now();
    send("INT", child.id());
    drop(child.stderr.take());
    let (status, report) = finish(child);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!((status, report["error"]["code"].as_str()), (Some(130), Some("LC0507")), "{report}");
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "nothing is left");
}

#[test]
fn the_worker_is_called_like_the_program() {
    let place = large();
    let mut parent = start_large(place.path(), &[]);
    let worker = measuring_worker(&mut parent);
    let name = std::fs::read_to_string(format!("/proc/{worker}/comm")).unwrap();
    let words = std::fs::read_to_string(format!("/proc/{worker}/cmdline")).unwrap();
    send("INT", parent.id());
    finish(parent);
    assert_eq!((name.trim_end(), words.split('\0').next()), ("loadcheck", Some("loadcheck")));
}

#[test]
fn an_interrupt_ends_it_while_nobody_reads_what_it_prints() {
    // More than a pipe holds.
    let place = tempfile::tempdir().unwrap();
    let tensors: Vec<_> = (0..2000)
        .map(|number| onelayer_testing::TestTensor::random(format!("t{number}.weight"), 16, number))
        .collect();
    onelayer_testing::write_file(&place.path().join("many.safetensors"), &tensors, 0);
    let mut parent = loadcheck(place.path())
        .args(["many.safetensors", "--device", "none", "--hash", "--json", "-q"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Once its worker has come and gone it writes, and waits for a reader.
    eventually("the write", || {
        let call = std::fs::read_to_string(format!("/proc/{}/syscall", parent.id())).unwrap_or_default();
        (call.starts_with("1 0x1 ") && children(parent.id()).is_empty()).then_some(())
    });
    let start = Instant::now();
    send("INT", parent.id());
    let status = parent.wait().unwrap();
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(status.code(), Some(130));
}

#[test]
fn a_thread_that_cannot_be_had_is_an_error_and_no_panic() {
    let place = workplace();
    // Address space in small steps: somewhere in there each of the threads is the first that does not
    // fit.
    let (mut refused, mut succeeded) = (0, 0);
    for mebibytes in (12..100).step_by(onelayer_testing::all_or(1, 3)) {
        let limit: u32 = mebibytes << 10;
        let program = env!("CARGO_BIN_EXE_loadcheck");
        let script = format!("ulimit -v {limit}; exec {program} model --budget 8MiB --json -q");
        let output = Command::new("sh").args(["-c", &script]).current_dir(place.path()).output().unwrap();
        let text = stderr(&output);
        match output.status.code() {
            Some(0) => succeeded += 1,
            Some(4 | 5) => {
                refused += 1;
                assert!(text.contains("error[LC0"), "{mebibytes} MiB: {text}");
            }
            // Too little for the dynamic linker, or for a first allocation.
            Some(127) | None => {}
            other => panic!("{mebibytes} MiB: {other:?}: {text}"),
        }
        assert!(!text.contains("failed to spawn thread"), "{mebibytes} MiB: {text}");
    }
    assert!(refused > 0 && succeeded > 0, "{refused} refused, {succeeded} succeeded");
}

/// The files are exchanged while the load is held up: what was delivered is of the old one, what is
/// compared of the new.
#[test]
fn a_byte_that_differs_from_the_file_is_exit_code_five() {
    let place = tempfile::tempdir().unwrap();
    let mut tensors: Vec<_> = (0..20_000)
        .map(|number| {
            onelayer_testing::TestTensor::random(format!("t{number}.{:->100}", "weight"), 16, number)
        })
        .collect();
    onelayer_testing::write_file(&place.path().join("old"), &tensors, 0);
    tensors[12_345].bytes[7] ^= 0x10;
    onelayer_testing::write_file(&place.path().join("new"), &tensors, 0);
    let link = |target: &str, name: &str| {
        std::os::unix::fs::symlink(target, place.path().join(name)).unwrap();
    };
    link("old", "m.safetensors");
    let parent = loadcheck(place.path())
        .args(["m.safetensors", "--device", "host", "--hash", "--verify", "--json", "-q"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Its hashes are more than a pipe holds: a worker whose parent does not read waits with the old
    // file open.
    let is_held_up = |worker: u32| {
        let files = std::fs::read_dir(format!("/proc/{worker}/fd")).into_iter().flatten().flatten();
        let mut files = files.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        let call = std::fs::read_to_string(format!("/proc/{worker}/syscall")).unwrap_or_default();
        call.starts_with("1 0x1 ") && files.any(|file| file.ends_with("old"))
    };
    eventually("a worker that is held up", || {
        send("STOP", parent.id());
        std::thread::sleep(Duration::from_millis(100));
        let is_held_up = children(parent.id()).into_iter().any(is_held_up);
        if !is_held_up {
            send("CONT", parent.id());
        }
        is_held_up.then_some(())
    });
    link("new", "next");
    std::fs::rename(place.path().join("next"), place.path().join("m.safetensors")).unwrap();
    send("CONT", parent.id());
    let (code, report) = finish(parent);
    assert_eq!(code, Some(5), "{}", report["error"]);
    let error = &report["error"];
    let name = &tensors[12_345].name;
    assert_eq!((&error["code"], &error["place"]), (&"LC0508".into(), &format!("{name}, byte 7").into()));
    let run = &report["runs"][0];
    assert_eq!((&run["verified"]["tensors"], &run["verified"]["mismatches"]), (&20_000.into(), &1.into()));
    assert_eq!(run["outcome"], "failed");
    let first = &run["verified"]["first_mismatch"];
    assert_eq!((&first["tensor"], &first["offset_bytes"]), (&name.as_str().into(), &7.into()));
    let delivered = tensors[12_345].bytes[7] ^ 0x10;
    assert!(first["found"].as_str().unwrap().starts_with(&format!("{delivered:02x} ")), "{first}");
}
