//! The program on the simulated CUDA driver: loads and compares, counts device memory, and ends as
//! its table of exit codes says. Every report names the device, and that name says that it is
//! simulated.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use std::path::Path;

use crate::support::{loadcheck, workplace};
use onelayer_testing::cuda_sim::{MODES, SimOutcome, SimRun, driver_without};
use onelayer_testing::{TestTensor, fixture, random_bytes, write_file};
use serde_json::Value;

/// The program in `place`, on words that hold no blanks.
fn sim(place: &Path, line: &str) -> SimRun {
    let mut command = loadcheck(place);
    command.env_remove("LD_LIBRARY_PATH").args(line.split_whitespace());
    SimRun::new(command)
}

#[track_caller]
fn assert_code(outcome: &SimOutcome, expected: i32) {
    let printed = format!("stdout:\n{}\nstderr:\n{}", outcome.stdout, outcome.stderr);
    assert_eq!(outcome.status.code(), Some(expected), "{printed}");
}

/// The JSON of a run that used the device, after which the driver has nothing to complain about.
#[track_caller]
fn report(outcome: &SimOutcome, code: i32) -> Value {
    assert_code(outcome, code);
    let report: Value =
        serde_json::from_str(&outcome.stdout).unwrap_or_else(|_| panic!("{}", outcome.stdout));
    let name = report["host"]["gpus"][0]["name"].as_str().unwrap();
    assert!(name.contains("simulated"), "{name}");
    assert!(!outcome.reports.is_empty(), "the driver was used");
    outcome.reports.iter().for_each(|report| {
        report.assert_clean();
    });
    report
}

/// 3 MiB in four layers, an odd tensor among them, all F32.
fn write_model(path: &Path) {
    let tensor = |name: &str, elements: usize, seed| TestTensor {
        name: name.to_owned(),
        dtype: "F32",
        shape: vec![elements as u64],
        bytes: random_bytes(4 * elements, seed),
    };
    let tensors = [
        tensor("model.embed_tokens.weight", 300_000, 1),
        tensor("model.layers.0.norm.weight", 17, 2),
        tensor("model.layers.0.mlp.weight", 150_000, 3),
        tensor("model.layers.1.mlp.weight", 150_000, 4),
        tensor("lm_head.weight", 150_001, 5),
    ];
    write_file(path, &tensors, 0);
}

fn model() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    write_model(&place.path().join("m.safetensors"));
    place
}

#[test]
fn what_is_delivered_equals_the_files_however_late_copies_run() {
    let place = model();
    for mode in MODES {
        for flags in ["", "--window 1", "--dtype bf16", "--dtype f16 --window 2 --io mmap"] {
            let line = format!("m.safetensors --device cuda:0 --verify --json {flags}");
            let report = report(&sim(place.path(), &line).set("MODE", mode).run(), 0);
            let run = &report["runs"][0];
            assert_eq!(run["verified"]["tensors"], 5, "{mode} {flags}");
            assert_eq!(run["verified"]["mismatches"], 0, "{mode} {flags}");
            assert_eq!(run["verified"]["bytes"], report["plan"]["tensor_bytes"]);
            assert_eq!((&run["params"]["device"], &run["promise"]["kept"]), (&"cuda:0".into(), &true.into()));
        }
    }
}

#[test]
fn real_checkpoints_arrive_whole() {
    let place = tempfile::tempdir().unwrap();
    for (name, mode) in
        ["llama", "llama_sharded", "gemma2", "gpt2", "qwen2_moe"].iter().zip(MODES.iter().cycle())
    {
        let line = format!("{} --device cuda:0 --verify --json --dtype f16", fixture(name).display());
        let report = report(&sim(place.path(), &line).set("MODE", mode).run(), 0);
        let verified = &report["runs"][0]["verified"];
        assert_eq!(
            (&verified["tensors"], &verified["mismatches"]),
            (&report["source"]["tensors"], &0.into())
        );
    }
}

#[test]
fn hashes_on_the_device_are_those_of_the_host() {
    let place = model();
    let hashes = |device: &str| {
        let outcome = sim(place.path(), &format!("m.safetensors --hash --json --device {device}")).run();
        let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
        report["hashes"].clone()
    };
    assert_eq!(hashes("cuda:0"), hashes("host"));
    assert_eq!(hashes("none").as_array().unwrap().len(), 5);
}

#[test]
fn quantised_weights_on_the_device_are_those_of_the_host() {
    let place = tempfile::tempdir().unwrap();
    let source = fixture("llama");
    for form in ["int8", "int4", "fp8"] {
        let hashes = |device: &str| {
            let line = format!("{} --quantise {form} --hash --json --device {device}", source.display());
            let outcome = sim(place.path(), &line).run();
            assert_code(&outcome, 0);
            let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
            report["hashes"].as_array().unwrap().clone()
        };
        let on_device = hashes("cuda:0");
        assert_eq!(on_device, hashes("host"), "{form}");
        assert!(on_device.iter().any(|tensor| tensor["name"].as_str().unwrap().contains("scale")), "{form}");
    }
}

#[test]
fn auto_takes_the_device_and_the_plan_is_that_of_the_run() {
    let place = model();
    let run = report(&sim(place.path(), "m.safetensors --json").run(), 0);
    assert_eq!(run["runs"][0]["params"]["device"], "cuda:0");
    assert!(run["notes"].is_null(), "{}", run["notes"]);
    let plan = |flags: &str, code| {
        let outcome = sim(place.path(), &format!("plan m.safetensors --json {flags}")).run();
        assert_code(&outcome, code);
        serde_json::from_str::<Value>(&outcome.stdout).unwrap()["plan"].clone()
    };
    assert_eq!(plan("", 0), run["plan"]);
    assert_eq!(plan("--device cuda:0", 0), run["plan"]);
    let host = sim(place.path(), "m.safetensors --json --device host").run();
    let host: Value = serde_json::from_str(&host.stdout).unwrap();
    assert_eq!(host["runs"][0]["params"]["device"], "host");
    assert_eq!(host["host"]["gpus"].as_array().unwrap().len(), 0, "a device that is not used is not named");
}

#[test]
fn the_device_is_named_for_people_and_programs() {
    let place = model();
    let outcome = sim(place.path(), "m.safetensors --device cuda:1 -q").set("DEVICES", 2).run();
    assert_code(&outcome, 0);
    let line = outcome.stdout.lines().find(|line| line.starts_with("device    ")).unwrap();
    assert!(
        line.contains("cuda:1 is simulated CUDA device 1 (4 GiB, CUDA 12.8, 0000:02:00.0, GPU-"),
        "{line}"
    );
    let vram = outcome.stdout.lines().find(|line| line.trim_start().starts_with("VRAM ")).unwrap();
    assert!(vram.contains("back at 16 MiB after unload"), "{vram}");
    let report =
        report(&sim(place.path(), "m.safetensors --device cuda:1 --json").set("DEVICES", 2).run(), 0);
    let gpu = &report["host"]["gpus"][0];
    assert_eq!((&gpu["index"], &gpu["cuda_version"]), (&1.into(), &"12.8".into()));
    assert_eq!(gpu["memory_total_bytes"], 4_u64 << 30);
    assert!(gpu["uuid"].as_str().unwrap().starts_with("GPU-"), "{gpu}");
}

#[test]
fn device_memory_is_counted_in_three_ways_and_comes_back() {
    let place = model();
    const CONTEXT_BYTES: u64 = 16 << 20;
    const OTHER_BYTES: u64 = 100 << 20;
    for window in ["all", "1"] {
        let line = format!("m.safetensors --device cuda:0 --json --window {window}");
        let report = report(&sim(place.path(), &line).set("OTHER", "100M").run(), 0);
        let run = &report["runs"][0];
        let methods: Vec<&str> =
            run["vram"].as_array().unwrap().iter().map(|way| way["method"].as_str().unwrap()).collect();
        // Inside a container, NVML's process numbers are not ours.
        let in_container = std::fs::read_link("/proc/self/ns/pid").unwrap().as_os_str() != "pid:[4026531836]";
        let expected = ["nvml_process", "nvml_device", "driver"];
        assert_eq!(methods, expected[usize::from(in_container)..], "{}", report["unavailable"]);
        assert_eq!(run["peak"]["vram_method"], methods[0]);
        for way in run["vram"].as_array().unwrap() {
            let others = if way["method"] == "nvml_process" { 0 } else { OTHER_BYTES };
            assert_eq!(way["baseline_bytes"], CONTEXT_BYTES + others, "{way}: the context is open before");
            assert_eq!(way["after_unload_growth_bytes"], 0, "{way}");
            let growth = way["peak_bytes"].as_u64().unwrap() - way["baseline_bytes"].as_u64().unwrap();
            let resident = run["resident_bytes"].as_u64().unwrap();
            assert!(growth >= if window == "all" { resident } else { 1 }, "{way}, resident {resident}");
            assert!(growth <= resident + (4 << 20), "{way}, resident {resident}");
        }
        let headline = &run["vram"][0];
        assert_eq!(run["peak"]["vram_bytes"], headline["peak_bytes"]);
        assert_eq!(run["baseline"]["vram_bytes"], headline["baseline_bytes"]);
        assert_eq!(run["after_unload"]["vram_bytes"], headline["after_unload_bytes"]);
        assert!(run["peak"]["vram_at"]["layer"].is_string(), "{}", run["peak"]);
        assert_eq!(run["resident_host_bytes"], 0);
        let limit = run["params"]["budget_bytes"].as_u64().unwrap() + (16 << 20);
        assert_eq!(run["promise"]["limit_bytes"], limit, "layers are no host memory");
    }
}

#[test]
fn without_nvml_the_driver_counts_and_the_report_says_so() {
    let place = model();
    let outcome =
        sim(place.path(), "m.safetensors --device cuda:0 --json --max-vram 1GiB@0").set("NVML", 0).run();
    let report = report(&outcome, 0);
    assert_eq!(report["runs"][0]["peak"]["vram_method"], "driver");
    assert_eq!(report["runs"][0]["vram"].as_array().unwrap().len(), 1);
    for method in ["nvml_process", "nvml_device"] {
        let metric = format!("vram.{method}");
        let missing =
            report["unavailable"].as_array().unwrap().iter().find(|entry| entry["metric"] == metric);
        let reason = missing.unwrap()["reason"].as_str().unwrap();
        assert!(reason.contains("nvmlInit_v2 failed"), "{reason}");
    }
    assert_eq!(report["limits"][0]["passed"], true);
}

#[test]
fn device_memory_is_a_gate() {
    let place = model();
    let gate = |limit: &str, code| {
        let line = format!("m.safetensors --device cuda:0 --json --max-vram {limit}");
        report(&sim(place.path(), &line).run(), code)["limits"][0].clone()
    };
    let failed = gate("17MiB", 1);
    assert_eq!((&failed["metric"], &failed["passed"]), (&"vram".into(), &false.into()));
    assert!(failed["actual_bytes"].as_u64() > Some(17 << 20), "{failed}");
    assert!(failed["first_exceeded_at"].is_object(), "{failed}");
    assert_eq!(gate("40MiB@0", 0)["passed"], true);
    assert_eq!(gate("50%", 0)["limit_bytes"], 2_u64 << 30, "of the device");
    let outcome =
        sim(place.path(), "m.safetensors --device cuda:0 --max-vram 1GiB@1").set("DEVICES", 2).run();
    assert_code(&outcome, 4);
    assert!(outcome.stderr.contains("error[LC0401]"), "{}", outcome.stderr);
}

#[test]
fn too_little_device_memory_is_refused_before_anything_is_loaded() {
    let place = model();
    // 16 MiB are the context's; of the other 64, all are to stay free.
    let small = |flags: &str| {
        sim(place.path(), &format!("m.safetensors --device cuda:0 {flags}")).set("MEM", "80M").run()
    };
    let outcome = small("");
    assert_code(&outcome, 2);
    assert_eq!(outcome.stdout, "");
    for part in ["error[LC0207]", "64 MiB of them reserved", "short", "--> --window all", "--device-reserve"]
    {
        assert!(outcome.stderr.contains(part), "{part}: {}", outcome.stderr);
    }
    assert_eq!(outcome.reports[0].calls("cuMemAllocFromPoolAsync"), 0);
    assert_code(&small("--device-reserve 1MiB"), 0);
    let outcome = small("--device-reserve 50%");
    assert_code(&outcome, 0);
    let outcome = small("--device-reserve 50% --cache cold --runs 2 --json");
    let report = report(&outcome, 0);
    assert_eq!(report["runs"].as_array().unwrap().len(), 2, "the size is known to every run");
    assert_eq!(report["plan"]["params"]["device_reserve_bytes"], 40 << 20);
    let outcome = small("--device-budget 1MiB --device-reserve 0");
    assert_code(&outcome, 2);
    assert!(outcome.stderr.contains("--> --device-budget"), "{}", outcome.stderr);
}

#[test]
fn what_fails_midway_is_exit_code_five() {
    let place = model();
    for fault in ["cuMemcpyHtoDAsync_v2:2:719", "cuMemAllocFromPoolAsync:2+:2", "cuEventSynchronize:1:700"] {
        let outcome = sim(place.path(), "m.safetensors --device cuda:0 --json").fail(fault).run();
        assert_code(&outcome, 5);
        let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
        assert_eq!(report["error"]["code"], "LC0501", "{fault}: {}", report["error"]);
        assert_eq!(report["runs"][0]["outcome"], "failed");
    }
}

#[test]
fn a_driver_that_cannot_be_used_is_exit_code_four_and_auto_is_the_host() {
    let place = workplace();
    let stub = |run: SimRun| run.on_stub();
    let old = driver_without(&["cuMemAllocFromPoolAsync"]);
    let old = |run: SimRun| run.on_driver(&old);
    let none = |run: SimRun| run.set("DEVICES", 0);
    let cases: [(&dyn Fn(SimRun) -> SimRun, &str); 3] = [
        (&stub, "the CUDA driver (libcuda.so) does not start"),
        (&old, "libcuda.so has no cuMemAllocFromPoolAsync: it is no CUDA driver, or one older than 11.4"),
        (&none, "no device is visible: in a container, start it with the GPUs"),
    ];
    for (change, what) in cases {
        let outcome = change(sim(place.path(), "model --device cuda:0")).run();
        assert_code(&outcome, 4);
        assert_eq!(outcome.stdout, "");
        let lines: Vec<&str> = outcome.stderr.lines().collect();
        let [message, _help] = lines[..] else { panic!("{}", outcome.stderr) };
        assert!(message.starts_with("error[LC0402]: cannot use --device cuda:0: "), "{message}");
        assert!(message.contains(what), "{message}");
        let outcome = change(sim(place.path(), "model -q")).run();
        assert_code(&outcome, 0);
        let note = outcome.stdout.lines().find(|line| line.starts_with("note: ")).unwrap();
        assert!(note.contains(what) && note.ends_with("using host memory"), "{note}");
    }
    let outcome = sim(place.path(), "model --device cuda:3").set("DEVICES", 2).run();
    assert_code(&outcome, 4);
    assert!(outcome.stderr.contains("no CUDA device 3: the driver shows 2"), "{}", outcome.stderr);
}

#[test]
fn a_device_that_is_there_and_does_not_open_is_no_reason_for_the_host() {
    let place = workplace();
    let outcome = sim(place.path(), "model").fail("cuDevicePrimaryCtxRetain:1:46").run();
    assert_code(&outcome, 4);
    assert!(outcome.stderr.contains("cuDevicePrimaryCtxRetain failed"), "{}", outcome.stderr);
}

#[test]
fn pinning_that_is_refused_is_named() {
    let place = model();
    for (change, expected, words) in [
        ("", "whole", ""),
        ("cuMemHostRegister_v2:1:2", "slot_by_slot", "pinned slot by slot"),
        ("20M", "fewer_slots", "slots of the ring could be pinned"),
        ("0", "pageable", "could not be pinned"),
    ] {
        let run = sim(place.path(), "m.safetensors --device cuda:0 --verify --json");
        let run = match change {
            "" => run,
            rules if rules.contains(':') => run.fail(rules),
            most => run.set("PINNED", most),
        };
        let report = report(&run.run(), 0);
        let ring = &report["runs"][0]["ring"];
        assert_eq!(ring["pinning"], expected, "{ring}");
        assert_eq!(report["plan"]["ring"]["pinning"], "whole", "that was asked for");
        let slots = ring["slots"].as_u64().unwrap();
        let slot_bytes = ring["slot_bytes"].as_u64().unwrap();
        let pinned = if expected == "pageable" { 0 } else { slots * slot_bytes };
        assert_eq!(ring["pinned_bytes"], pinned, "{ring}");
        assert_eq!(report["runs"][0]["peak"]["pinned_bytes"].as_u64().max(Some(pinned)), Some(pinned));
        let notes = report["notes"].to_string();
        assert_eq!(notes.contains(words) && !words.is_empty(), expected != "whole", "{notes}");
        assert_eq!(ring["pinning_reason"].is_string(), expected != "whole", "{ring}");
    }
}

#[test]
fn pinned_memory_is_a_gate_and_is_not_counted_twice() {
    let place = model();
    let line = "m.safetensors --device cuda:0 --json --budget 32MiB --max-pinned";
    let failed = report(&sim(place.path(), &format!("{line} 8MiB")).run(), 1);
    let run = &failed["runs"][0];
    assert_eq!(failed["limits"][0]["actual_bytes"], run["ring"]["pinned_bytes"]);
    assert!(failed["limits"][0]["first_exceeded_at"].is_object(), "{}", failed["limits"][0]);
    let growth =
        run["peak"]["host_bytes"].as_u64().unwrap() - run["baseline"]["host_bytes"].as_u64().unwrap();
    assert!(growth <= (32 << 20) + (16 << 20), "pinned pages are anonymous ones already: {growth}");
    let passed = report(&sim(place.path(), &format!("{line} 32MiB")).run(), 0);
    assert_eq!(passed["limits"][0]["passed"], true);
}

#[test]
fn every_format_has_the_device_memory() {
    let place = model();
    let text = |format: &str| {
        let line = format!("m.safetensors --device cuda:0 --verify -q --format {format}");
        let outcome = sim(place.path(), &line).run();
        assert_code(&outcome, 0);
        outcome.stdout
    };
    let csv = text("csv");
    let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    let cell = |name: &str| rows[1][rows[0].iter().position(|column| *column == name).unwrap()];
    assert!(cell("peak_vram_bytes").parse::<u64>().unwrap() > 16 << 20, "{csv}");
    assert_eq!((cell("device"), cell("pinning"), cell("mismatches")), ("cuda:0", "whole", "0"));
    let markdown = text("md");
    for part in ["| run | VRAM by | peak |", "device cuda:0 is simulated", "verified 5 of 5 tensors"] {
        assert!(markdown.contains(part), "{part}: {markdown}");
    }
    let lines = text("jsonl");
    let summary: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert!(summary["host"]["gpus"][0]["name"].as_str().unwrap().contains("simulated"), "{summary}");
}

#[test]
fn the_picture_has_a_strip_of_device_memory() {
    let place = model();
    let line = "m.safetensors --device cuda:0 --timeline 1 --json --export-svg load.svg";
    let report = report(&sim(place.path(), line).run(), 0);
    let samples = &report["runs"][0]["samples"];
    assert_eq!(samples["columns"][6], "vram_bytes");
    let points = samples["rows"].as_array().unwrap().iter().filter_map(|row| row[6].as_u64());
    assert_eq!(points.clone().min(), report["runs"][0]["baseline"]["vram_bytes"].as_u64());
    assert!(points.max() <= report["runs"][0]["peak"]["vram_bytes"].as_u64());
    let drawn = std::fs::read_to_string(place.path().join("load.svg")).unwrap();
    assert!(drawn.contains("<path class=\"vram\"") && drawn.contains("device memory (MiB)"), "{drawn}");
}

#[test]
fn a_hundred_cycles_leave_the_device_as_it_was() {
    let place = model();
    for (line, loads) in [("leak m.safetensors", 1), ("leak m.safetensors m.safetensors", 2)] {
        let outcome =
            sim(place.path(), &format!("{line} --device cuda:0 --cycles 100 --max-slope vram=0 --json"))
                .run();
        let report = report(&outcome, 0);
        assert_eq!(report["leak"]["loads"].as_array().unwrap().len(), loads);
        let slopes = report["leak"]["slopes"].as_array().unwrap();
        for kind in ["vram", "live"] {
            let slope = slopes.iter().find(|slope| slope["kind"] == kind).unwrap();
            let points = slope["points_bytes"].as_array().unwrap();
            assert!(
                points.len() == 100 && points.iter().all(|point| *point == slope["floor_bytes"]),
                "{slope}"
            );
            assert_eq!(
                (slope["bytes_per_cycle"].as_f64(), slope["low_bytes_per_cycle"].as_f64()),
                (Some(0.0), Some(0.0))
            );
        }
        assert!(
            report["runs"][0]["peak"]["vram_bytes"].as_u64()
                > report["runs"][0]["baseline"]["vram_bytes"].as_u64()
        );
        assert_eq!(report["runs"][0]["promise"]["kept"], true);
    }
}

/// Every free is answered with success and does nothing: a MiB stays with the driver after each
/// unload, for which a device takes its smallest grain.
#[test]
fn device_memory_that_does_not_come_back_is_found() {
    let place = tempfile::tempdir().unwrap();
    write_file(
        &place.path().join("m.safetensors"),
        &[TestTensor::random("model.layers.0.weight", 1 << 20, 1)],
        0,
    );
    let outcome = sim(place.path(), "leak m.safetensors --device cuda:0 --cycles 27 --json")
        .fail("cuMemFreeAsync:*:0")
        .run();
    assert_code(&outcome, 1);
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let slopes = report["leak"]["slopes"].as_array().unwrap();
    let grows: Vec<&Value> = slopes.iter().filter(|slope| slope["verdict"] == "leak").collect();
    assert_eq!(grows.len(), 1, "{slopes:?}");
    assert_eq!(grows[0]["kind"], "vram");
    assert_eq!(grows[0]["bytes_per_cycle"], f64::from(2 << 20), "{}", grows[0]);
}
