//! The program and the Python package are built from the same artefacts.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// The libraries that both have.
const LIBRARIES: [&str; 4] = ["onelayer", "onelayer-fit", "onelayer-probe", "onelayer-system"];

/// Cargo builds a package once for each set of features, and with it all that depends on it.
#[test]
fn program_and_python_package_share_one_build_of_the_libraries() {
    let (program, python) = (features(&["loadcheck"]), features(&["onelayer-python"]));
    let mut differing = Vec::new();
    for package in features(&LIBRARIES).keys() {
        let (here, there) = (program.get(package), python.get(package));
        if here != there {
            differing.push(format!("{package}: {here:?} for loadcheck, {there:?} for onelayer-python"));
        }
    }
    assert!(differing.is_empty(), "built twice, make their features equal:\n{}", differing.join("\n"));
}

/// Everything that these packages need -> its features, once for each kind of build.
fn features(packages: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "--offline", "--edges", "no-dev", "--prefix", "none", "--no-dedupe"])
        .args(["--format", "{p}|{f}"])
        .args(packages.iter().flat_map(|package| ["--package", package]))
        .current_dir(house::repository())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in String::from_utf8(output.stdout).unwrap().lines().filter(|line| !line.is_empty()) {
        let (package, features) = line.split_once('|').unwrap();
        // Without its folder.
        let package = package.split(" (").next().unwrap();
        found.entry(package.to_owned()).or_default().insert(features.to_owned());
    }
    found
}
