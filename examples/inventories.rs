//! Measures the grouping rule.
//!
//! `cargo run --release -p onelayer --example inventories -- PATH [--verbose] [--sensitivity]
//! [--names-only]`
//!
//! PATH is a folder of inventories (or of folders), or one file. `--names-only` drops the shapes,
//! like an index file; `--sensitivity` varies the thresholds. `--scale`, without a PATH, times the
//! grouping of large and hostile sets of names. `inventories/read.rs` describes the formats,
//! `inventories/score.rs` the scoring. Prints one line per folder and one per miss. Exits with 1 if
//! a tensor is lost, or a folder called `transformers` or `diffusers` is below its target.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example reports to its terminal")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use onelayer::layers::{LayerMap, Layers, Rule};

#[path = "inventories/read.rs"]
mod read;
#[path = "inventories/scale.rs"]
mod scale;
#[path = "inventories/score.rs"]
mod score;
#[path = "inventories/sensitivity.rs"]
mod sensitivity;

use read::{Folder, Inventory};
use score::Score;

/// Folders with a target: the share of exact inventories in percent.
const TARGETS: [(&str, usize); 2] = [("transformers", 95), ("diffusers", 92)];

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut flag = |name: &str| {
        let before = arguments.len();
        arguments.retain(|argument| argument != name);
        arguments.len() < before
    };
    let (verbose, with_sensitivity) = (flag("--verbose"), flag("--sensitivity"));
    let names_only = flag("--names-only");
    let all_scales = flag("--scale");
    let result = match &arguments[..] {
        [] if all_scales => scale::report().map(|()| true),
        [case] if case.starts_with("--scale=") => {
            scale::report_case(&case["--scale=".len()..]).map(|()| true)
        }
        [path] if !path.starts_with('-') => {
            report(&PathBuf::from(path), verbose, with_sensitivity, names_only)
        }
        _ => Err("usage: inventories PATH [--verbose] [--sensitivity] [--names-only] | --scale".to_owned()),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Prints everything; false if a target is missed.
fn report(path: &Path, verbose: bool, with_sensitivity: bool, names_only: bool) -> Result<bool, String> {
    let mut folders = read::read_tree(path)?;
    if names_only {
        let inventories = folders.iter_mut().flat_map(|folder| &mut folder.inventories);
        inventories.flat_map(|inventory| &mut inventory.tensors).for_each(|(_, shape)| *shape = None);
    }
    if folders.iter().all(|folder| folder.inventories.is_empty()) {
        return Err(format!("{}: no inventory found", path.display()));
    }
    let mut passed = true;
    for folder in &folders {
        passed &= report_folder(folder, verbose)?;
    }
    if with_sensitivity {
        for folder in &folders {
            sensitivity::report(folder)?;
        }
    }
    Ok(passed)
}

fn report_folder(folder: &Folder, verbose: bool) -> Result<bool, String> {
    let start = Instant::now();
    let (mut judged, mut exact, mut exact_all, mut lost, mut layer_count, mut tensor_count) =
        (0, 0, 0, 0, 0, 0);
    for inventory in &folder.inventories {
        let layers = group(inventory, &Rule::default())?;
        let indexed = inventory.indexed_paths();
        let score = score::score(inventory, &layers, &indexed);
        lost += score.lost;
        layer_count += layers.as_slice().iter().filter(|layer| is_member(layer)).count();
        tensor_count += inventory.tensors.len();
        if verbose {
            print_layers(inventory, &layers);
        }
        if indexed.is_empty() {
            continue;
        }
        judged += 1;
        exact += usize::from(score.is_exact());
        exact_all += usize::from(all_paths_score(inventory, &layers).is_exact());
        if !score.is_exact() {
            println!("miss  {}/{}  {}", folder.name, inventory.name, score.reason());
        }
    }
    for (path, reason) in &folder.unread {
        println!("unread  {}  {reason}", path.display());
    }
    println!(
        "{}: {} inventories, {tensor_count} tensors, {layer_count} layers in stacks, {lost} tensors lost, {:.2} s",
        folder.name,
        folder.inventories.len(),
        start.elapsed().as_secs_f64()
    );
    if judged == 0 {
        return Ok(lost == 0);
    }
    println!(
        "{}: exact {exact} of {judged} ({}); with the paths that are not indexed {exact_all} of {judged}",
        folder.name,
        percent(exact, judged)
    );
    let target = TARGETS.iter().find(|(name, _)| *name == folder.name).map_or(0, |&(_, target)| target);
    let is_met = exact * 100 >= target * judged;
    if !is_met {
        println!("FAIL  {}: the target is {target} %", folder.name);
    }
    Ok(is_met && lost == 0)
}

fn is_member(layer: &onelayer::layers::Layer) -> bool {
    matches!(layer.kind, onelayer::layers::LayerKind::Member { .. })
}

fn all_paths_score(inventory: &Inventory, layers: &Layers) -> Score {
    let paths: Vec<_> = inventory.no_split_paths.iter().map(String::as_str).collect();
    score::score(inventory, layers, &paths)
}

fn group(inventory: &Inventory, rule: &Rule) -> Result<Layers, String> {
    Layers::from_names_by(&inventory.named_shapes(), &LayerMap::default(), rule)
        .map_err(|error| format!("{}: {error}", inventory.name))
}

/// `part` of `whole` with one decimal.
fn percent(part: usize, whole: usize) -> String {
    let tenths = part * 1000 / whole.max(1);
    format!("{}.{} %", tenths / 10, tenths % 10)
}

/// Prints the stacks with their confidence, and the layers outside them in order.
fn print_layers(inventory: &Inventory, layers: &Layers) {
    println!("{}:", inventory.name);
    let mut last_stack = None;
    for layer in layers.as_slice() {
        match layer.kind {
            onelayer::layers::LayerKind::Member { stack } if last_stack == Some(stack) => {}
            onelayer::layers::LayerKind::Member { stack } => {
                let members = layers.as_slice().iter().filter(|other| other.kind == layer.kind).count();
                let sub_units = layer.sub_units.len();
                println!(
                    "    {}.*  {members} members, first has {sub_units} sub-units, {:?}",
                    layers.stacks()[stack],
                    layers.confidence(stack)
                );
                last_stack = Some(stack);
            }
            _ => println!("    {}  {} tensors", layer.id, layer.tensors.len()),
        }
    }
}
