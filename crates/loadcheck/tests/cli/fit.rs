//! `fit`: the smallest limit is found by running under limits; a kill by a limit is a result,
//! everything else is an error.
//!
//! Needs a control group to make others below; where there is none, each test that does says so.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    reason = "a test that cannot go on panics"
)]

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::{
    assert_code, children, eventually, is_alive, json, loadcheck, program_for_all_users, stderr, stdout,
    workplace,
};
use onelayer_probe::{ChildGroup, Procfs, residency};
use onelayer_testing::skipped;
use onelayer_testing::{TestTensor, write_file};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// True where limits can be tried.
fn can_try_limits() -> bool {
    match ChildGroup::create(Some(1 << 30)) {
        Ok(_) => true,
        Err(error) => {
            skipped(error);
            false
        }
    }
}

fn fit(place: &Path, flags: &[&str]) -> Output {
    loadcheck(place).args(["fit", "model"]).args(flags).output().unwrap()
}

fn bytes(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number of bytes"))
}

/// The groups of a process that are left below ours.
fn leftovers(pid: u32) -> Vec<String> {
    let group = Procfs::default().myself().memory_group().unwrap();
    let entries = fs::read_dir(group.directory()).unwrap().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(&format!("onelayer-{pid}-"))).collect()
}

#[test]
fn what_a_command_needs_is_found_within_the_precision() {
    if !can_try_limits() {
        return;
    }
    let place = workplace();
    // A buffer of that size, filled again and again so that it is seen, and nothing else to speak of.
    let command = "dd if=/dev/zero of=/dev/null bs={strategy} count=16 status=none";
    let output = fit(place.path(), &["--json", "--cmd", command, "-s", "96M", "-s", "24M", "--runs", "2"]);
    assert_code(&output, 0);
    let report = json(&output);
    assert_eq!((report["command"].as_str(), report["verdict"].as_str()), (Some("fit"), Some("pass")));
    let loaders = report["fit"]["loaders"].as_array().unwrap();
    assert_eq!(loaders.len(), 2);
    for (loader, need_mib) in loaders.iter().zip([96, 24]) {
        let smallest = bytes(&loader["smallest_bytes"]);
        let precision = bytes(&loader["precision_bytes"]);
        assert!((4 * MIB..6 * MIB).contains(&precision), "{precision}");
        // Beside the buffer there are the program itself and the kernel's share, a few MiB.
        assert!((need_mib * MIB..need_mib * MIB + precision + 4 * MIB).contains(&smallest), "{smallest}");
        // On a busy machine no limit may come near the time without one.
        assert!(loader["comfortable_bytes"].as_u64().is_none_or(|comfortable| comfortable >= smallest));
        let tries = loader["tries"].as_array().unwrap();
        let at =
            |wanted: u64| tries.iter().filter(move |tried| tried["limit_bytes"].as_u64() == Some(wanted));
        assert!(at(smallest).count() >= 2 && at(smallest).all(|tried| tried["outcome"] == "ok"), "{loader}");
        let killed = tries.iter().filter(|tried| tried["outcome"] == "killed");
        let largest = killed.map(|tried| bytes(&tried["limit_bytes"])).max().unwrap();
        assert!(largest < smallest && smallest - largest <= precision, "{loader}");
        assert!(at(largest).count() >= 2, "the border is tried again on both sides");
        assert!(loader["unlimited_seconds"].as_f64().unwrap() > 0.0);
        // Sampled: on a busy machine a short command may hardly be seen, but never as more than it is.
        assert!(
            loader["unlimited_host_bytes"].as_u64().is_none_or(|host_bytes| host_bytes < smallest + 4 * MIB)
        );
        assert_eq!(loader["command"][3], format!("bs={need_mib}M"));
    }
}

#[test]
fn our_own_load_is_tried_in_fresh_processes_and_nothing_stays() {
    if !can_try_limits() {
        return;
    }
    let place = workplace();
    let mut child = loadcheck(place.path())
        .args(["fit", "model", "--json", "--window", "1", "--budget", "8MiB"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let (mut text, mut log) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{log}");
    assert_eq!(leftovers(pid), [""; 0]);
    let report: Value = serde_json::from_str(&text).unwrap();
    let loader = &report["fit"]["loaders"][0];
    let smallest = bytes(&loader["smallest_bytes"]);
    assert!((MIB..64 * MIB).contains(&smallest), "{loader}");
    let tries = loader["tries"].as_array().unwrap();
    assert!(tries.iter().any(|tried| tried["outcome"] == "killed"), "{loader}");
    // Cold before each, so that what is read is charged to the group; unchecked only where nobody can
    // tell.
    let can_tell = residency(&place.path().join("model/model.safetensors")).value().is_some();
    let is_cold = |tried: &Value| tried["cached_share"].as_f64().map_or(!can_tell, |share| share < 0.01);
    assert!(tries.iter().all(is_cold), "{loader}");
    assert!(log.contains("no limit  ok") && log.contains("killed by the limit"), "{log}");
    assert_eq!(report["source"]["tensors"], 8);
}

#[test]
fn lines_that_can_be_pasted_stand_alone_on_stdout() {
    if !can_try_limits() {
        return;
    }
    let place = workplace();
    // A range of one limit that is more than enough: the answer is known.
    let range = [
        "--lo", "256Mi", "--hi", "256Mi", "--runs", "1", "--window", "1", "--io", "direct", "--device",
        "host",
    ];
    for (emit, more, expected) in [
        ("k8s", "25%", "resources: {requests: {memory: 256Mi}, limits: {memory: 320Mi}}   # stream, +25 %\n"),
        ("docker", "25%", "--memory=320m --memory-swap=320m\n"),
        ("docker", "0", "--memory=256m --memory-swap=256m\n"),
        ("systemd", "50%", "# stream, +50 %\n[Service]\nMemoryMax=384M\nMemorySwapMax=0\n"),
    ] {
        let output = fit(place.path(), &[&range[..], &["--emit", emit, "--headroom", more]].concat());
        assert_code(&output, 0);
        assert_eq!(stdout(&output), expected);
        assert!(stderr(&output).contains("smallest that works   256 MiB"), "{}", stderr(&output));
    }
    // The gate is made of samples, and so short a load may be seen in one run and not in another.
    let output = fit(place.path(), &[&range[..], &["--emit", "args", "--headroom", "400%"]].concat());
    let text = stdout(&output);
    let flags = "--budget=64MiB --io=direct --device=host --window=1 --prefetch=2 --max-memory=";
    assert!(text.starts_with(flags) && text.lines().count() == 1, "{text}");
    // They are our own flags.
    let output = loadcheck(place.path()).arg("model").args(text.split_whitespace()).output().unwrap();
    assert_code(&output, 0);
    let output = fit(place.path(), &[&range[..], &["--emit", "docker", "--json"]].concat());
    assert_eq!(json(&output)["fit"]["emitted"][0], "--memory=320m --memory-swap=320m");
}

#[test]
fn the_table_names_every_limit_and_both_answers() {
    if !can_try_limits() {
        return;
    }
    let place = workplace();
    let command = "dd if=/dev/zero of=/dev/null bs=40M count=1 status=none";
    let flags = ["--cmd", command, "--lo", "32Mi", "--hi", "64Mi", "--runs", "2", "--precision", "16MiB"];
    let output = fit(place.path(), &flags);
    assert_code(&output, 0);
    let text = stdout(&output);
    assert!(text.contains("loader    cmd: dd if=/dev/zero"), "{text}");
    assert!(text.contains("  32 MiB  killed by the limit (2 runs)"), "{text}");
    assert!(text.contains("  45 MiB  ok ("), "{text}");
    assert!(
        text.contains("smallest that works   45 MiB   32 MiB is not enough: killed by the limit"),
        "{text}"
    );
    assert!(text.contains("smallest comfortable"), "{text}");
    let output = fit(place.path(), &[&flags[..], &["--format", "csv", "-q"]].concat());
    let text = stdout(&output);
    assert!(text.starts_with("strategy,limit_bytes,outcome,"), "{text}");
    assert!(text.lines().any(|line| line.starts_with("cmd,33554432,killed,")), "{text}");
    assert_eq!(stderr(&output), "", "-q is quiet");
    let output = fit(place.path(), &[&flags[..], &["--format", "md"]].concat());
    assert!(stdout(&output).contains("| `cmd` | 45 MiB | "), "{}", stdout(&output));
}

#[test]
fn names_are_escaped_while_it_runs_too() {
    if !can_try_limits() {
        return;
    }
    let place = workplace();
    let flags =
        ["--cmd", "true {strategy}", "-s", "a\nb\u{1b}[2J", "--lo", "64Mi", "--hi", "64Mi", "--runs", "1"];
    let output = fit(place.path(), &[&flags[..], &["--emit", "k8s"]].concat());
    assert_code(&output, 0);
    let text = stdout(&output) + &stderr(&output);
    assert!(text.contains("a\\u{a}b\\u{1b}[2J") && !text.contains('\u{1b}'), "{text}");
}

#[test]
fn a_part_that_is_killed_counts_whatever_the_rest_says() {
    if !can_try_limits() {
        return;
    }
    let place = workplace();
    // One that hides the kill, and one that waits for ever.
    for rest in ["; true", "|| sleep 1000"] {
        let command = format!("sh -c 'dd if=/dev/zero of=/dev/null bs=64M count=1 status=none {rest}'");
        let flags = [
            "--json",
            "--cmd",
            &command,
            "--lo",
            "16Mi",
            "--hi",
            "112Mi",
            "--runs",
            "1",
            "--precision",
            "32Mi",
            "--max-slowdown",
            "1000",
        ];
        let start = Instant::now();
        let output = fit(place.path(), &flags);
        assert_code(&output, 0);
        assert!(start.elapsed() < Duration::from_secs(60));
        let loader = &json(&output)["fit"]["loaders"][0];
        assert!((64 * MIB..112 * MIB).contains(&bytes(&loader["smallest_bytes"])), "{rest}: {loader}");
    }
}

#[test]
fn a_range_in_which_nothing_works_is_exit_code_one() {
    if !can_try_limits() {
        return;
    }
    let place = workplace();
    let command = "dd if=/dev/zero of=/dev/null bs=64M count=1 status=none";
    let output = fit(place.path(), &["--cmd", command, "--hi", "32Mi", "--runs", "1"]);
    assert_code(&output, 1);
    assert!(stdout(&output).contains("no limit up to 32 MiB works"), "{}", stdout(&output));
    let output = fit(place.path(), &["--cmd", command, "--hi", "32Mi", "--runs", "1", "--emit", "k8s"]);
    assert_code(&output, 1);
    assert_eq!(stdout(&output), "");
}

#[test]
fn what_works_only_sometimes_is_not_taken_for_working() {
    if !can_try_limits() {
        return;
    }
    let place = workplace();
    // Every other run takes more than any limit of the range; without a limit both work.
    let script = "n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) > n; \
        if [ $((n % 2)) = 0 ]; then size=1M; else size=300M; fi; exec dd if=/dev/zero of=/dev/null bs=$size count=1 status=none";
    fs::write(place.path().join("every-other"), script).unwrap();
    let flags = ["--json", "--cmd", "sh every-other", "--lo", "64Mi", "--hi", "128Mi", "--runs", "4"];
    let output = fit(place.path(), &flags);
    assert_code(&output, 1);
    let report = json(&output);
    assert_eq!(report["verdict"], "fail");
    let loader = &report["fit"]["loaders"][0];
    assert!(loader["smallest_bytes"].is_null(), "{loader}");
    assert!(!loader["flaky_bytes"].as_array().unwrap().is_empty(), "{loader}");
}

#[test]
fn a_limit_that_only_slows_down_is_given_up() {
    if !can_try_limits() {
        return;
    }
    let place = workplace();
    fs::write(place.path().join("slower"), "if [ -e done ]; then sleep 100; else : > done; fi").unwrap();
    let range = ["--lo", "64Mi", "--hi", "64Mi", "--runs", "1", "--max-slowdown", "2"];
    let output = fit(place.path(), &[&["--json", "--cmd", "sh slower"], &range[..]].concat());
    assert_code(&output, 1);
    let tries = &json(&output)["fit"]["loaders"][0]["tries"];
    assert_eq!(
        (tries[0]["outcome"].as_str(), tries[1]["outcome"].as_str()),
        (Some("ok"), Some("too_slow")),
        "{tries}"
    );
    assert!(tries[1]["slowdown"].is_null());
}

#[test]
fn a_failure_that_is_no_kill_ends_the_search() {
    if !can_try_limits() {
        return;
    }
    let place = workplace();
    let output = fit(place.path(), &["--json", "--cmd", "sh -c 'exit 3'"]);
    assert_code(&output, 5);
    let report = json(&output);
    assert_eq!(report["error"]["code"], "LC0504");
    assert_eq!(report["fit"]["loaders"][0]["tries"].as_array().unwrap().len(), 1, "no second one");
    assert_code(&fit(place.path(), &["--cmd", "no-such-program-at-all {source}"]), 2);
    // A SIGKILL by somebody else is none by the limit.
    let output = fit(place.path(), &["--cmd", "sh -c 'kill -9 $$'", "--lo", "64Mi", "--hi", "64Mi"]);
    assert_code(&output, 5);
    assert!(stderr(&output).contains("SIGKILL"), "{}", stderr(&output));
    fs::write(place.path().join("model/model.safetensors"), "no checkpoint").unwrap();
    assert_code(&fit(place.path(), &[]), 3);
}

#[test]
fn slips_are_refused_before_anything_runs() {
    let place = workplace();
    for flags in [
        &["--lo", "2GiB", "--hi", "1GiB"][..],
        &["--lo", "0"],
        &["--hi", "2x"],
        &["--headroom", "-1"],
        &["--runs", "0"],
        &["--emit", "nomad"],
        &["--cmd", "load 'x"],
        &["--cmd", ""],
        &["--cmd", "load {strategy}"],
        &["-s", "steam"],
        &["--cmd", "load {source}", "-s", "load_file"],
    ] {
        let output = fit(place.path(), flags);
        let code = output.status.code();
        // Without control groups, that comes first.
        assert!(code == Some(2) || (code == Some(4) && !can_try_limits()), "{flags:?}: {}", stderr(&output));
    }
    assert_code(&loadcheck(place.path()).args(["fit", "missing", "--lo", "0"]).output().unwrap(), 3);
}

#[test]
fn without_control_groups_it_says_what_to_do() {
    let place = workplace();
    if !rustix::process::geteuid().is_root() {
        skipped("only root can become somebody who may not make groups");
        return;
    }
    for folder in [place.path(), &place.path().join("model")] {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let output = Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .arg(program_for_all_users(place.path()))
        .args(["fit", "model", "--json"])
        .current_dir(place.path())
        .output();
    let Ok(output) = output else {
        skipped("no setpriv");
        return;
    };
    if output.status.code() == Some(127) || output.status.code() == Some(126) {
        skipped(format_args!("nobody may not run the program where it is: {}", stderr(&output)));
        return;
    }
    assert_code(&output, 4);
    let report = json(&output);
    assert_eq!(report["error"]["code"], "LC0401");
    let help = report["error"]["help"].as_str().unwrap();
    assert!(
        help.contains("systemd-run --user --scope -p Delegate=yes") && help.contains("docker run"),
        "{help}"
    );
}

#[test]
fn an_interrupt_keeps_what_was_found_and_leaves_no_group() {
    if !can_try_limits() {
        return;
    }
    let place = workplace();
    // Quick without a limit, so that the signal comes in the middle of the search.
    fs::write(place.path().join("slower"), "if [ -e done ]; then sleep 65; else : > done; fi").unwrap();
    let mut child = loadcheck(place.path())
        .args([
            "fit",
            "model",
            "--json",
            "--cmd",
            "sh slower",
            "--lo",
            "64Mi",
            "--runs",
            "1",
            "--max-slowdown",
            "1000",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let family = eventually("the second run", || {
        let shell = *children(child.id()).first()?;
        let sleep = *children(shell).first()?;
        Some([shell, sleep])
    });
    assert!(!leftovers(child.id()).is_empty(), "it runs in a group");
    let start = Instant::now();
    assert!(Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status().unwrap().success());
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{text}");
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["error"]["code"], "LC0507");
    let tries = &report["fit"]["loaders"][0]["tries"];
    assert_eq!(
        (tries[0]["outcome"].as_str(), tries[1]["outcome"].as_str()),
        (Some("ok"), Some("interrupted"))
    );
    assert!(!family.iter().any(|pid| is_alive(*pid)), "nothing stays");
    assert_eq!(leftovers(child.id()), [""; 0]);
}

#[test]
fn habits_of_other_loaders_are_really_tried() {
    if !can_try_limits() {
        return;
    }
    // One that keeps what it reads, in memory that cannot be taken back, and one whose pages can.
    let place = tempfile::tempdir().unwrap();
    fs::create_dir(place.path().join("model")).unwrap();
    let tensors: Vec<TestTensor> = (0..4)
        .map(|layer| TestTensor::random(format!("model.layers.{layer}.weight"), 12 << 20, layer))
        .collect();
    write_file(&place.path().join("model/model.safetensors"), &tensors, 0);
    let flags = ["--json", "-s", "mmap", "-s", "read", "--lo", "24Mi", "--hi", "96Mi", "--runs", "1"];
    let output = fit(place.path(), &flags);
    assert_code(&output, 0);
    let report = json(&output);
    let loaders = report["fit"]["loaders"].as_array().unwrap();
    assert_eq!(
        (loaders[0]["strategy"].as_str(), loaders[1]["strategy"].as_str()),
        (Some("mmap"), Some("read"))
    );
    assert_eq!(bytes(&loaders[0]["smallest_bytes"]), 24 * MIB, "mapped pages go and come back");
    assert!((48 * MIB..64 * MIB).contains(&bytes(&loaders[1]["smallest_bytes"])), "{}", loaders[1]);
    let outcomes =
        loaders[1]["tries"].as_array().unwrap().iter().map(|tried| tried["outcome"].as_str().unwrap());
    let outcomes: Vec<&str> = outcomes.collect();
    assert!(outcomes.contains(&"killed") && !outcomes.contains(&"refused"), "{outcomes:?}");
    assert!(report["plan"].is_null(), "nothing of ours was planned");
}
