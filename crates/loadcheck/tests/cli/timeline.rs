//! Memory over time: what a real run keeps of it, draws of it, and draws again from a saved report.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on panics")]

use std::fs;
use std::path::Path;

use crate::support::{assert_code, json, run, stderr, stdout, workplace};
use onelayer_testing::{TestTensor, write_file};

/// What is promised of a picture and of a page.
const PICTURE_BYTES_MAX: usize = 512 << 10;

fn text(place: &Path, name: &str) -> String {
    fs::read_to_string(place.join(name)).unwrap()
}

/// Small, whole, and complete in itself.
#[track_caller]
fn assert_picture(text: &str) {
    assert!(text.len() < PICTURE_BYTES_MAX, "{} bytes", text.len());
    assert!(text.trim_end().ends_with("</svg>") || text.trim_end().ends_with("</html>"), "{text}");
    let ours = include_str!("../../src/output/picture/page.js");
    let elsewhere = text.replace("xmlns=\"http://www.w3.org/2000/svg\"", "").replace(ours, "");
    let elsewhere = elsewhere.replace("http-equiv=\"Content-Security-Policy\"", "");
    for word in ["http", "src=", "href=", "url(", "@import"] {
        assert!(!elsewhere.contains(word), "{word}");
    }
}

#[test]
fn a_run_keeps_when_layers_were_handed_out_and_draws_it() {
    let place = workplace();
    let path = place.path();
    let line = "model --window 1 --export-html r.html --export-svg r.svg --json";
    let output = run(path, line);
    assert_code(&output, 0);
    let report = json(&output);
    let kept = &report["runs"][0]["deliveries"];
    assert_eq!((kept["layers"].as_u64(), kept["layers_per_row"].as_u64()), (Some(5), Some(1)), "{kept}");
    let rows = kept["rows"].as_array().unwrap();
    let mut names: Vec<&str> = rows.iter().map(|row| row["layer"].as_str().unwrap()).collect();
    let times: Vec<u64> = rows.iter().map(|row| row["elapsed_us"].as_u64().unwrap()).collect();
    assert!(times.is_sorted() && times[0] > 0, "{times:?}");
    let samples = report["runs"][0]["samples"]["rows"].as_array().unwrap();
    let last = samples.last().unwrap()[0].as_u64().unwrap();
    assert!(
        times[4] <= last,
        "one clock: the last layer at {} is before the last sample at {last}",
        times[4]
    );
    names.sort_unstable();
    assert_eq!(
        names,
        ["lm_head", "model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2"]
    );
    for name in ["r.html", "r.svg"] {
        let drawn = text(path, name);
        assert_picture(&drawn);
        for word in [
            "delivered at",
            "peak of unreclaimable memory",
            "RSS limit",
            "class=\"anon\"",
            "prefers-color-scheme",
        ] {
            assert!(drawn.contains(word), "{name} has {word}");
        }
    }
    let page = text(path, "r.html");
    let answer = report["answer"]["sentence"].as_str().unwrap();
    assert!(page.contains(">PASS<") && page.contains(&format!("<h1>{answer}</h1>")), "{answer}");
    for row in rows {
        let sizes = ["bytes", "read_bytes"].map(|name| row[name].as_u64());
        assert!(sizes[0].is_some_and(|size| size > 0) && sizes[1].is_some(), "{row}");
    }
    let sum = |name: &str| rows.iter().map(|row| row[name].as_u64().unwrap_or(0)).sum::<u64>();
    let io = &report["runs"][0]["io"];
    assert_eq!(Some(sum("bytes")), report["source"]["bytes"].as_u64());
    assert!(sum("read_bytes") <= io["read_bytes"].as_u64().unwrap());
    let refused = run(path, line);
    assert_code(&refused, 2);
    assert!(
        stderr(&refused).contains("LC0205") && stderr(&refused).contains("--force"),
        "{}",
        stderr(&refused)
    );
    assert_code(&run(path, &format!("{line} --force")), 0);
}

#[test]
fn nothing_is_kept_unless_it_is_asked_for() {
    let place = workplace();
    let report = json(&run(place.path(), "model --json"));
    assert!(report["runs"][0].get("deliveries").is_none(), "{}", report["runs"][0]);
    assert_eq!(report["runs"][0]["samples"]["rows"].as_array().unwrap().len(), 0);
    let report = json(&run(place.path(), "model --json --timeline 1 --runs 2"));
    for run in report["runs"].as_array().unwrap() {
        assert_eq!(run["deliveries"]["layers"], 5);
    }
}

#[test]
fn a_thousand_layers_make_a_small_page() {
    let place = tempfile::tempdir().unwrap();
    let tensors: Vec<TestTensor> = (0..2000)
        .map(|index| {
            let part = ["mlp.down", "norm"][usize::try_from(index % 2).unwrap()];
            TestTensor::random(format!("model.layers.{}.{part}.weight", index / 2), 4096, index)
        })
        .collect();
    fs::create_dir(place.path().join("model")).unwrap();
    write_file(&place.path().join("model/model.safetensors"), &tensors, 0);
    let output = run(place.path(), "model --window 1 --timeline 1 --runs 3 --export-html r.html -o r.svg");
    assert_code(&output, 0);
    assert_eq!(stdout(&output), "");
    for name in ["r.html", "r.svg"] {
        let drawn = text(place.path(), name);
        println!("{name}: {} bytes", drawn.len());
        assert_picture(&drawn);
        assert!(drawn.contains("model.layers.") && drawn.contains("run 3 of 3"), "{name}");
    }
}

#[test]
fn compare_and_exec_are_drawn_too() {
    let place = workplace();
    let path = place.path();
    assert_code(&run(path, "compare model -s stream -s read --runs 2 -o c.html"), 0);
    let page = text(path, "c.html");
    assert_picture(&page);
    assert!(page.contains("<th scope=\"col\">read</th>") && page.contains("<svg"), "{page}");
    assert_code(&run(path, "exec --export-svg e.svg -- sleep 0.1"), 0);
    let drawn = text(path, "e.svg");
    assert_picture(&drawn);
    assert!(drawn.contains("sleep 0.1") && drawn.contains("class=\"host\""), "{drawn}");
}

#[test]
fn a_saved_report_is_rendered_again() {
    let place = workplace();
    let path = place.path();
    let line =
        "model --max-host 1KiB --timeline 1 --export-json r.json --export-svg r.svg --export-markdown r.md";
    assert_code(&run(path, line), 1);
    for name in ["again.svg", "again.html", "again.md", "again.json"] {
        let output = run(path, &format!("report r.json -o {name}"));
        assert_code(&output, 0);
        assert_eq!((stdout(&output), stderr(&output)), (String::new(), String::new()), "{name}");
    }
    for (one, other) in [("r.svg", "again.svg"), ("r.md", "again.md"), ("r.json", "again.json")] {
        assert!(text(path, one) == text(path, other), "{one} and {other} differ");
    }
    assert_picture(&text(path, "again.html"));
    assert!(text(path, "again.html").contains("--max-memory"), "its limit is a line");
    assert_code(&run(path, "report r.json -o again.svg"), 2);
    assert!(stdout(&run(path, "report r.json")).contains("FAIL"), "on stdout it is what people read");
}

#[test]
fn other_reports_are_rendered_as_far_as_they_go() {
    let place = workplace();
    let path = place.path();
    // A report on stdout has no curve, one in a file has.
    fs::write(path.join("run.json"), stdout(&run(path, "model --json"))).unwrap();
    assert_code(&run(path, "model -o saved.json"), 0);
    assert_code(&run(path, "report saved.json -o saved.html"), 0);
    assert_code(&run(path, "doctor -o doctor.json"), 0);
    assert_code(&run(path, "plan model -o plan.json"), 0);
    fs::write(path.join("other.json"), r#"{"schema": "loadcheck/9"}"#).unwrap();
    fs::write(path.join("half.json"), r#"{"schema": "loadcheck/1", "runs": []}"#).unwrap();
    fs::write(path.join("no.json"), "[1, 2").unwrap();
    assert_code(&run(path, "report run.json -o run.md"), 0);
    assert_code(&run(path, "report doctor.json -o doctor.md"), 0);
    assert!(text(path, "doctor.md").contains("| check | found |"));
    for (line, code, name, why) in [
        ("report run.json -o x.svg", 2, "LC0207", "--timeline"),
        ("report doctor.json -o x.html", 2, "LC0207", "no picture"),
        ("report plan.json", 2, "LC0207", "run the command again"),
        ("report other.json", 3, "LC0302", "loadcheck/9"),
        ("report half.json --json", 3, "LC0302", "missing field"),
        ("report no.json", 3, "LC0302", "not a report"),
        ("report none.json", 3, "LC0301", "none.json"),
        ("report /dev/zero", 3, "LC0303", "not a regular file"),
    ] {
        let output = run(path, line);
        assert_code(&output, code);
        let said = stderr(&output);
        assert!(said.contains(name) && said.contains(why), "{line}: {said}");
        assert!(!path.join("x.svg").exists() && !path.join("x.html").exists(), "{line}");
    }
    assert_eq!(json(&run(path, "report half.json --json"))["error"]["code"], "LC0302");
}

#[test]
fn two_reports_say_what_changed() {
    let place = workplace();
    let path = place.path();
    assert_code(&run(path, "model --window 1 --timeline 1 -o a.json"), 0);
    assert_code(&run(path, "model --budget 32MiB --timeline 1 -o b.json"), 0);
    assert_code(&run(path, "compare model -s stream -s read --runs 2 --timeline 1 -o c.json"), 0);
    let output = run(path, "report a.json b.json");
    assert_code(&output, 0);
    let said = stdout(&output);
    for words in ["what differs: budget, window", "unreclaimable", "before", "64 MiB", "32 MiB", "rate"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert_eq!(stdout(&run(path, "diff a.json b.json")), said);
    let report = json(&run(path, "report a.json b.json --json"));
    assert_eq!((report["command"].as_str(), report["verdict"].as_str()), (Some("report"), Some("pass")));
    let both = &report["changes"]["metrics"][0];
    let peak = |name: &str| {
        json(&run(path, &format!("report {name} --json")))["runs"][0]["peak"]["host_bytes"].clone()
    };
    assert_eq!((&both["before_bytes"], &both["after_bytes"]), (&peak("a.json"), &peak("b.json")), "{both}");
    for name in ["both.html", "both.svg", "both.json", "both.md", "both.csv"] {
        assert_code(&run(path, &format!("report a.json b.json -o {name}")), 0);
    }
    for name in ["both.html", "both.svg"] {
        let drawn = text(path, name);
        assert_picture(&drawn);
        assert!(drawn.contains("class=\"before\"") && drawn.contains("class=\"host\""), "{name}");
    }
    assert!(text(path, "both.csv").starts_with("strategy,metric,before_bytes,after_bytes"));
    // It is a report like others.
    assert_code(&run(path, "report both.json -o again.html"), 0);
    assert!(text(path, "again.html") == text(path, "both.html"));
    let rows = stdout(&run(path, "report c.json c.json"));
    assert!(
        rows.contains("stream") && rows.contains("read") && rows.contains("the settings are the same"),
        "{rows}"
    );
    for (line, name, why) in [
        ("report a.json c.json", "LC0207", "a.json is a report of `run`, and c.json one of `compare`"),
        ("report both.json both.json", "LC0207", "reports of `report` are not compared"),
        ("report a.json none.json", "LC0301", "none.json"),
    ] {
        let output = run(path, line);
        let said = stderr(&output);
        assert!(said.contains(name) && said.contains(why) && !output.status.success(), "{line}: {said}");
    }
}

#[test]
fn sizes_in_a_report_may_add_up_to_more_than_any_number() {
    let place = workplace();
    let path = place.path();
    assert_code(&run(path, "convert model out -o report.json"), 0);
    let mut report: serde_json::Value = serde_json::from_str(&text(path, "report.json")).unwrap();
    for list in ["files", "side_files"] {
        for file in report["convert"][list].as_array_mut().unwrap() {
            file["bytes"] = u64::MAX.into();
        }
    }
    report["convert"]["result"]["files_kept"] = u64::MAX.into();
    report.as_object_mut().unwrap().remove("answer");
    fs::write(path.join("large.json"), report.to_string()).unwrap();
    let output = run(path, "report large.json");
    assert_code(&output, 0);
    assert!(stdout(&output).contains("16777216 TiB"), "{}", stdout(&output));
}
