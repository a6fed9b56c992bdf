//! The one-way flow: a stage may use the stages above it, never one below.
//!
//! The order is that of the `mod` lines in `lib.rs`. The test reads the sources, so that a `use` in
//! the wrong direction fails here with file and line rather than in a review.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use std::fs;
use std::path::{Path, PathBuf};

/// The stages from top to bottom. `error` types belong to their stage.
const FLOW: [&str; 20] = [
    "units",
    "footprint",
    "file_system",
    "page_cache",
    "folder",
    "budget",
    "checkpoint",
    "slices",
    "layers",
    "live",
    "ranks",
    "plan",
    "fit",
    "source",
    "staging",
    "device",
    "load",
    "model",
    "placed",
    "convert",
];

#[test]
fn stages_use_only_what_is_above_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&root, &mut files);
    assert!(files.len() > 20, "the sources are there");
    let mut wrong = Vec::new();
    for file in files {
        let relative = file.strip_prefix(&root).unwrap();
        let Some(stage) = stage_of(relative) else { continue };
        let text = fs::read_to_string(&file).unwrap();
        for (number, line) in (1..).zip(text.lines()) {
            for used in stages_in(line) {
                if position(used).is_some_and(|used| used > stage) {
                    wrong.push(format!("{}:{number}: {}", relative.display(), line.trim()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "uses against the flow:\n{}", wrong.join("\n"));
}

#[test]
fn the_library_lists_its_stages_in_the_order_of_the_flow() {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    let module = |line: &str| {
        let name =
            line.strip_prefix("pub ").unwrap_or(line).strip_prefix("mod ")?.strip_suffix(';')?.to_owned();
        Some(name)
    };
    let listed: Vec<String> = text.lines().filter_map(module).collect();
    let is_stage = |name: &&str| !["probe", "skipped"].contains(name);
    let stages: Vec<&str> = listed.iter().map(String::as_str).filter(is_stage).collect();
    let expected: Vec<&str> =
        FLOW.into_iter().filter(|stage| listed.iter().any(|name| name == stage)).collect();
    assert_eq!(stages, expected);
    assert!(stages.len() >= 10, "every stage is there");
}

#[test]
fn names_are_found_however_they_are_written() {
    let found = |line| stages_in(line).collect::<Vec<_>>();
    assert_eq!(found("use crate::plan::LoadPlan;"), ["plan"]);
    assert_eq!(found("use crate::{load, plan::{Window, IoMode}, units};"), ["load", "plan", "units"]);
    assert_eq!(
        found("    let x: crate::load::Loader = crate::model::y(); // crate::device"),
        ["load", "model"]
    );
    assert_eq!(found("pub(crate) fn crate_name() {}"), [""; 0]);
}

#[test]
fn the_probe_observes_and_is_used_by_no_stage() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&root, &mut files);
    for file in files {
        let relative = file.strip_prefix(&root).unwrap().to_path_buf();
        if stage_of(&relative).is_none() {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        assert!(
            !code.clone().any(|line| line.contains("crate::probe")),
            "{} uses the probe",
            relative.display()
        );
    }
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if !path.ends_with("bin") {
                collect(&path, files);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

fn stage_of(relative: &Path) -> Option<usize> {
    let first = relative.components().next()?.as_os_str().to_str()?;
    position(first.trim_end_matches(".rs"))
}

fn position(stage: &str) -> Option<usize> {
    FLOW.iter().position(|known| *known == stage)
}

/// The stages that a line of code names as `crate::stage` or `crate::{stage, ...}`. Comments may
/// point anywhere.
fn stages_in(line: &str) -> impl Iterator<Item = &str> {
    let code = line.split("//").next().unwrap_or_default();
    code.split("crate::").skip(1).flat_map(|rest| match rest.strip_prefix('{') {
        Some(list) => members(list),
        None => vec![name_at_start(rest)],
    })
}

fn name_at_start(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

/// The first names of the members of a `use` list whose opening brace is gone.
fn members(list: &str) -> Vec<&str> {
    let (mut names, mut depth, mut start) = (Vec::new(), 0_usize, 0);
    for (at, c) in list.char_indices().chain([(list.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                names.push(name_at_start(list[start..at].trim_start()));
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                names.push(name_at_start(list[start..at].trim_start()));
                start = (at + 1).min(list.len());
            }
            _ => {}
        }
    }
    names
}
