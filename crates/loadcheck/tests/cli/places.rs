//! `run --device-map`: a load onto GPUs, host and disk, told place by place. GPUs are those of the
//! simulated driver.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use std::fs;
use std::path::Path;

use crate::support::{assert_code, json, run, stderr, stdout};
use onelayer_testing::fixture;
use serde_json::Value;

/// A folder with a copy of the small Gemma 2 (five layers, the embedding is the head) and a map.
fn place(map: &str) -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    fs::create_dir(place.path().join("model")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(fixture("gemma2").join(name), place.path().join("model").join(name)).unwrap();
    }
    fs::write(place.path().join("map.json"), map).unwrap();
    place
}

const LINE: &str = "run model --device-map map.json --budget 8MiB -q";
const HOST_AND_DISK: &str = r#"{"model.layers.0": "disk", "": "cpu"}"#;

fn places(report: &Value) -> Vec<(&str, u64, u64)> {
    let places = report["runs"][0]["places"].as_array().unwrap().iter();
    let number = |place: &Value, key: &str| place[key].as_u64().unwrap();
    places
        .map(|place| {
            (place["tier"].as_str().unwrap(), number(place, "layers"), number(place, "tensor_bytes"))
        })
        .collect()
}

#[test]
fn host_and_disk_are_told_apart_and_the_promise_is_kept() {
    let place = place(HOST_AND_DISK);
    let report = json(&run(place.path(), &format!("{LINE} --verify --hash --json --runs 2")));
    let all = report["source"]["bytes"].as_u64().unwrap();
    let found = places(&report);
    let [("cpu", 5, on_host), ("disk", 1, on_disk)] = found[..] else { panic!("{found:?}") };
    assert_eq!(on_host + on_disk, all);
    let one = &report["runs"][0];
    assert_eq!(one["verified"]["mismatches"], 0);
    assert_eq!(one["verified"]["bytes"], on_host);
    assert_eq!(one["params"]["device"], "map");
    assert!(one["promise"]["kept"].as_bool().unwrap(), "{}", one["promise"]);
    let resident = one["resident_host_bytes"].as_u64().unwrap();
    assert!(resident >= on_host);
    assert_eq!(one["promise"]["limit_bytes"].as_u64().unwrap(), (8 << 20) + (16 << 20) + resident);
    let (first, second) = (&one["places"][0], &one["places"][1]);
    assert!(first["seconds"].as_f64().unwrap() > 0.0 && second["seconds"].is_null());
    assert_eq!((&second["resident_bytes"], &second["read_bytes"]), (&0.into(), &0.into()));
    assert_eq!(report["plan"]["places"][0]["resident_bytes"], first["resident_bytes"]);
    assert_eq!(report["plan"]["tensor_bytes"], on_host);
    let hashes = report["hashes"].as_array().unwrap();
    assert!(!hashes.is_empty());
    assert!(!hashes.iter().any(|hash| hash["name"].as_str().unwrap().starts_with("model.layers.0.")));

    let text = stdout(&run(place.path(), &format!("{LINE} -v").replace(" -q", "")));
    for expected in ["device map", "place     host: 5 layers, ", "place     disk: 1 layer, ", "; not read"] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
    // A load without a map says nothing of places.
    let plain = json(&run(place.path(), "run model --device host --budget 8MiB --json -q"));
    assert!(plain["runs"][0].get("places").is_none() && plain["plan"].get("places").is_none());
}

/// One place has all the layers and the other only what is not quantised; what was lost is told of
/// every weight that was loaded.
#[test]
fn what_was_quantised_is_told_of_all_places() {
    let place = place(HOST_AND_DISK);
    let report = json(&run(place.path(), &format!("{LINE} --quantise int8 --json")));
    let quantised = report["runs"][0]["quantised"].as_array().unwrap();
    let names: Vec<&str> = quantised.iter().map(|tensor| tensor["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"model.layers.1.mlp.up_proj.weight"), "{names:?}");
    assert!(!names.iter().any(|name| name.starts_with("model.layers.0.")), "{names:?}");
    fs::write(place.path().join("map.json"), r#"{"model.layers": "disk", "": "cpu"}"#).unwrap();
    let report = json(&run(place.path(), &format!("{LINE} --quantise int8 --json")));
    assert_eq!((&report["verdict"], report["runs"][0].get("quantised")), (&"pass".into(), None), "{report}");
}

#[test]
fn a_map_that_was_written_is_one_to_load_by() {
    let place = place("{}");
    let written = run(
        place.path(),
        "plan model --budget 8MiB -q --host 8400KiB --context 1 --export-device-map out.json",
    );
    assert_code(&written, 0);
    let text = fs::read_to_string(place.path().join("out.json")).unwrap();
    assert!(
        text.contains("lm_head") && text.contains("\"disk\""),
        "a head without a tensor is in it: {text}"
    );
    let report = json(&run(place.path(), &format!("{} --json", LINE.replace("map.json", "out.json"))));
    assert_eq!(places(&report).len(), 2);
}

#[test]
fn maps_that_cannot_be_kept_name_what_is_wrong() {
    for (map, code, words) in [
        (r#"{"": "cpu", "model.layer.0": "disk"}"#, 2, "LC0215"),
        (r#"{"": "cpu", "model.layer.0": "disk"}"#, 2, "the first is `model.layer.0`"),
        (r#"{"model.layers": "cpu"}"#, 2, "have no place"),
        (r#"{"": "cpu", "model.layers.0.mlp": "disk"}"#, 2, "layer `model.layers.0` is split"),
        (r#"{"": "gpu"}"#, 2, "LC0215"),
        (r#"{"": "cpu", "": "disk"}"#, 2, "occurs twice"),
        (r#"{"": "disk"}"#, 2, "there is nothing to load"),
        (r#"{"": "cpu", "model.layers.0": 3}"#, 4, "cannot use GPU 3 of the device map"),
    ] {
        let place = place(map);
        let output = run(place.path(), LINE);
        assert_code(&output, code);
        assert!(stderr(&output).contains(words), "{map}: {words}\n{}", stderr(&output));
    }
    let place = place(HOST_AND_DISK);
    for flags in ["--device host", "--window 1", "--passes 2", "--tp 0/2"] {
        assert_code(&run(place.path(), &format!("{LINE} {flags}")), 2);
    }
    assert_code(&run(place.path(), &LINE.replace("map.json", "none.json")), 2);
    // All that is wrong comes in one go.
    fs::write(place.path().join("map.json"), r#"{"": 1, "nothing": "cpu"}"#).unwrap();
    let output = run(place.path(), LINE);
    assert!(
        stderr(&output).contains("GPU 1") && stderr(&output).contains("`nothing`"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn the_long_help_has_it() {
    let place = place(HOST_AND_DISK);
    assert!(stdout(&run(place.path(), "run --help")).contains("--device-map <FILE>"));
    assert!(!stdout(&run(place.path(), "run -h")).contains("--device-map"));
}

#[cfg(feature = "cuda")]
#[cfg(feature = "cuda")]
mod on_gpus {
    use super::*;
    use crate::support::loadcheck;
    use onelayer_testing::cuda_sim::{MODES, SimOutcome, SimRun};

    const FOUR_PLACES: &str = r#"{"model.embed_tokens": 0, "lm_head": 0, "model.layers.0": 1, "model.layers.1": 1,
        "model.layers.2": "disk", "": "cpu"}"#;

    fn sim(place: &Path, line: &str) -> SimRun {
        let mut command = loadcheck(place);
        command.env_remove("LD_LIBRARY_PATH").args(line.split_whitespace());
        SimRun::new(command)
    }

    #[track_caller]
    fn ended_with(outcome: &SimOutcome, code: i32) {
        assert_eq!(outcome.status.code(), Some(code), "{}\n{}", outcome.stdout, outcome.stderr);
        outcome.reports.iter().for_each(|report| {
            report.assert_clean();
        });
    }

    #[test]
    fn two_gpus_host_and_disk() {
        let place = place(FOUR_PLACES);
        for mode in MODES {
            let line = format!("{LINE} --verify --json");
            let outcome = sim(place.path(), &line).set("DEVICES", 2).set("MODE", mode).run();
            ended_with(&outcome, 0);
            let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
            let tiers: Vec<&str> = places(&report).into_iter().map(|(tier, ..)| tier).collect();
            assert_eq!(tiers, ["0", "1", "cpu", "disk"]);
            assert_eq!(report["host"]["gpus"].as_array().unwrap().len(), 2);
            let one = &report["runs"][0];
            assert_eq!(one["verified"]["mismatches"], 0);
            assert_eq!(one["verified"]["bytes"], report["plan"]["tensor_bytes"]);
            assert!(one["promise"]["kept"].as_bool().unwrap(), "{}", one["promise"]);
            for gpu in 0..2 {
                let vram = one["places"][gpu]["vram"].as_array().unwrap();
                let driver = vram.iter().find(|vram| vram["method"] == "driver").unwrap();
                let bytes = |key: &str| driver[key].as_u64().unwrap();
                let resident = one["places"][gpu]["resident_bytes"].as_u64().unwrap();
                assert_eq!(report["plan"]["places"][gpu]["resident_bytes"], resident);
                assert!(bytes("after_load_bytes") - bytes("baseline_bytes") >= resident, "{driver}");
                assert_eq!(driver["after_unload_growth_bytes"], 0, "{driver}");
            }
        }
        let outcome = sim(place.path(), LINE).set("DEVICES", 2).run();
        ended_with(&outcome, 0);
        for expected in ["place     GPU 1: 2 layers, ", "; all of it back after unload"] {
            assert!(outcome.stdout.contains(expected), "{expected}\n{}", outcome.stdout);
        }
    }

    #[test]
    fn a_gpu_that_is_missing_or_too_small_is_named() {
        let place = place(FOUR_PLACES);
        let outcome = sim(place.path(), LINE).set("DEVICES", 1).run();
        ended_with(&outcome, 4);
        assert!(
            outcome.stderr.contains("cannot use GPU 1 of the device map: no CUDA device 1"),
            "{}",
            outcome.stderr
        );
        let outcome =
            sim(place.path(), LINE).set("DEVICES", 2).set("MEM", "4G,18M").set("CONTEXT", "16M").run();
        ended_with(&outcome, 2);
        assert!(outcome.stderr.contains("on GPU 1, where 2 MiB are free"), "{}", outcome.stderr);
        assert!(outcome.stderr.contains("short"), "{}", outcome.stderr);
    }
}
