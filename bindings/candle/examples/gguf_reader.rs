//! candle's own reader of GGUF files, for comparison: every tensor is read, turned into floats and
//! dropped.
//!
//!     cargo run --release --example gguf_reader -- FILE.gguf f32|bf16
//!
//! Prints the seconds, and the growth of resident memory at its peak in MiB.
//! `benches/gguf_speed.py --candle` runs it.
#![allow(clippy::print_stdout, reason = "an example says what it found")]

use std::error::Error;
use std::fs::File;
use std::hint::black_box;
use std::time::Instant;

use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device};

/// A number of KiB in the status of this process.
fn status_kib(key: &str) -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(key)).ok_or("no such line")?;
    Ok(line.trim_start_matches(':').trim().trim_end_matches(" kB").parse()?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, dtype] = &arguments[..] else { return Err("usage: gguf_reader FILE.gguf f32|bf16".into()) };
    let dtype = match dtype.as_str() {
        "f32" => DType::F32,
        "bf16" => DType::BF16,
        other => return Err(format!("{other} is neither f32 nor bf16").into()),
    };
    let before_kib = status_kib("VmRSS")?;
    let start = Instant::now();
    let mut file = File::open(path)?;
    let content = Content::read(&mut file)?;
    for name in content.tensor_infos.keys() {
        let blocks = content.tensor(&mut file, name, &Device::Cpu)?;
        black_box(blocks.dequantize(&Device::Cpu)?.to_dtype(dtype)?);
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("{seconds} {}", status_kib("VmHWM")?.saturating_sub(before_kib) / 1024);
    Ok(())
}
