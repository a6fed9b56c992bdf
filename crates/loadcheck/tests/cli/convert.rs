//! `loadcheck convert`: what is written and said, what is refused, how parts come together, and how
//! an interruption ends. `verify` is in `cli_verify`; what the library does with bytes and with a
//! crash is in `convert_*`.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    reason = "a test that cannot go on panics"
)]

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{CONVERTED_FILES as FILES, assert_code, json, loadcheck, model, run, stderr, stdout};
use onelayer_testing::{TestTensor, random_bytes, write_file};
use serde_json::Value;

/// The names of everything in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Every tensor of every file in a folder, by name: type, shape, bytes. Read by the format's own
/// crate.
fn tensors(folder: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for name in names(folder).iter().filter(|name| name.ends_with(".safetensors")) {
        let bytes = fs::read(folder.join(name)).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, tensor) in file.tensors() {
            let entry = (tensor.dtype().to_string(), tensor.shape().to_vec(), tensor.data().to_vec());
            assert!(found.insert(name.clone(), entry).is_none(), "{name} is there twice");
        }
    }
    found
}

#[test]
fn a_conversion_is_a_checkpoint_and_the_report_says_what_it_took() {
    let place = model();
    let output = run(place.path(), "convert model out --json");
    assert_code(&output, 0);
    let report = json(&output);
    assert_eq!((&report["command"], &report["verdict"]), (&Value::from("convert"), &Value::from("pass")));
    let mut expected = FILES.to_vec();
    expected.extend([
        "config.json",
        "model.safetensors.index.json",
        "onelayer.manifest.json",
        "tokenizer.json",
    ]);
    expected.sort_unstable();
    assert_eq!(names(&place.path().join("out")), expected);
    assert_eq!(tensors(&place.path().join("out")), tensors(&place.path().join("model")));

    let convert = &report["convert"];
    assert_eq!(convert["summary"], "3 layers of 55 KiB, model.embed_tokens, lm_head");
    let listed = convert["files"].as_array().unwrap();
    let names: Vec<&str> = listed.iter().map(|file| file["name"].as_str().unwrap()).collect();
    assert_eq!(names, FILES);
    assert!(listed.iter().all(|file| file["state"] == "written"), "{listed:?}");
    assert_eq!(listed[1]["layers"], serde_json::json!(["model.layers.0"]));
    for file in listed {
        let path = place.path().join("out").join(file["name"].as_str().unwrap());
        assert_eq!(fs::metadata(path).unwrap().len(), file["bytes"].as_u64().unwrap());
    }
    let result = &convert["result"];
    assert_eq!((result["files_written"].as_u64(), result["files_kept"].as_u64()), (Some(5), Some(0)));
    assert_eq!((result["complete"].as_bool(), result["side_files"].as_u64()), (Some(true), Some(2)));
    let written: u64 = listed.iter().map(|file| file["bytes"].as_u64().unwrap()).sum();
    assert_eq!(result["written_bytes"].as_u64(), Some(written));
    let terms = convert["memory"]["terms"].as_array().unwrap();
    let sum: u64 = terms.iter().map(|term| term["bytes"].as_u64().unwrap()).sum();
    assert_eq!(convert["memory"]["host_bytes"].as_u64(), Some(sum));
    assert!(sum <= 64 << 20, "{sum}");

    let run = &report["runs"][0];
    assert_eq!((&run["strategy"], &run["outcome"]), (&Value::from("convert"), &Value::from("completed")));
    assert_eq!(run["promise"]["limit_bytes"].as_u64(), Some(80 << 20));
    assert_eq!(run["promise"]["kept"], true);
    assert!(run["peak"]["rss_bytes"].as_u64() > run["baseline"]["rss_bytes"].as_u64());
}

#[test]
fn the_same_command_again_has_nothing_to_do() {
    let place = model();
    assert_code(&run(place.path(), "convert model out"), 0);
    let before = fs::read(place.path().join("out/onelayer.manifest.json")).unwrap();
    let report = json(&run(place.path(), "convert model out --json"));
    let result = &report["convert"]["result"];
    assert_eq!((result["files_written"].as_u64(), result["files_kept"].as_u64()), (Some(0), Some(5)));
    assert!(report["convert"]["memory"].is_null(), "nothing is read: {report}");
    assert_eq!(fs::read(place.path().join("out/onelayer.manifest.json")).unwrap(), before);
    let text = stdout(&run(place.path(), "convert model out"));
    assert!(text.contains("\nkept      5 files of an earlier run\ncomplete  "), "{text}");
}

#[test]
fn a_dry_run_shows_everything_and_writes_nothing() {
    let place = model();
    let output = run(place.path(), "convert model out --dry-run -v");
    assert_code(&output, 0);
    assert!(!place.path().join("out").exists());
    let text = stdout(&output);
    for part in [
        "target    out\n",
        "files     5 files (3 layers of 55 KiB, model.embed_tokens, lm_head), ",
        "; data starts on a multiple of 4096 bytes\n",
        "beside    2 side files copied, 24 B\n",
        "are free); the source is not changed\n",
        "(estimated)",
        "of the budget of 64 MiB (derived); at least ",
        " ring\n",
        "\nNothing was written: this was a dry run.\n",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    assert!(!text.contains("peak"), "nothing is measured: {text}");
    let next = "Next: loadcheck convert model out   (the same without --dry-run)\n";
    assert_eq!(stderr(&output), next);
    let report = json(&run(place.path(), "convert model out --dry-run --json"));
    let convert = &report["convert"];
    assert!(convert["result"].is_null() && report["runs"].as_array().unwrap().is_empty());
    assert!(convert["files"].as_array().unwrap().iter().all(|file| file["state"] == "planned"));
    assert!(convert["needed_bytes"].as_u64().unwrap() > 550 << 10);
    assert!(convert["free_bytes"].as_u64().unwrap() > convert["needed_bytes"].as_u64().unwrap());
    let estimate = &convert["estimate"];
    assert_eq!(estimate["source"], "estimated");
    match estimate["seconds"].as_f64() {
        Some(seconds) => {
            assert!(seconds > 0.0 && seconds < 60.0, "{estimate}");
            assert!(estimate["read_bytes_per_second"].as_u64() > Some(0));
            assert!(estimate["write_bytes_per_second"].as_u64() > Some(0));
        }
        // A file system without unnamed files, or without direct I/O.
        None => {
            let missing = report["unavailable"].as_array().unwrap();
            assert!(missing.iter().any(|entry| entry["metric"] == "convert.estimate.seconds"), "{report}");
        }
    }
    assert_eq!(names(place.path()), ["model"]);
}

#[test]
fn a_dry_run_of_an_unfinished_conversion_knows_what_is_done() {
    let place = model();
    assert_code(&run(place.path(), "convert model out --part 1/2"), 0);
    let before = names(&place.path().join("out"));
    let report = json(&run(place.path(), "convert model out --part 2/2 --dry-run --json"));
    let kept = |state: &str| {
        let files = report["convert"]["files"].as_array().unwrap();
        files.iter().filter(|file| file["state"] == state).count()
    };
    let own = report["convert"]["part_files"].as_u64().unwrap();
    assert_eq!((kept("kept") + kept("planned"), kept("planned") as u64), (5, own));
    assert!((1..5).contains(&own), "{own}");
    assert_eq!(names(&place.path().join("out")), before);
}

#[test]
fn there_and_back_again() {
    let place = model();
    for line in [
        "convert model out",
        "convert out whole --merge",
        "convert out shards --merge --max-shard-size 200KiB",
        "convert shards again",
    ] {
        assert_code(&run(place.path(), line), 0);
    }
    let original = tensors(&place.path().join("model"));
    for folder in ["out", "whole", "shards", "again"] {
        assert_eq!(tensors(&place.path().join(folder)), original, "{folder}");
    }
    assert!(place.path().join("whole/model.safetensors").exists());
    assert!(!place.path().join("whole/model.safetensors.index.json").exists());
    for file in FILES {
        let bytes = |folder: &str| fs::read(place.path().join(folder).join(file)).unwrap();
        assert_eq!(bytes("out"), bytes("again"), "{file}");
    }
}

#[test]
fn patterns_take_layers_by_their_id_and_tensors_by_their_name() {
    let place = model();
    let taken = |flags: &[&str], target: &str| -> Vec<String> {
        let output = loadcheck(place.path()).args(["convert", "model", target]).args(flags).output().unwrap();
        assert_code(&output, 0);
        tensors(&place.path().join(target)).into_keys().collect()
    };
    assert_eq!(
        taken(&["--select", "model.layers.1"], "a"),
        ["model.layers.1.mlp.down.weight", "model.layers.1.norm.weight"]
    );
    assert_eq!(
        taken(&["--select", "layers", "--exclude", r"\.norm\.", "--exclude", "model.layers.0"], "b").len(),
        2
    );
    assert_eq!(taken(&["--exclude", "model.layers"], "c"), ["lm_head.weight", "model.embed_tokens.weight"]);
    let manifest: Value =
        serde_json::from_slice(&fs::read(place.path().join("c/onelayer.manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["options"], serde_json::json!(["--exclude model.layers"]));
    assert_eq!(manifest["left_out"].as_array().unwrap().len(), 6);
    // As a regular expression it would take the eleventh layer too.
    let part = |layer: u64, part| TestTensor::random(format!("model.layers.{layer}.{part}"), 100, layer);
    let many: Vec<TestTensor> =
        (0..11).flat_map(|layer| [part(layer, "norm.weight"), part(layer, "mlp.weight")]).collect();
    write_file(&place.path().join("many.safetensors"), &many, 0);
    assert_code(&run(place.path(), "convert many.safetensors one --select model.layers.1"), 0);
    assert_eq!(
        tensors(&place.path().join("one")).into_keys().collect::<Vec<_>>(),
        ["model.layers.1.mlp.weight", "model.layers.1.norm.weight"]
    );
    let output = run(place.path(), "convert model d --select lm_head --exclude embeddings");
    assert_code(&output, 0);
    assert!(
        stdout(&output).contains("note: --exclude \"embeddings\" matches no tensor\n"),
        "{}",
        stdout(&output)
    );
}

/// A place with `floats/`: F32 weights, an I64 and a BOOL tensor.
fn floats() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    fs::create_dir(place.path().join("floats")).unwrap();
    let float = |name: &str, seed| {
        let mut tensor = TestTensor::random(name, 4096, seed);
        // Exponents in the middle of their range: no infinities, nothing subnormal.
        tensor.bytes.chunks_exact_mut(4).for_each(|bytes| bytes[3] = 0x3f);
        (tensor.dtype, tensor.shape) = ("F32", vec![32, 32]);
        tensor
    };
    let other = |name: &str, dtype, len: usize, width: u64| TestTensor {
        name: name.to_owned(),
        dtype,
        shape: vec![len as u64 / width],
        bytes: random_bytes(len, 77).iter().map(|byte| byte & 1).collect(),
    };
    let tensors = [
        other("counts", "I64", 64, 8),
        float("model.layers.0.mlp.weight", 1),
        float("model.layers.0.norm.weight", 2),
        float("model.layers.1.mlp.weight", 3),
        float("model.layers.1.norm.weight", 4),
        other("switches", "BOOL", 16, 1),
    ];
    write_file(&place.path().join("floats/model.safetensors"), &tensors, 0);
    place
}

#[test]
fn rules_decide_about_types_by_name() {
    let place = floats();
    let rules = "[[rule]]\nmatch = 'norm'\ndtype = 'keep'\n\n[[rule]]\nmatch = '^counts$'\ndtype = 'f32'\n\n\
                 [[rule]]\nmatch = 'norm'\ndtype = 'f16'\n";
    fs::write(place.path().join("rules.toml"), rules).unwrap();
    let output = run(place.path(), "convert floats out --dtype bf16 --dtype-rules rules.toml");
    assert_code(&output, 0);
    let text = stdout(&output);
    assert!(text.contains("note: the dtype rule in line 10 (\"norm\") applies to no tensor"), "{text}");
    let types: Vec<(String, String)> =
        tensors(&place.path().join("out")).into_iter().map(|(name, (dtype, ..))| (name, dtype)).collect();
    let types: Vec<(&str, &str)> =
        types.iter().map(|(name, dtype)| (name.as_str(), dtype.as_str())).collect();
    assert_eq!(
        types,
        [
            ("counts", "F32"),
            ("model.layers.0.mlp.weight", "BF16"),
            ("model.layers.0.norm.weight", "F32"),
            ("model.layers.1.mlp.weight", "BF16"),
            ("model.layers.1.norm.weight", "F32"),
            ("switches", "BOOL"),
        ]
    );
    let manifest: Value =
        serde_json::from_slice(&fs::read(place.path().join("out/onelayer.manifest.json")).unwrap()).unwrap();
    let options: Vec<&str> =
        manifest["options"].as_array().unwrap().iter().map(|option| option.as_str().unwrap()).collect();
    assert_eq!(options[..3], ["--dtype bf16", "--dtype-rules rules.toml", "rule \"norm\" = keep"]);
}

#[test]
fn what_cannot_be_met_is_refused_before_anything_is_written() {
    let place = floats();
    let path = place.path();
    fs::write(path.join("bad.toml"), "[[rule]]\nmatch = 'x'\ndtype = 'int4'\n").unwrap();
    fs::write(path.join("bools.toml"), "[[rule]]\nmatch = 'switch'\ndtype = 'bf16'\n").unwrap();
    fs::write(path.join("file"), "a file").unwrap();
    fs::create_dir(path.join("taken")).unwrap();
    fs::write(path.join("taken/model-00001-of-00004.safetensors"), "somebody else's").unwrap();
    std::os::unix::fs::symlink("floats", path.join("link")).unwrap();
    for (line, code, named) in [
        ("convert floats out --budget 1MiB", "LC0201", "or more"),
        ("convert floats out --budget 2000%", "LC0202", "at most 100%"),
        ("convert floats out --part 9/8", "LC0202", "1/8 for the first"),
        ("convert floats out --part 1/8 --finish", "LC0202", "cannot be used with"),
        ("convert floats out --merge --experts per-file", "LC0202", "cannot be used with"),
        ("convert floats out --opaque-dtypes", "LC0202", "--opaque-dtypes"),
        ("convert floats", "LC0202", "<TARGET>"),
        ("convert floats out --select (", "LC0204", "--select: unclosed group"),
        ("convert floats out --exclude [", "LC0204", "--exclude: unclosed"),
        ("convert floats out -o taken", "LC0205", "directory"),
        ("convert floats out --layers none.toml", "LC0206", "none.toml"),
        ("convert floats out --select nothing-is-called-so", "LC0208", "inspect"),
        ("convert floats floats", "LC0210", "floats"),
        ("convert floats link", "LC0210", "link"),
        ("convert floats ./floats/.", "LC0210", "floats"),
        ("convert floats file", "LC0210", "file"),
        ("convert floats file/below", "LC0210", "file"),
        ("convert floats taken", "LC0210", "--force"),
        ("convert floats s3://bucket/key", "LC0210", "local directory"),
        ("convert floats out --dtype-rules bad.toml", "LC0213", "line 3, column 9: `dtype` is \"int4\""),
        ("convert floats out --dtype-rules none.toml", "LC0213", "none.toml"),
        ("convert floats out --dtype-rules bools.toml", "LC0214", "switches"),
    ] {
        let output = run(path, line);
        assert_code(&output, 2);
        let text = stderr(&output);
        assert!(text.contains(&format!("error[{code}]")) && text.contains(named), "{line}: {text}");
        assert!(!path.join("out").exists(), "{line}");
    }
    assert_eq!(names(&path.join("taken")), ["model-00001-of-00004.safetensors"]);
    assert_eq!(names(&path.join("floats")), ["model.safetensors"]);
    for (line, code) in
        [("convert none out", "LC0301"), ("convert org/name out", "LC0304"), ("verify none", "LC0301")]
    {
        let output = run(path, line);
        assert_code(&output, 3);
        assert!(stderr(&output).contains(code), "{line}: {}", stderr(&output));
    }
}

#[test]
fn all_problems_come_in_one_go() {
    let place = floats();
    fs::write(place.path().join("bad.toml"), "").unwrap();
    let line = "convert floats s3://x --dtype-rules bad.toml --layers none.toml --select ( -o no/such/file";
    let output = run(place.path(), line);
    assert_code(&output, 2);
    let text = stderr(&output);
    for code in ["LC0204", "LC0205", "LC0206", "LC0210", "LC0213"] {
        assert!(text.contains(code), "{code}: {text}");
    }
    fs::write(place.path().join("floats/model.safetensors"), "bad").unwrap();
    let output = run(place.path(), "convert floats out --dtype-rules bad.toml --budget 1MiB --json");
    assert_code(&output, 3);
    let codes: Vec<String> = json(&output)["errors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|error| error["code"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(codes, ["LC0302", "LC0213", "LC0201"]);
}

#[test]
fn what_is_in_the_way_is_replaced_on_purpose_only() {
    let place = floats();
    assert_code(&run(place.path(), "convert floats out"), 0);
    let output = run(place.path(), "convert floats out --dtype bf16");
    assert_code(&output, 2);
    assert!(stderr(&output).contains("error[LC0210]"), "{}", stderr(&output));
    assert_eq!(tensors(&place.path().join("out")), tensors(&place.path().join("floats")));
    assert_code(&run(place.path(), "convert floats out --dtype bf16 --force"), 0);
    assert_eq!(tensors(&place.path().join("out"))["model.layers.0.mlp.weight"].0, "BF16");
}

#[test]
fn parts_come_together_whatever_their_order() {
    let place = model();
    let path = place.path();
    assert_code(&run(path, "convert model whole"), 0);
    for line in
        ["convert model out --part 3/3", "convert model out --part 1/3", "convert model out --part 1/3"]
    {
        let output = run(path, line);
        assert_code(&output, 0);
        assert!(stdout(&output).contains("index and manifest come with --finish"), "{}", stdout(&output));
        assert!(stderr(&output).contains("--finish"), "{}", stderr(&output));
        assert!(!path.join("out/onelayer.manifest.json").exists());
    }
    let early = run(path, "convert model out --finish --json");
    assert_code(&early, 5);
    let report = json(&early);
    assert_eq!(report["error"]["code"], "LC0511");
    assert_eq!(report["convert"]["result"]["complete"], false);
    assert_code(&run(path, "convert model out --part 2/3"), 0);
    let report = json(&run(path, "convert model out --finish --json"));
    assert_eq!(report["convert"]["result"]["complete"], true);
    assert_eq!(names(&path.join("out")), names(&path.join("whole")));
    for name in names(&path.join("out")) {
        let bytes = |folder: &str| fs::read(path.join(folder).join(&name)).unwrap();
        assert_eq!(bytes("out"), bytes("whole"), "{name}");
    }
    assert_code(&run(path, "convert model never-begun --finish"), 5);
    assert!(!path.join("never-begun").exists());
}

#[test]
fn progress_tells_programs_of_each_file() {
    let place = model();
    let output = run(place.path(), "convert model out --progress json");
    let lines: Vec<Value> =
        stderr(&output).lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let files: Vec<&Value> = lines.iter().map(|line| &line["file"]).filter(|file| file.is_object()).collect();
    assert_eq!(files.iter().map(|file| file["name"].as_str().unwrap()).collect::<Vec<_>>(), FILES);
    assert!(files.iter().all(|file| file["state"] == "written" && file["bytes"].as_u64() > Some(0)));
    let last = &lines.iter().rfind(|line| line["progress"].is_object()).unwrap()["progress"];
    assert_eq!(
        (last["done_bytes"].as_u64(), &last["files_total"]),
        (last["total_bytes"].as_u64(), &Value::from(5))
    );
    let plain = stderr(&run(place.path(), "convert model plain"));
    assert!(plain.contains("loadcheck: 100 %") && plain.contains("/5 files\n"), "{plain}");
    assert_eq!(stderr(&run(place.path(), "convert model quiet -q")), "");
}

/// A place with `large/`: 16 layers of 8 MiB.
fn large() -> tempfile::TempDir {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = place.path().join("large");
    fs::create_dir(&folder).unwrap();
    let part = |layer: u64, part, len| TestTensor::random(format!("model.layers.{layer}.{part}"), len, layer);
    let tensors: Vec<TestTensor> = (0..16)
        .flat_map(|layer| [part(layer, "mlp.weight", 8 << 20), part(layer, "norm.weight", 1 << 10)])
        .collect();
    write_file(&folder.join("model.safetensors"), &tensors, 0);
    place
}

#[test]
fn an_interrupt_keeps_what_is_finished_and_the_same_command_goes_on() {
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let place = large();
        let mut child = loadcheck(place.path())
            .args(["convert", "large", "out", "--json", "--progress", "json"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let first = lines.find(|line| line.as_ref().unwrap().contains("\"file\""));
        assert!(first.is_some(), "a file was published");
        let start = Instant::now();
        let sent = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let rest: Vec<String> = lines.map(Result::unwrap).collect();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{rest:?}");
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        let report = json(&output);
        assert_eq!(report["error"]["code"], "LC0507");
        assert!(rest.iter().any(|line| line.contains("the same command continues")), "{rest:?}");
        assert_eq!(report["runs"][0]["outcome"], "interrupted");
        let result = &report["convert"]["result"];
        let written = result["files_written"].as_u64().unwrap();
        assert!((1..16).contains(&written) && result["complete"] == false, "{result}");
        let there = names(&place.path().join("out"));
        let whole = there.iter().filter(|name| name.ends_with(".safetensors") && !name.starts_with('.'));
        assert_eq!(whole.count() as u64, written, "{there:?}");
        assert!(!there.iter().any(|name| name.ends_with(".partial")), "{there:?}");

        let report = json(&run(place.path(), "convert large out --json"));
        let result = &report["convert"]["result"];
        assert_eq!(
            (result["files_kept"].as_u64(), result["files_written"].as_u64()),
            (Some(written), Some(16 - written))
        );
        assert_eq!(tensors(&place.path().join("out")), tensors(&place.path().join("large")));
        assert!(!names(&place.path().join("out")).iter().any(|name| name.starts_with('.')));
    }
}

#[test]
fn names_from_files_are_escaped() {
    let place = tempfile::tempdir().unwrap();
    for (folder, seed) in [("a", 1), ("b", 2)] {
        fs::create_dir(place.path().join(folder)).unwrap();
        let tensors = [TestTensor::random("model.\u{1b}[31mred", 64, seed)];
        write_file(&place.path().join(folder).join("model.safetensors"), &tensors, 0);
    }
    for (line, code) in [
        ("convert a out -v", 0),
        ("convert a out2 --dry-run -v", 0),
        ("convert a out3 --select nothing", 2),
        ("verify a --against b", 5),
        ("verify a --against b --format md", 5),
        ("verify a --against b --format csv", 5),
        ("verify a --against b --format github", 5),
    ] {
        let output = run(place.path(), line);
        assert_code(&output, code);
        for text in [stdout(&output), stderr(&output)] {
            assert!(!text.contains('\u{1b}'), "{line}: {text:?}");
        }
    }
}

#[test]
fn a_name_in_the_cache_can_be_converted_and_verified() {
    let place = model();
    let commit = "0e9e39f249a16976918f6564b8830bc894c89659";
    let repository = place.path().join("hub/models--org--name");
    let snapshot = repository.join("snapshots").join(commit);
    for folder in ["blobs", "refs"] {
        fs::create_dir_all(repository.join(folder)).unwrap();
    }
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(repository.join("refs/main"), commit).unwrap();
    for name in names(&place.path().join("model")) {
        fs::copy(place.path().join("model").join(&name), repository.join("blobs").join(&name)).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{name}"), snapshot.join(&name)).unwrap();
    }
    for line in ["convert org/name out --verify --json", "verify out --against org/name --json"] {
        let mut command = loadcheck(place.path());
        let output =
            command.args(line.split(' ')).env("HF_HUB_CACHE", place.path().join("hub")).output().unwrap();
        assert_code(&output, 0);
    }
    assert!(
        names(&place.path().join("out")).contains(&"config.json".to_owned()),
        "links to files are followed"
    );
    assert_eq!(tensors(&place.path().join("out")), tensors(&place.path().join("model")));
}
