//! Every layout that we know of goes to a file per layer, to merged files and back, in several
//! ways; the files are read and compared by `scripts/round_trip.py`, which shares no code with us.
#![allow(clippy::print_stdout, reason = "a test says what it counted")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use onelayer_testing::layouts;

use std::path::PathBuf;
use std::process::Command;

fn round_trip(sources: &[PathBuf]) {
    let root = onelayer_testing::repository();
    let output = Command::new("python3")
        .arg(root.join("scripts/round_trip.py"))
        .args(["--program", env!("CARGO_BIN_EXE_loadcheck")])
        .args(sources)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}");
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.starts_with(&format!("{} checkpoints", sources.len())), "{text}");
}

#[test]
fn every_layout_comes_back_bit_by_bit() {
    let folder = tempfile::tempdir().unwrap();
    let sources: Vec<PathBuf> = layouts::all(folder.path()).into_iter().map(|layout| layout.path).collect();
    assert!(sources.len() >= 10);
    round_trip(&onelayer_testing::sample(sources, 4));
}

#[test]
fn the_checkpoints_of_transformers_come_back_bit_by_bit() {
    let names = ["gemma2", "gpt2", "llama", "llama_sharded", "qwen2_moe"];
    round_trip(&names.map(onelayer_testing::fixture));
}
