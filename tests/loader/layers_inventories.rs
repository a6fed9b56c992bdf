//! The story: the rule is scored on what real model code calls its layers.
//!
//! fixtures/inventories holds the tensors of 247 model classes with their authors' boundaries, and
//! 15 indexes found in public repositories. The scores are pinned: a change of the rule that costs
//! a model shows here, by name.

#![allow(clippy::unwrap_used, reason = "a test helper that fails should fail the test")]

use onelayer::layers::{LayerKind, LayerMap, Layers, Rule};

use crate::read;
use crate::score;

use crate::read::{Folder, Inventory};

fn folders() -> Vec<Folder> {
    let path = onelayer_testing::repository().join("fixtures/inventories");
    let folders = read::read_tree(path.as_ref()).unwrap();
    assert!(folders.iter().all(|folder| folder.unread.is_empty()));
    folders
}

fn group(inventory: &Inventory, rule: &Rule) -> Layers {
    Layers::from_names_by(&inventory.named_shapes(), &LayerMap::default(), rule).unwrap()
}

/// Inventories judged, and the misses with their reasons.
fn misses(folder: &Folder) -> (usize, Vec<String>) {
    let mut judged = 0;
    let mut misses = Vec::new();
    for inventory in &folder.inventories {
        let paths = inventory.indexed_paths();
        if paths.is_empty() {
            continue;
        }
        judged += 1;
        let score = score::score(inventory, &group(inventory, &Rule::default()), &paths);
        if !score.is_exact() {
            misses.push(format!("{}: {}", inventory.name, score.reason()));
        }
    }
    (judged, misses)
}

#[test]
fn the_authors_boundaries_are_kept_but_for_known_misses() {
    let folders = folders();
    let of = |name: &str| misses(folders.iter().find(|folder| folder.name == name).unwrap());
    assert_eq!(of("diffusers"), (30, vec![]));
    // Finer than its author, who calls a whole stage a layer; see docs/layers.md.
    let swin = "swinv2: 4 split: swinv2.encoder.layers.0 into 3 layers, ...".to_owned();
    assert_eq!(of("transformers"), (95, vec![swin]));
}

#[test]
fn no_tensor_is_lost_anywhere() {
    let mut counts = Vec::new();
    for folder in folders() {
        let mut tensors = 0;
        for inventory in &folder.inventories {
            let layers = group(inventory, &Rule::default());
            assert_eq!(score::score(inventory, &layers, &[]).lost, 0, "{}", inventory.name);
            tensors += inventory.tensors.len();
        }
        counts.push((folder.name, folder.inventories.len(), tensors));
    }
    let expected = [("diffusers", 68, 41_219), ("real", 15, 48_921), ("transformers", 179, 101_374)];
    assert_eq!(counts, expected.map(|(name, inventories, tensors)| (name.to_owned(), inventories, tensors)));
}

#[test]
fn stacks_found_in_public_indexes() {
    let folders = folders();
    let real = folders.iter().find(|folder| folder.name == "real").unwrap();
    let mut lines = Vec::new();
    for inventory in &real.inventories {
        let layers = group(inventory, &Rule::default());
        for (stack, path) in layers.stacks().iter().enumerate() {
            let members = layers.as_slice().iter().filter(|layer| layer.kind == LayerKind::Member { stack });
            lines.push(format!("{:32} {path} x{}", inventory.name, members.count()));
        }
    }
    insta::assert_snapshot!(lines.join("\n"));
}

#[test]
fn the_score_does_not_hang_on_a_threshold() {
    type Change = (&'static str, fn(&mut Rule));
    let changes: [Change; 6] = [
        ("deep", |rule| rule.deep_percent = 40),
        ("common", |rule| rule.common_percent = 40),
        ("agreement", |rule| rule.agreement_percent = 90),
        ("uniform", |rule| rule.uniform_percent = 35),
        ("own names", |rule| rule.own_names_percent = 40),
        ("alike", |rule| rule.alike_percent = 60),
    ];
    for folder in folders() {
        // The largest say no more than their smaller relatives, and cost most of the time.
        for inventory in folder.inventories.iter().filter(|inventory| inventory.tensors.len() < 400) {
            let paths = inventory.indexed_paths();
            let exact = |rule: &Rule| score::score(inventory, &group(inventory, rule), &paths).is_exact();
            for (name, change) in changes {
                let mut rule = Rule::default();
                change(&mut rule);
                assert_eq!(
                    exact(&rule),
                    exact(&Rule::default()),
                    "{} under another `{name}`",
                    inventory.name
                );
            }
        }
    }
}
