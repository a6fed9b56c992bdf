#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench")]
#![allow(clippy::as_conversions, clippy::cast_precision_loss, reason = "rounded figures")]
//! Compares the sources with the plain reader on the same file, with the same block size, threads
//! and buffer, in turns: cold (pages are dropped before every run, checked with `mincore`) and
//! warm.
//!
//! `cargo bench -p onelayer --bench sources -- [--file X.safetensors | --size 1GiB] [--threads N]
//! [--block 4MiB] [--buffer 64MiB] [--rounds N]`
//!
//! Without a file, it creates one of random bytes in the temporary folder and removes it
//! afterwards. Each line has the best and the median rate, and the median ratio to the plain reader
//! of the same round: `direct` and, cold, every other source is compared with plain direct and
//! plain buffered reads.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use onelayer::checkpoint::Checkpoint;
use onelayer::source::{self, IoMode, ReadRequest, Source};
use onelayer::units::{Alignment, ByteRange};

use self::plain::{HugeBuffer, Plain};

#[path = "support/plain.rs"]
mod plain;
#[path = "support/residency.rs"]
mod residency;

struct Options {
    file: Option<PathBuf>,
    size_bytes: usize,
    threads: usize,
    block_bytes: usize,
    buffer_bytes: usize,
    rounds: usize,
}

enum Reader {
    Plain(Plain),
    Source(Box<dyn Source>),
}

fn main() {
    let options = parse();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = options.file.clone().unwrap_or_else(|| {
        let path = folder.path().join("random.safetensors");
        make(&path, options.size_bytes).expect("room for the file");
        path
    });
    let checkpoint = Checkpoint::open(&path).expect("a checkpoint");
    let requests = requests(&checkpoint, options.block_bytes);
    let mut buffer = HugeBuffer::new(options.buffer_bytes).expect("memory");
    let plain =
        |direct| Reader::Plain(Plain { direct, threads: options.threads, block_bytes: options.block_bytes });
    let source = |mode| Reader::Source(source::open(mode, &checkpoint).expect("a source"));
    let readers = [
        ("plain direct", plain(true)),
        ("source direct", source(IoMode::Direct)),
        ("plain buffered", plain(false)),
        ("source buffered", source(IoMode::Buffered)),
        ("source mmap", source(IoMode::Mmap)),
    ];
    println!(
        "{}: {} MiB, {} threads, {} KiB blocks, {} MiB buffer, {} rounds",
        path.display(),
        checkpoint.tensor_bytes() >> 20,
        options.threads,
        options.block_bytes >> 10,
        options.buffer_bytes >> 20,
        options.rounds
    );
    for cold in [true, false] {
        println!("{}", if cold { "cold" } else { "warm" });
        let mut rates = vec![Vec::new(); readers.len()];
        let mut cached_most = 0;
        // The first round warms up.
        for round in 0..=options.rounds {
            // Each round starts with another reader, so that none always follows the same one.
            for turn in 0..readers.len() {
                let index = (round + turn) % readers.len();
                if cold {
                    residency::drop_pages(&path).expect("advice");
                    cached_most = cached_most.max(residency::cached_bytes(&path).expect("mincore"));
                }
                let rate = run(&readers[index].1, &path, &requests, &options, buffer.bytes());
                if round > 0 {
                    rates[index].push(rate);
                }
            }
        }
        if cold {
            println!("  at most {cached_most} bytes were cached before a run");
        }
        report(&readers.each_ref().map(|(name, _)| *name), &rates);
    }
}

fn report(names: &[&str], rates: &[Vec<f64>]) {
    for (name, mine) in names.iter().zip(rates) {
        let ratio = |other: usize| median(mine.iter().zip(&rates[other]).map(|(a, b)| a / b).collect());
        let best = mine.iter().copied().fold(0.0, f64::max);
        println!(
            "  {name:16} {best:6.2} GiB/s best {:6.2} median; {:.2} of plain direct, {:.2} of plain buffered",
            median(mine.clone()),
            ratio(0),
            ratio(2)
        );
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Blocks of every file from its first byte on, as in a plan. The payload of a block is its tensor
/// bytes.
fn requests(checkpoint: &Checkpoint, block_bytes: usize) -> Vec<ReadRequest> {
    let block_bytes = u64::try_from(block_bytes).expect("64 bits");
    let mut requests = Vec::new();
    for tensor in checkpoint.tensors() {
        let mut start = Alignment::PAGE.down(tensor.extent.start());
        while start < tensor.extent.end() {
            let end =
                Alignment::PAGE.up(tensor.extent.end().min(start + block_bytes)).expect("a file's length");
            let extent = ByteRange::new(start, end).expect("blocks are not empty");
            let payload = extent.intersect(tensor.extent).expect("the block begins inside the tensor");
            requests.push(ReadRequest { shard: tensor.shard, extent, payload });
            start = end;
        }
    }
    requests
}

/// Runs one reader over the file; GiB per second.
fn run(reader: &Reader, path: &Path, requests: &[ReadRequest], options: &Options, buffer: &mut [u8]) -> f64 {
    let start = Instant::now();
    let bytes = match reader {
        Reader::Plain(plain) => plain.read(&[path.to_owned()], buffer).expect("a plain read"),
        Reader::Source(source) => read_source(source.as_ref(), requests, options, buffer),
    };
    let rate = bytes as f64 / start.elapsed().as_secs_f64() / (1u64 << 30) as f64;
    if let Reader::Source(source) = reader {
        assert_eq!(source.fallbacks(), [], "another way of reading would be measured");
    }
    rate
}

fn read_source(source: &dyn Source, requests: &[ReadRequest], options: &Options, buffer: &mut [u8]) -> u64 {
    let (next, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
    let part_bytes = options.buffer_bytes / options.threads / plain::PAGE * plain::PAGE;
    std::thread::scope(|scope| {
        for part in buffer.chunks_mut(part_bytes).take(options.threads) {
            let (next, bytes) = (&next, &bytes);
            scope.spawn(move || {
                for place in (0..part.len() / options.block_bytes).cycle() {
                    let index = usize::try_from(next.fetch_add(1, Ordering::Relaxed)).expect("64 bits");
                    let Some(request) = requests.get(index) else { return };
                    let target = &mut part[place * options.block_bytes..][..options.block_bytes];
                    source.read(request, target).expect("a read");
                    bytes.fetch_add(request.payload.len_bytes(), Ordering::Relaxed);
                }
            });
        }
    });
    bytes.into_inner()
}

/// A checkpoint of one tensor of random bytes.
fn make(path: &Path, len: usize) -> io::Result<()> {
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
    let mut file = File::create(path)?;
    file.write_all(&u64::try_from(header.len()).expect("64 bits").to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut state = 1u64;
    let mut block = Vec::with_capacity(8 << 20);
    let mut left = len;
    while left > 0 {
        block.clear();
        while block.len() < left.min(8 << 20) {
            // xorshift64: fast, and no disk or hypervisor compresses it.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            block.extend_from_slice(&state.to_le_bytes());
        }
        block.truncate(left);
        file.write_all(&block)?;
        left -= block.len();
    }
    file.sync_all()
}

fn parse() -> Options {
    let mut options = Options {
        file: None,
        size_bytes: 1 << 30,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        block_bytes: 4 << 20,
        buffer_bytes: 64 << 20,
        rounds: 10,
    };
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    while let Some(word) = words.next() {
        let value = words.next().unwrap_or_else(|| panic!("{word} needs a value"));
        match word.as_str() {
            "--file" => options.file = Some(value.into()),
            "--size" => options.size_bytes = size(&value),
            "--threads" => options.threads = size(&value),
            "--block" => options.block_bytes = size(&value),
            "--buffer" => options.buffer_bytes = size(&value),
            "--rounds" => options.rounds = size(&value),
            other => panic!("unknown option {other}"),
        }
    }
    options
}

fn size(text: &str) -> usize {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        other => panic!("{other}: not KiB, MiB or GiB"),
    };
    digits.parse::<usize>().expect("a number") << shift
}
