//! Converts a checkpoint to one file per layer and prints progress: the library call behind
//! `loadcheck convert`.
//!
//! `cargo run --release -p onelayer --example convert -- SOURCE TARGET`
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program")]

use std::error::Error;

use onelayer::convert::{Conversion, ConvertEvent};

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args_os().skip(1);
    let (Some(source), Some(target)) = (words.next(), words.next()) else {
        return Err("usage: convert SOURCE TARGET".into());
    };
    let prepared = Conversion::new()
        .host_budget(64 << 20)
        .observe(|event| {
            if let ConvertEvent::FilePublished { file, bytes } = event {
                eprintln!("{file}: {bytes} bytes");
            }
        })
        .prepare(source, target)?;
    println!("{} files, {} bytes to write", prepared.files().len(), prepared.needed_bytes());
    let report = prepared.run()?;
    println!("{} bytes written in {:.2?}", report.written_bytes, report.elapsed);
    Ok(())
}
