//! `loadcheck verify`: a conversion that is right, one that was damaged, and what is said about
//! either. What the library compares is in its own tests.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    reason = "a test that cannot go on panics"
)]

use std::fs;
use std::path::Path;

use crate::support::{CONVERTED_FILES as FILES, assert_code, json, model, run, stderr, stdout};
use onelayer_testing::{TestTensor, write_file};
use serde_json::Value;

#[test]
fn verify_finds_nothing_where_nothing_is_wrong() {
    let place = model();
    assert_code(&run(place.path(), "convert model out --sha256 --verify"), 0);
    let output = run(place.path(), "verify out --against model");
    assert_code(&output, 0);
    let text = stdout(&output);
    assert!(text.contains("verified  5 files, 8 tensors, "), "{text}");
    assert!(text.contains(": as it should be and as in model\n"), "{text}");
    let report = json(&run(place.path(), "verify out --json"));
    assert_eq!((&report["command"], &report["verdict"]), (&Value::from("verify"), &Value::from("pass")));
    let found = &report["verification"];
    assert_eq!((found["files"].as_u64(), found["tensors"].as_u64()), (Some(5), Some(8)));
    assert!(found["bytes"].as_u64() > Some(550 << 10) && found["against"].is_null());
    assert!(found["differences"].as_array().unwrap().is_empty());
    // Without a manifest there is nothing to compare the bytes with.
    let output = run(place.path(), "verify model");
    assert_code(&output, 0);
    assert!(
        stdout(&output).contains("note: ") && stdout(&output).contains("manifest"),
        "{}",
        stdout(&output)
    );
    assert_code(&run(place.path(), "verify model --against out"), 0);
}

/// Changes one byte in the middle of a file.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn verify_names_each_difference() {
    let place = model();
    let path = place.path();
    assert_code(&run(path, "convert model out"), 0);
    damage(&path.join("out").join(FILES[2]));
    damage(&path.join("out/config.json"));
    for line in ["verify out", "verify out --against model"] {
        let output = run(path, line);
        assert_code(&output, 5);
        let text = stdout(&output);
        assert!(text.contains("DIFFERS  ") && text.contains("model.layers.1.mlp.down.weight"), "{text}");
        assert!(text.contains("config.json"), "{text}");
        assert!(stderr(&output).contains("error[LC0510]: "), "{}", stderr(&output));
    }
    let report = json(&run(path, "verify out --json"));
    assert_eq!(
        (&report["verdict"], &report["error"]["code"]),
        (&Value::from("error"), &Value::from("LC0510"))
    );
    let differences = report["verification"]["differences"].as_array().unwrap();
    assert!(differences.len() >= 2, "{differences:?}");
    let csv = stdout(&run(path, "verify out --format csv"));
    assert_eq!(csv.lines().count(), differences.len() + 1, "{csv}");
    assert!(csv.starts_with("place,difference\n"), "{csv}");
    let markdown = stdout(&run(path, "verify out --format md"));
    assert!(markdown.contains("| place | difference |"), "{markdown}");
    fs::write(path.join("out/onelayer.manifest.json"), "{\"schema\": \"another/7\"}").unwrap();
    let output = run(path, "verify out");
    assert_code(&output, 3);
    assert!(stderr(&output).contains("LC0305"), "{}", stderr(&output));
}

#[test]
fn a_long_list_of_differences_is_cut_for_people_and_whole_for_programs() {
    let place = tempfile::tempdir().unwrap();
    for (folder, seed) in [("a", 0), ("b", 1000)] {
        fs::create_dir(place.path().join(folder)).unwrap();
        let tensors: Vec<TestTensor> =
            (0..30).map(|number| TestTensor::random(format!("w{number:02}"), 64, seed + number)).collect();
        write_file(&place.path().join(folder).join("model.safetensors"), &tensors, 0);
    }
    let output = run(place.path(), "verify a --against b");
    assert_code(&output, 5);
    let text = stdout(&output);
    assert_eq!(text.lines().filter(|line| line.starts_with("DIFFERS  ")).count(), 20, "{text}");
    assert!(text.contains("  ... and 10 more (all of them: --json)\n"), "{text}");
    let report = json(&run(place.path(), "verify a --against b --json"));
    assert_eq!(report["verification"]["differences"].as_array().unwrap().len(), 30);
}
