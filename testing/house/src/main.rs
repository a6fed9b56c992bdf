//! `cargo run -p house [-- FOLDER]`: the table of sizes of a checkout.
#![allow(clippy::unwrap_used, reason = "a check that cannot read the sources has to stop")]
#![allow(clippy::print_stdout, reason = "it prints a table")]

use std::path::PathBuf;

use house::{imports, lines, public, tree};

fn main() {
    let verbose = std::env::args().any(|word| word == "-v");
    let top = std::env::args().skip(1).find(|word| word != "-v").map(PathBuf::from);
    let top = top.unwrap_or_else(|| house::repository().to_owned());
    println!(
        "| package | files | lines of code | longest file | longest function | circles (files in them) | public items |\n\
         |---|---:|---:|---|---|---:|---:|"
    );
    let mut total = (0, 0);
    for root in tree::roots(&top) {
        let files: Vec<(usize, String)> = root
            .modules
            .values()
            .map(|module| (lines::count(&module.file), module.path.display().to_string()))
            .collect();
        let sum: usize = files.iter().map(|(lines, _)| lines).sum();
        total = (total.0 + files.len(), total.1 + sum);
        let longest = files.iter().max().unwrap();
        let functions = root.modules.values().flat_map(|module| {
            let path = module.path.display().to_string();
            lines::functions(&module.file)
                .into_iter()
                .map(move |found| (found.lines, found.name, path.clone(), found.line))
        });
        let mut functions: Vec<_> = functions.collect();
        functions.sort();
        let (length, name, ..) = functions.last().cloned().unwrap_or_default();
        let circles = imports::circles(&imports::uses(&root));
        let inside: usize = circles.iter().map(Vec::len).sum();
        let items =
            if root.name.ends_with("lib") { public::items(&root).len().to_string() } else { String::new() };
        println!(
            "| {} | {} | {sum} | {} {} | {length} `{name}` | {} ({inside}) | {items} |",
            root.name,
            files.len(),
            longest.0,
            longest.1,
            circles.len(),
        );
        if verbose {
            for (lines, path) in files.iter().filter(|(lines, _)| *lines > 500) {
                println!("  long file: {path} {lines}");
            }
            for (lines, name, path, line) in functions.iter().filter(|found| found.0 > 70) {
                println!("  long function: {path}:{line} {name} {lines}");
            }
            for circle in circles {
                let names: Vec<String> = circle.iter().map(|path| path.join("::")).collect();
                println!("  circle of {}: {}", names.len(), names.join(", "));
            }
        }
    }
    println!("| all | {} | {} | | | | |", total.0, total.1);
}
