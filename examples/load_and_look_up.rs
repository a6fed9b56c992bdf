//! Loads a whole checkpoint, looks up tensors by name, and frees the memory with a receipt.
//!
//! `cargo run --release -p onelayer --example load_and_look_up -- PATH NAME...`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;

use onelayer::units::HumanBytes;
use onelayer::{Checkpoint, Loader, Target};

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let path = words.next().ok_or("say which checkpoint, and which tensors")?;

    let checkpoint = Checkpoint::open(path)?; // headers only
    let mut model = Loader::builder(Target::Host).host_budget(64 << 20).build()?.load(&checkpoint)?;
    println!("{} layers, {} resident", model.layers().count(), HumanBytes(model.resident_bytes()));

    for name in words {
        match model.tensor(&name) {
            Ok(tensor) => {
                let bytes = tensor.as_bytes().ok_or("the host can read what lies on the host")?;
                println!("{name}: {} {:?}, {} bytes", tensor.dtype(), tensor.shape(), bytes.len());
                println!("  BLAKE3 {}", tensor.hash()?.ok_or("what has bytes has a hash")?);
            }
            // "the model has no tensor named ...; did you mean ...?"
            Err(error) => println!("{error}"),
        }
    }

    // One layer by name first, then the rest. A tensor still held would be counted here.
    let first = model.layers().next().map(|layer| layer.id().clone());
    if let Some(first) = first {
        println!("{first}: {}", model.unload(&first)?);
    }
    println!("the rest: {}", model.unload_all());
    Ok(())
}
