//! Many loads at once on one checkpoint, with settings drawn at random: whoever reads, drops,
//! cancels or panics when, every byte that is delivered is right, every stream ends, and no thread
//! stays.
//!
//! `ONELAYER_STRESS_ROUNDS=500 cargo test --release -p onelayer --test loader load_stress` looks
//! longer; a failure names its seed.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use onelayer::{Checkpoint, IoMode, LoadError, LoadedLayer, Loader, LoaderBuilder, Target, Window};
use onelayer_testing::{Random, TestTensor, write_sharded};

/// More than the loader keeps open at once.
const SHARDS: usize = 40;
/// Streams that run at the same time.
const STREAMS: u64 = 6;

/// Thirty layers whose tensors lie in shuffled order all over the shards, many without bytes, one
/// larger than a slot.
fn scattered(folder: &std::path::Path) -> HashMap<String, blake3::Hash> {
    let mut random = Random(7);
    let mut tensors = vec![TestTensor::random("lm_head.weight", 3_000_001, 1)];
    for layer in 0..30_u64 {
        for part in 0..12_u64 {
            let len = [0, 0, 1, 255, 4096, 4097, 30_000, 100_000][usize::try_from(random.below(8)).unwrap()];
            let name = format!("model.layers.{layer}.part{part}.weight");
            tensors.push(TestTensor::random(name, len, 100 * layer + part));
        }
    }
    let hashes = tensors.iter().map(|tensor| (tensor.name.clone(), blake3::hash(&tensor.bytes))).collect();
    let mut shards: Vec<Vec<TestTensor>> = (0..SHARDS).map(|_| Vec::new()).collect();
    while !tensors.is_empty() {
        let at = usize::try_from(random.below(u64::try_from(tensors.len()).unwrap())).unwrap();
        let shard = usize::try_from(random.below(u64::try_from(SHARDS).unwrap())).unwrap();
        shards[shard].push(tensors.swap_remove(at));
    }
    shards.retain(|shard| !shard.is_empty());
    write_sharded(folder, &shards);
    hashes
}

fn settings(random: &mut Random) -> LoaderBuilder {
    let target = if random.one_in(3) { Target::None } else { Target::Host };
    let modes = [IoMode::Auto, IoMode::Buffered, IoMode::Mmap, IoMode::Direct];
    let io = modes[usize::try_from(random.below(4)).unwrap()];
    let window = if random.one_in(4) { Window::All } else { Window::Layers(1 + random.number(32)) };
    // The smallest budget for mapped windows, up to one with a large ring.
    let budget_mib = 6 + if random.one_in(2) { 0 } else { random.below(60) };
    Loader::builder(target)
        .io(io)
        .window(window)
        .prefetch(random.number(40))
        .readers(1 + random.number(16))
        .host_budget(budget_mib << 20)
        .hash(target == Target::None)
        .stall_timeout(Duration::from_secs(60))
}

fn check(layer: &LoadedLayer, hashes: &HashMap<String, blake3::Hash>) {
    for tensor in layer.tensors() {
        let hash = tensor.hash().unwrap().map(|hash| *hash.as_bytes());
        assert_eq!(hash, Some(*hashes[tensor.name()].as_bytes()), "{}", tensor.name());
    }
}

/// One load to its end or to a cancel; layers are checked and dropped by another thread, in any
/// order.
fn load(seed: u64, checkpoint: &Checkpoint, hashes: &HashMap<String, blake3::Hash>) {
    let mut random = Random(seed);
    let loader = settings(&mut random).build().unwrap();
    let mut stream = loader.stream(checkpoint).unwrap();
    let layers = stream.plan().layers().len();
    let window = match stream.plan().window() {
        Window::Layers(count) => usize::try_from(count).unwrap(),
        _ => layers,
    };
    let cancel_after = random.one_in(3).then(|| Duration::from_micros(random.below(20_000)));
    let abandon_after = random.one_in(4).then(|| random.below(31));
    let handle = stream.cancel_handle();
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel::<LoadedLayer>();
        let drop_seed = random.below(u64::MAX);
        scope.spawn(move || {
            let mut random = Random(drop_seed);
            let mut held = Vec::new();
            for layer in receiver {
                check(&layer, hashes);
                held.push(layer);
                // One place of the window is always left, so that the stream can go on.
                while held.len() >= window || (!held.is_empty() && random.one_in(2)) {
                    let at = usize::try_from(random.below(u64::try_from(held.len()).unwrap())).unwrap();
                    drop(held.swap_remove(at));
                }
            }
        });
        if let Some(pause) = cancel_after {
            scope.spawn(move || {
                thread::sleep(pause);
                handle.cancel();
            });
        }
        let mut taken = 0;
        loop {
            if abandon_after == Some(taken) {
                break;
            }
            match stream.next() {
                Some(Ok(layer)) => sender.send(layer).unwrap(),
                Some(Err(LoadError::Cancelled)) if cancel_after.is_some() => break,
                Some(Err(error)) => panic!("{error}"),
                None => {
                    assert_eq!(taken, u64::try_from(layers).unwrap());
                    break;
                }
            }
            taken += 1;
        }
        drop(sender);
        drop(stream);
    });
}

fn loader_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with("onelayer-")).collect()
}

#[test]
fn many_loads_at_once_deliver_every_byte_and_end() {
    if onelayer_testing::in_own_process(module_path!(), "many_loads_at_once_deliver_every_byte_and_end") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let hashes = scattered(folder.path());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let rounds = std::env::var("ONELAYER_STRESS_ROUNDS").map_or(4, |rounds| rounds.parse().unwrap());
    for round in 0..rounds {
        let start = Instant::now();
        let seeds = (0..STREAMS).map(|number| round * STREAMS + number);
        thread::scope(|scope| {
            let (checkpoint, hashes) = (&checkpoint, &hashes);
            for (seed, thread) in seeds
                .map(|seed| (seed, scope.spawn(move || load(seed, checkpoint, hashes))))
                .collect::<Vec<_>>()
            {
                assert!(thread.join().is_ok(), "seed {seed}");
            }
        });
        assert!(start.elapsed() < Duration::from_secs(60), "round {round} took {:?}", start.elapsed());
    }
    assert_eq!(loader_threads(), [""; 0]);
}

#[test]
fn a_selection_that_panics_is_the_callers_and_leaves_nothing() {
    if onelayer_testing::in_own_process(
        module_path!(),
        "a_selection_that_panics_is_the_callers_and_leaves_nothing",
    ) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let hashes = scattered(folder.path());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for last in ["model.layers.0", "model.layers.29", "lm_head"] {
        let loader = Loader::builder(Target::Host)
            .select(move |tensor| if tensor.name.starts_with(last) { panic!("not this one") } else { true })
            .build()
            .unwrap();
        let panic = catch_unwind(AssertUnwindSafe(|| loader.stream(&checkpoint).map(drop))).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"not this one"));
    }
    load(1, &checkpoint, &hashes);
}
