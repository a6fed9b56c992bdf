//! `--passes`: what an operator sees of a load that goes on, as text and as JSON.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use crate::support::{assert_code, json, run, stderr, stdout, workplace};

#[test]
fn every_pass_is_timed_and_what_binds_is_named() {
    let place = workplace();
    let line = "model --passes 6 --window 2 --keep outside --io buffered --device host --verify";
    let report = json(&run(place.path(), &format!("{line} --json")));
    assert_eq!(report["verdict"], "pass");
    let run_entry = &report["runs"][0];
    assert_eq!((&run_entry["params"]["passes"], &run_entry["params"]["window"]), (&6.into(), &2.into()));
    let passes = &run_entry["passes"];
    assert_eq!((&passes["asked"], passes["each"].as_array().unwrap().len()), (&6.into(), 6));
    let (window, kept) = (passes["window_bytes"].as_u64().unwrap(), passes["kept_bytes"].as_u64().unwrap());
    assert!(window > 0 && kept >= 200 << 10, "{passes}");
    assert_eq!(run_entry["resident_bytes"].as_u64(), Some(window + kept));
    let read: u64 =
        passes["each"].as_array().unwrap().iter().map(|pass| pass["read_bytes"].as_u64().unwrap()).sum();
    assert_eq!(Some(read), run_entry["io"]["read_bytes"].as_u64());
    for shares in
        passes["each"].as_array().unwrap().iter().map(|pass| &pass["shares"]).chain([&passes["shares"]])
    {
        let sum: f64 =
            ["disk", "fill", "link", "engine"].iter().map(|name| shares[name].as_f64().unwrap()).sum();
        assert!((0.0..=1.01).contains(&sum), "{shares}");
    }
    let tensors = report["source"]["tensors"].as_u64().unwrap();
    assert_eq!(run_entry["verified"]["tensors"].as_u64(), Some(6 * tensors), "in each pass all of them");

    let text = stdout(&run(place.path(), &format!("{line} -q")));
    assert_eq!(text.lines().filter(|line| line.starts_with("  step ")).count(), 6, "{text}");
    assert!(
        text.contains("\nsteps     6 of 6 decode steps, window ") && text.contains("\nbottleneck  "),
        "{text}"
    );
    let plain = json(&run(place.path(), "model --window 2 --device host --json"));
    assert!(plain["runs"][0].get("passes").is_none(), "one pass is reported as it was");
}

#[test]
fn a_slow_engine_is_seen_to_bind() {
    let place = workplace();
    let line = "model --passes 3 --window 2 --device host --io buffered --engine-time 30ms --json";
    let report = json(&run(place.path(), line));
    let passes = &report["runs"][0]["passes"];
    assert_eq!((&passes["binds"], &passes["engine_seconds"]), (&"engine".into(), &0.03.into()), "{passes}");
    assert!(passes["shares"]["engine"].as_f64().unwrap() > 0.3, "{passes}");
}

#[test]
fn a_plan_names_the_window_and_what_stays() {
    let place = workplace();
    let report =
        json(&run(place.path(), "plan model --passes 2 --window 1MiB --keep outside --device host --json"));
    let terms: Vec<_> = report["plan"]["resident"]
        .as_array()
        .unwrap()
        .iter()
        .map(|term| term["name"].as_str().unwrap())
        .collect();
    assert_eq!(terms, ["window", "kept layers"]);
    assert_eq!(report["plan"]["params"]["window_bytes"].as_u64(), Some(1 << 20));
    let text = stdout(&run(place.path(), "plan model --passes 2 --window 1 --keep outside --device host"));
    assert!(text.contains("  window: ") && text.contains("  kept layers: "), "{text}");
}

#[test]
fn what_cannot_be_is_said() {
    let place = workplace();
    for (line, part) in [
        ("model --passes 0", "0 is not in 1..=10000"),
        ("model --keep , --passes 2", "names of layers with commas between"),
        ("model --passes 2 --keep nowhere --device host", "no layer named `nowhere`"),
        ("model --passes 2 --window 1KiB --device host", "allow a window of"),
        ("model --window 3x-layer", "a size such as 2GiB"),
    ] {
        let output = run(place.path(), line);
        assert_code(&output, 2);
        assert!(stderr(&output).contains(part), "{line}: {}", stderr(&output));
    }
}
