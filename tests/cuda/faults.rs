//! Every call of the driver fails once, in loads that are otherwise like any other.
//!
//! Whatever fails, a load either ends with an error or every byte is right; nothing is left behind,
//! nobody hangs, nothing panics. Each run is a process of its own that finds the simulated driver;
//! the tests that say `scenario` are what runs there, and do nothing by themselves.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a scenario tells its parent, a sweep its figures"
)]

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use onelayer::load::{LoadError, LoadedLayer};
use onelayer::{Checkpoint, HandOut, Loader, Target, Window};
use onelayer_testing::{TestTensor, all_or, small_decoder, write_sharded};

use onelayer_testing::cuda_sim::{SimOutcome, SimRun};

fn run(way: &str, mode: &str, change: impl FnOnce(SimRun) -> SimRun) -> SimOutcome {
    let run = SimRun::again(module_path!(), "scenario")
        .env("ONELAYER_WAY", way)
        .set("MODE", mode)
        .set("DELAY_US", 20);
    change(run).run()
}

/// A fault that made a run go wrong, in words; `None` if all is well.
fn judge(outcome: &SimOutcome) -> Result<&str, String> {
    let words =
        || format!("{:?}\n{}\n{}\n{:?}", outcome.status, outcome.stdout, outcome.stderr, outcome.reports);
    let ending = outcome.stdout.lines().find_map(|line| line.split_once("outcome: "));
    match (ending, &outcome.reports[..]) {
        (Some((_, ending)), [report])
            if outcome.status.success() && report.violations().is_empty() && report.leaks().is_empty() =>
        {
            Ok(ending)
        }
        // A driver that was never initialised has nothing to report.
        (Some((_, ending)), []) if outcome.status.success() && ending.contains("does not start") => {
            Ok(ending)
        }
        _ => Err(words()),
    }
}

/// How long a process with a fault may take, from its start to its end, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// Fails each call of a load in turn: with each code in a thorough check, else with one of them. A
/// hang is noticed too: no run takes longer than it may.
fn sweep(way: &str, mode: &str, codes: [u32; 3]) {
    let plain = run(way, mode, |run| run);
    assert_eq!(judge(&plain), Ok("complete"));
    let calls = usize::try_from(plain.report().number("calls.total")).unwrap();
    let points: Vec<(usize, u32)> = (1..=calls)
        .flat_map(|call| {
            all_or(codes.to_vec(), vec![codes[call % 3]]).into_iter().map(move |code| (call, code))
        })
        .collect();
    let jobs = Mutex::new(points.iter().enumerate());
    let endings = Mutex::new(BTreeMap::<String, usize>::new());
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let job = jobs.lock().unwrap().next();
                    let Some((job, (call, code))) = job else { break };
                    let rule = format!("*:{call}:{code}");
                    let started = Instant::now();
                    let outcome = run(way, mode, |run| run.fail(&rule).set("SEED", 1 + job));
                    assert!(started.elapsed() < PATIENCE, "{rule}: {:?}", started.elapsed());
                    let ending = judge(&outcome).unwrap_or_else(|words| panic!("{rule}: {words}"));
                    let kind = ending.split(&[' ', ':'][..]).take(3).collect::<Vec<_>>().join(" ");
                    *endings.lock().unwrap().entry(kind).or_default() += 1;
                }
            });
        }
    });
    let endings = endings.into_inner().unwrap();
    eprintln!("{way}, {mode}: {} runs ({calls} calls, codes {codes:?}): {endings:#?}", points.len());
    assert_eq!(endings.values().sum::<usize>(), points.len());
    // Faults that hit cannot all have been harmless.
    assert!(endings.get("complete").copied().unwrap_or(0) < points.len() * 2 / 3);
}

/// Out of memory, a context that is lost, and an error that means nothing.
#[test]
fn every_call_of_a_load_may_fail() {
    sweep("load", "lazy", [2, 700, 999]);
}

/// A refusal, a context that is lost otherwise, and a driver that shuts down.
#[test]
fn every_call_of_a_stream_may_fail() {
    sweep("stream", "thread", [1, 719, 4]);
}

/// What one load ended with: how many tensors could be read back, all of them right.
fn check(layer: &LoadedLayer, tensors: &[TestTensor]) -> Result<usize, LoadError> {
    let mut read = 0;
    for tensor in layer.tensors() {
        let expected = &tensors.iter().find(|expected| expected.name == tensor.name()).unwrap().bytes;
        let mut found = vec![0; expected.len()];
        tensor.read(0, &mut found)?;
        assert!(found == *expected, "{} is wrong", tensor.name());
        read += 1;
    }
    Ok(read)
}

fn load_all(checkpoint: &Checkpoint, tensors: &[TestTensor]) -> Result<usize, LoadError> {
    let loader = Loader::builder(Target::Cuda(0)).host_budget(5 << 20).readers(2).build()?;
    let name = loader.device().info()?.name;
    assert!(name.contains("simulated"), "{name}");
    let mut model = loader.load(checkpoint)?;
    let mut read = 0;
    for layer in model.layers() {
        read += check(layer, tensors)?;
    }
    model.unload_all();
    Ok(read)
}

fn stream_all(checkpoint: &Checkpoint, tensors: &[TestTensor]) -> Result<usize, LoadError> {
    let builder = Loader::builder(Target::Cuda(0)).host_budget(5 << 20).readers(2);
    let loader = builder.window(Window::Layers(2)).hand_out(HandOut::AtOnce).build()?;
    let name = loader.device().info()?.name;
    assert!(name.contains("simulated"), "{name}");
    let mut read = 0;
    for layer in loader.stream(checkpoint)? {
        let layer = layer?;
        // Somebody may use it from now on.
        let _ = layer.tensors().next().and_then(|tensor| tensor.device_pointer());
        layer.is_ready()?;
        layer.wait_ready()?;
        read += check(&layer, tensors)?;
    }
    Ok(read)
}

#[test]
#[ignore = "scenario"]
fn scenario() {
    let folder = tempfile::tempdir().unwrap();
    let shards = small_decoder(2, 150_000);
    write_sharded(folder.path(), &shards);
    let tensors = shards.concat();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let outcome = match std::env::var("ONELAYER_WAY").unwrap().as_str() {
        "load" => load_all(&checkpoint, &tensors),
        "stream" => stream_all(&checkpoint, &tensors),
        way => panic!("no way {way}"),
    };
    match outcome {
        Ok(read) => {
            assert_eq!(read, tensors.len());
            println!("outcome: complete");
        }
        Err(error) => println!("outcome: error: {error}"),
    }
}
