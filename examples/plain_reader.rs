#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program")]
//! A baseline: the fastest simple way to read files, without parsing, checking or this library.
//!
//! `plain_reader --direct|--buffered [--threads N] [--block 4MiB] [--buffer 64MiB] [--cold]
//! [--rounds N] FILES...`
//!
//! N threads take blocks, in file order, from a shared counter. Each reads into its own part of one
//! buffer, which is 2 MiB aligned, advised to use huge pages, and touched before the clock starts.
//! Prints one line per round: bytes in the page cache at its start, bytes read, seconds, GiB/s.
//! `--direct` opens with `O_DIRECT` and fails if that is refused, without fallback. `--cold` drops
//! the files' pages before each round.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use self::plain::{HugeBuffer, PAGE, Plain};

#[path = "../benches/support/plain.rs"]
mod plain;
#[path = "../benches/support/residency.rs"]
mod residency;

struct Options {
    reader: Plain,
    cold: bool,
    buffer_bytes: usize,
    rounds: usize,
    paths: Vec<PathBuf>,
}

fn main() -> ExitCode {
    match parse(std::env::args().skip(1)).and_then(|options| run(&options).map_err(|e| e.to_string())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("plain_reader: {message}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut direct = None;
    let mut options = Options {
        reader: Plain {
            direct: false,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            block_bytes: 4 << 20,
        },
        cold: false,
        buffer_bytes: 64 << 20,
        rounds: 1,
        paths: Vec::new(),
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--direct" => direct = Some(true),
            "--buffered" => direct = Some(false),
            "--cold" => options.cold = true,
            "--threads" => options.reader.threads = number(&value()?)?,
            "--rounds" => options.rounds = number(&value()?)?,
            "--block" => options.reader.block_bytes = size(&value()?)?,
            "--buffer" => options.buffer_bytes = size(&value()?)?,
            flag if flag.starts_with('-') => return Err(format!("unknown option {flag}")),
            path => options.paths.push(path.into()),
        }
    }
    options.reader.direct = direct.ok_or("say --direct or --buffered")?;
    if options.paths.is_empty() {
        return Err("no files".to_owned());
    }
    if options.reader.block_bytes == 0 || !options.reader.block_bytes.is_multiple_of(PAGE) {
        return Err(format!("the block must be a multiple of {PAGE} bytes"));
    }
    if options.reader.threads == 0
        || options.buffer_bytes / options.reader.threads < options.reader.block_bytes
    {
        return Err("the buffer must hold one block per thread".to_owned());
    }
    Ok(options)
}

fn number(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| format!("{text}: not a number"))
}

fn size(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" | "B" => 0,
        "KiB" | "K" => 10,
        "MiB" | "M" => 20,
        "GiB" | "G" => 30,
        other => return Err(format!("{other}: not KiB, MiB or GiB")),
    };
    number(digits).map(|count| count << shift)
}

fn run(options: &Options) -> io::Result<()> {
    let mut buffer = HugeBuffer::new(options.buffer_bytes)?;
    for _ in 0..options.rounds {
        if options.cold {
            for path in &options.paths {
                residency::drop_pages(path)?;
            }
        }
        let mut cached = 0;
        for path in &options.paths {
            cached += residency::cached_bytes(path)?;
        }
        let start = Instant::now();
        let bytes = options.reader.read(&options.paths, buffer.bytes())?;
        let seconds = start.elapsed().as_secs_f64();
        let mode = if options.reader.direct { "direct" } else { "buffered" };
        println!(
            "{mode}, {} threads, {} KiB blocks, {cached} bytes cached: {bytes} bytes, {seconds:.4} s, {:.3} GiB/s",
            options.reader.threads,
            options.reader.block_bytes >> 10,
            gibibytes(bytes) / seconds
        );
    }
    Ok(())
}

#[allow(clippy::as_conversions, clippy::cast_precision_loss, reason = "a figure for people")]
fn gibibytes(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}
