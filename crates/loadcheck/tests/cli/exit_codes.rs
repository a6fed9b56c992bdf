//! Every row of the exit code table, as far as a machine without a GPU reaches it. What interrupts
//! and kills is in `cli_worker`, what other commands do in `cli_exec`.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    reason = "a test that cannot go on panics"
)]

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::{
    assert_code, json, loadcheck, loadcheck_at, program_for_all_users, run, stderr, stdout, workplace,
};

#[test]
fn zero_is_a_run_within_its_limits() {
    let place = workplace();
    let output = run(place.path(), "model --max-memory 1GiB --max-peak-rss 1GiB --limit time=60s");
    assert_code(&output, 0);
    assert!(stdout(&output).contains("PASS  unreclaimable"), "{}", stdout(&output));
    for line in ["run model", "plan model", "inspect model", "completions bash", "man", "--version", "-h"] {
        assert_code(&run(place.path(), line), 0);
    }
}

#[test]
fn zero_is_a_reader_that_closes_the_pipe() {
    let place = workplace();
    for line in ["man run", "completions zsh", "inspect model --json", "model --hash", "--help"] {
        let mut child = loadcheck(place.path())
            .args(line.split(' '))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let status = child.wait().unwrap();
        let mut messages = String::new();
        child.stderr.take().unwrap().read_to_string(&mut messages).unwrap();
        assert_eq!(status.code(), Some(0), "{line}: {messages}");
        assert!(!messages.contains("panicked") && !messages.contains("error"), "{line}: {messages}");
    }
}

/// A sparse file that no machine can keep: 4 TiB in one tensor.
#[test]
fn two_is_a_checkpoint_that_memory_cannot_hold() {
    let place = workplace();
    let bytes = 4_u64 << 40;
    let header = format!("{{\"x\":{{\"dtype\":\"U8\",\"shape\":[{bytes}],\"data_offsets\":[0,{bytes}]}}}}");
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    let path = place.path().join("huge.safetensors");
    fs::write(&path, &file).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(file.len() as u64 + bytes).unwrap();
    let output = run(place.path(), "huge.safetensors");
    assert_code(&output, 2);
    let text = stderr(&output);
    assert!(
        text.contains("LC0207") && text.contains("need 4 TiB") && text.contains("--device none"),
        "{text}"
    );
    assert_code(&run(place.path(), "plan huge.safetensors"), 0);
}

#[test]
fn one_is_a_limit_that_was_exceeded() {
    let place = workplace();
    let output = run(place.path(), "model --limit 1KiB --max-peak-rss 1GiB");
    assert_code(&output, 1);
    let text = stdout(&output);
    assert!(text.contains("FAIL  unreclaimable") && text.contains("PASS  rss"), "{text}");
    assert!(text.contains("first exceeded at model."), "the gate names the place: {text}");
    let report = json(&run(place.path(), "model --limit 1KiB --json"));
    assert_eq!(
        (report["verdict"].as_str(), report["limits"][0]["passed"].as_bool()),
        (Some("fail"), Some(false))
    );
    assert!(report["limits"][0]["first_exceeded_at"]["tensor"].as_str().unwrap().starts_with("model."));
    assert_code(&run(place.path(), "model --max-time 1ms --runs 2"), 1);
}

#[test]
fn two_is_a_command_line_that_is_not_understood() {
    let place = workplace();
    for (line, expected) in [
        ("", "Usage"),
        ("model --budgt 5MiB", "--budget"),
        ("insepct model", "inspect"),
        ("model --budget 5q", "10GiB"),
        ("model --budget 512m", "ambiguous"),
        ("model --limit speed=3", "host, rss"),
        ("model --window 0", "at least 1"),
        ("model --quiet --verbose", "cannot be used with"),
        ("exec", "COMMAND"),
        ("man nothing", "there is no command"),
        ("model --select (", "unclosed group"),
        ("exec --until-line [ -- true", "unclosed"),
    ] {
        let output = run(place.path(), line);
        assert_code(&output, 2);
        assert!(stderr(&output).contains(expected), "{line}: {}", stderr(&output));
        assert!(stdout(&output).is_empty(), "{line}: {}", stdout(&output));
    }
}

#[test]
fn two_is_a_request_that_cannot_be_met() {
    let place = workplace();
    fs::write(place.path().join("old.json"), "old").unwrap();
    fs::write(place.path().join("map.toml"), "stacks = 7").unwrap();
    for (line, code, help) in [
        ("model --budget 1MiB", "LC0201", "--budget 5MiB or more"),
        ("plan model --budget 0", "LC0201", "or more"),
        ("model -o old.json", "LC0205", "--force"),
        ("model --export-json no/such/file", "LC0205", "does not exist"),
        ("inspect model -o model/model.safetensors --force", "LC0205", "file of weights"),
        ("run model --export-json new.safetensors.index.json", "LC0205", "file of weights"),
        ("model --layers map.toml", "LC0206", "map.toml"),
        ("model --layers missing.toml", "LC0206", "missing.toml"),
        ("model --select nothing-is-called-so", "LC0208", "inspect"),
        ("exec -- ./no-such-command", "LC0209", "no-such-command"),
        ("exec --max-host 2x-layer -- true", "LC0203", "largest layer"),
    ] {
        let output = run(place.path(), line);
        assert_code(&output, 2);
        let text = stderr(&output);
        assert!(text.contains(&format!("error[{code}]")) && text.contains(help), "{line}: {text}");
    }
    assert_eq!(fs::read_to_string(place.path().join("old.json")).unwrap(), "old");
}

#[test]
fn two_is_a_file_of_layer_rules_that_is_none() {
    let place = workplace();
    let made = std::process::Command::new("mkfifo").arg(place.path().join("pipe.toml")).status().unwrap();
    assert!(made.success());
    fs::write(place.path().join("large.toml"), "#".repeat(300 << 10)).unwrap();
    fs::write(place.path().join("binary.toml"), [0xff, 0xfe]).unwrap();
    fs::write(place.path().join("long.toml"), format!("stacks = [\"{}\"]", "x".repeat(200 << 10))).unwrap();
    for (file, expected) in [
        ("pipe.toml", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        ("/dev/null", "not a regular file"),
        ("large.toml", "307200 bytes, at most 262144"),
        ("binary.toml", "invalid utf-8"),
        ("long.toml", "no numbered list has that name"),
    ] {
        for command in ["run model", "plan model", "inspect model", "convert model out"] {
            let start = Instant::now();
            let output = run(place.path(), &format!("{command} --layers {file}"));
            assert_code(&output, 2);
            let text = stderr(&output);
            assert!(text.contains("error[LC0206]") && text.contains(expected), "{command} {file}: {text}");
            assert!(text.len() < 2500, "{command} {file}: {} bytes", text.len());
            assert!(start.elapsed() < Duration::from_secs(5), "{command} {file} took {:?}", start.elapsed());
        }
    }
}

#[test]
fn two_is_an_output_that_cannot_be_written_before_anything_is_measured() {
    let place = workplace();
    std::os::unix::fs::symlink("nowhere", place.path().join("link.json")).unwrap();
    let long = "x".repeat(256);
    for file in ["link.json", long.as_str(), "model/model.safetensors/x.json"] {
        for command in ["run", "plan", "inspect"] {
            let output = run(place.path(), &format!("{command} model -o {file}"));
            assert_code(&output, 2);
            assert!(stderr(&output).contains("error[LC0205]"), "{file}: {}", stderr(&output));
        }
    }
    // As long as a name can be, and through a link that may be replaced.
    for flags in [format!("-o {}.json", "x".repeat(250)), "-o link.json --force".to_owned()] {
        assert_code(&run(place.path(), &format!("plan model {flags}")), 0);
    }
    assert!(!place.path().join("nowhere").exists(), "the link was replaced, not followed");
}

/// The program as a user to whom modes of files mean something.
fn without_privileges(program: &std::path::Path, place: &std::path::Path) -> std::process::Command {
    use std::os::unix::process::CommandExt as _;
    let mut command = loadcheck_at(program, place);
    if rustix::process::getuid().is_root() {
        fs::set_permissions(place, fs::Permissions::from_mode(0o755)).unwrap();
        command.uid(65534).gid(65534);
    }
    command
}

#[test]
fn what_is_not_permitted_is_said_to_be_so() {
    let place = workplace();
    let program = program_for_all_users(place.path());
    let locked = place.path().join("locked");
    fs::create_dir(&locked).unwrap();
    fs::copy(place.path().join("model/model.safetensors"), locked.join("model.safetensors")).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o000)).unwrap();
    let results: Vec<_> = [
        ("inspect locked", 3, "LC0303"),
        ("inspect locked/model.safetensors", 3, "LC0303"),
        ("run locked/model.safetensors", 3, "LC0303"),
        ("inspect model -o locked/report.json", 2, "LC0205"),
        ("run model --export-json locked/report.json", 2, "LC0205"),
        ("run model --layers locked/map.toml", 2, "LC0206"),
    ]
    .map(|(line, exit, code)| {
        let output = without_privileges(&program, place.path()).args(line.split(' ')).output().unwrap();
        (line, exit, code, output)
    })
    .into();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o755)).unwrap();
    for (line, exit, code, output) in results {
        assert_code(&output, exit);
        let text = stderr(&output);
        assert!(text.contains(code) && text.contains("ermission denied"), "{line}: {text}");
        assert!(text.contains("locked"), "{line}: {text}");
    }
}

#[test]
fn the_budget_that_help_names_works() {
    let place = workplace();
    let text = stderr(&run(place.path(), "model --budget 1MiB"));
    let (_, rest) = text.split_once("help: ").unwrap();
    let flag = rest.split(" or more").next().unwrap();
    assert_code(&run(place.path(), &format!("model {flag}")), 0);
    assert_code(&run(place.path(), "model --budget 20x-layer"), 2);
    assert_code(&run(place.path(), "model --budget 50x-largest-tensor"), 0);
    assert_code(&run(place.path(), "model --budget 10%"), 0);
}

#[test]
fn three_is_a_source_that_is_missing_or_corrupt() {
    let place = workplace();
    let path = place.path();
    let whole = fs::read(path.join("model/model.safetensors")).unwrap();
    fs::write(path.join("cut.safetensors"), &whole[..whole.len() - 100]).unwrap();
    fs::write(path.join("text.safetensors"), "this is no safetensors file").unwrap();
    fs::create_dir(path.join("empty")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(path.join("pipe.safetensors")).status().unwrap();
    assert!(made.success());
    for (line, code, named) in [
        ("missing", "LC0301", "missing"),
        ("./missing.safetensors", "LC0301", "missing.safetensors"),
        ("empty", "LC0301", "empty"),
        ("s3://bucket/key", "LC0301", "s3://"),
        ("org/name", "LC0304", "org/name"),
        ("org/name@v2", "LC0304", "v2"),
        ("cut.safetensors", "LC0302", "cut.safetensors"),
        ("text.safetensors", "LC0302", "text.safetensors"),
        ("pipe.safetensors", "LC0302", "pipe.safetensors"),
    ] {
        for command in ["run SOURCE", "plan SOURCE", "inspect SOURCE", "convert SOURCE out"] {
            let start = Instant::now();
            let command = command.replace("SOURCE", line);
            let output = run(path, &command);
            assert_code(&output, 3);
            let text = stderr(&output);
            assert!(text.contains(&format!("error[{code}]")), "{command}: {text}");
            assert!(text.contains(named), "{command}: {text}");
            assert!(start.elapsed() < Duration::from_secs(5), "{command} took {:?}", start.elapsed());
        }
    }
    // What a comparison finds wrong with bytes is what it was asked for.
    for (line, exit, code) in [
        ("verify missing", 3, "LC0301"),
        ("verify empty", 3, "LC0301"),
        ("verify org/name", 3, "LC0304"),
        ("verify model --against missing", 3, "LC0301"),
        ("verify cut.safetensors", 5, "LC0510"),
        ("verify text.safetensors", 5, "LC0510"),
    ] {
        let output = run(path, line);
        assert_code(&output, exit);
        assert!(stderr(&output).contains(&format!("error[{code}]")), "{line}: {}", stderr(&output));
    }
    let text = stderr(&run(path, "cut.safetensors"));
    assert!(text.contains("lm_head.weight") && text.contains("100 bytes short"), "{text}");
    assert!(text.contains("help: the download or copy stopped early"), "{text}");
}

#[test]
fn four_is_what_cannot_be_measured_or_used_here() {
    let place = workplace();
    for line in [
        "model --max-vram 12GiB",
        "model --limit vram=1GiB@0",
        "exec --max-vram 1GiB -- true",
        "model --device cuda:0",
        "--device cuda model --json",
    ] {
        let output = run(place.path(), line);
        if line.contains('@') && !line.contains("max-vram") {
            // The GPU is part of --max-vram alone.
            assert_code(&output, 2);
            continue;
        }
        assert_code(&output, 4);
        assert!(stderr(&output).contains("error[LC04"), "{line}: {}", stderr(&output));
    }
}

#[test]
fn five_is_a_result_that_cannot_be_written() {
    let place = workplace();
    let output = run(place.path(), "plan model -o /dev/full");
    assert_code(&output, 5);
    assert!(stderr(&output).contains("error[LC0505]"), "{}", stderr(&output));
    for line in ["plan model", "--help", "--version", "man"] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let output = loadcheck(place.path()).args(line.split(' ')).stdout(full).output().unwrap();
        assert_code(&output, 5);
        assert!(stderr(&output).contains("error[LC0505]"), "{line}: {}", stderr(&output));
    }
}

#[test]
fn six_is_a_limit_inside_the_spread_of_the_runs() {
    let place = workplace();
    let mut middle_ms = 5.0;
    let codes: Vec<Option<i32>> = (0..10)
        .map(|_| {
            let line = format!("model --runs 8 --strict-noise --json --limit time={middle_ms:.3}ms");
            let output = run(place.path(), &line);
            let report = json(&output);
            let mut times: Vec<f64> = report["runs"]
                .as_array()
                .unwrap()
                .iter()
                .map(|run| run["seconds"].as_f64().unwrap())
                .collect();
            times.sort_by(f64::total_cmp);
            middle_ms = (times[3] + times[4]) * 500.0;
            if output.status.code() == Some(6) {
                assert_eq!(report["verdict"], "inconclusive");
                assert_eq!(report["limits"][0]["inside_spread"], true);
            }
            output.status.code()
        })
        .collect();
    assert!(codes.contains(&Some(6)), "{codes:?}");
}

#[test]
fn all_problems_come_at_once_and_the_most_basic_one_decides() {
    let place = workplace();
    fs::write(place.path().join("bad.safetensors"), "bad").unwrap();
    let output = run(place.path(), "bad.safetensors --budget 1MiB --max-vram 12GiB@1 --device cuda:0");
    assert_code(&output, 3);
    let text = stderr(&output);
    let places: Vec<usize> =
        ["LC0302", "LC0401", "LC0402", "LC0201"].map(|code| text.find(code).expect(code)).into();
    assert!(places.is_sorted(), "{text}");
    let output = run(place.path(), "model --budget 1MiB --max-vram 12GiB --select (");
    assert_code(&output, 4);
    let text = stderr(&output);
    assert!(text.contains("LC0201") && text.contains("LC0204"), "{text}");
}
