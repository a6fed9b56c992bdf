//! The one-way order: of packages, of the stages of the loader, of the files in each package.

use std::collections::BTreeSet;
use std::fs;

use house::{imports, repository};
use syn::Item;

/// What each package may use of the others.
const PACKAGES: [(&str, &[&str]); 13] = [
    ("crates/system", &[]),
    ("testing/support", &[]),
    ("testing/house", &[]),
    ("testing/cuda-sim", &[]),
    ("crates/probe", &["onelayer-system"]),
    ("crates/synth", &["onelayer-system"]),
    (".", &["onelayer-system"]),
    ("crates/fit", &["onelayer", "onelayer-system"]),
    ("bindings/dlpack", &["onelayer"]),
    ("bindings/c", &["onelayer", "onelayer-dlpack"]),
    ("bindings/candle", &["onelayer"]),
    (
        "bindings/python",
        &["onelayer", "onelayer-dlpack", "onelayer-fit", "onelayer-probe", "onelayer-system"],
    ),
    (
        "crates/loadcheck",
        &["onelayer", "onelayer-fit", "onelayer-probe", "onelayer-synth", "onelayer-system"],
    ),
];

/// The stages of the loader, in the order of docs/design.md.
const STAGES: [&str; 14] = [
    "footprint",
    "budget",
    "checkpoint",
    "slices",
    "layers",
    "live",
    "ranks",
    "plan",
    "source",
    "staging",
    "device",
    "load",
    "model",
    "convert",
];

#[test]
fn every_package_has_its_place_in_the_order() {
    let repository = repository();
    let mut found = BTreeSet::from([".".to_owned()]);
    for folder in ["bindings", "crates", "testing"] {
        for entry in fs::read_dir(repository.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.join("Cargo.toml").exists() {
                found.insert(path.strip_prefix(repository).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    assert_eq!(found, PACKAGES.iter().map(|(folder, _)| (*folder).to_owned()).collect());
}

#[test]
fn packages_use_only_what_is_below_them() {
    for (folder, wanted) in PACKAGES {
        let text = fs::read_to_string(repository().join(folder).join("Cargo.toml")).unwrap();
        let section = text.split("\n[dependencies]\n").nth(1).unwrap();
        let section = section.split("\n[").next().unwrap();
        let names = section.lines().filter_map(|line| line.split(['.', ' ', '=']).next());
        let found: BTreeSet<&str> = names.filter(|name| name.starts_with("onelayer")).collect();
        assert_eq!(found, wanted.iter().copied().collect(), "dependencies of {folder}");
    }
}

#[test]
fn stages_use_only_what_is_above_them() {
    let roots = super::roots();
    let root = roots.iter().find(|root| root.name == ". lib").unwrap();
    let stages: Vec<String> = root.modules[&Vec::new()]
        .file
        .items
        .iter()
        .filter_map(|item| match item {
            Item::Mod(stage) if stage.content.is_none() => Some(stage.ident.to_string()),
            _ => None,
        })
        .collect();
    let listed: Vec<&String> = stages.iter().filter(|stage| STAGES.contains(&stage.as_str())).collect();
    assert_eq!(listed, STAGES, "lib.rs lists the stages in their order");
    let place = |name: &String| stages.iter().position(|stage| stage == name);
    let mut wrong = Vec::new();
    for (user, used) in imports::uses(root) {
        let Some(from) = user.first().and_then(place) else { continue };
        for used in used {
            if used.first().and_then(place).is_some_and(|to| to > from) {
                wrong.push(format!("{} uses {}", user.join("::"), used.join("::")));
            }
        }
    }
    assert!(wrong.is_empty(), "against the order of `mod` lines in src/lib.rs:\n{}", wrong.join("\n"));
}

#[test]
fn files_do_not_use_each_other_in_circles() {
    let mut found = Vec::new();
    for root in super::roots() {
        for circle in imports::circles(&imports::uses(&root)) {
            let names: Vec<String> = circle.iter().map(|path| path.join("::")).collect();
            found.push(format!("{}: {}", root.name, names.join(", ")));
        }
    }
    assert!(found.is_empty(), "circles of files (a module and its parent may):\n{}", found.join("\n"));
}
