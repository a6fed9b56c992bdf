//! Opens a checkpoint and prints the time and the memory of it, as one JSON object.
//!
//! `cargo run --release -p onelayer --example open_checkpoint -- CHECKPOINT`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::time::Instant;

use onelayer::Checkpoint;

/// A line of `/proc/self/status`, in bytes.
fn status_bytes(name: &str) -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with(name)).ok_or("no such line")?;
    Ok(line.split_whitespace().nth(1).ok_or("no number")?.parse::<u64>()? * 1024)
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: open_checkpoint CHECKPOINT")?;
    let before_bytes = status_bytes("VmRSS:")?;
    let start = Instant::now();
    let checkpoint = Checkpoint::open(path)?;
    let seconds = start.elapsed().as_secs_f64();
    let growth_bytes = status_bytes("VmHWM:")?.saturating_sub(before_bytes);
    println!(
        r#"{{"seconds":{seconds},"growth_bytes":{growth_bytes},"tensors":{},"description_bytes":{}}}"#,
        checkpoint.tensor_count(),
        checkpoint.metadata_bytes()
    );
    Ok(())
}
