//! `--device`, `--dtype` and `--verify` on a machine without a CUDA driver: every run here finds
//! files called libcuda that are no libraries, so the machine that runs the tests may have a driver
//! or not. With a (simulated) driver: `cli_cuda`.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    reason = "a test that cannot go on panics"
)]

use std::path::Path;

use crate::support::{assert_code, json, run, stderr, stdout, workplace};
use onelayer_testing::{TestTensor, fixture, random_bytes, write_file};

#[test]
#[cfg(feature = "cuda")]
fn no_driver_is_exit_code_four_and_one_message() {
    let place = workplace();
    let output = run(place.path(), "model --device cuda:0");
    assert_code(&output, 4);
    assert_eq!(stdout(&output), "", "nothing else is printed");
    let text = stderr(&output);
    let lines: Vec<&str> = text.lines().collect();
    let [message, help] = lines[..] else { panic!("{text}") };
    let start =
        "error[LC0402]: cannot use --device cuda:0: no CUDA driver: looked for libcuda.so, libcuda.so.1 (";
    let end = "); install the NVIDIA driver, or start the container with its GPUs";
    assert!(message.starts_with(start) && message.ends_with(end), "{message}");
    assert_eq!(help, "  help: --device host keeps the layers in memory, --device none only reads them");
    let report = json(&run(place.path(), "model --device cuda:0 --json"));
    assert_eq!((&report["error"]["code"], &report["verdict"]), (&"LC0402".into(), &"error".into()));
    assert_eq!(report["runs"].as_array().unwrap().len(), 0, "nothing was run");
}

/// The device is looked at even where there is no checkpoint: all problems come in one go.
#[test]
fn a_missing_source_does_not_hide_a_missing_device() {
    let place = workplace();
    let output = run(place.path(), "nowhere --device cuda:0");
    assert_code(&output, 3);
    let text = stderr(&output);
    let codes: Vec<&str> = text.split("error[").skip(1).map(|block| &block[..6]).collect();
    assert_eq!(codes, ["LC0301", "LC0402"], "{text}");
}

#[test]
fn auto_is_the_host_and_says_why() {
    let place = workplace();
    let why = if cfg!(feature = "cuda") { "no CUDA driver" } else { "this build has no CUDA device" };
    for line in ["model -v", "model -v --device auto", "plan model -v"] {
        let text = stdout(&run(place.path(), line));
        assert!(text.contains("device host"), "{line}: {text}");
        let note = text.lines().find(|line| line.starts_with("note: ")).unwrap();
        assert!(note.contains(why) && note.ends_with("using host memory"), "{note}");
        let report = json(&run(place.path(), &format!("{line} --json")));
        assert!(report["notes"][0].as_str().unwrap().contains(why), "{}", report["notes"]);
    }
    let report = json(&run(place.path(), "model --runs 2 --json"));
    for run in report["runs"].as_array().unwrap() {
        assert_eq!(run["params"]["device"], "host");
        assert_eq!(run["ring"]["pinning"], "not_needed");
        assert!(run["ring"]["mode"].as_str().unwrap().ends_with("_pages"), "{}", run["ring"]);
        assert_eq!(run["resident_host_bytes"], run["resident_bytes"]);
        assert!(run["vram"].is_null() && run["peak"]["vram_bytes"].is_null());
    }
    assert_eq!(report["host"]["gpus"].as_array().unwrap().len(), 0);
    let text = stdout(&run(place.path(), "model -q --device host"));
    assert!(!text.contains("note"), "who asks for the host gets no note: {text}");
}

#[test]
fn a_device_is_planned_for_without_being_there() {
    let place = workplace();
    let output = run(place.path(), "plan model --device cuda:0 --json");
    assert_code(&output, 0);
    let plan = &json(&output)["plan"];
    assert_eq!(plan["params"]["device"], "cuda:0");
    assert_eq!(plan["params"]["device_reserve_bytes"], 64 << 20);
    assert_eq!(plan["ring"]["pinning"], "whole");
    assert_eq!(plan["resident_host_bytes"], 0, "that is device memory");
    assert!(plan["resident_bytes"].as_u64() > Some(0) && plan["ring"]["pinned_bytes"].as_u64() > Some(0));
    assert!(plan["ring"]["mode"].is_null(), "nothing was mapped");
    let text = stdout(&run(place.path(), "plan model --device cuda:7 -v"));
    assert!(text.contains("device cuda:7") && text.contains("on the device: at most"), "{text}");
    assert!(text.contains("the whole ring if the driver allows it"), "{text}");
    let host = &json(&run(place.path(), "plan model --device host --json"))["plan"];
    assert_eq!(host["ring"]["pinning"], "not_needed");
    assert_eq!(host["resident_host_bytes"], host["resident_bytes"]);
    assert!(host["params"]["device_reserve_bytes"].is_null());
}

#[test]
fn a_device_budget_is_refused_with_what_would_do() {
    let place = workplace();
    let output = run(place.path(), "plan model --device cuda:0 --device-budget 400KiB");
    assert_code(&output, 2);
    let text = stderr(&output);
    assert!(text.contains("error[LC0207]") && text.contains("--device-budget 1MiB or more"), "{text}");
    assert_code(&run(place.path(), "plan model --device cuda:0 --device-budget 1MiB"), 0);
    let report = json(&run(place.path(), "plan model --device cuda:0 --device-budget 4x-layer --json"));
    assert_eq!(report["plan"]["params"]["device_budget_bytes"], 4 * (200 << 10));
    let output = run(place.path(), "plan model --device cuda:0 --device-reserve 10%");
    assert_code(&output, 2);
    assert!(stderr(&output).contains("error[LC0203]"), "per cent of what: {}", stderr(&output));
}

/// Floats of every width with every kind of number, tensors of more than one piece, empty ones, and
/// bytes that are no floats.
fn write_floats(path: &Path) -> u64 {
    let float = |name: &str, dtype: &'static str, bytes: Vec<u8>, size: usize| TestTensor {
        name: name.to_owned(),
        dtype,
        shape: vec![(bytes.len() / size) as u64],
        bytes,
    };
    let specials = [0.0, -0.0, f64::NAN, f64::INFINITY, -1e300, 65519.999, 6e-8, 1e-320, 1.0039062500000002];
    let mut doubles = random_bytes(1 << 20, 1);
    doubles.extend(specials.iter().flat_map(|number| number.to_le_bytes()));
    let mut singles = random_bytes(3 << 20, 2);
    singles.extend(specials.iter().flat_map(|&number| (number as f32).to_le_bytes()));
    let tensors = [
        float("model.embed_tokens.weight", "F32", singles, 4),
        float("model.layers.0.weight", "F64", doubles, 8),
        float("model.layers.0.norm", "BF16", random_bytes(2002, 3), 2),
        float("model.layers.1.weight", "F32", random_bytes(40_004, 4), 4),
        float("model.layers.1.bits", "U8", random_bytes(777, 5), 1),
        float("model.layers.1.nothing", "F32", Vec::new(), 4),
        float("lm_head.weight", "F16", random_bytes(50_000, 6), 2),
    ];
    write_file(path, &tensors, 0);
    tensors.len() as u64
}

#[test]
fn what_is_delivered_equals_the_files() {
    let place = tempfile::tempdir().unwrap();
    let tensors = write_floats(&place.path().join("floats.safetensors"));
    let plain = json(&run(place.path(), "floats.safetensors --json --device host"));
    assert!(plain["runs"][0]["verified"].is_null(), "only if asked for");
    let whole_bytes = plain["plan"]["tensor_bytes"].as_u64().unwrap();
    for dtype in ["", "--dtype bf16", "--dtype f16", "--dtype f32"] {
        for flags in ["", "--window 1", "--io direct", "--io mmap --window 2"] {
            let line = format!("floats.safetensors --json --device host --verify {dtype} {flags}");
            let output = run(place.path(), &line);
            assert_code(&output, 0);
            let report = json(&output);
            let verified = &report["runs"][0]["verified"];
            assert_eq!(
                (&verified["tensors"], &verified["mismatches"]),
                (&tensors.into(), &0.into()),
                "{line}"
            );
            assert_eq!(verified["bytes"], report["plan"]["tensor_bytes"], "{line}");
            assert_eq!(verified["bytes"].as_u64() < Some(whole_bytes), !dtype.is_empty(), "{line}");
            let asked = dtype.strip_prefix("--dtype ").map_or(serde_json::Value::Null, Into::into);
            assert_eq!(report["runs"][0]["params"]["dtype"], asked);
            assert_eq!(report["runs"][0]["params"]["verify"], true);
            assert_eq!(report["runs"][0]["promise"]["kept"], true, "{line}");
        }
    }
}

#[test]
fn verified_checkpoints_say_so() {
    let place = tempfile::tempdir().unwrap();
    for name in ["llama", "llama_sharded", "gemma2", "gpt2", "qwen2_moe"] {
        let path = fixture(name);
        let output = run(place.path(), &format!("{} --device host --verify --window 1 -q", path.display()));
        assert_code(&output, 0);
        let text = stdout(&output);
        let line = text.lines().find(|line| line.starts_with("verified  ")).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words[1], words[3], "as many as there are: {line}");
        assert!(text.contains("of comparing between the layers"), "{text}");
    }
}

#[test]
fn there_is_nothing_to_verify_where_nothing_is_kept() {
    let place = workplace();
    let output = run(place.path(), "model --device none --verify");
    assert_code(&output, 2);
    assert!(stderr(&output).contains("error[LC0202]: --verify needs tensors"), "{}", stderr(&output));
    assert_code(&run(place.path(), "model --dtype int8"), 2);
}

#[test]
fn the_host_has_no_device_memory_to_limit() {
    let place = workplace();
    for (line, what) in [
        ("model --max-vram 1GiB --device host", "--device host takes no device memory"),
        ("model --max-vram 1GiB", "--device host takes no device memory"),
        ("model --max-vram 1GiB --device none", "--device none takes no device memory"),
        ("model --limit vram=1GiB --device none", "cannot check --limit vram"),
        ("model --max-vram 1GiB@1 --device cuda:0", "the load goes to cuda:0"),
    ] {
        let output = run(place.path(), line);
        assert_code(&output, 4);
        assert!(stderr(&output).contains("error[LC0401]") && stderr(&output).contains(what), "{line}");
    }
}
