//! Repeatedly loads a checkpoint to a CUDA device and unloads it, in one process, and prints the
//! memory after each round.
//!
//! ```text
//! cargo bench -p onelayer --bench device_cycles -- CHECKPOINT [--device N] [--cycles N] [--budget BYTES]
//! ```
//!
//! Prints one JSON object. Exit code 1 if a load fails, 2 for wrong usage, 4 without a usable
//! device. It does not judge the numbers, since other processes may use the device, too.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program of measurements")]

use std::process::ExitCode;
use std::time::Instant;

use onelayer::{Checkpoint, Loader, Target};
use onelayer_probe::Procfs;
use serde_json::{Value, json};

struct Arguments {
    checkpoint: String,
    device: u32,
    cycles: u32,
    budget_bytes: u64,
}

fn arguments() -> Option<Arguments> {
    let mut found = Arguments { checkpoint: String::new(), device: 0, cycles: 10, budget_bytes: 64 << 20 };
    // cargo adds `--bench`.
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    while let Some(word) = words.next() {
        match word.as_str() {
            "--device" => found.device = words.next()?.parse().ok()?,
            "--cycles" => found.cycles = words.next()?.parse().ok()?,
            "--budget" => found.budget_bytes = words.next()?.parse().ok()?,
            _ if found.checkpoint.is_empty() && !word.starts_with('-') => found.checkpoint = word,
            _ => return None,
        }
    }
    (!found.checkpoint.is_empty()).then_some(found)
}

/// Free bytes on the device.
fn free_bytes(loader: &Loader) -> Option<u64> {
    loader.device().memory().ok().flatten().map(|memory| memory.free_bytes)
}

fn rss_bytes() -> Option<u64> {
    Procfs::default().myself().memory().rss_bytes.value()
}

fn cycles(loader: &Loader, arguments: &Arguments) -> Result<Value, Box<dyn std::error::Error>> {
    let (free_before, rss_before) = (free_bytes(loader), rss_bytes());
    let mut rounds = Vec::new();
    for _ in 0..arguments.cycles {
        let checkpoint = Checkpoint::open(&arguments.checkpoint)?;
        let start = Instant::now();
        let mut model = loader.load(&checkpoint)?;
        let load_seconds = start.elapsed().as_secs_f64();
        let (free_loaded, resident_bytes) = (free_bytes(loader), model.resident_bytes());
        let pinning = model.report().pinning.name();
        let start = Instant::now();
        let receipt = model.unload_all();
        drop(model);
        rounds.push(json!({
            "load_seconds": load_seconds,
            "unload_seconds": start.elapsed().as_secs_f64(),
            "resident_bytes": resident_bytes,
            "returned_bytes": receipt.returned_bytes,
            "pinning": pinning,
            "device_free_loaded_bytes": free_loaded,
            "device_free_after_bytes": free_bytes(loader),
            "rss_after_bytes": rss_bytes(),
        }));
    }
    Ok(json!({
        "device": loader.device().info()?.name,
        "budget_bytes": arguments.budget_bytes,
        "device_free_before_bytes": free_before,
        "device_free_after_bytes": free_bytes(loader),
        "rss_before_bytes": rss_before,
        "rss_after_bytes": rss_bytes(),
        "cycles": rounds,
    }))
}

fn main() -> ExitCode {
    let Some(arguments) = arguments() else {
        println!(
            "{}",
            json!({ "error": "usage: device_cycles CHECKPOINT [--device N] [--cycles N] [--budget BYTES]" })
        );
        return ExitCode::from(2);
    };
    let builder = Loader::builder(Target::Cuda(arguments.device)).host_budget(arguments.budget_bytes);
    let loader = match builder.build() {
        Ok(loader) => loader,
        Err(error) => {
            println!("{}", json!({ "error": error.to_string() }));
            return ExitCode::from(if error.is_device_unavailable() { 4 } else { 1 });
        }
    };
    match cycles(&loader, &arguments) {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("{}", json!({ "error": error.to_string() }));
            ExitCode::FAILURE
        }
    }
}
