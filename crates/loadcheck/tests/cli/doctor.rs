//! `doctor`: everything is tried and told, nothing is a failure, and nothing is left behind.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    clippy::print_stdout,
    reason = "a test that cannot go on panics, one that cannot begin says so"
)]

use std::fs;
use std::process::Command;

use crate::support::{assert_code, json, run, stderr, stdout, workplace};
use onelayer_probe::ChildGroup;
use serde_json::Value;

const CHECKS: [&str; 17] = [
    "kernel",
    "cgroup",
    "swap",
    "cpu",
    "memlock",
    "address_space",
    "overcommit",
    "shm",
    "direct_io",
    "page_cache",
    "io_uring",
    "huge_pages",
    "peak_reset",
    "exact_memory",
    "pressure",
    "cuda",
    "nvml",
];

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    let checks = report["doctor"].as_array().unwrap();
    checks.iter().find(|check| check["check"] == name).unwrap()
}

#[test]
fn every_check_is_told_once_and_what_is_amiss_has_a_consequence() {
    let place = workplace();
    let output = run(place.path(), "doctor model --json");
    assert_code(&output, 0);
    let report = json(&output);
    let checks = report["doctor"].as_array().unwrap();
    let names: Vec<&str> = checks.iter().map(|check| check["check"].as_str().unwrap()).collect();
    assert_eq!(names, CHECKS);
    for check in checks {
        assert!(!check["found"].as_str().unwrap().is_empty(), "{check}");
        assert_eq!(check["state"] == "ok", check["consequence"].is_null(), "{check}");
        assert!(check["state"] != "ok" || check["fix"].is_null(), "{check}");
    }
    // The tests' own environment has no driver.
    assert_eq!(
        (&check(&report, "cuda")["state"], &check(&report, "nvml")["state"]),
        (&"missing".into(), &"missing".into())
    );
    assert_eq!(check(&report, "cgroup")["state"] == "ok", ChildGroup::create(Some(1 << 30)).is_ok());
}

#[test]
fn it_looks_where_it_is_told_to() {
    let place = workplace();
    fs::create_dir(place.path().join("empty")).unwrap();
    let before = fs::metadata(place.path().join("model/model.safetensors")).unwrap().modified().unwrap();
    for path in ["model", "model/model.safetensors", "empty"] {
        let report = json(&run(place.path(), &format!("doctor {path} --json")));
        assert_ne!(check(&report, "direct_io")["found"], "", "{path}");
        let text = check(&report, "direct_io").to_string();
        assert!(!text.contains("nothing to try it on"), "{path}: {text}");
    }
    assert_eq!(fs::read_dir(place.path().join("empty")).unwrap().count(), 0, "nothing is left behind");
    assert_eq!(
        fs::metadata(place.path().join("model/model.safetensors")).unwrap().modified().unwrap(),
        before
    );
    let output = run(place.path(), "doctor missing --json");
    assert_code(&output, 0);
    let report = json(&output);
    assert_eq!(
        (&check(&report, "direct_io")["state"], &check(&report, "page_cache")["state"]),
        (&"missing".into(), &"missing".into())
    );
}

#[test]
fn it_reads_well_in_every_format() {
    let place = workplace();
    let output = run(place.path(), "doctor model");
    assert_code(&output, 0);
    let text = stdout(&output);
    assert!(text.contains("\nmissing  cuda           no CUDA driver"), "{text}");
    assert!(text.contains("\n                        fix: install NVIDIA's driver"), "{text}");
    let counts = text.lines().last().unwrap();
    assert!(counts.contains(" ok, ") && counts.ends_with(" missing"), "{counts}");
    assert_eq!(stderr(&output), "");
    let text = stdout(&run(place.path(), "doctor model --format csv"));
    assert!(text.starts_with("check,state,found,consequence,fix\nkernel,"), "{text}");
    assert_eq!(text.lines().count(), CHECKS.len() + 1);
    let text = stdout(&run(place.path(), "doctor model --format md"));
    assert!(text.contains("| missing | cuda |"), "{text}");
    let text = stdout(&run(place.path(), "doctor model --format jsonl"));
    assert_eq!(text.matches("\"type\":\"check\"").count(), CHECKS.len());
}

#[test]
fn restrictions_are_seen_from_inside() {
    let place = workplace();
    let script = "ulimit -l 64; ulimit -v 8000000; exec \"$0\" doctor model --json";
    let output = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_loadcheck")])
        .current_dir(place.path())
        .output()
        .unwrap();
    assert_code(&output, 0);
    let report = json(&output);
    assert_eq!(check(&report, "address_space")["state"], "limited");
    let memlock = check(&report, "memlock");
    assert!(memlock["found"].as_str().unwrap().starts_with("64 KiB"), "{memlock}");
    assert!(
        memlock["state"] == "limited" || memlock["found"].as_str().unwrap().contains("capability"),
        "{memlock}"
    );
}
