#![allow(unsafe_code, reason = "calls mincore; copies out of mappings")]
#![allow(
    missing_docs,
    clippy::as_conversions,
    clippy::cast_precision_loss,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a bench"
)]
//! Compares our loads with the limits of the machine, measured in the same run on the same files.
//!
//! `cargo bench -p onelayer --bench limits -- DIR [--rounds N] [--only cold|warm] [--io IO]
//! [--threads N] [--pilot-mib N]`
//!
//! The cold limit is the fastest plain direct reader. The warm limit is the fastest plain copy out
//! of the page cache: into a ring of 64 MiB, into hot memory, and into fresh memory that keeps
//! everything. A pilot chooses three shapes (threads, block size) for each kind. These run in turns
//! with ours, each round in another order; the limit is the shape with the highest median. Ratios
//! are taken within rounds: median, minimum and maximum. A/A is the ratio of the limit to itself in
//! the previous round, which shows the noise.
//!
//! Cold: `mincore` found less than 1 % of the files cached. Warm: it found at least 99 %.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;

use memmap2::{Advice, MmapMut};
use onelayer::{Checkpoint, IoMode, Loader, Model, Target};

use self::plain::HugeBuffer;
use self::stream_copy::StreamCopy;
use self::ways::{Shape, Way};

#[path = "support/plain.rs"]
#[allow(dead_code, reason = "not all of it is used by every bench")]
mod plain;
#[path = "support/residency.rs"]
mod residency;
#[path = "support/stream_copy.rs"]
mod stream_copy;
#[path = "support/ways.rs"]
mod ways;

const MIB: usize = 1 << 20;
const RING_BYTES: usize = 64 * MIB;
const GIB: f64 = (1u64 << 30) as f64;
/// Number of shapes per kind that the pilot keeps.
const FINALISTS: usize = 3;

struct Options {
    source: PathBuf,
    files: Vec<PathBuf>,
    file_bytes: usize,
    rounds: usize,
    only: Option<State>,
    io: Option<IoMode>,
    threads: usize,
    pilot_bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Cold,
    Warm,
}

/// A participant of the rounds.
#[derive(Clone, Copy)]
enum Contestant {
    Plain(Shape),
    /// The target of the load.
    Ours(Target),
}

/// A limit and the loads compared with it.
struct Kind {
    title: &'static str,
    target: Target,
    shapes: Vec<Shape>,
}

/// Limits of one kind, our load, and all rates in GiB/s by round.
struct Contest {
    state: State,
    /// Everything is in memory at the end.
    keeps: bool,
    contestants: Vec<Contestant>,
    rates: Vec<Vec<f64>>,
}

fn main() {
    let Some(options) = parse() else {
        eprintln!(
            "usage: cargo bench -p onelayer --bench limits -- DIR [--rounds N] [--only cold|warm] [--io IO] [--threads N]"
        );
        return;
    };
    let mut buffer = HugeBuffer::new(RING_BYTES).expect("memory for a ring");
    check_copies(buffer.bytes());
    println!(
        "{}: {:.1} GiB in {} files, {} threads, {} rounds",
        options.source.display(),
        options.file_bytes as f64 / GIB,
        options.files.len(),
        options.threads,
        options.rounds
    );
    println!("memcpy alone: {}", memory(&options));
    for state in [State::Cold, State::Warm] {
        if options.only.is_none_or(|only| only == state) {
            for kind in kinds(&options, state) {
                let mut contest = Contest::pilot(&options, state, kind, buffer.bytes());
                contest.run(&options, buffer.bytes());
                contest.report();
            }
        }
    }
}

/// Checks that the ways copy correctly.
fn check_copies(target: &mut [u8]) {
    let source: Vec<u8> =
        (0..10_007_u32).map(|number| number.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    for copy in StreamCopy::available() {
        for (from, to, len) in [(0, 0, 8192), (1, 0, 10_006), (3, 64, 255), (5, 1, 777)] {
            target[..source.len() + 64].fill(0);
            // SAFETY: source and buffer have as many bytes and do not overlap; only ways supported
            // by the processor are available.
            unsafe { copy.copy(source[from..].as_ptr(), target[to..].as_mut_ptr(), len) };
            assert_eq!(target[to..][..len], source[from..][..len], "{}", copy.name());
            assert_eq!(target[to + len], 0, "{}", copy.name());
        }
    }
}

/// The measurements of a cache state, and the candidate shapes for its limit.
fn kinds(options: &Options, state: State) -> Vec<Kind> {
    let threads = options.threads;
    let mut kinds = match state {
        State::Cold => vec![
            Kind { title: "cold, read and dropped", target: Target::None, shapes: direct_shapes(true) },
            Kind {
                title: "cold, all kept in fresh memory",
                target: Target::Host,
                shapes: direct_shapes(false),
            },
        ],
        State::Warm => {
            let blocks = [256 << 10, MIB, 4 * MIB];
            let turns = copy_shapes(threads, &blocks, |_, _| Some(RING_BYTES));
            let hot = copy_shapes(threads, &blocks, |threads, block_bytes| Some(threads * block_bytes));
            // Fresh memory costs more than the difference between block sizes.
            let fresh = copy_shapes(threads, &blocks[2..], |_, _| None);
            vec![
                Kind { title: "warm, against a ring of 64 MiB in turn", target: Target::None, shapes: turns },
                Kind { title: "warm, against hot memory", target: Target::None, shapes: hot },
                Kind { title: "warm, all kept in fresh memory", target: Target::Host, shapes: fresh },
            ]
        }
    };
    if options.file_bytes >= available_bytes() / 3 {
        println!("{state:?}, all kept in fresh memory: left out, there is too little of it");
        kinds.retain(|kind| kind.target != Target::Host);
    }
    kinds
}

fn direct_shapes(dropped: bool) -> Vec<Shape> {
    let mut shapes = Vec::new();
    for threads in [1, 2, 4] {
        for block_bytes in [2 * MIB, 4 * MIB] {
            let buffer_bytes = dropped.then_some(threads * block_bytes);
            shapes.push(Shape { way: Way::Direct, threads, block_bytes, buffer_bytes });
        }
    }
    shapes
}

fn copy_shapes(
    most_threads: usize,
    blocks: &[usize],
    buffer: fn(usize, usize) -> Option<usize>,
) -> Vec<Shape> {
    let mut ways = vec![Way::Pread, Way::MapCopy];
    ways.extend(StreamCopy::available().into_iter().map(Way::MapStream));
    let mut shapes = Vec::new();
    for way in ways {
        for threads in [most_threads.div_ceil(2), most_threads, most_threads * 2] {
            for &block_bytes in blocks {
                let buffer_bytes = buffer(threads, block_bytes);
                shapes.push(Shape { way, threads, block_bytes, buffer_bytes });
            }
        }
    }
    shapes
}

impl Contest {
    /// Runs every shape of a kind twice on a part of the files, and keeps the fastest.
    fn pilot(options: &Options, state: State, kind: Kind, buffer: &mut [u8]) -> Self {
        let Kind { title, target, shapes } = kind;
        let keeps = target == Target::Host;
        let mut tried = Vec::new();
        for shape in shapes {
            let mut best: f64 = 0.0;
            for _ in 0..2 {
                prepare(options, state, keeps.then_some(options.pilot_bytes));
                best = best.max(rate(|| plain(&shape, options, options.pilot_bytes, buffer)));
            }
            tried.push((best, shape));
        }
        tried.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let finalists = tried.iter().take(FINALISTS).map(|(_, shape)| Contestant::Plain(*shape));
        let contestants: Vec<_> = finalists.chain([Contestant::Ours(target)]).collect();
        println!("{title}: {} shapes in the pilot", tried.len());
        let rates = vec![Vec::new(); contestants.len()];
        Self { state, keeps, contestants, rates }
    }

    fn run(&mut self, options: &Options, buffer: &mut [u8]) {
        let count = self.contestants.len();
        for round in 0..options.rounds {
            for turn in 0..count {
                let index = (round + turn) % count;
                prepare(options, self.state, self.keeps.then_some(options.file_bytes));
                let rate = match self.contestants[index] {
                    Contestant::Plain(shape) => rate(|| plain(&shape, options, usize::MAX, buffer)),
                    Contestant::Ours(target) => rate(|| ours(options, target)),
                };
                self.rates[index].push(rate);
            }
        }
    }

    fn report(&self) {
        let plain = self.contestants.len() - 1;
        let fastest = (0..plain)
            .max_by(|a, b| median(&self.rates[*a]).total_cmp(&median(&self.rates[*b])))
            .expect("a pilot lets some through");
        let limit = &self.rates[fastest];
        for (contestant, rates) in self.contestants.iter().zip(&self.rates) {
            let name = match contestant {
                Contestant::Plain(shape) => shape.to_string(),
                Contestant::Ours(target) => format!("onelayer, {target:?}"),
            };
            println!("  {:6.2} GiB/s  {name}", median(rates));
        }
        let ratios: Vec<f64> =
            self.rates[plain].iter().zip(limit).map(|(ours, limit)| ours / limit).collect();
        println!("  ours / limit: {}", Spread(&ratios));
        let itself: Vec<f64> = limit.windows(2).map(|pair| pair[1] / pair[0]).collect();
        if !itself.is_empty() {
            println!("  limit / itself: {}", Spread(&itself));
        }
    }
}

/// Formats a median with minimum and maximum.
struct Spread<'a>(&'a [f64]);

impl std::fmt::Display for Spread<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let least = self.0.iter().copied().fold(f64::INFINITY, f64::min);
        let most = self.0.iter().copied().fold(0.0, f64::max);
        write!(f, "{:.3} ({least:.3} to {most:.3})", median(self.0))
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// GiB per second of `work`, which returns the moved bytes. Freeing its result is not timed.
fn rate<T>(work: impl FnOnce() -> (usize, T)) -> f64 {
    let start = Instant::now();
    let (bytes, held) = work();
    let seconds = start.elapsed().as_secs_f64();
    drop(held);
    bytes as f64 / seconds / GIB
}

fn plain(shape: &Shape, options: &Options, most_bytes: usize, buffer: &mut [u8]) -> (usize, Option<MmapMut>) {
    shape.run(&options.files, most_bytes, buffer).expect("every way reads these files")
}

/// A whole load, from opening the checkpoint to the last byte.
fn ours(options: &Options, target: Target) -> (usize, Model) {
    let checkpoint = Checkpoint::open(&options.source).expect("a checkpoint");
    let mut builder = Loader::builder(target);
    if let Some(io) = options.io {
        builder = builder.io(io);
    }
    let model = builder.build().expect("a loader").load(&checkpoint).expect("a load");
    let bytes = model.report().tensor_bytes;
    (usize::try_from(bytes).expect("64 bits"), model)
}

/// Brings the files into a cache state, checks it, and prepares memory for the kept data.
fn prepare(options: &Options, state: State, kept_bytes: Option<usize>) {
    reach(options, state);
    if let Some(bytes) = kept_bytes {
        back_memory(bytes);
    }
}

fn reach(options: &Options, state: State) {
    for attempt in 0.. {
        if state == State::Cold {
            options.files.iter().for_each(|path| residency::drop_pages(path).expect("advice"));
        }
        let cached = options.files.iter().map(|path| residency::cached_bytes(path).expect("mincore"));
        let share = cached.sum::<usize>() as f64 / options.file_bytes as f64;
        if (state == State::Cold && share < 0.01) || (state == State::Warm && share > 0.99) {
            return;
        }
        assert!(attempt < 5, "{state:?} was asked for, {:.0} % of the files is cached", share * 100.0);
        if state == State::Warm {
            options.files.iter().for_each(|path| read_in(path).expect("a file"));
        }
    }
}

/// Touches memory and frees it. The host of a virtual machine reclaims pages that are free for some
/// seconds, and the next touch would be slow.
fn back_memory(bytes: usize) {
    let mut memory = MmapMut::map_anon(bytes + bytes / 8).expect("memory");
    memory.advise(Advice::HugePage).expect("advice");
    if memory.advise(Advice::PopulateWrite).is_err() {
        memory.fill(1);
    }
}

/// Reads a file from its start in large blocks, so that the kernel can use large pages.
fn read_in(path: &Path) -> io::Result<()> {
    let mut block = vec![0; 8 * MIB];
    let mut file = File::open(path)?;
    while file.read(&mut block)? > 0 {}
    Ok(())
}

/// Copy rate without files: from 256 MiB of memory into a buffer of the ring's size, by all
/// threads.
fn memory(options: &Options) -> String {
    let mut source = HugeBuffer::new(256 * MIB).expect("memory");
    let mut target = HugeBuffer::new(RING_BYTES).expect("memory");
    let rates: Vec<f64> = (0..5)
        .map(|_| {
            let (source, target) = (&*source.bytes(), target.bytes());
            rate(|| {
                let part = source.len() / options.threads;
                let room = target.len() / options.threads;
                std::thread::scope(|scope| {
                    for (source, target) in source.chunks(part).zip(target.chunks_mut(room)) {
                        scope.spawn(move || {
                            source
                                .chunks(target.len())
                                .for_each(|piece| target[..piece.len()].copy_from_slice(piece))
                        });
                    }
                });
                (source.len(), ())
            })
        })
        .collect();
    format!("{:.2} GiB/s with {} threads", median(&rates), options.threads)
}

fn available_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<usize>().ok());
    kib.unwrap_or(0) << 10
}

fn parse() -> Option<Options> {
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    let source = PathBuf::from(words.next()?);
    let checkpoint = Checkpoint::open(&source).expect("a checkpoint");
    let files: Vec<PathBuf> = checkpoint.shards().iter().map(|shard| shard.path.clone()).collect();
    let lens = files.iter().map(|path| path.metadata().expect("a file").len());
    let mut options = Options {
        source,
        file_bytes: usize::try_from(lens.sum::<u64>()).expect("64 bits"),
        files,
        rounds: 7,
        only: None,
        io: None,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        pilot_bytes: 1 << 30,
    };
    while let Some(word) = words.next() {
        let value = words.next().unwrap_or_else(|| panic!("{word} needs a value"));
        let number = || value.parse::<usize>().expect("a number");
        match (word.as_str(), value.as_str()) {
            ("--rounds", _) => options.rounds = number().max(1),
            ("--threads", _) => options.threads = number().max(1),
            ("--pilot-mib", _) => options.pilot_bytes = number() * MIB,
            ("--only", "cold") => options.only = Some(State::Cold),
            ("--only", "warm") => options.only = Some(State::Warm),
            ("--io", name) => {
                let modes = [IoMode::Auto, IoMode::Buffered, IoMode::Direct, IoMode::Mmap, IoMode::Uring];
                let found = modes.into_iter().find(|mode| mode.to_string() == name);
                options.io = Some(found.unwrap_or_else(|| panic!("--io {name}: no such mode")));
            }
            _ => panic!("unknown option {word} {value}"),
        }
    }
    Some(options)
}
