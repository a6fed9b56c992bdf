//! `loadcheck`: measures what loading a model checkpoint costs.

mod synth;

use std::io::Write;
use std::process::ExitCode;

/// Runs `synth SOURCE DIRECTORY [--dtype D] [--layers N] [--max-shard-size BYTES] [--seed N] [--threads N] [--force]`.
fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let mut plain = Vec::new();
    let mut request = synth::SynthRequest::new("", "");
    let mut err = std::io::stderr();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().unwrap_or_default();
        match argument.as_str() {
            "--dtype" => request.dtype = synth::FloatType::parse(&value()),
            "--layers" => request.layer_count = value().parse().ok(),
            "--max-shard-size" => request.shard_bytes_max = value().parse().unwrap_or_default(),
            "--seed" => request.seed = value().parse().unwrap_or_default(),
            "--threads" => request.thread_count = value().parse().ok(),
            "--force" => request.force = true,
            _ => plain.push(argument),
        }
    }
    if plain.len() != 3 || plain[0] != "synth" {
        for preset in synth::presets() {
            let _ =
                writeln!(err, "{:14} {} ({} parameters)", preset.name, preset.about, preset.parameter_count);
        }
        return ExitCode::from(2);
    }
    request.source = plain[1].clone();
    request.directory = plain[2].clone().into();
    match synth::run(&request, &mut |_, _| {}) {
        Ok(report) => {
            let _ = writeln!(err, "{report:?}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            let _ = writeln!(err, "loadcheck: {error}");
            if error.is_interrupted() {
                ExitCode::from(130)
            } else if error.is_request() {
                ExitCode::from(2)
            } else if error.is_invalid_config() {
                ExitCode::from(3)
            } else {
                ExitCode::from(5)
            }
        }
    }
}
