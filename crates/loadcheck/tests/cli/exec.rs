//! `exec -- CMD`: any process tree is measured, its exit code kept, its output put where it
//! belongs.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    reason = "a test that cannot go on panics"
)]

use std::io::Read as _;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::{
    assert_code, children, eventually, is_alive, json, loadcheck, stderr, stdout, workplace,
};
use onelayer_testing::skipped;

const MIB: u64 = 1 << 20;

fn exec(flags: &[&str], script: &str) -> Output {
    let place = tempfile::tempdir().unwrap();
    loadcheck(place.path()).arg("exec").args(flags).args(["--", "sh", "-c", script]).output().unwrap()
}

/// A shell that holds about so many MiB for a while: a variable of letters.
fn holding(mib: u32) -> String {
    format!("x=$(head -c {} /dev/zero | tr '\\0' a); sleep 0.4", mib << 20)
}

#[test]
fn what_a_command_holds_is_measured() {
    let report = json(&exec(&["--json"], &holding(40)));
    let peak = &report["runs"][0]["peak"];
    let host_bytes = peak["host_bytes"].as_u64().unwrap();
    assert!((40 * MIB..400 * MIB).contains(&host_bytes), "{host_bytes}");
    assert!(peak["rss_bytes"].as_u64().unwrap() >= host_bytes);
    assert_eq!(report["runs"][0]["outcome"], "completed");
    assert_eq!((report["command"].as_str(), report["verdict"].as_str()), (Some("exec"), Some("pass")));
    assert_eq!(report["exec"]["exit_code"], 0);
    assert!(report["runs"][0]["promise"].is_null(), "nothing is promised about other programs");
}

#[test]
fn the_whole_tree_counts() {
    // Each says when it holds its share and goes only once the other does too, however busy the machine
    // is.
    let both = |own: &str, other: &str| {
        format!("({}; : > {own}; until [ -e {other} ]; do sleep 0.02; done; sleep 0.4)", holding(30))
    };
    let script = format!("{} & {} & wait", both("a", "b"), both("b", "a"));
    let report = json(&exec(&["--json"], &script));
    let host_bytes = report["runs"][0]["peak"]["host_bytes"].as_u64().unwrap();
    assert!(host_bytes >= 60 * MIB, "two children of 30 MiB hold {host_bytes}");
    assert!(report["exec"]["processes"].as_u64().unwrap() >= 3);
}

#[test]
fn limits_apply_to_commands_too() {
    let output = exec(&["--max-host", "10MiB", "--format", "plain"], &holding(40));
    assert_code(&output, 1);
    assert!(stdout(&output).contains("FAIL  unreclaimable"), "{}", stdout(&output));
    assert!(stdout(&output).contains("first exceeded at 0."), "{}", stdout(&output));
    assert_code(&exec(&["--max-host", "1GiB", "--max-time", "60s"], &holding(5)), 0);
}

#[test]
fn a_failing_command_is_exit_code_five_and_its_own_stands_in_the_report() {
    let output = exec(&["--json"], "exit 3");
    assert_code(&output, 5);
    let report = json(&output);
    assert_eq!(report["exec"]["exit_code"], 3);
    assert_eq!(
        (report["verdict"].as_str(), report["error"]["code"].as_str()),
        (Some("error"), Some("LC0504"))
    );
    let output = exec(&["--json"], "sleep 0.1; kill -9 $$");
    assert_code(&output, 5);
    let report = json(&output);
    assert_eq!((report["exec"]["exit_code"].as_u64(), report["exec"]["signal"].as_u64()), (None, Some(9)));
    assert_eq!(report["runs"][0]["outcome"], "killed");
    assert!(stderr(&output).contains("SIGKILL"), "{}", stderr(&output));
}

#[test]
fn output_of_the_command_never_mixes_with_data() {
    let output = exec(&["--json"], "echo out; echo err >&2");
    assert_eq!(json(&output)["verdict"], "pass");
    assert!(stderr(&output).contains("out") && stderr(&output).contains("err"), "{}", stderr(&output));
    let output = exec(&[], "echo out");
    assert!(stdout(&output).starts_with("out\n"), "{}", stdout(&output));
    let output = exec(&["--json", "--until-line", "out"], "echo out; echo err >&2; sleep 30");
    assert_eq!(json(&output)["exec"]["line_seen"], true);
    let place = tempfile::tempdir().unwrap();
    let words = ["exec", "--json", "-o", "r.json", "--", "echo", "out"];
    let output = loadcheck(place.path()).args(words).output().unwrap();
    assert_eq!(stdout(&output), "out\n", "with -o, stdout is the command's again");
    assert!(place.path().join("r.json").exists());
}

#[test]
fn measuring_ends_with_the_line_and_the_command_with_it() {
    let start = Instant::now();
    let output =
        exec(&["--json", "--until-line", "^server is r.ady$"], "echo no; echo server is ready >&2; sleep 60");
    assert_code(&output, 0);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let report = json(&output);
    assert_eq!(report["runs"][0]["outcome"], "stopped");
    // A command that ignores SIGTERM is killed, with its children.
    // The time is a name that no other process has.
    let (first, second) =
        (format!("sleep 61.{}", std::process::id()), format!("sleep 62.{}", std::process::id()));
    let output = exec(&["--until-line", "go"], &format!("trap '' TERM; echo go; {first} & {second}"));
    assert_code(&output, 0);
    let left = Command::new("ps").args(["-eo", "args"]).output().unwrap();
    let left = String::from_utf8_lossy(&left.stdout).into_owned();
    assert!(!left.lines().any(|line| line == first || line == second), "{left}");
    let output = exec(&["--until-line", "never"], "echo something else");
    assert_code(&output, 5);
    assert!(stderr(&output).contains("before a line matched"), "{}", stderr(&output));
}

#[test]
fn a_command_too_short_to_be_seen_is_not_zero() {
    let place = tempfile::tempdir().unwrap();
    for _ in 0..20 {
        let output = loadcheck(place.path()).args(["exec", "--json", "--", "true"]).output().unwrap();
        assert_code(&output, 0);
        let report = json(&output);
        let host_bytes = &report["runs"][0]["peak"]["host_bytes"];
        let is_listed =
            report["unavailable"].as_array().unwrap().iter().any(|e| e["metric"] == "peak.host_bytes");
        assert_eq!(host_bytes.is_null(), is_listed, "{report}");
        assert_ne!(host_bytes.as_u64(), Some(0));
        if host_bytes.is_null() {
            let words = ["exec", "--max-host", "1GiB", "--", "true"];
            let output = loadcheck(place.path()).args(words).output().unwrap();
            assert!(matches!(output.status.code(), Some(0 | 4)), "never a silent pass: {}", stderr(&output));
        }
    }
}

#[test]
fn what_a_command_leaves_behind_is_said() {
    let output = exec(&[], "sleep 1 >/dev/null 2>&1 &");
    assert_code(&output, 0);
    assert!(stdout(&output).contains("note: 1 process of the command still run"), "{}", stdout(&output));
}

#[test]
fn an_interrupt_is_forwarded_and_nothing_stays() {
    for (signal, code, trap) in [("INT", 130, ""), ("TERM", 143, ""), ("INT", 130, "trap '' INT TERM; ")] {
        let place = tempfile::tempdir().unwrap();
        let script = format!("{trap}sleep 63 & sleep 64");
        let mut child = loadcheck(place.path())
            .args(["exec", "--json", "--", "sh", "-c", &script])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let family = eventually("the command", || {
            let shell = *children(child.id()).first()?;
            let sleeps = children(shell);
            (sleeps.len() == 2).then_some([vec![shell], sleeps].concat())
        });
        let start = Instant::now();
        let killed = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap();
        assert!(killed.success());
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        let status = child.wait().unwrap();
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert_eq!(status.code(), Some(code), "{text}");
        let report: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (report["error"]["code"].as_str(), report["runs"][0]["outcome"].as_str()),
            (Some("LC0507"), Some("interrupted"))
        );
        assert!(
            report["runs"][0]["peak"]["rss_bytes"].as_u64().unwrap() > 0,
            "the partial report has numbers"
        );
        assert!(!family.iter().any(|pid| is_alive(*pid)), "nothing stays");
    }
}

#[test]
fn processes_of_another_namespace_are_not_taken_for_those_of_the_command() {
    // Process ids of its own, and a /proc that counts in others: whoever has the number of a child is
    // somebody else.
    let place = tempfile::tempdir().unwrap();
    let output = Command::new("unshare")
        .args(["--pid", "--fork", env!("CARGO_BIN_EXE_loadcheck"), "exec", "--json", "--", "sleep", "0.1"])
        .current_dir(place.path())
        .output()
        .unwrap();
    if stderr(&output).contains("unshare failed") {
        skipped("no namespace of process ids can be made here");
        return;
    }
    assert_code(&output, 0);
    let report = json(&output);
    assert!(report["runs"][0]["peak"]["rss_bytes"].is_null(), "{report}");
    let reasons: Vec<&str> = report["unavailable"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["reason"].as_str().unwrap())
        .collect();
    assert!(reasons.iter().any(|reason| reason.contains("another namespace")), "{reasons:?}");
    assert!(report["notes"].is_null(), "nobody of the command still runs: {}", report["notes"]);
}

#[test]
fn processes_that_were_there_before_are_left_alone() {
    let place = workplace();
    // A shell that becomes the program: its children become the program's.
    let script = "sleep 67 >/dev/null 2>&1 & echo $! > pid; exec \"$0\" \"$@\"";
    for words in [
        &["exec", "--json", "--until-line", "go", "--", "sh", "-c", "echo go; sleep 68"][..],
        &["exec", "--json", "--", "true"],
        &["compare", "model", "-s", "mmap", "--cmd", "true", "--runs", "1", "--json"],
    ] {
        let mut shell = Command::new("sh");
        shell.args(["-c", script, env!("CARGO_BIN_EXE_loadcheck")]).args(words).current_dir(place.path());
        let start = Instant::now();
        let output = shell.stdin(Stdio::null()).output().unwrap();
        let pid: u32 = std::fs::read_to_string(place.path().join("pid")).unwrap().trim().parse().unwrap();
        let is_left_alone = is_alive(pid);
        let _ = Command::new("kill").arg(pid.to_string()).status();
        assert_code(&output, 0);
        assert!(is_left_alone, "{words:?}");
        assert!(start.elapsed() < Duration::from_secs(4), "nobody waits for it: {:?}", start.elapsed());
        assert!(!json(&output)["notes"].to_string().contains("still run"), "{}", json(&output)["notes"]);
    }
}

#[test]
fn a_command_that_is_run_again_and_again_reads_nothing() {
    let place = workplace();
    for (words, expected) in [
        (&["exec", "--", "sh", "-c", "cat >> log"][..], "text"),
        (&["compare", "model", "--cmd", "sh -c 'cat >> log'", "-s", "mmap", "--runs", "2"], ""),
    ] {
        let mut child = loadcheck(place.path())
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"text").unwrap();
        assert!(child.wait().unwrap().success());
        let log = std::fs::read_to_string(place.path().join("log")).unwrap();
        std::fs::remove_file(place.path().join("log")).unwrap();
        assert_eq!(log, expected, "{words:?}");
    }
}

/// A process that runs already is measured for a time and left alone; its end ends the measuring.
#[test]
fn a_process_that_runs_already_is_measured_and_left_alone() {
    let place = tempfile::tempdir().unwrap();
    let mut server = Command::new("sh")
        .args(["-c", &format!("{}; : > ready; read line; exit 0", holding(30))])
        .current_dir(place.path())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("its memory", || place.path().join("ready").exists().then_some(()));
    let pid = server.id().to_string();
    let attached = |flags: &[&str]| {
        loadcheck(place.path()).args(["exec", "--pid", &pid, "--json"]).args(flags).output().unwrap()
    };
    let output = attached(&["--for", "300ms", "--max-memory", "10MiB"]);
    assert_code(&output, 1);
    let report = json(&output);
    assert!(report["runs"][0]["peak"]["host_bytes"].as_u64().unwrap() >= 30 * MIB, "{report}");
    assert_eq!(
        (report["runs"][0]["outcome"].as_str(), &report["exec"]["has_ended"]),
        (Some("stopped"), &false.into())
    );
    assert!(report["exec"]["command"][0].as_str().unwrap().contains("sh"), "{report}");
    assert!(is_alive(server.id()), "it is never ended by us");

    let ends = std::thread::spawn({
        let stdin = server.stdin.take();
        move || {
            // By then the program has found the process, on a busy machine too.
            std::thread::sleep(Duration::from_secs(2));
            drop(stdin);
            server.wait().unwrap()
        }
    });
    let report = json(&attached(&[]));
    assert_eq!(report["exec"]["has_ended"], true, "{report}");
    assert!(ends.join().unwrap().success());
    let output = attached(&[]);
    assert_code(&output, 2);
    assert!(stderr(&output).contains("there is no such process"), "{}", stderr(&output));
}

#[test]
fn a_thread_is_no_process() {
    let (send, stop) = std::sync::mpsc::channel::<()>();
    let (tell, told) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        tell.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
        let _ = stop.recv();
    });
    let id = told.recv().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    let place = tempfile::tempdir().unwrap();
    let output = loadcheck(place.path()).args(["exec", "--pid", &id, "--for", "10ms"]).output().unwrap();
    drop(send);
    thread.join().unwrap();
    assert_code(&output, 2);
    let expected = format!("this is a thread of process {}", std::process::id());
    assert!(stderr(&output).contains(&expected), "{}", stderr(&output));
}
