//! The story: names are whatever a file says, so grouping stays linear in their bytes and never
//! panics.
//!
//! Each input would take minutes in a grouping that is quadratic in the length or the number of
//! names; the bound is far above what the linear one needs even in a debug build on a busy machine.

#![allow(clippy::unwrap_used, reason = "a test helper that fails should fail the test")]

use std::time::{Duration, Instant};

use onelayer::layers::{LayerMap, Layers, NamedShape};
use proptest::prelude::*;

const NAME_BYTES: usize = 64 << 10;

fn group_in_time(names: &[String]) -> Layers {
    let shape: &[u64] = &[64, 64];
    let entries: Vec<_> = names.iter().map(|name| NamedShape { name, shape: Some(shape) }).collect();
    let start = Instant::now();
    let layers = Layers::from_names(&entries, &LayerMap::default()).unwrap();
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    assert_eq!(layers.as_slice().iter().map(|layer| layer.tensors.len()).sum::<usize>(), names.len());
    layers
}

/// Names of 64 KiB made of `part`, each with `other` at another place.
fn long_names(count: usize, part: &str, other: &str) -> Vec<String> {
    let parts = NAME_BYTES / part.len();
    let name = |at: usize| {
        let odd = at * parts / count;
        let pieces = (0..parts).map(|position| if position == odd { other } else { part });
        pieces.collect::<String>() + &format!(".x{at}")
    };
    (0..count).map(name).collect()
}

#[test]
fn thousands_of_dots() {
    group_in_time(&long_names(50, ".", "a."));
    group_in_time(&long_names(50, "a.", "b."));
}

#[test]
fn thousands_of_numbers() {
    group_in_time(&long_names(50, "1.", "2."));
    group_in_time(&long_names(50, "0.a.", "1.a."));
}

#[test]
fn numbers_of_thousands_of_digits() {
    let layers = group_in_time(&long_names(50, "1", "2"));
    assert_eq!(layers.as_slice().len(), 50);
    let huge = "9".repeat(1000);
    let names: Vec<_> = ["q", "k", "norm"]
        .into_iter()
        .flat_map(|part| [format!("h.{huge}.{part}.w"), format!("h.10.{part}.w")])
        .collect();
    let ids: Vec<_> = group_in_time(&names).as_slice().iter().map(|layer| layer.id.to_string()).collect();
    assert_eq!(ids, ["h.10".to_owned(), format!("h.{huge}")]);
}

#[test]
fn chains_of_companion_suffixes_and_slashes() {
    let chain: Vec<_> = (0..2000).map(|count| format!("w{}", "_scale".repeat(count))).collect();
    assert_eq!(group_in_time(&chain).as_slice().len(), 1);
    group_in_time(&long_names(50, "/", "a"));
    group_in_time(&long_names(50, "_", "."));
}

#[test]
fn many_groups_and_many_stacks() {
    let many = |name: fn(usize) -> String| (0..100_000).map(name).collect::<Vec<_>>();
    assert_eq!(group_in_time(&many(|at| format!("t{at}"))).as_slice().len(), 100_000);
    group_in_time(&many(|at| format!("a.s{at}.0.q.weight")));
    group_in_time(&many(|at| format!("{at}.1.{at}.2.{at}")));
    let nested: Vec<_> = (1..2000).map(|depth| "a.".repeat(depth) + "0.b.c").collect();
    group_in_time(&nested);
}

#[test]
fn names_that_are_prefixes_of_each_other_or_empty() {
    let names = [
        "", ".", "..", "0", "0.", "0.0", ".0", "a", "a.", "a.0", "a.0.", "a..0", "/", "a/", "a/0", "/0.a",
        "a/b/0.c",
    ];
    group_in_time(&names.map(str::to_owned));
}

proptest! {
    #[test]
    fn any_names_are_accounted_for_exactly_once(
        names in prop::collection::vec("([a-c]{0,2}|[0-9]{1,2}|/|_scale){1,2}(\\.([a-c]{0,2}|[0-9]{1,2}|weight_packed|é)){0,6}", 0..60),
        shapes in prop::collection::vec(prop::collection::vec(0_u64..5, 0..3), 60),
    ) {
        let entries: Vec<_> = names.iter().zip(&shapes).map(|(name, shape)| NamedShape { name, shape: Some(shape) }).collect();
        let layers = Layers::from_names(&entries, &LayerMap::default()).unwrap();
        let mut seen = vec![0; names.len()];
        for (position, layer) in layers.as_slice().iter().enumerate() {
            prop_assert!(!layer.tensors.is_empty());
            let mut in_units = 0;
            for &tensor in &layer.tensors {
                seen[tensor.index()] += 1;
                prop_assert_eq!(layers.position_of(tensor), position);
            }
            for unit in &layer.sub_units {
                in_units += unit.tensors.len();
                prop_assert!(unit.tensors.iter().all(|tensor| layer.tensors.contains(tensor)));
            }
            prop_assert!(in_units <= layer.tensors.len());
            prop_assert_eq!(layers.find(&layer.id), Some(layer));
        }
        prop_assert!(seen.iter().all(|&count| count == 1));
    }

    #[test]
    fn the_order_of_the_file_does_not_change_the_layers(seed in any::<u64>()) {
        let mut names: Vec<String> = (0..4).flat_map(|layer| {
            ["attn.q", "attn.o", "mlp.experts.0.up.w", "mlp.experts.1.up.w", "norm"].map(|part| format!("m.layers.{layer}.{part}"))
        }).chain(["m.embed.w", "m.norm.w", "head.w"].map(str::to_owned)).collect();
        let ids = |names: &[String]| {
            let entries: Vec<_> = names.iter().map(|name| NamedShape { name, shape: None }).collect();
            let layers = Layers::from_names(&entries, &LayerMap::default()).unwrap();
            layers.as_slice().iter().map(|layer| (layer.id.to_string(), layer.tensors.len())).collect::<Vec<_>>()
        };
        let expected = ids(&names);
        let length = names.len();
        let mut state = seed | 1;
        for at in (1..length).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            names.swap(at, usize::try_from(state >> 33).unwrap() % (at + 1));
        }
        prop_assert_eq!(ids(&names), expected);
    }
}
