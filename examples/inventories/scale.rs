//! Measures time and memory of the grouping for large and hostile sets of names.

use std::fmt::Write;
use std::time::Instant;

use onelayer::layers::{LayerMap, Layers, NamedShape};

const MILLION: usize = 1_000_000;

/// A set of names.
type Case = (&'static str, fn() -> Vec<String>);

const CASES: [Case; 9] = [
    ("experts: 1 000 000 tensors, 82 layers of 4 065 experts", experts),
    ("FP8: the same number, a scale for every weight", scaled_experts),
    ("flat: 1 000 000 names without a dot", || numbered(|at| format!("tensor_{at:07}"))),
    ("stacks: 1 000 000 stacks of one member", || numbered(|at| format!("stack{at}.0.a.b.c.d.weight"))),
    ("one list: 1 000 000 members of one tensor", || numbered(|at| format!("layers.{at}.mlp.weight"))),
    ("digits: 1 000 000 names of 8 numbers", || {
        numbered(|at| format!("{at}.1.{}.1.2.{}.3.{at}", at % 7, at % 1000))
    }),
    ("dots: 1 000 names of 64 KiB, 32 768 empty or short components", || hostile(".a.", "..")),
    ("depth: 1 000 names of 64 KiB, 32 768 numbers", || hostile("1.", "2.")),
    ("long digits: 1 000 names, indices of 64 KiB", || hostile("1", "2")),
];

/// Prints one line per case, each from a separate process, so that none reuses memory of another.
pub(crate) fn report() -> Result<(), String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    for number in 0..CASES.len() {
        let status = std::process::Command::new(&program).arg(format!("--scale={number}")).status();
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => return Err(format!("case {number}: {status}")),
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(())
}

/// Measures one case in this process.
pub(crate) fn report_case(number: &str) -> Result<(), String> {
    let case = number.parse().ok().and_then(|number: usize| CASES.get(number));
    let &(title, make) = case.ok_or_else(|| format!("no case {number}"))?;
    let names = make();
    let shape: &[u64] = &[64, 64];
    let name_bytes: usize = names.iter().map(String::len).sum();
    let entries: Vec<_> = names.iter().map(|name| NamedShape { name, shape: Some(shape) }).collect();
    reset_peak();
    let before = resident_peak_kib();
    let cpu = cpu_ns();
    let start = Instant::now();
    let layers = Layers::from_names(&entries, &LayerMap::default()).map_err(|error| error.to_string())?;
    let seconds = start.elapsed().as_secs_f64();
    let cpu_ms = match (cpu, cpu_ns()) {
        (Some(before), Some(after)) => format!("{} ms", (after - before) / 1_000_000),
        _ => "unknown".to_owned(),
    };
    let peak = match (before, resident_peak_kib()) {
        (Some(before), Some(after)) => format!("{} MiB", after.saturating_sub(before) >> 10),
        _ => "unknown".to_owned(),
    };
    println!(
        "{title}: {seconds:.2} s ({cpu_ms} on the processor), {} layers, {} MiB kept, peak growth {peak} (names alone: {} MiB)",
        layers.as_slice().len(),
        layers.metadata_bytes() >> 20,
        name_bytes >> 20
    );
    Ok(())
}

fn numbered(name: impl Fn(usize) -> String) -> Vec<String> {
    (0..MILLION).map(name).collect()
}

fn experts() -> Vec<String> {
    let mut names = Vec::with_capacity(MILLION);
    for layer in 0..82 {
        for part in ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "input_layernorm"] {
            names.push(format!("model.layers.{layer}.{part}.weight"));
        }
        for expert in 0..4065 {
            for part in ["gate_proj", "up_proj", "down_proj"] {
                names.push(format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight"));
            }
        }
    }
    names.truncate(MILLION);
    names
}

fn scaled_experts() -> Vec<String> {
    let mut names = experts();
    names.truncate(MILLION / 2);
    let scales: Vec<_> = names.iter().map(|name| format!("{name}_scale_inv")).collect();
    names.extend(scales);
    names
}

/// A thousand names of 64 KiB that differ at a different place each.
fn hostile(part: &str, other: &str) -> Vec<String> {
    const NAME_BYTES: usize = 64 << 10;
    let parts = NAME_BYTES / part.len();
    let name = |at: usize| {
        let odd = at * parts / 1000;
        let mut name = String::with_capacity(NAME_BYTES + 16);
        for position in 0..parts {
            name.push_str(if position == odd { other } else { part });
        }
        let _ = write!(name, ".x{at}");
        name
    };
    (0..1000).map(name).collect()
}

/// The peak of this process's resident memory in KiB, if known.
fn resident_peak_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

/// CPU time of this thread, in nanoseconds.
fn cpu_ns() -> Option<u64> {
    let statistics = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    statistics.split_whitespace().next()?.parse().ok()
}

/// Resets the peak, if the system allows it.
fn reset_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}
