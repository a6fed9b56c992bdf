//! The check for machines with a GPU (`scripts/gpu-check`) and the bench that it carries
//! (`device_limits`), from end to end on the simulated driver: every step runs, both files are
//! written, and the figures say that they mean nothing.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

use onelayer_testing::cuda_sim::SimRun;

/// Says so if benches are not to be built for this: it takes a minute.
fn is_left_out() -> bool {
    if !onelayer_testing::is_thorough() {
        onelayer_testing::skipped("benches of GPUs are for the thorough check");
    }
    !onelayer_testing::is_thorough()
}

/// A bench as a program, built by the cargo that runs the tests.
fn bench(name: &str) -> PathBuf {
    let built = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["build", "--quiet", "--locked", "-p", "onelayer", "--bench", name, "--message-format=json"])
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let lines = String::from_utf8(built.stdout).unwrap();
    let messages = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let bench = messages.filter(|message| message["target"]["name"] == name);
    // Warnings are messages about the same target.
    let mut programs = bench.filter_map(|message| message["executable"].as_str().map(PathBuf::from));
    programs.next().unwrap()
}

fn device_limits() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| bench("device_limits"))
}

fn device_cycles() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| bench("device_cycles"))
}

/// A folder with the programs, as it would be carried.
fn binaries(folder: &Path) -> PathBuf {
    let binaries = folder.join("binaries");
    fs::create_dir(&binaries).unwrap();
    let loadcheck = Path::new(env!("CARGO_BIN_EXE_loadcheck"));
    let programs =
        [("loadcheck", loadcheck), ("device_limits", device_limits()), ("device_cycles", device_cycles())];
    for (name, program) in programs {
        std::os::unix::fs::symlink(program, binaries.join(name)).unwrap();
    }
    binaries
}

fn check(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new("python3");
    command.arg(onelayer_testing::repository().join("scripts/gpu-check"));
    command.arg(binaries(folder)).arg(folder.join("out")).args(words).env("TMPDIR", folder);
    command
}

/// What the check wrote: the JSON, and the table as text.
fn written(folder: &Path) -> (Value, String) {
    let text = |name: &str| fs::read_to_string(folder.join("out").join(name)).unwrap();
    (serde_json::from_str(&text("gpu-check.json")).unwrap(), text("gpu-check.md"))
}

fn output(mut command: Command) -> Output {
    command.output().unwrap()
}

/// No folder of data is left behind.
fn assert_tidy(folder: &Path) {
    let left = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let left: Vec<String> = left.filter(|name| name.starts_with("gpu-check-")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn limits_are_measured_without_misuse_of_the_driver() {
    if is_left_out() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("some.bytes");
    fs::write(&file, vec![7; 5 << 20]).unwrap();
    let mut command = Command::new(device_limits());
    command.args(["--quick", "--file"]).arg(&file);
    let ran = SimRun::new(command).run();
    ran.assert_success().report().assert_clean();
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    for section in
        ["h2d", "h2d_pageable", "d2h", "registration", "allocation", "fill", "fill_and_copy", "disk"]
    {
        let rows = report[section].as_array().unwrap();
        assert!(!rows.is_empty(), "{section}");
        assert!(rows.iter().all(|row| row.get("error").is_none()), "{section}: {rows:?}");
    }
    assert!(report["h2d"][0]["gb_per_s"].as_f64().unwrap() > 0.0);
}

#[test]
fn limits_without_a_driver_are_an_error_and_not_a_panic() {
    if is_left_out() {
        return;
    }
    let mut command = Command::new(device_limits());
    // Where there is a driver after all, it has no such device.
    command.args(["--quick", "--device", "99"]);
    let ran = output(command);
    assert_eq!(ran.status.code(), Some(4), "{ran:?}");
    let report: Value = serde_json::from_slice(&ran.stdout).unwrap();
    let error = report["error"].as_str().unwrap();
    assert!(error.starts_with("no CUDA driver") || error.starts_with("no device 99"), "{error}");
}

#[test]
fn without_a_usable_driver_both_files_say_so() {
    if is_left_out() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let ran = SimRun::new(check(folder.path(), &["--scale", "tiny"])).on_stub().run();
    assert_eq!(ran.status.code(), Some(4), "{}\n{}", ran.stdout, ran.stderr);
    let (report, table) = written(folder.path());
    assert!(report["verdict"].as_str().unwrap().starts_with("no device"), "{}", report["verdict"]);
    assert!(table.contains("no device"), "{table}");
    assert_tidy(folder.path());
}

#[test]
fn the_whole_check_passes_on_the_simulated_driver() {
    if is_left_out() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let command = check(folder.path(), &["--scale", "tiny", "--minutes", "4"]);
    // Work that is done at once: this test is about the check, and the programs have tests of their
    // own.
    let ran = SimRun::new(command).set("MODE", "eager").timeout(Duration::from_secs(300)).run();
    let (report, table) = written(folder.path());
    let steps = report["correctness"].as_array().unwrap();
    let wrong: Vec<&Value> = steps.iter().filter(|step| step["outcome"] != "passed").collect();
    assert!(wrong.is_empty(), "{wrong:#?}\n{}", ran.stderr);
    assert_eq!(steps.len(), 16);
    ran.assert_success();
    assert_eq!(report["simulated"], true);
    assert!(table.contains("simulated: figures mean nothing"), "{table}");
    let rows = report["measurements"].as_array().unwrap();
    let ours = rows.iter().filter(|row| row["row"].as_str().unwrap().starts_with("onelayer"));
    let rates: Vec<f64> = ours.map(|row| row["gb_per_s"]["median"].as_f64().unwrap()).collect();
    // Four rings warm, two ways cold, small tensors, narrowed, and a mixture of experts.
    assert_eq!(rates.len(), 9, "{table}");
    for report in &ran.reports {
        report.assert_clean();
    }
    assert_tidy(folder.path());
}
