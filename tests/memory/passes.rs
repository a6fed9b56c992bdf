//! Pass after pass, nothing grows and nothing is allocated: counted by an allocator that counts
//! while it is told to, and from the kernel's own counts. Each measurement is a process of its own.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use crate::allocator::{BLOCKS, IS_COUNTING};
use onelayer::plan::TermKind;
use onelayer::{Checkpoint, IoMode, Keep, LoadedTensor, Loader, Passes, Target, Window};
use onelayer_probe::Procfs;
use onelayer_testing::{TestTensor, write_sharded};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const BUDGET_BYTES: u64 = 16 * MIB;
const SLACK_BYTES: u64 = 16 * MIB;
/// How far the kernel's counts may be off: it adds them up processor by processor, now and then.
const COUNT_BYTES: u64 = 192 * KIB;
/// Passes that are measured. One more follows, so that the end of the load is not in the last of
/// them.
const PASSES: u64 = 20;
/// Passes after which lists have their length, threads have waited once, and every page of the ring
/// has been touched.
const WARM_UP: u64 = 5;
/// Layers that come and go in each pass.
const LAYERS: u64 = 6;

/// 12 MiB of embedding and head, six layers of 6 MiB.
fn write_checkpoint(folder: &std::path::Path) {
    let mut tensors = vec![TestTensor::random("model.embed_tokens.weight", 8 << 20, 1)];
    for layer in 0..LAYERS {
        for (number, name) in (0..).zip(["mlp.up_proj.weight", "mlp.down_proj.weight"]) {
            let name = format!("model.layers.{layer}.{name}");
            tensors.push(TestTensor::random(name, (3 << 20) + 7, 10 + 3 * layer + number));
        }
    }
    tensors.push(TestTensor::random("lm_head.weight", 4 << 20, 2));
    write_sharded(folder, &[tensors]);
}

/// Waits until a number has not changed for half a second.
fn wait_until_still(number: impl Fn() -> u64) {
    let (mut last, mut polls) = (number(), 0);
    while polls < 10 {
        std::thread::sleep(Duration::from_millis(50));
        let now = number();
        polls = if now == last { polls + 1 } else { 0 };
        last = now;
    }
}

/// The measured process. Does nothing unless started by [`measure`].
#[test]
fn measured_child() {
    let Ok(setting) = std::env::var("ONELAYER_PASSES_MEMORY") else { return };
    let (path, io) = setting.rsplit_once(' ').unwrap();
    let io = match io {
        "mmap" => IoMode::Mmap,
        "direct" => IoMode::Direct,
        "uring" => IoMode::Uring,
        "auto" => IoMode::Auto,
        _ => IoMode::Buffered,
    };
    let procfs = Procfs::default().myself();
    drop(Checkpoint::open(onelayer_testing::fixture("llama")).unwrap());
    procfs.reset_peak().unwrap();
    let before = procfs.memory().rss_bytes.value().unwrap();
    let checkpoint = Checkpoint::open(path).unwrap();
    let builder = Loader::builder(Target::Host).host_budget(BUDGET_BYTES).io(io).window(Window::Layers(2));
    let passes = Passes::Times(PASSES + 1);
    let loader = builder.prefetch(8).keep(Keep::OutsideStacks).passes(passes).build().unwrap();
    let mut stream = loader.stream(&checkpoint).unwrap();
    let resident_bytes = stream.plan().memory().resident_bytes();
    let mapped_bytes = stream.plan().memory().bytes_of(TermKind::MappedWindows);
    let layers = stream.plan().layers().len() as u64;
    // A thread that tensors are sent to: now this one is the last to let go of a layer, now that. The
    // channel is never full.
    let (sender, tensors) = mpsc::sync_channel::<LoadedTensor>(64);
    let other = std::thread::spawn(move || tensors.iter().for_each(drop));
    // Reserved before anything is counted.
    let progress = stream.progress();
    let mut passes = Vec::with_capacity(64);
    let mut taken = 0;
    for layer in &mut stream {
        let layer = layer.unwrap();
        if taken == 2 {
            // What is read ahead meanwhile fills the whole ring: every page of it has been touched after the
            // first pass.
            wait_until_still(|| progress.read_bytes());
        }
        for tensor in layer.tensors() {
            assert!(tensor.as_bytes().is_some_and(|bytes| !bytes.is_empty()));
            sender.send(tensor).unwrap();
        }
        drop(layer);
        taken += 1;
        if taken % layers == 0 && taken <= PASSES * layers {
            // What the probe itself takes is not the load's.
            IS_COUNTING.store(false, Ordering::SeqCst);
            let memory = procfs.memory();
            let grown = |now: u64| now.saturating_sub(before);
            let peak = grown(memory.rss_peak_bytes.value().unwrap());
            passes.push([BLOCKS.swap(0, Ordering::SeqCst), peak, memory.anon_bytes.value().unwrap()]);
            IS_COUNTING.store(true, Ordering::SeqCst);
        }
    }
    IS_COUNTING.store(false, Ordering::SeqCst);
    drop((stream, checkpoint, sender));
    other.join().unwrap();
    let column = |index: usize| {
        passes.iter().map(|pass: &[u64; 3]| pass[index].to_string()).collect::<Vec<_>>().join(",")
    };
    println!("measured {resident_bytes} {mapped_bytes} {} {} {}", column(0), column(1), column(2));
}

struct Measured {
    resident_bytes: u64,
    /// What windows of mappings may take, of the budget.
    mapped_bytes: u64,
    /// Blocks taken from the allocator in each pass; in the first nobody counts.
    blocks: Vec<u64>,
    /// Growth of resident memory, at its highest, after each pass.
    peaks: Vec<u64>,
    /// Resident memory that is not a file's, after each pass.
    anonymous: Vec<u64>,
}

fn measure(path: &std::path::Path, io: &str) -> Measured {
    let line = onelayer_testing::measured(
        module_path!(),
        "ONELAYER_PASSES_MEMORY",
        &format!("{} {io}", path.display()),
    );
    let mut words = line.split(' ');
    let [resident_bytes, mapped_bytes] = [(); 2].map(|()| words.next().unwrap().parse().unwrap());
    let mut numbers =
        || words.next().unwrap().split(',').map(|word| word.parse().unwrap()).collect::<Vec<u64>>();
    Measured { resident_bytes, mapped_bytes, blocks: numbers(), peaks: numbers(), anonymous: numbers() }
}

#[test]
fn twenty_passes_take_what_one_takes() {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path());
    for io in ["buffered", "direct", "uring", "mmap", "auto"] {
        let Measured { resident_bytes, mapped_bytes, blocks, peaks, anonymous } = measure(folder.path(), io);
        let kib = |bytes: &[u64]| bytes.iter().map(|bytes| bytes / KIB).collect::<Vec<_>>();
        println!("{io}: blocks {blocks:?}, KiB at most {:?}, anonymous {:?}", kib(&peaks), kib(&anonymous));
        let all = [blocks.len(), peaks.len(), anonymous.len()];
        assert_eq!(all.map(|passes| passes as u64), [PASSES; 3]);
        assert_eq!(resident_bytes, 2 * (8 << 20) + (8 << 20) + (4 << 20), "two places and what is kept");
        let last = *peaks.last().unwrap();
        assert!(last <= BUDGET_BYTES + resident_bytes + SLACK_BYTES, "{io}: peak growth {last}");
        assert!(last >= resident_bytes, "{io}: a peak of {last} shows less than what is resident");

        let warm = usize::try_from(WARM_UP).unwrap();
        assert_eq!(blocks[warm..].iter().sum::<u64>(), 0, "{io}: blocks of each pass {blocks:?}");
        let mut sorted = blocks[1..].to_vec();
        sorted.sort_unstable();
        assert_eq!(sorted[sorted.len() / 2], 0, "{io}: blocks of each pass {blocks:?}");
        // What is the process's own has its size, and so has the most that was ever resident. Windows of a
        // mapping come and go; that two of them meet which had not met before is as far as this
        // goes.
        let (last_anonymous, warm_anonymous) = (anonymous.last().unwrap(), anonymous[warm - 1]);
        assert!(*last_anonymous <= warm_anonymous + COUNT_BYTES, "{io}: anonymous {:?}", kib(&anonymous));
        assert!(last <= peaks[warm - 1] + mapped_bytes + COUNT_BYTES, "{io}: at most {:?}", kib(&peaks));
        assert!(last <= peaks[0] + mapped_bytes + MIB, "{io}: at most {:?}", kib(&peaks));
    }
}
