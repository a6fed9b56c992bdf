//! What is printed, and where: goldens for people, one valid object for programs, no colour in a
//! pipe, no escape sequence from a file's name, ever.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    reason = "a test that cannot go on panics"
)]

use std::fs;
use std::path::Path;

use crate::support::{assert_code, json, loadcheck, repository, run, stderr, stdout, workplace};
use onelayer_testing::skipped;
use onelayer_testing::{TestTensor, write_file};
use serde_json::Value;

/// Numbers that differ from run to run, and the size of the library's own tables, become words.
fn assert_golden(name: &str, text: &str) {
    let lines: Vec<String> = text.lines().map(without_measurements).collect();
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("output");
    settings.set_prepend_module_to_snapshot(false);
    settings.add_filter(r"first exceeded at .*", "first exceeded at <place>");
    settings.add_filter(r"(?m)^ +\S+ \w+(  (checkpoint metadata|layer grouping|plan))$", "  <bytes>$1");
    settings.add_filter(r"needs [\d.]+ \S+ of unreclaimable", "needs <measured> of unreclaimable");
    settings.add_filter(r"(Fits in the) .* needs .*", "$1 <free>: <derived>, <spare>");
    settings.add_filter(r"(?m)^stream was .*$", "stream was <measured>");
    // What holds the temporary files, and what it can do, differs from machine to machine.
    settings.add_filter(r"(?m)^reading   .*$", "reading   <files>");
    settings.add_filter(r"(?m)^read      .*; (\S+ x the tensors).*$", "read      <ways>; $1");
    // The system's words about a library that is none.
    settings.add_filter(r"(looked for libcuda.so, libcuda.so.1) \(.*\)", "$1 (<reason>)");
    settings.bind(|| insta::assert_snapshot!(name, lines.join("\n")));
}

/// Of a line with measured numbers, what comes first and what comes last.
fn without_measurements(line: &str) -> String {
    let words: Vec<&str> = line.split("  ").map(str::trim).filter(|word| !word.is_empty()).collect();
    match words[..] {
        [name @ ("unreclaimable" | "RSS" | "after"), .., note] => format!("  {name}  <measured>  {note}"),
        // The widths of columns follow what was measured.
        ["resident layers" | "peak", ..] => format!("  {}", words.join("  ")),
        ["time", ..] => "  time  <measured>".to_owned(),
        [word @ ("PASS" | "FAIL"), metric, _, ref limit @ ..] => {
            format!("{word}  {metric}  <actual>  {}", limit.join("  "))
        }
        _ => line.to_owned(),
    }
}

#[test]
fn run_reads_well() {
    let place = workplace();
    let output = run(place.path(), "model --readers 2 --window 1 --max-host 1KiB --max-peak-rss 1GiB -q");
    assert_code(&output, 1);
    assert_golden("run", &stdout(&output));
    let how = stdout(&run(place.path(), "model --readers 2 --window 1 -v"));
    let strategy = "strategy  stream · auto, 2 readers · budget 64 MiB · device host, window 1, prefetch 2";
    assert!(how.contains(strategy) && how.contains("\nread      "), "{how}");
}

/// A row of measured numbers becomes its name; blanks differ with the numbers.
fn without_numbers(line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        [name, first, _, ..] if line.starts_with("  ") && !line.contains("file pages, which") => {
            let is_measured = first.starts_with(|c: char| c.is_ascii_digit() || c == '<' || c == '-');
            if is_measured { format!("{name} <measured>") } else { words.join(" ") }
        }
        _ => words.join(" "),
    }
}

#[test]
fn compare_reads_well() {
    let place = workplace();
    let line = "compare model -s stream -s mmap -s read -s pread -s direct --io buffered --readers 2 --runs 2 --window 1 -q --cmd";
    let mut words: Vec<&str> = line.split(' ').collect();
    words.push("sh -c 'exit 3'");
    let output = loadcheck(place.path()).args(words).output().unwrap();
    assert_code(&output, 5);
    let text = stdout(&output);
    let mut tables = text.lines().filter(|line| line.starts_with("  "));
    assert!(tables.all(|line| line.chars().count() <= 80), "{text}");
    assert_golden("compare", &text.lines().map(without_numbers).collect::<Vec<_>>().join("\n"));
}

#[test]
fn plan_reads_well() {
    let place = workplace();
    assert_golden("plan", &stdout(&run(place.path(), "plan model --readers 2 -v")));
    let line = "plan model --readers 2 -v --device cuda:0 --dtype bf16 --device-budget 1GiB";
    assert_golden("plan_cuda", &stdout(&run(place.path(), line)));
}

#[test]
fn inspect_reads_well() {
    let place = workplace();
    assert_golden("inspect", &stdout(&run(place.path(), "inspect model")));
    assert_golden("inspect_csv", &stdout(&run(place.path(), "inspect model --format csv")));
    assert_golden("inspect_md", &stdout(&run(place.path(), "inspect model --format md")));
}

#[test]
fn long_stacks_are_folded_for_people_and_whole_for_programs() {
    let place = tempfile::tempdir().unwrap();
    let part = |layer: u64, part| TestTensor::random(format!("model.layers.{layer}.{part}"), 100, layer);
    let tensors: Vec<TestTensor> =
        (0..60).flat_map(|layer| [part(layer, "norm.weight"), part(layer, "mlp.weight")]).collect();
    write_file(&place.path().join("deep.safetensors"), &tensors, 0);
    let text = stdout(&run(place.path(), "inspect deep.safetensors"));
    assert!(text.contains("model.layers.0 .. model.layers.59  (60 layers, each:)"), "{text}");
    assert!(text.lines().count() < 30, "{text}");
    assert_eq!(
        json(&run(place.path(), "inspect deep.safetensors --json"))["layers"].as_array().unwrap().len(),
        60
    );
    let text = stdout(&run(place.path(), "inspect deep.safetensors -v"));
    assert!(text.contains("\n  model.layers.59  "), "{text}");
}

#[test]
fn errors_read_well() {
    let place = workplace();
    let whole = fs::read(place.path().join("model/model.safetensors")).unwrap();
    fs::write(place.path().join("cut.safetensors"), &whole[..300_000]).unwrap();
    let output =
        run(place.path(), "cut.safetensors --budget 1MiB --max-vram 12GiB@1 --device cuda:0 --select (");
    assert_golden("errors", &stderr(&output));
}

#[test]
fn pipes_have_no_colour_unless_it_is_forced() {
    let place = workplace();
    let coloured = |flags: &[&str], variables: &[(&str, &str)]| {
        let mut command = loadcheck(place.path());
        command.args(["model", "--max-host", "1KiB", "--format", "table"]).args(flags);
        command.envs(variables.iter().copied());
        let output = command.output().unwrap();
        assert_code(&output, 1);
        stdout(&output).contains('\u{1b}') || stderr(&output).contains('\u{1b}')
    };
    assert!(!coloured(&[], &[]));
    assert!(coloured(&["--color", "always"], &[]));
    assert!(coloured(&["--color=always"], &[("NO_COLOR", "1")]));
    assert!(coloured(&[], &[("CLICOLOR_FORCE", "1")]));
    assert!(!coloured(&[], &[("CLICOLOR_FORCE", "0")]));
    assert!(!coloured(&[], &[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]));
    assert!(!coloured(&["--color", "never"], &[("CLICOLOR_FORCE", "1")]));
    for format in ["plain", "json", "jsonl", "md", "csv", "github"] {
        let output = run(place.path(), &format!("model --max-host 1KiB --color always -q --format {format}"));
        assert!(!stdout(&output).contains('\u{1b}'), "{format} is never coloured");
    }
    let help = run(place.path(), "run --help --color always");
    assert!(stdout(&help).contains('\u{1b}') && !stdout(&run(place.path(), "run --help")).contains('\u{1b}'));
}

/// Names that move the cursor, ring the bell, turn the direction of text, end a table cell or a
/// workflow command.
const HOSTILE: [&str; 5] = [
    "model.\u{1b}[2J\u{1b}[31mred",
    "model.\u{202e}gnirts\u{2066}",
    "model.a\r\n::set-output name=x::y",
    "model.|`cell`|<b>",
    "model.\u{7}\u{9b}31m\u{200b}",
];

fn hostile_place() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    let mut tensors: Vec<TestTensor> =
        HOSTILE.iter().enumerate().map(|(index, name)| TestTensor::random(*name, 64, index as u64)).collect();
    tensors.sort_by(|left, right| left.name.cmp(&right.name));
    write_file(&place.path().join("hostile.safetensors"), &tensors, 0);
    place
}

fn assert_harmless(text: &str, context: &str) {
    for character in text.chars() {
        let is_harmless =
            character == '\n' || !(character.is_control() || "\u{202e}\u{2066}\u{200b}".contains(character));
        assert!(is_harmless, "{context}: {character:?} in {text:?}");
    }
    assert!(!text.lines().any(|line| line.starts_with("::set-output")), "{context}: {text}");
}

#[test]
fn names_from_files_are_escaped() {
    let place = hostile_place();
    let file = "hostile.safetensors";
    for format in ["table", "plain", "md", "csv", "github", "json", "jsonl"] {
        for command in ["run --hash --max-host 1KiB", "plan", "inspect", "inspect -v"] {
            let output = run(place.path(), &format!("{command} {file} --format {format}"));
            assert_harmless(&stdout(&output), &format!("{command} {format}"));
            assert_harmless(&stderr(&output), &format!("{command} {format}"));
        }
    }
    let text = stdout(&run(place.path(), &format!("run --hash {file}")));
    assert!(text.contains("model.\\u{1b}[2J"), "{text}");
    // In JSON a name is escaped as JSON does it: data is not changed.
    let report = json(&run(place.path(), &format!("inspect {file} --json")));
    let mut names: Vec<&str> = report["layers"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|layer| layer["tensors"].as_array().unwrap())
        .map(|tensor| tensor["name"].as_str().unwrap())
        .collect();
    names.sort_unstable();
    let mut expected = HOSTILE;
    expected.sort_unstable();
    assert_eq!(names, expected);
    // A path is a name as well.
    fs::write(place.path().join("bad\u{1b}[31m.safetensors"), "bad").unwrap();
    let output = loadcheck(place.path()).arg("bad\u{1b}[31m.safetensors").output().unwrap();
    assert_code(&output, 3);
    assert_harmless(&stderr(&output), "a path");
}

#[test]
fn json_is_one_valid_object_whatever_happens() {
    let place = workplace();
    fs::write(place.path().join("bad.safetensors"), "bad").unwrap();
    let schema: Value =
        serde_json::from_slice(&fs::read(repository("docs/loadcheck.schema.json")).unwrap()).unwrap();
    for (line, code, verdict) in [
        ("model", 0, "pass"),
        ("model --runs 2 --hash --timeline 1 --device none --window 2", 0, "pass"),
        ("model --max-host 1KiB --max-time 60s", 1, "fail"),
        ("plan model", 0, "pass"),
        ("inspect model", 0, "pass"),
        ("exec -- true", 0, "pass"),
        ("compare model --runs 2 --cmd true --timeline 10", 0, "pass"),
        ("compare model -s stream -s pread -s direct --runs 1 --device none --cache cold", 0, "pass"),
        ("compare model --runs 1 --cmd false", 5, "error"),
        ("compare model --runs 1 --cmd no-such-program", 2, "error"),
        ("compare model -s steam", 2, "error"),
        ("exec -- false", 5, "error"),
        ("synth tiny-llama made --layers 1", 0, "pass"),
        ("synth no-such-preset other", 2, "error"),
        ("convert model split --dry-run", 0, "pass"),
        ("convert model split --sha256 --verify", 0, "pass"),
        ("convert model split --dtype bf16 --select lm_head", 2, "error"),
        ("convert model half --part 1/2", 0, "pass"),
        ("convert model half --finish", 5, "error"),
        ("convert missing split", 3, "error"),
        ("verify split", 0, "pass"),
        ("verify split --against made", 5, "error"),
        ("verify missing", 3, "error"),
        ("doctor model", 0, "pass"),
        ("fit missing --lo 2GiB --hi 1GiB", 3, "error"),
        ("bad.safetensors", 3, "error"),
        ("missing --max-vram 1GiB", 3, "error"),
        ("model --device cuda:7", 4, "error"),
        ("model --budget 1MiB", 2, "error"),
        ("model --no-such-flag", 2, "error"),
        ("insepct model", 2, "error"),
        ("model --budget 5q", 2, "error"),
    ] {
        // Before any `--`, which ends the flags.
        let line = if line.starts_with("exec") {
            line.replacen("exec", "exec --json", 1)
        } else {
            format!("{line} --json")
        };
        let output = run(place.path(), &line);
        assert_code(&output, code);
        let report = json(&output);
        assert_eq!(report["schema"], "loadcheck/1", "{line}");
        assert_eq!(report["verdict"], verdict, "{line}");
        assert_eq!(report["error"].is_object(), verdict == "error", "{line}");
        if verdict == "error" {
            let code = report["error"]["code"].as_str().unwrap();
            assert!(code.starts_with("LC0") && !report["error"]["message"].as_str().unwrap().is_empty());
            assert!(stderr(&output).contains(code), "{line}: the text goes to stderr: {}", stderr(&output));
        }
        let problems = check_schema(&report, &schema, &schema, "$");
        assert!(problems.is_empty(), "{line}: {problems:?}");
    }
}

#[test]
fn a_search_for_a_limit_is_of_the_schema() {
    if let Err(error) = onelayer_probe::ChildGroup::create(Some(1 << 30)) {
        skipped(error);
        return;
    }
    let place = workplace();
    let schema: Value =
        serde_json::from_slice(&fs::read(repository("docs/loadcheck.schema.json")).unwrap()).unwrap();
    let output = run(place.path(), "fit model --window 1 --runs 1 --emit k8s --json");
    assert_code(&output, 0);
    let report = json(&output);
    assert!(report["fit"]["loaders"][0]["tries"].as_array().unwrap().len() > 2);
    let problems = check_schema(&report, &schema, &schema, "$");
    assert!(problems.is_empty(), "{problems:?}");
}

/// Holds a value against a JSON schema, as far as the published one goes: `$ref`, `anyOf`, `oneOf`,
/// `const`, `enum`, `type`, `properties`, `required`, `items`. Fields that the schema does not know
/// are problems too.
fn check_schema(value: &Value, schema: &Value, root: &Value, at: &str) -> Vec<String> {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = root.pointer(reference.trim_start_matches('#')).expect("references lead somewhere");
        return check_schema(value, target, root, at);
    }
    for alternatives in ["anyOf", "oneOf"] {
        if let Some(list) = schema[alternatives].as_array() {
            let fits = list.iter().any(|one| check_schema(value, one, root, at).is_empty());
            return if fits { vec![] } else { vec![format!("{at}: {value} fits no alternative")] };
        }
    }
    let mut problems = Vec::new();
    if !schema["const"].is_null() && schema["const"] != *value {
        problems.push(format!("{at}: {value} is not {}", schema["const"]));
    }
    if schema["enum"].as_array().is_some_and(|list| !list.contains(value)) {
        problems.push(format!("{at}: {value} is not in {}", schema["enum"]));
    }
    let fits = |kind: &str| match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => panic!("{at}: unknown type {kind}"),
    };
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => vec![],
    };
    if !kinds.is_empty() && !kinds.iter().any(|kind| fits(kind)) {
        problems.push(format!("{at}: {value} is no {kinds:?}"));
    }
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if value.is_object() && value.get(name).is_none() {
            problems.push(format!("{at}.{name} is missing"));
        }
    }
    for (name, field) in value.as_object().into_iter().flatten() {
        match schema["properties"].get(name) {
            Some(schema) => problems.extend(check_schema(field, schema, root, &format!("{at}.{name}"))),
            None => problems.push(format!("{at}.{name} is not in the schema")),
        }
    }
    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
        problems.extend(check_schema(item, &schema["items"], root, &format!("{at}[{index}]")));
    }
    problems
}

#[test]
fn the_schema_check_finds_faults() {
    let schema: Value =
        serde_json::from_slice(&fs::read(repository("docs/loadcheck.schema.json")).unwrap()).unwrap();
    let place = workplace();
    let report = json(&run(place.path(), "inspect model --json"));
    for (pointer, value) in [
        ("/schema", Value::from(1)),
        ("/verdict", Value::from("perhaps")),
        ("/host/ram_bytes", Value::from(1.5)),
        ("/layers/0/tensors/0/bytes", Value::from("600")),
        ("/tool", serde_json::json!({"name": "x"})),
        ("/source/dtypes/0", serde_json::json!({"dtype": "U8", "tensors": 1, "bytes": 2, "more": 3})),
    ] {
        let mut broken = report.clone();
        *broken.pointer_mut(pointer).unwrap() = value;
        assert!(!check_schema(&broken, &schema, &schema, "$").is_empty(), "{pointer}");
    }
}

#[test]
fn inspect_lists_every_tensor_once_with_its_place_in_the_file() {
    let place = workplace();
    let report = json(&run(place.path(), "inspect model --json"));
    let ids: Vec<&str> =
        report["layers"].as_array().unwrap().iter().map(|layer| layer["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "lm_head"]);
    let bytes = fs::read(place.path().join("model/model.safetensors")).unwrap();
    let head = &report["layers"][4]["tensors"][0];
    let offset = usize::try_from(head["offset"].as_u64().unwrap()).unwrap();
    assert_eq!(bytes[offset..], onelayer_testing::random_bytes(200 << 10, 9));
    assert_eq!((head["dtype"].as_str(), head["shape"][0].as_u64()), (Some("U8"), Some(200 << 10)));
    assert_eq!(report["layers"][1]["stack"], "model.layers");
    assert!(report["layers"][0]["stack"].is_null());
    assert_eq!(
        (report["source"]["tensors"].as_u64(), report["source"]["layers"].as_u64()),
        (Some(8), Some(5))
    );
}

#[test]
fn derived_numbers_say_so() {
    let place = workplace();
    let report = json(&run(place.path(), "plan model --json"));
    assert_eq!(report["plan"]["source"], "derived");
    let sum: u64 =
        report["plan"]["memory"].as_array().unwrap().iter().map(|term| term["bytes"].as_u64().unwrap()).sum();
    assert_eq!(Some(sum), report["plan"]["host_bytes"].as_u64());
    assert!(sum <= 64 << 20);
    let text = stdout(&run(place.path(), "plan model"));
    for line in text.lines().filter(|line| line.contains("smallest budget") || line.contains("over-read")) {
        assert!(line.contains("derived"), "{line}");
    }
}

#[test]
fn lines_and_rows_can_be_parsed() {
    let place = workplace();
    let output = run(place.path(), "model --runs 2 --max-host 1GiB --hash --format jsonl");
    let kinds: Vec<String> = stdout(&output)
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["type"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(kinds.iter().filter(|kind| *kind == "run").count(), 2);
    assert_eq!(kinds.iter().filter(|kind| *kind == "hash").count(), 8);
    assert_eq!(kinds.last().map(String::as_str), Some("summary"));
    let text = stdout(&run(place.path(), "model --runs 2 --format csv"));
    let widths: Vec<usize> = text.lines().map(|line| line.split(',').count()).collect();
    assert_eq!(widths, [25, 25, 25]);
}

#[test]
fn github_gets_annotations_and_a_job_summary() {
    let place = workplace();
    let summary = place.path().join("summary.md");
    let output = loadcheck(place.path())
        .args(["model", "--max-host", "1KiB", "--max-peak-rss", "1GiB", "--format", "github"])
        .env("GITHUB_STEP_SUMMARY", &summary)
        .output()
        .unwrap();
    assert_code(&output, 1);
    let text = stdout(&output);
    assert!(
        text.starts_with("::error title=loadcheck: unreclaimable over its limit::FAIL  unreclaimable"),
        "{text}"
    );
    assert!(text.contains("\nPASS  rss"), "{text}");
    assert!(fs::read_to_string(summary).unwrap().contains("| **FAIL** | unreclaimable |"));
}

#[test]
fn files_are_written_whole_in_the_format_of_their_ending() {
    let place = workplace();
    let path = place.path();
    let output = run(path, "model -o r.json --export-markdown r.md --export-json r2.json");
    assert_code(&output, 0);
    assert_eq!(stdout(&output), "");
    let report: Value = serde_json::from_slice(&fs::read(path.join("r.json")).unwrap()).unwrap();
    let copy: Value = serde_json::from_slice(&fs::read(path.join("r2.json")).unwrap()).unwrap();
    assert_eq!(report, copy);
    assert!(fs::read_to_string(path.join("r.md")).unwrap().contains("| run | unreclaimable |"));
    assert_code(&run(path, "inspect model -o r.json"), 2);
    assert_code(&run(path, "inspect model -o r.json --force"), 0);
    assert_code(&run(path, "inspect model -o i.csv"), 0);
    assert!(fs::read_to_string(path.join("i.csv")).unwrap().starts_with("layer,stack,tensors,bytes\n"));
    let mut left: Vec<_> =
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["i.csv", "model", "r.json", "r.md", "r2.json"]);
}

#[test]
fn progress_goes_to_stderr_in_the_form_that_was_asked_for() {
    let place = workplace();
    let output = run(place.path(), "model");
    assert!(stderr(&output).contains("loadcheck: 100 %"), "{}", stderr(&output));
    let output = run(place.path(), "model --progress json --runs 2");
    let lines: Vec<Value> =
        stderr(&output).lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let last = lines.last().unwrap();
    assert_eq!(last["progress"]["done_bytes"], last["progress"]["total_bytes"]);
    assert_eq!(last["progress"]["stage"], "run 2 of 2");
    for line in ["model -q", "model --progress never --json"] {
        assert_eq!(stderr(&run(place.path(), line)), "", "{line}");
    }
    assert!(
        stderr(&run(place.path(), "model --progress never"))
            .starts_with("Next: loadcheck model --max-memory")
    );
}

const COMMANDS: [&str; 14] = [
    "run",
    "compare",
    "fit",
    "leak",
    "plan",
    "inspect",
    "exec",
    "convert",
    "verify",
    "report",
    "doctor",
    "synth",
    "completions",
    "man",
];

#[test]
fn help_fits_a_screen_and_opens_with_what_is_measured() {
    let place = tempfile::tempdir().unwrap();
    for command in [""].into_iter().chain(COMMANDS) {
        let output = loadcheck(place.path())
            .args(command.split_whitespace())
            .arg("-h")
            .env("COLUMNS", "80")
            .output()
            .unwrap();
        let text = stdout(&output);
        assert!(text.lines().count() <= 40, "{command}: {} lines", text.lines().count());
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let first = text.lines().next().unwrap();
        let says_what =
            ["measure", "cost", "load", "Prints", "checkpoint"].iter().any(|word| first.contains(word));
        assert!(says_what, "{first}");
    }
    let text = stdout(&run(place.path(), "--help"));
    let examples = text.find("Examples:").unwrap();
    assert!(examples < text.find("Usage:").unwrap() && text.find("Usage:") < text.find("Exit codes:"));
    for row in
        ["    0  ", "    1  ", "    2  ", "    3  ", "    4  ", "    5  ", "    6  ", "  130  ", "  143  "]
    {
        assert!(text.contains(row), "{row:?} in {text}");
    }
    for command in COMMANDS {
        assert!(text.contains(&format!("\n  {command} ")), "{command} is not offered: {text}");
    }
    let of_run = stdout(&run(place.path(), "run --help"));
    assert!(of_run.contains("--tp <RANK/WORLD>"), "{of_run}");
}

#[test]
fn completions_and_manual_pages_cover_every_command() {
    let place = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let text = stdout(&run(place.path(), &format!("completions {shell}")));
        assert!(text.contains("max-peak-rss") && text.contains("inspect"), "{shell}");
        assert!(!text.contains("__worker"), "{shell}");
    }
    let main = stdout(&run(place.path(), "man"));
    assert!(main.starts_with(".ie") && main.contains(".TH loadcheck 1"), "{main}");
    for command in COMMANDS {
        assert!(main.contains(&format!("loadcheck\\-{command}(1)")), "{command} is referred to");
        let page = stdout(&run(place.path(), &format!("man {command}")));
        assert!(page.contains(&format!(".TH loadcheck-{command} 1")), "{page}");
        assert_eq!(page, stdout(&run(place.path(), &format!("man loadcheck-{command}"))));
    }
}

#[test]
fn a_name_in_the_cache_is_found_and_a_path_wins() {
    let place = workplace();
    let commit = "0e9e39f249a16976918f6564b8830bc894c89659";
    let snapshot = place.path().join("hub/models--org--name/snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(place.path().join("hub/models--org--name/refs")).unwrap();
    fs::write(place.path().join("hub/models--org--name/refs/main"), commit).unwrap();
    fs::copy(place.path().join("model/model.safetensors"), snapshot.join("model.safetensors")).unwrap();
    let found = |line: &str| {
        let mut command = loadcheck(place.path());
        command.args(line.split(' ')).env("HF_HUB_CACHE", place.path().join("hub"));
        let output = command.output().unwrap();
        assert_code(&output, 0);
        output
    };
    for name in ["org/name", "org/name@main", "hf://org/name", &format!("org/name@{commit}")] {
        let report = json(&found(&format!("inspect {name} --json --offline")));
        assert_eq!(report["source"]["revision"], commit, "{name}");
        assert_eq!(Path::new(report["source"]["resolved"].as_str().unwrap()), snapshot);
    }
    let text = stdout(&found("inspect org/name"));
    assert!(text.contains("\nsource    org/name @ 0e9e39f (local cache, 1 file, 8 tensors"), "{text}");
    fs::create_dir(place.path().join("org")).unwrap();
    fs::rename(place.path().join("model"), place.path().join("org/name")).unwrap();
    assert!(json(&found("inspect org/name --json"))["source"]["revision"].is_null(), "a path beats a name");
}

#[test]
fn the_page_cache_is_brought_into_the_state_that_was_asked_for() {
    // Not on tmpfs, whose pages are the files themselves.
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    write_file(&place.path().join("m.safetensors"), &[TestTensor::random("w", 4 << 20, 1)], 0);
    for (state, expected) in [("cold", 0.0), ("warm", 1.0), ("cold", 0.0)] {
        let is_reached = || {
            let report =
                json(&run(place.path(), &format!("m.safetensors --cache {state} --json --io buffered")));
            let cache = &report["runs"][0]["cache"];
            assert_eq!(cache["asked"], state);
            let Some(share) = cache["cached_share"].as_f64() else {
                skipped("this kernel does not tell what is cached");
                return true;
            };
            (share - expected).abs() < 0.01
        };
        // A machine short of memory takes pages back at any time.
        assert!((0..5).any(|_| is_reached()), "{state}");
    }
}
