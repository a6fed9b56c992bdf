//! What other crates see: no type of another library's that they would have to pin to the same
//! version, and few dependencies.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lines of code of the library, with file and number.
fn code() -> Vec<(PathBuf, usize, String)> {
    let root = onelayer_testing::repository().join("src");
    let (mut folders, mut lines) = (vec![root.clone()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let relative = path.strip_prefix(&root).unwrap();
                let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
                lines.extend(
                    (1..).zip(code).map(|(number, line)| (relative.to_owned(), number, line.to_owned())),
                );
            }
        }
    }
    lines
}

fn told(lines: &[&(PathBuf, usize, String)]) -> String {
    let lines =
        lines.iter().map(|(path, number, line)| format!("{}:{number}: {}", path.display(), line.trim()));
    lines.collect::<Vec<_>>().join("\n")
}

/// Types of `cudarc` are named in one module alone, nothing of which is public: so no public
/// signature can show one. (Two engines may pin two versions of it.)
#[test]
fn no_public_signature_shows_a_type_of_the_drivers_bindings() {
    let code = code();
    let is_inside = |path: &Path| path.starts_with("device/cuda");
    let names_it =
        |line: &str| line.contains("cudarc") || line.contains("CUcontext") || line.contains("sys::");
    let inside = code.iter().filter(|(path, _, line)| is_inside(path) && names_it(line)).count();
    assert!(inside > 20, "the module that may name them is looked at: {inside}");

    let outside: Vec<_> = code.iter().filter(|(path, _, line)| !is_inside(path) && names_it(line)).collect();
    assert!(outside.is_empty(), "named outside:\n{}", told(&outside));

    let public: Vec<_> = code
        .iter()
        .filter(|(path, _, line)| is_inside(path) && line.trim_start().starts_with("pub "))
        .collect();
    assert!(public.is_empty(), "public inside:\n{}", told(&public));
    let is_alias = |line: &str| line.trim_start().trim_start_matches("pub(crate) ").starts_with("type ");
    let aliases: Vec<_> =
        code.iter().filter(|(path, _, line)| is_inside(path) && is_alias(line) && names_it(line)).collect();
    assert!(aliases.is_empty(), "another name for one:\n{}", told(&aliases));
    assert!(code.iter().any(|(_, _, line)| line.trim() == "pub(crate) mod cuda;"), "the module is private");
}

/// Packages that somebody who wants the library alone compiles.
fn packages(package: &str, features: &[&str]) -> BTreeSet<String> {
    let mut command = Command::new(env!("CARGO"));
    command.args([
        "tree",
        "--locked",
        "--offline",
        "--package",
        package,
        "--edges",
        "normal",
        "--prefix",
        "none",
    ]);
    let output = command.args(features).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

#[test]
fn the_library_alone_is_light() {
    let alone = packages("onelayer", &["--no-default-features"]);
    assert!(alone.contains("onelayer") && alone.contains("memmap2"), "{alone:?}");
    for absent in ["clap", "cudarc", "libloading", "serde_json", "tokio", "regex", "io-uring", "indicatif"] {
        assert!(!alone.contains(absent), "{absent} is for features that are off");
    }
    // 33, the package that it shares with the probe, and itself: a dependency that brings others along
    // is noticed.
    assert!(alone.len() <= 35, "{} packages: {alone:?}", alone.len());
    let with_program = packages("loadcheck", &[]);
    assert!(
        with_program.contains("clap") && with_program.len() > 2 * alone.len(),
        "what is compared differs"
    );
}
