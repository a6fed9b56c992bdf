//! Pass after pass, nothing grows and nothing is allocated: counted by an allocator that counts, and from the kernel's own
//! high-water mark. Each measurement is a process of its own.
#![allow(unsafe_code, reason = "an allocator that counts hands everything on to the system's")]
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::{TestTensor, write_sharded};
use onelayer::probe::Procfs;
use onelayer::{Checkpoint, IoMode, Keep, Loader, Passes, Target, Window};

const MIB: u64 = 1 << 20;
const BUDGET_BYTES: u64 = 16 * MIB;
const SLACK_BYTES: u64 = 16 * MIB;
const PASSES: u64 = 20;
/// Layers that come and go in each pass.
const LAYERS: u64 = 6;
/// Blocks that a layer takes from the allocator while it comes and goes: the shared handles of its arena, of its place and of
/// itself, and the device's side of it. This number may only fall.
const BLOCKS_PER_LAYER_MAX: u64 = 4;

/// Counts what is taken from the system's allocator.
struct Counting;

static BLOCKS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is handed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BLOCKS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        BLOCKS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

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
    drop(Checkpoint::open(common::fixture("llama")).unwrap());
    procfs.reset_peak().unwrap();
    let before = procfs.memory().rss_bytes.value().unwrap();
    let checkpoint = Checkpoint::open(path).unwrap();
    let builder = Loader::builder(Target::Host).host_budget(BUDGET_BYTES).io(io).window(Window::Layers(2));
    let loader = builder.prefetch(8).keep(Keep::OutsideStacks).passes(Passes::Times(PASSES)).build().unwrap();
    let mut stream = loader.stream(&checkpoint).unwrap();
    let resident_bytes = stream.plan().memory().resident_bytes();
    let windows = stream.plan().memory().terms().iter().filter(|term| term.name == "mapped windows");
    let mapped_bytes: u64 = windows.map(|term| term.bytes).sum();
    let layers = stream.plan().layers().len() as u64;
    // Reserved before anything is counted.
    let mut blocks = Vec::with_capacity(64);
    let mut peaks = Vec::with_capacity(64);
    let mut taken = 0;
    for layer in &mut stream {
        let layer = layer.unwrap();
        if taken == 2 {
            // What is read ahead meanwhile fills the whole ring: every page of it has been touched after the first pass.
            std::thread::sleep(Duration::from_millis(300));
        }
        drop(layer);
        taken += 1;
        if taken % layers == 0 {
            blocks.push(BLOCKS.load(Ordering::Relaxed));
            // What the probe itself takes is not the load's.
            peaks.push(procfs.memory().rss_peak_bytes.value().unwrap());
            let probed = BLOCKS.load(Ordering::Relaxed);
            blocks.push(probed);
        }
    }
    drop((stream, checkpoint));
    // The blocks of a pass: from behind the probe of the one before it until its own end.
    let of_pass: Vec<String> =
        blocks[1..].chunks_exact(2).map(|pass| (pass[1] - pass[0]).to_string()).collect();
    let peaks: Vec<String> = peaks.iter().map(|peak| (peak - before).to_string()).collect();
    println!("measured {resident_bytes} {mapped_bytes} {} {}", of_pass.join(","), peaks.join(","));
}

struct Measured {
    resident_bytes: u64,
    /// What windows of mappings may take, of the budget.
    mapped_bytes: u64,
    /// Of each pass but the first.
    blocks: Vec<u64>,
    /// Growth of resident memory, at its highest, after each pass.
    peaks: Vec<u64>,
}

fn measure(path: &std::path::Path, io: &str) -> Measured {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["measured_child", "--exact", "--nocapture", "--test-threads=1"])
        .env("ONELAYER_PASSES_MEMORY", format!("{} {io}", path.display()))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let line =
        text.lines().find_map(|line| line.split("measured ").nth(1)).unwrap_or_else(|| panic!("{text}"));
    let mut words = line.split(' ');
    let [resident_bytes, mapped_bytes] = [(); 2].map(|()| words.next().unwrap().parse().unwrap());
    let mut numbers =
        || words.next().unwrap().split(',').map(|word| word.parse().unwrap()).collect::<Vec<u64>>();
    Measured { resident_bytes, mapped_bytes, blocks: numbers(), peaks: numbers() }
}

#[test]
fn twenty_passes_take_what_one_takes() {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path());
    for io in ["buffered", "direct", "uring", "mmap", "auto"] {
        let Measured { resident_bytes, mapped_bytes, blocks, peaks } = measure(folder.path(), io);
        println!(
            "{io}: blocks of each pass {blocks:?}, peaks in KiB {:?}",
            peaks.iter().map(|p| p >> 10).collect::<Vec<_>>()
        );
        assert_eq!((blocks.len() as u64, peaks.len() as u64), (PASSES - 1, PASSES));
        assert_eq!(resident_bytes, 2 * (8 << 20) + (8 << 20) + (4 << 20), "two places and what is kept");
        let last = *peaks.last().unwrap();
        assert!(last <= BUDGET_BYTES + resident_bytes + SLACK_BYTES, "{io}: peak growth {last}");
        assert!(last >= resident_bytes, "{io}: a peak of {last} shows less than what is resident");
        // Stacks, and what the allocator rounds up; windows of a mapping that had not met at once before.
        assert!(last <= peaks[0] + mapped_bytes + MIB, "{io}: {peaks:?}");
        // A list or a stack that grows once more, late, is no leak: nearly all passes have to be alike.
        let mut sorted = blocks.clone();
        sorted.sort_unstable();
        let typical = sorted[sorted.len() / 2];
        assert!(typical <= LAYERS * BLOCKS_PER_LAYER_MAX, "{io}: {blocks:?}");
        let total: u64 = blocks[1..].iter().sum();
        let allowed = (PASSES - 2) * LAYERS * BLOCKS_PER_LAYER_MAX + 32;
        assert!(total <= allowed, "{io}: {total} blocks in 18 passes: {blocks:?}");
    }
}
