#![allow(unsafe_code, reason = "asks mincore what is cached")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program")]
//! The yardstick: the fastest simple way to read files, without parsing, checking or this library.
//!
//! `plain_reader --direct|--buffered [--threads N] [--block 4MiB] [--buffer 64MiB] [--cold] [--rounds N] FILES...`
//!
//! N threads take blocks, in file order, from one shared counter, and read each into the next place of their
//! own part of one buffer: 2 MiB aligned, huge pages asked for, touched before the clock starts. One line per
//! round: bytes in the page cache at its start, bytes read, seconds, GiB/s. `--direct` opens with `O_DIRECT` and fails where that is refused; a yardstick
//! does not fall back. `--cold` drops the files' pages before each round.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use memmap2::{Advice, MmapMut};

#[path = "../benches/support/residency.rs"]
mod residency;

const HUGE_PAGE: usize = 2 << 20;
const PAGE: usize = 4096;

struct Options {
    direct: bool,
    cold: bool,
    threads: usize,
    block_bytes: usize,
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
        direct: false,
        cold: false,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        block_bytes: 4 << 20,
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
            "--threads" => options.threads = number(&value()?)?,
            "--rounds" => options.rounds = number(&value()?)?,
            "--block" => options.block_bytes = size(&value()?)?,
            "--buffer" => options.buffer_bytes = size(&value()?)?,
            flag if flag.starts_with('-') => return Err(format!("unknown option {flag}")),
            path => options.paths.push(path.into()),
        }
    }
    options.direct = direct.ok_or("say --direct or --buffered")?;
    if options.paths.is_empty() {
        return Err("no files".to_owned());
    }
    if options.block_bytes == 0 || !options.block_bytes.is_multiple_of(PAGE) {
        return Err(format!("the block must be a multiple of {PAGE} bytes"));
    }
    if options.threads == 0 || options.buffer_bytes / options.threads < options.block_bytes {
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
    let mut map = MmapMut::map_anon(options.buffer_bytes + HUGE_PAGE)?;
    let skip = map.as_ptr().align_offset(HUGE_PAGE);
    map.advise_range(Advice::HugePage, skip, options.buffer_bytes)?;
    let buffer = &mut map[skip..][..options.buffer_bytes];
    buffer.fill(1);
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
        let bytes = read_all(options, buffer)?;
        let seconds = start.elapsed().as_secs_f64();
        let mode = if options.direct { "direct" } else { "buffered" };
        println!(
            "{mode}, {} threads, {} KiB blocks, {cached} bytes cached: {bytes} bytes, {seconds:.4} s, {:.3} GiB/s",
            options.threads,
            options.block_bytes >> 10,
            gibibytes(bytes) / seconds
        );
    }
    Ok(())
}

/// Reads every file once; returns the bytes that arrived. Opening is part of the time, as for any reader.
fn read_all(options: &Options, buffer: &mut [u8]) -> io::Result<u64> {
    let mut files = Vec::new();
    let mut blocks = 0;
    for path in &options.paths {
        let flags = if options.direct { rustix::fs::OFlags::DIRECT } else { rustix::fs::OFlags::empty() };
        let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
        let len = usize::try_from(file.metadata()?.len()).expect("64-bit addresses");
        files.push((blocks, file));
        blocks += len.div_ceil(options.block_bytes);
    }
    let next = AtomicUsize::new(0);
    let part_bytes = options.buffer_bytes / options.threads / PAGE * PAGE;
    std::thread::scope(|scope| {
        let readers: Vec<_> = buffer
            .chunks_mut(part_bytes)
            .take(options.threads)
            .map(|part| scope.spawn(|| read_blocks(&files, blocks, &next, options, part)))
            .collect();
        readers.into_iter().map(|reader| reader.join().expect("a reader does not panic")).sum()
    })
}

fn read_blocks(
    files: &[(usize, File)],
    blocks: usize,
    next: &AtomicUsize,
    options: &Options,
    part: &mut [u8],
) -> io::Result<u64> {
    let (direct, block_bytes) = (options.direct, options.block_bytes);
    let mut bytes = 0;
    for place in (0..part.len() / block_bytes).cycle() {
        let block = next.fetch_add(1, Ordering::Relaxed);
        if block >= blocks {
            break;
        }
        let (first, file) = &files[files.partition_point(|(first, _)| *first <= block) - 1];
        let offset = (block - first) * block_bytes;
        let target = &mut part[place * block_bytes..][..block_bytes];
        let mut filled = 0;
        // Zero, or a direct read that ends inside a page, is the end of the file.
        while filled < target.len() && (!direct || filled.is_multiple_of(PAGE)) {
            let from = u64::try_from(offset + filled).expect("64-bit offsets");
            match file.read_at(&mut target[filled..], from)? {
                0 => break,
                count => filled += count,
            }
        }
        bytes += u64::try_from(filled).expect("64-bit lengths");
    }
    Ok(bytes)
}

#[allow(clippy::as_conversions, clippy::cast_precision_loss, reason = "a figure for people")]
fn gibibytes(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}
