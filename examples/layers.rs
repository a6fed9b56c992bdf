//! Streams a checkpoint layer by layer, like an engine, and prints the contents of each layer.
//!
//! `cargo run --release -p onelayer --example layers -- PATH [BUDGET_MIB] [buffered|mmap|direct]
//! [none|host] [WINDOW]`
#![allow(clippy::print_stdout, clippy::as_conversions, reason = "an example prints rounded numbers")]

use std::error::Error;

use onelayer::units::{HumanBytes, MIB};
use onelayer::{Checkpoint, IoMode, Loader, Target, Window};

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let word = |place: usize| words.get(place).map(String::as_str);
    let path = word(0).ok_or("say which checkpoint")?;
    let budget_mib: u64 = word(1).unwrap_or("64").parse()?;
    let io = match word(2) {
        Some("mmap") => IoMode::Mmap,
        Some("direct") => IoMode::Direct,
        _ => IoMode::Buffered,
    };
    let target = if word(3) == Some("none") { Target::None } else { Target::Host };
    let window = Window::Layers(word(4).unwrap_or("2").parse()?);

    // Reads headers only.
    let checkpoint = Checkpoint::open(path)?;
    let loader = Loader::builder(target).host_budget(budget_mib * MIB).io(io).window(window).build()?;

    let mut stream = loader.stream(&checkpoint)?;
    for layer in &mut stream {
        let layer = layer?; // an owned layer: `Send`, freed when it is dropped
        println!(
            "{:<48} {:>9}  {} tensors",
            layer.id(),
            HumanBytes(layer.tensor_bytes()),
            layer.tensors().len()
        );
    }
    let report = stream.report();
    let gib_per_s = report.tensor_bytes as f64 / report.elapsed.as_secs_f64() / f64::from(1 << 30);
    println!("{} in {:.2?}, {gib_per_s:.2} GiB/s", HumanBytes(report.tensor_bytes), report.elapsed);
    Ok(())
}
