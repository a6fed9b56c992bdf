//! What people meet first: answers on top, exit codes of `fits`, slips of the command line, words.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::fs;
use std::io::Write as _;
use std::path::Path;

use crate::support::group::group_or_skip;
use crate::support::{assert_code, json, loadcheck, model, run, stderr, stdout, workplace};
use onelayer_testing::fixture;

/// Sixteen layers of holes: `len_bytes` that take no room.
fn write_sparse(path: &Path, len_bytes: u64) {
    let each = len_bytes / 32;
    let names =
        (0..16).flat_map(|layer| ["down", "up"].map(|part| format!("model.layers.{layer}.{part}.weight")));
    let entries: Vec<String> = (0..32_u64)
        .zip(names)
        .map(|(index, name)| {
            let (start, end) = (index * each, (index + 1) * each);
            format!("\"{name}\":{{\"dtype\":\"U8\",\"shape\":[{each}],\"data_offsets\":[{start},{end}]}}")
        })
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let header_bytes = u64::try_from(header.len()).unwrap();
    let mut file = fs::File::create(path).unwrap();
    file.write_all(&header_bytes.to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header_bytes + each * 32).unwrap();
}

#[test]
fn every_command_opens_with_its_answer() {
    let place = model();
    for (line, answer, outcome) in [
        ("run model", "Loading needs ", "ok"),
        ("run model --max-memory 1GiB", ": within its limits.", "ok"),
        ("run model --max-memory 1KiB", ": over the limit of 1 KiB.", "over_limit"),
        ("plan model", "Fits in the ", "fits"),
        ("plan model --max-memory 16MiB", "Does not fit in 16 MiB: needs ", "does_not_fit"),
        ("fits model 8GB", "Fits in 8 GB: needs ", "fits"),
        ("inspect model", "553 KiB in 8 tensors and 5 layers", "ok"),
        ("compare model --runs 1", "stream was ", "ok"),
        ("leak model --cycles 12 --max-slope 1GiB", "No leak: in 12 cycles nothing grows", "ok"),
        ("exec sleep 0.3", "The command needs ", "ok"),
        ("convert model out --dry-run", "Would write 5 files, ", "ok"),
        ("verify model", "the weights were not checked", "ok"),
        ("doctor", " checks", "ok"),
    ] {
        let text = stdout(&run(place.path(), line));
        let first = text.lines().next().unwrap_or_default();
        assert!(first.contains(answer), "{line}: {text}");
        let line = format!("{line} --json").replace("exec sleep 0.3 --json", "exec --json sleep 0.3");
        let report = json(&run(place.path(), &line));
        assert_eq!(report["answer"]["outcome"], outcome, "{line}");
        assert!(report["answer"]["sentence"].as_str().unwrap().contains(answer), "{line}");
        assert!(report["verdict"].is_string(), "the key stays");
    }
    let report = json(&run(place.path(), "inspect nothing --json"));
    assert_eq!(report["answer"]["outcome"], "error");
}

#[test]
fn fits_answers_with_its_exit_code() {
    let place = workplace();
    write_sparse(&place.path().join("big.safetensors"), 4 << 30);
    assert_code(&run(place.path(), "fits big.safetensors 8GB"), 0);
    let output = run(place.path(), "fits big.safetensors 2GB");
    assert_code(&output, 1);
    let text = stdout(&output);
    assert!(
        text.starts_with("Does not fit in 2 GB: needs ")
            && text.contains(" short; with --window 2 it does ("),
        "{text}"
    );
    let room = &json(&run(place.path(), "fits big.safetensors 2GB --json"))["room"];
    assert_eq!((&room["fits"], &room["limit_of"]), (&false.into(), &"stated".into()));
    assert_eq!(room["alternatives"][0]["flags"], "--window 2");
    let with = run(place.path(), "fits big.safetensors 2GB --window 2");
    assert_code(&with, 0);
    assert_eq!(
        room["alternatives"][0]["needed_bytes"],
        json(&run(place.path(), "fits big.safetensors 2GB --window 2 --json"))["room"]["needed_bytes"]
    );
    assert_code(&run(place.path(), "fits big.safetensors 8"), 2);
    assert_code(&run(place.path(), "fits nothing 8GB"), 3);
}

/// A prediction knows the group that it runs in: as `run`, which is refused there.
#[test]
fn a_plan_knows_the_limit_of_its_control_group() {
    let Some(group) = group_or_skip(Some(1 << 30)) else { return };
    let place = workplace();
    write_sparse(&place.path().join("big.safetensors"), 2 << 30);
    let inside = |line: &str| {
        let procs = group.directory().join("cgroup.procs");
        let script = format!("echo $$ > {} && exec \"$@\"", procs.display());
        let words = ["sh", "-c", &script, "sh"];
        let mut command = loadcheck(place.path());
        command.args(line.split(' '));
        crate::support::run_command(&crate::support::wrapped(words, &command))
    };
    for line in ["plan big.safetensors", "fits big.safetensors"] {
        let output = inside(line);
        let text = stdout(&output);
        assert!(
            text.starts_with("Does not fit in the ") && text.contains("free in this container"),
            "{text}"
        );
        assert!(text.contains("with --window 2 it does"), "{text}");
        assert_code(&output, i32::from(line.starts_with("fits")));
        assert!(!stderr(&output).contains("Next:"), "what cannot work is not recommended");
    }
    assert_code(&inside("run big.safetensors"), 2);
    assert_code(&inside("plan big.safetensors --window 2"), 0);
}

#[test]
fn a_placement_says_whether_it_fits() {
    let place = tempfile::tempdir().unwrap();
    let llama = fixture("llama").display().to_string();
    let text = stdout(&run(place.path(), &format!("plan {llama} --budget 8MiB --host 8300KiB")));
    assert!(text.starts_with("Does not fit: ") && text.contains(" stay on the disk."), "{text}");
    let text = stdout(&run(place.path(), &format!("plan {llama} --budget 8MiB --host 1GiB --context 64")));
    assert!(
        text.starts_with("Fits: 7 layers on the host, ")
            && text.contains("; batch ")
            && !text.contains("1 048 576"),
        "{text}"
    );
}

#[test]
fn slips_get_advice_that_helps() {
    let place = workplace();
    for (line, expected) in [
        ("model --vram 8GB", "`--max-vram SIZE` limits device memory"),
        ("model --memory 8GB", "`--max-memory SIZE`"),
        ("plan model --limit 8GB", "`--max-memory SIZE`"),
        ("synth --list", "`loadcheck synth --help` lists the presets"),
        ("model --budget -1", "not negative"),
        ("model --emit k8s", "`--emit` is a flag of `fit`"),
        ("bench model", "there is no command `bench`"),
        ("model model2", "`run` takes one SOURCE"),
        ("model --windw 1", "`--window`"),
        ("model --max-host 8", "8 of what? write 8GB, 8MiB or 8B"),
        ("model --budget 64", "64 of what?"),
        ("fit --cmd load/{source}", "no SOURCE is given"),
        ("fit --cmd true -s mmap --cmd true", "no SOURCE is given"),
        ("leak --cmd load/{source}", "no SOURCE is given"),
        ("leak", "<SOURCE>"),
        ("compare model --cmd true --name a --name b", "more --name than --cmd"),
        ("model -o r.xyz", "picks no format"),
        ("plan model -o r.html", "picks no format"),
        ("convert model model/sub", "inside the source"),
        ("explain LC9999", "there is no code"),
    ] {
        let output = run(place.path(), line);
        assert_code(&output, 2);
        let text = stderr(&output);
        assert!(text.contains(expected) && !text.contains("as a value, use"), "{line}: {text}");
    }
    assert!(!place.path().join("model/sub").exists());
    for line in
        ["model -o r.txt", "model --json -o r.xyz", "model --max-memory 1GiB", "model --limit memory=1GiB"]
    {
        assert_code(&run(place.path(), line), 0);
    }
}

#[test]
fn commands_need_neither_a_source_nor_dashes() {
    let place = workplace();
    assert_code(&run(place.path(), "leak --cmd true --cycles 8 --warmup 0"), 0);
    let output = run(place.path(), "exec cat model/model.safetensors --help");
    assert_code(&output, 0);
    assert!(stdout(&output).contains("cat model/model.safetensors --help"), "{}", stdout(&output));
    if group_or_skip(None).is_some() {
        assert_code(&run(place.path(), "fit --cmd true --runs 1"), 0);
    }
    let output = loadcheck(place.path())
        .args(["compare", "model", "--runs", "1", "-s", "read", "--cmd", "cat {source}/model.safetensors"])
        .args(["--name", "plain cat", "--json"])
        .output()
        .unwrap();
    assert_eq!(json(&output)["comparison"][1]["strategy"], "plain cat");
}

#[test]
fn a_command_that_memory_ran_out_for_is_told_how_to_find_its_need() {
    let Some(group) = group_or_skip(Some(64 << 20)) else { return };
    let place = workplace();
    let procs = group.directory().join("cgroup.procs");
    let script = format!("echo $$ > {} && exec \"$@\"", procs.display());
    let mut command = loadcheck(place.path());
    command.args(["exec", "--", "sh", "-c", "x=$(head -c 268435456 /dev/zero | tr '\\0' a)"]);
    let output = crate::support::run_command(&crate::support::wrapped(["sh", "-c", &script, "sh"], &command));
    let text = stderr(&output);
    assert_code(&output, 5);
    assert!(
        text.contains("not what the command needs") && text.contains("loadcheck fit --cmd 'sh -c "),
        "{text}"
    );
    let text = stdout(&output);
    assert!(text.starts_with("Killed at ") && text.contains("by the limit of 64 MiB"), "{text}");
    assert!(!text.contains("has to hold this"), "{text}");
}

/// A gate that the command swallowed would be green for ever.
#[test]
fn limits_behind_a_command_are_told() {
    let place = workplace();
    let text = stdout(&run(place.path(), "exec sh -c true --max-memory 1MiB"));
    assert!(text.contains("--max-memory stands behind the command"), "{text}");
    let text = stdout(&run(place.path(), "exec -- sh -c true --max-memory 1MiB"));
    assert!(!text.contains("stands behind"), "{text}");
    // The answer is seen where the report is not.
    let output = run(place.path(), "model --max-memory 1KiB -o gate.json --progress never");
    assert_code(&output, 1);
    assert!(stderr(&output).contains("over the limit of 1 KiB"), "{}", stderr(&output));
}

#[test]
fn verify_says_what_was_checked() {
    let place = workplace();
    let text = stdout(&run(place.path(), "verify model"));
    assert!(!text.contains("as they should be") && text.contains("were not checked"), "{text}");
    let output = run(place.path(), "verify model --require-hashes");
    assert_code(&output, 5);
    assert!(stderr(&output).contains("there is no hash to check the weights by"), "{}", stderr(&output));
    assert_code(&run(place.path(), "convert model out"), 0);
    assert_code(&run(place.path(), "verify out --require-hashes"), 0);
}

#[test]
fn files_of_the_cache_are_checked_by_their_names() {
    let place = workplace();
    let bytes = fs::read(place.path().join("model/model.safetensors")).unwrap();
    let sum = std::process::Command::new("sha256sum")
        .arg(place.path().join("model/model.safetensors"))
        .output()
        .unwrap();
    let hash = String::from_utf8(sum.stdout).unwrap()[..64].to_owned();
    let snapshot = place.path().join("hub/models--o--n/snapshots/0e9e39f249a16976918f6564b8830bc894c89659");
    let blob = place.path().join("hub/models--o--n/blobs").join(&hash);
    for folder in [&snapshot, blob.parent().unwrap()] {
        fs::create_dir_all(folder).unwrap();
    }
    fs::write(&blob, &bytes).unwrap();
    std::os::unix::fs::symlink(format!("../../blobs/{hash}"), snapshot.join("model.safetensors")).unwrap();
    let verify = || {
        let mut command = loadcheck(place.path());
        command.args(["verify", "--require-hashes"]).arg(&snapshot).output().unwrap()
    };
    assert_code(&verify(), 0);
    let mut damaged = bytes;
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(&blob, damaged).unwrap();
    let output = verify();
    assert_code(&output, 5);
    assert!(stdout(&output).contains("DIFFERS  model.safetensors: its SHA-256 is "), "{}", stdout(&output));
}

#[test]
fn a_cast_changes_the_type_in_the_configuration() {
    let place = model();
    let config = r#"{"torch_dtype": "float32",
        "eps": 1e-05, "text_config": {"dtype":"float16"}, "other": {"dtype": "float16"}}"#;
    fs::write(place.path().join("model/config.json"), config).unwrap();
    let text = stdout(&run(place.path(), "convert model out --dtype bf16"));
    assert!(text.contains("torch_dtype was float32 and is bfloat16 now"), "{text}");
    let written = fs::read_to_string(place.path().join("out/config.json")).unwrap();
    let expected = config.replace("float32", "bfloat16").replacen("float16\"}", "bfloat16\"}", 1);
    assert_eq!(written, expected, "nothing else changes");
    assert_code(&run(place.path(), "verify out --against model"), 0);
    let text = stdout(&run(place.path(), "convert model out2"));
    assert!(!text.contains("torch_dtype"), "{text}");
    assert_eq!(fs::read_to_string(place.path().join("out2/config.json")).unwrap(), config);
}

/// Python writes and reads them, and the configurations of Mamba models have them.
#[test]
fn a_configuration_with_infinities_names_the_new_type_too() {
    let place = model();
    let config = r#"{"time_step_limit": [0.0, Infinity, -Infinity, NaN], "say": "NaN \" Infinity\\",
        "model_type": "mamba2", "dtype": "float32"}"#;
    fs::write(place.path().join("model/config.json"), config).unwrap();
    assert_code(&run(place.path(), "convert model out --dtype bf16"), 0);
    let written = fs::read_to_string(place.path().join("out/config.json")).unwrap();
    assert_eq!(written, config.replace("float32", "bfloat16"));
}

#[test]
fn what_a_conversion_claims_is_so() {
    let place = tempfile::tempdir().unwrap();
    let llama = fixture("llama").display().to_string();
    let plain = stdout(&run(place.path(), &format!("convert {llama} plain")));
    assert!(plain.contains("opens in any loader"), "{plain}");
    let small = stdout(&run(place.path(), &format!("convert {llama} small --quantize int4")));
    assert!(!small.contains("opens in any loader") && small.contains("for onelayer's loaders"), "{small}");
    let known = stdout(&run(place.path(), &format!("convert {llama} known --quantize int8 --dtype f16")));
    assert!(known.contains("opens in what reads compressed-tensors"), "{known}");
    let text = fs::read_to_string(place.path().join("known/config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(config["dtype"], "float16", "{text}");
    let quantisation = &config["quantization_config"];
    assert_eq!(quantisation["format"], "int-quantized", "{text}");
    let ignored = ["cls.predictions.decoder", "embed_out", "lm_head", "model.embed_tokens"];
    assert_eq!(quantisation["ignore"], serde_json::json!(ignored), "{text}");
    let output = run(place.path(), &format!("verify known --against {llama}"));
    assert_code(&output, 0);
    let text = stdout(&output);
    assert!(
        text.starts_with("Every tensor is what the conversion makes of ") && text.contains("quantised), "),
        "{text}"
    );
    // A matrix stored as [in, out] has its scales on the wrong side for that reader.
    let gpt2 = fixture("gpt2").display().to_string();
    let turned = stdout(&run(place.path(), &format!("convert {gpt2} turned --quantize int8")));
    assert!(turned.contains("for onelayer's loaders"), "{turned}");
}

#[test]
fn codes_are_explained() {
    let place = tempfile::tempdir().unwrap();
    let text = stdout(&run(place.path(), "explain LC0205"));
    assert!(
        text.starts_with("LC0205: ") && text.contains("--force") && text.contains("Exit code 2"),
        "{text}"
    );
    assert!(stdout(&run(place.path(), "explain")).lines().count() > 30);
}

#[test]
fn the_c_locale_has_ascii_only() {
    let place = workplace();
    let output =
        loadcheck(place.path()).args(["model", "-v", "--runs", "2"]).env("LC_ALL", "C").output().unwrap();
    assert!(stdout(&output).is_ascii() && stderr(&output).is_ascii(), "{}", stdout(&output));
}
