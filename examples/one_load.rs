#![allow(unsafe_code, reason = "maps a file as other loaders do")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program")]
//! One load in a separate process, for the comparison in `benches/peers`; the parent measures.
//!
//! `one_load host-all|host-1|none|crate-to-vec SOURCE [--io auto|buffered|direct|mmap|uring]
//! [--budget-mib N] [--readers N] [--window N] [--dtype bf16]`
//!
//! `host-all` ends with every tensor in owned memory, `host-1` streams with one resident layer at a
//! time, `none` reads every byte and keeps none. `crate-to-vec` does not use this library: only the
//! crates `safetensors` and `memmap2`, and one vector per tensor, as usual for Rust loaders.
//!
//! Lines of JSON on stdout, a word on stdin, as in `benches/peers/child.py`: `ready` -> "go" ->
//! `done` -> "end".

use std::error::Error;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use onelayer::units::MIB;
use onelayer::{Checkpoint, IoMode, Loader, LoaderBuilder, Model, Target, Window};
use safetensors::SafeTensors;
use serde_json::json;

type Outcome<T> = Result<T, Box<dyn Error>>;

struct Options {
    way: String,
    source: PathBuf,
    io: Option<IoMode>,
    budget_mib: u64,
    readers: Option<u32>,
    window: Option<u32>,
    narrows: bool,
}

/// The loaded tensors; dropped when the parent has measured them.
enum Held {
    Model(Box<Model>),
    Vectors(Vec<Vec<u8>>),
    Nothing,
}

fn main() -> ExitCode {
    let outcome = parse().and_then(|options| run(&options));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The parent reports it as a refusal.
            println!("{}", json!({ "refused": error.to_string() }));
            ExitCode::FAILURE
        }
    }
}

fn parse() -> Outcome<Options> {
    let mut words = std::env::args().skip(1);
    let mut next = |what: &'static str| words.next().ok_or(what);
    let way = next("say how to load")?;
    let source = PathBuf::from(next("say what to load")?);
    let mut options =
        Options { way, source, io: None, budget_mib: 64, readers: None, window: None, narrows: false };
    while let Ok(word) = next("") {
        let value = next("an option needs a value")?;
        match (word.as_str(), value.as_str()) {
            ("--io", name) => {
                let modes = [IoMode::Auto, IoMode::Buffered, IoMode::Direct, IoMode::Mmap, IoMode::Uring];
                let found = modes.into_iter().find(|mode| mode.to_string() == name);
                options.io = Some(found.ok_or_else(|| format!("--io {name}: no such mode"))?);
            }
            ("--readers", number) => options.readers = Some(number.parse()?),
            ("--window", number) => options.window = Some(number.parse()?),
            ("--dtype", "bf16") => options.narrows = true,
            ("--budget-mib", number) => options.budget_mib = number.parse()?,
            _ => return Err(format!("{word} {value}: no such option").into()),
        }
    }
    Ok(options)
}

fn run(options: &Options) -> Outcome<()> {
    println!("{}", json!({ "ready": true, "import_seconds": 0.0 }));
    wait_for_word()?;
    let start = Instant::now();
    let (bytes, held) = load(options)?;
    let seconds = start.elapsed().as_secs_f64();
    let held_bytes = match &held {
        Held::Model(model) => model.report().tensor_bytes,
        Held::Vectors(vectors) => vectors.iter().map(|vector| bytes_of(vector)).sum(),
        Held::Nothing => 0,
    };
    let done = json!({ "done": true, "seconds": seconds, "bytes": bytes, "mapped_bytes": 0, "held_bytes": held_bytes });
    println!("{done}");
    wait_for_word()
}

fn wait_for_word() -> Outcome<()> {
    io::stdin().read_line(&mut String::new())?;
    Ok(())
}

/// Loads and returns the number of tensor bytes, and the kept tensors.
fn load(options: &Options) -> Outcome<(u64, Held)> {
    match options.way.as_str() {
        "host-all" => {
            let checkpoint = Checkpoint::open(&options.source)?;
            let model = loader(options, Target::Host).build()?.load(&checkpoint)?;
            Ok((model.report().tensor_bytes, Held::Model(Box::new(model))))
        }
        "host-1" => stream(options, loader(options, Target::Host).window(Window::Layers(1))),
        "none" => stream(options, loader(options, Target::None)),
        "crate-to-vec" => to_vectors(&options.source),
        other => Err(format!("{other}: no such way").into()),
    }
}

fn loader(options: &Options, target: Target) -> LoaderBuilder {
    let mut builder = Loader::builder(target).host_budget(options.budget_mib * MIB);
    if let Some(io) = options.io {
        builder = builder.io(io);
    }
    if let Some(readers) = options.readers {
        builder = builder.readers(readers);
    }
    if options.narrows {
        builder = builder.dtype(onelayer::FloatType::Bf16);
    }
    if let Some(layers) = options.window {
        builder = builder.window(Window::Layers(layers));
    }
    builder
}

fn stream(options: &Options, builder: LoaderBuilder) -> Outcome<(u64, Held)> {
    let checkpoint = Checkpoint::open(&options.source)?;
    let mut stream = builder.build()?.stream(&checkpoint)?;
    for layer in &mut stream {
        drop(layer?);
    }
    Ok((stream.report().tensor_bytes, Held::Nothing))
}

fn to_vectors(source: &Path) -> Outcome<(u64, Held)> {
    let mut paths = vec![source.to_owned()];
    if source.is_dir() {
        let entries = source.read_dir()?.map(|entry| entry.map(|entry| entry.path()));
        paths = entries.collect::<io::Result<_>>()?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
        paths.sort();
    }
    let mut vectors = Vec::new();
    for path in paths {
        let file = File::open(path)?;
        // SAFETY: the files of a comparison do not change while it runs.
        let map = unsafe { memmap2::Mmap::map(&file) }?;
        for (_, tensor) in SafeTensors::deserialize(&map)?.tensors() {
            vectors.push(tensor.data().to_vec());
        }
    }
    Ok((vectors.iter().map(|vector| bytes_of(vector)).sum(), Held::Vectors(vectors)))
}

fn bytes_of(vector: &[u8]) -> u64 {
    u64::try_from(vector.len()).expect("64-bit lengths")
}
