//! The comparison with other loaders (`benches/peers`), as far as it goes with Python's standard
//! library: the arithmetic of its tables, the measuring, and one whole run on a small checkpoint
//! with ours and with a loader that only reads.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::print_stdout, reason = "a test says what it ran")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use onelayer_testing::skipped;
use serde_json::Value;

fn root() -> &'static Path {
    onelayer_testing::repository()
}

/// Python without traces in the source folder; `None`, and said, where there is none.
fn python(test: &str) -> Option<Command> {
    if !Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success()) {
        skipped(format_args!("{test}: no python3"));
        return None;
    }
    let mut command = Command::new("python3");
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    Some(command)
}

/// The example, built beside this test, or else by the cargo that runs it.
fn one_load() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let beside = test.parent().and_then(Path::parent).unwrap().join("examples/one_load");
    if beside.exists() {
        return beside;
    }
    let built = Command::new(env!("CARGO"))
        .current_dir(root())
        .args([
            "build",
            "--quiet",
            "--locked",
            "-p",
            "onelayer",
            "--example",
            "one_load",
            "--message-format=json",
        ])
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let lines = String::from_utf8(built.stdout).unwrap();
    let messages = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let example = messages.filter(|message| message["target"]["name"] == "one_load");
    let mut programs = example.filter_map(|message| message["executable"].as_str().map(PathBuf::from));
    programs.next().unwrap()
}

#[test]
fn its_own_tests_pass() {
    let Some(mut command) = python("the tests of benches/peers") else { return };
    let output =
        command.current_dir(root().join("benches/peers")).args(["-m", "unittest", "-v"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    println!("{text}");
    assert!(output.status.success(), "{text}");
    assert!(text.contains("Ran 15 tests"), "{text}");
}

#[test]
fn a_small_checkpoint_goes_through_all_of_it_and_a_second_call_measures_nothing_again() {
    let Some(mut command) = python("a whole comparison") else { return };
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("model");
    copy(&root().join("fixtures/checkpoints/llama"), &source);
    let work = folder.path().join("work");
    command.arg(root().join("benches/peers/run")).arg(&source).arg("--work").arg(&work);
    command.arg("--program").arg(one_load());
    command.args([
        "--rounds",
        "2",
        "--cache",
        "cold",
        "warm",
        "--limits",
        "--only",
        "plain read",
        "onelayer",
        "to_vec",
    ]);
    let first = command.output().unwrap();
    let text = String::from_utf8_lossy(&first.stdout);
    assert!(first.status.success(), "{text}{}", String::from_utf8_lossy(&first.stderr));
    if text.contains("unready") {
        skipped("the rest: pages cannot be dropped on this file system");
        return;
    }
    let rows: Vec<&str> = text.lines().filter(|line| line.starts_with('|')).collect();
    let row = |name: &str| *rows.iter().find(|row| row.contains(name)).unwrap();
    assert!(row("Loader::load").contains("| owned |"), "{text}");
    assert!(row("one layer at a time").contains("| nothing |"), "{text}");
    assert!(row("device `none`").contains("| nothing |"), "{text}");
    assert!(row("to_vec").contains("| owned |") && row("plain read").contains("| owned |"), "{text}");
    // Two rounds of five rows in two states, and the line that says what they are of.
    let journal = work.join("results.jsonl");
    assert_eq!(fs::read_to_string(&journal).unwrap().lines().count(), 21, "{text}");
    let again = command.output().unwrap();
    assert!(again.status.success());
    assert_eq!(fs::read_to_string(&journal).unwrap().lines().count(), 21);
    assert_eq!(String::from_utf8_lossy(&again.stdout).trim(), text.split_once("\n\n").unwrap().1.trim());
}

fn copy(source: &Path, target: &Path) {
    fs::create_dir(target).unwrap();
    for entry in fs::read_dir(source).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), target.join(entry.file_name())).unwrap();
    }
}
