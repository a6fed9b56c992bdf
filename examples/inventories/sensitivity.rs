//! Measures the effect of the rule's thresholds: each one alone, and tuned on one half of the
//! inventories and scored on the other.

use onelayer::layers::{LayerMap, Layers, NamedShape, Rule};

use super::percent;
use super::read::{Folder, Inventory};
use super::score::score;

/// One threshold: its name, its setter, and the tried values (percent, except for the ratio).
type Threshold = (&'static str, fn(&mut Rule, u32), &'static [u32]);

const THRESHOLDS: [Threshold; 10] = [
    ("deep", |rule, value| rule.deep_percent = value, &[30, 40, 50, 60, 70]),
    ("common", |rule, value| rule.common_percent = value, &[10, 20, 25, 40, 50]),
    ("agreement", |rule, value| rule.agreement_percent = value, &[60, 70, 80, 90, 100]),
    ("uniform", |rule, value| rule.uniform_percent = value, &[25, 35, 50, 65, 80]),
    ("own names", |rule, value| rule.own_names_percent = value, &[30, 40, 50, 55, 60]),
    ("own elements", |rule, value| rule.own_elements_percent = value, &[50, 65, 75, 85, 95]),
    ("own elements, uniform", |rule, value| rule.own_elements_uniform_percent = value, &[5, 15, 25, 35, 45]),
    ("alike", |rule, value| rule.alike_percent = value, &[30, 40, 50, 60, 70]),
    ("alike, uniform", |rule, value| rule.alike_uniform_percent = value, &[70, 80, 90, 95, 100]),
    ("chain ratio", |rule, value| rule.chain_ratio = value, &[1, 2, 4, 8, 1000]),
];

/// Number of random halves.
const HALVES: u64 = 10;

struct Judged<'a> {
    inventory: &'a Inventory,
    names: Vec<NamedShape<'a>>,
    paths: Vec<&'a str>,
}

impl Judged<'_> {
    fn is_exact(&self, rule: &Rule) -> Result<bool, String> {
        let layers = Layers::from_names_by(&self.names, &LayerMap::default(), rule);
        let layers = layers.map_err(|error| format!("{}: {error}", self.inventory.name))?;
        Ok(score(self.inventory, &layers, &self.paths).is_exact())
    }
}

/// Prints both measurements for a folder; nothing for a folder without authors' boundaries.
pub(crate) fn report(folder: &Folder) -> Result<(), String> {
    let judged: Vec<_> = (folder.inventories.iter())
        .map(|inventory| Judged {
            inventory,
            names: inventory.named_shapes(),
            paths: inventory.indexed_paths(),
        })
        .filter(|judged| !judged.paths.is_empty())
        .collect();
    if judged.is_empty() {
        return Ok(());
    }
    // Each threshold alone, others at their defaults: the exact inventories for each candidate.
    let mut candidates = vec![("default".to_owned(), exact(&judged, &Rule::default())?)];
    println!(
        "{}: sensitivity, exact of {}; the default gives {}",
        folder.name,
        judged.len(),
        count(&candidates[0].1)
    );
    for (name, set, values) in THRESHOLDS {
        let mut cells = Vec::new();
        for &value in values {
            let mut rule = Rule::default();
            set(&mut rule, value);
            let exact = exact(&judged, &rule)?;
            cells.push(format!("{value}: {}", count(&exact)));
            candidates.push((format!("{name} {value}"), exact));
        }
        println!("    {name:22} {}", cells.join("   "));
    }
    hold_out(folder, &judged, &candidates);
    Ok(())
}

/// Chooses the best candidate on a random half and scores it on the other half.
fn hold_out(folder: &Folder, judged: &[Judged<'_>], candidates: &[(String, Vec<bool>)]) {
    for seed in 0..HALVES {
        let in_half: Vec<bool> =
            judged.iter().map(|judged| is_in_half(&judged.inventory.name, seed)).collect();
        let on = |exact: &[bool], side: bool| {
            exact.iter().zip(&in_half).filter(|&(&exact, &half)| exact && half == side).count()
        };
        let size = |side: bool| in_half.iter().filter(|&&half| half == side).count();
        // The first best one, so that the default wins a tie.
        let best = candidates.iter().rev().max_by_key(|(_, exact)| on(exact, true));
        let Some((name, exact)) = best else { continue };
        println!(
            "{}: half {seed}: tuned to `{name}`, {} on its half, {} on the other",
            folder.name,
            percent(on(exact, true), size(true)),
            percent(on(exact, false), size(false))
        );
    }
}

fn exact(judged: &[Judged<'_>], rule: &Rule) -> Result<Vec<bool>, String> {
    judged.iter().map(|judged| judged.is_exact(rule)).collect()
}

fn count(exact: &[bool]) -> usize {
    exact.iter().filter(|&&exact| exact).count()
}

/// A deterministic coin flip per name and seed (FNV-1a).
fn is_in_half(name: &str, seed: u64) -> bool {
    let hash = (name.bytes().chain(seed.to_le_bytes())).fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    (hash >> 33) & 1 == 1
}
