//! `plan --vram`: what fits where, on the terminal, as JSON, and as a device map that goes out and
//! comes back.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on panics, or says so")]

use std::fs;
use std::process::Command;

use crate::support::{assert_code, json, run, stderr, stdout};
use onelayer_testing::fixture;
use onelayer_testing::skipped;

/// A folder with a copy of the small Gemma 2: five layers, the embedding is the head.
fn place() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    fs::create_dir(place.path().join("model")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(fixture("gemma2").join(name), place.path().join("model").join(name)).unwrap();
    }
    place
}

const PLAN: &str = "plan model --budget 8MiB -q";

#[test]
fn the_table_reads_well() {
    let place = place();
    let line = format!("{PLAN} --vram 900KiB,200KiB --host 64MiB --context 128 --batch 2");
    let text = stdout(&run(place.path(), &line));
    for expected in [
        "placement, derived from headers and config.json (nothing was measured)",
        "weights 402 KiB, cache 80 KiB; 128 tokens x 2 at once",
        "  GPU 0       6  402 KiB  80 KiB      356 KiB           838 KiB  900 KiB",
        "  host        0      0 B                         8 MiB    8 MiB   64 MiB    56 MiB",
        "  model.layers.0      GPU 0  84.5 KiB   8 KiB  GQA, window 32",
        "  int4                            155 KiB  yes ",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
    assert!(text.lines().all(|line| line.len() <= 120), "{text}");
}

#[test]
fn the_report_has_every_layer_with_its_place() {
    let place = place();
    let report =
        json(&run(place.path(), &format!("{PLAN} --vram 600KiB --context 64 --kv-dtype fp8 --json")));
    let placement = &report["placement"];
    assert_eq!((&placement["source"], &placement["origin"]), (&"derived".into(), &"found".into()));
    let layers = placement["layers"].as_array().unwrap();
    assert_eq!(layers.len(), report["layers"].as_array().unwrap().len());
    let weights: u64 = layers.iter().map(|layer| layer["weight_bytes"].as_u64().unwrap()).sum();
    assert_eq!(Some(weights), report["source"]["bytes"].as_u64());
    let (windowed, full) = (&layers[1], &layers[2]);
    assert_eq!((windowed["attention"].as_str(), windowed["window_tokens"].as_u64()), (Some("GQA"), Some(32)));
    assert_eq!(full["cache_bytes"].as_u64().unwrap(), 2 * windowed["cache_bytes"].as_u64().unwrap());
    assert_eq!(placement["model_context_tokens"], 128);
    assert_eq!(placement["precisions"].as_array().unwrap().len(), 4);
    // Nothing is placed unless it is asked for.
    assert!(json(&run(place.path(), &format!("{PLAN} --json"))).get("placement").is_none());
}

#[test]
fn a_map_goes_out_and_comes_back() {
    let place = place();
    let line = format!("{PLAN} --vram 500KiB --host 8400KiB --export-device-map map.json --json");
    let found = json(&run(place.path(), &line))["placement"].clone();
    let map = place.path().join("map.json");
    let text = fs::read_to_string(&map).unwrap();
    assert!(text.contains("\"model.embed_tokens\": 0,\n") && text.contains("\"lm_head\": 0\n"), "{text}");
    let given = format!("{PLAN} --vram 500KiB --host 8400KiB --device-map map.json --json");
    let mut back = json(&run(place.path(), &given))["placement"].clone();
    assert_eq!(back["origin"], "given");
    back["origin"] = "found".into();
    assert_eq!(back, found);
    // It is there now, and stays as it is.
    assert_code(&run(place.path(), &line), 2);
    assert_eq!(fs::read_to_string(&map).unwrap(), text);
}

#[test]
fn an_edited_map_is_checked() {
    let place = place();
    let check = |map: &str, limits: &str| {
        fs::write(place.path().join("map.json"), map).unwrap();
        let output = run(place.path(), &format!("{PLAN} --device-map map.json {limits}"));
        (output.status.code().unwrap(), stderr(&output))
    };
    assert_eq!(check(r#"{"": 0, "model.layers.3": "cpu", "model.rotary_emb": 0}"#, "--vram 1MiB").0, 0);
    for (map, limits, expected) in [
        (r#"{"model": 0"#, "", "error[LC0215]: the device map is not understood: EOF"),
        (r#"{"model.layers": 0}"#, "", "no place, the first is `model.embed_tokens.weight`"),
        (r#"{"": 3}"#, "--vram 1MiB", "`` is placed on GPU 3, and there are 1"),
        (r#"{"": 0, "model.layers.1.mlp": "disk"}"#, "", "layer `model.layers.1` is split"),
        (r#"{"": 0}"#, "--vram 200KiB", "error[LC0207]: GPU 0 needs 402 KiB, its limit is 200 KiB"),
        (r#"{"": "cpu"}"#, "--host 8MiB", "error[LC0207]: the host needs"),
    ] {
        let (code, text) = check(map, limits);
        assert_eq!(code, 2, "{map}: {text}");
        assert!(text.contains(expected), "{map}: {text}");
    }
}

#[test]
fn what_is_not_known_is_said() {
    let place = place();
    let line = format!("{PLAN} --vram 1MiB --context 64");
    fs::write(place.path().join("model/config.json"), r#"{"model_type": "brand_new"}"#).unwrap();
    let text = stdout(&run(place.path(), &line));
    assert!(
        text.contains("note: no room is kept for the cache of a context: the cache of `brand_new`"),
        "{text}"
    );
    fs::write(place.path().join("model/config.json"), "no configuration").unwrap();
    assert_code(&run(place.path(), &line), 3);
    fs::remove_file(place.path().join("model/config.json")).unwrap();
    let text = stdout(&run(place.path(), &line));
    assert!(text.contains("there is no config.json"), "{text}");
    let refused = run(place.path(), &format!("{PLAN} --vram 1MiB --host 1MiB"));
    assert_code(&refused, 2);
    assert!(stderr(&refused).contains("the host needs at least 8 MiB"), "{}", stderr(&refused));
}

/// As many bytes as the plan of that load has, and the places that they fit.
#[test]
fn what_is_quantised_is_placed_as_it_is_delivered() {
    let place = place();
    let placed = |words: &str| json(&run(place.path(), &format!("{PLAN} --vram 1MiB {words} --json")));
    let stored = placed("")["placement"]["weight_bytes"].as_u64().unwrap();
    for words in ["--quantise int8", "--quantise int4", "--quantise fp8 --dtype f16"] {
        let report = placed(words);
        let counted = report["placement"]["weight_bytes"].as_u64();
        assert_eq!(counted, report["plan"]["tensor_bytes"].as_u64(), "{words}");
        assert!(counted.unwrap() < stored, "{words}");
    }
    let tiers = |words: &str| {
        let report = json(&run(place.path(), &format!("{PLAN} --vram 380KiB {words} --json")));
        let layers = report["placement"]["layers"].as_array().unwrap().clone();
        layers.iter().filter(|layer| layer["tier"] == "0").count()
    };
    assert!(tiers("--quantise int4") > tiers(""), "{} {}", tiers("--quantise int4"), tiers(""));
    let refused = run(place.path(), &format!("{PLAN} --vram 1MiB --quantise int8 --quantise-only mlp"));
    assert_code(&refused, 2);
    assert!(stderr(&refused).contains("leave out --quantise-only"), "{}", stderr(&refused));
}

#[test]
fn transformers_loads_by_the_map() {
    let python = std::env::var("ONELAYER_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let imports = Command::new(&python).args(["-c", "import accelerate, torch, transformers"]).output();
    if !imports.is_ok_and(|output| output.status.success()) {
        skipped(format_args!("{python} has no torch, transformers and accelerate: no map was loaded by"));
        return;
    }
    for (checkpoint, host) in [("gemma2", "8400KiB"), ("llama", "8600KiB"), ("gpt2", "8900KiB")] {
        let output = Command::new(&python)
            .arg(onelayer_testing::repository().join("scripts/check_device_map.py"))
            .arg(env!("CARGO_BIN_EXE_loadcheck"))
            .arg(fixture(checkpoint))
            .arg(host)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{checkpoint}: {text}{}", String::from_utf8_lossy(&output.stderr));
        println!("{checkpoint}: {text}");
        assert!(text.contains("the same answer"), "{text}");
    }
}
