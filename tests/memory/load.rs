//! The promise, from the kernel's own high-water mark: a load of many times the budget stays inside
//! budget + 16 MiB, and what was loaded is given back.
//!
//! Each measurement is a fresh process: this test binary starts itself again with one test and
//! settings in the environment, so that nothing another test did can be counted, or can hide what
//! is.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use onelayer::plan::PlanError;
use onelayer::{Checkpoint, IoMode, LoadError, Loader, Target, Window};
use onelayer_probe::Procfs;
use onelayer_testing::{TestTensor, write_sharded};

const MIB: u64 = 1 << 20;
/// Stacks, the allocator's slack: what the promise allows beside the budget.
const SLACK_BYTES: u64 = 16 * MIB;
/// Within this, memory counts as given back.
const RESIDUE_BYTES: u64 = 4 * MIB;

/// 400 MiB in two shards; the embedding alone is 160 MiB.
fn write_checkpoint(folder: &std::path::Path) {
    let mut tensors = vec![TestTensor::random("model.embed_tokens.weight", 160 << 20, 1)];
    for layer in 0..6 {
        for (number, name) in
            (0..).zip(["mlp.up_proj.weight", "mlp.down_proj.weight", "self_attn.q_proj.weight"])
        {
            let name = format!("model.layers.{layer}.{name}");
            tensors.push(TestTensor::random(name, (13 << 20) + 7, 10 + 3 * layer + number));
        }
    }
    let second = tensors.split_off(9);
    write_sharded(folder, &[tensors, second]);
}

struct Usage {
    rss_bytes: u64,
    peak_bytes: u64,
}

fn usage() -> Usage {
    let memory = Procfs::default().myself().memory();
    Usage { rss_bytes: memory.rss_bytes.value().unwrap(), peak_bytes: memory.rss_peak_bytes.value().unwrap() }
}

/// The measured process. Does nothing unless started by [`measure`].
#[test]
fn measured_child() {
    let Ok(setting) = std::env::var("ONELAYER_LOAD_MEMORY") else { return };
    let mut words = setting.split(' ');
    let path = words.next().unwrap();
    let io = match words.next().unwrap() {
        "mmap" => IoMode::Mmap,
        "direct" => IoMode::Direct,
        "auto" => IoMode::Auto,
        _ => IoMode::Buffered,
    };
    let target = if words.next() == Some("none") { Target::None } else { Target::Host };
    let mut number = || words.next().unwrap().parse::<u64>().unwrap();
    let (budget_bytes, window) = (number(), number());

    // Warm-up: the first touch of code and of the allocator is not the load's.
    drop(Checkpoint::open(onelayer_testing::fixture("llama")).unwrap());
    Procfs::default().myself().reset_peak().unwrap();
    let before = usage();
    let checkpoint = Checkpoint::open(path).unwrap();
    let builder = Loader::builder(target).host_budget(budget_bytes).io(io);
    let resident_bytes = if window == 0 {
        let mut model = builder.build().unwrap().load(&checkpoint).unwrap();
        let resident_bytes = model.resident_bytes();
        let receipt = model.unload_all();
        assert_eq!(receipt.returned_bytes, resident_bytes);
        resident_bytes
    } else {
        let window = Window::Layers(u32::try_from(window).unwrap());
        let mut stream = builder.window(window).build().unwrap().stream(&checkpoint).unwrap();
        let resident_bytes = stream.plan().memory().resident_bytes();
        for layer in &mut stream {
            // Touch what was delivered, as an engine would.
            let layer = layer.unwrap();
            let sum: u64 = layer
                .tensors()
                .filter_map(|t| {
                    t.as_bytes().map(|b| b.iter().step_by(4096).map(|&b| u64::from(b)).sum::<u64>())
                })
                .sum();
            assert!(sum > 0 || target == Target::None);
        }
        resident_bytes
    };
    drop(checkpoint);
    let after = usage();
    println!(
        "measured {} {} {resident_bytes}",
        after.peak_bytes - before.rss_bytes,
        after.rss_bytes.saturating_sub(before.rss_bytes)
    );
}

/// Peak growth, growth that stayed, and bytes of resident layers.
fn measure(
    path: &std::path::Path,
    io: &str,
    target: &str,
    budget_bytes: u64,
    window: u64,
) -> (u64, u64, u64) {
    let line = onelayer_testing::measured(
        module_path!(),
        "ONELAYER_LOAD_MEMORY",
        &format!("{} {io} {target} {budget_bytes} {window}", path.display()),
    );
    let numbers: Vec<u64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
    (numbers[0], numbers[1], numbers[2])
}

#[test]
fn peak_memory_is_the_budget_whatever_the_model() {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path());
    for io in ["auto", "buffered", "mmap", "direct"] {
        for (target, budget_mib, window) in [("none", 64, 2), ("none", 8, 1), ("host", 16, 1), ("host", 8, 0)]
        {
            let (peak, stayed, resident) = measure(folder.path(), io, target, budget_mib * MIB, window);
            let setting = format!("{io} {target} budget {budget_mib} MiB window {window}");
            println!(
                "{setting}: peak +{} KiB, resident {} KiB, stayed {} KiB",
                peak >> 10,
                resident >> 10,
                stayed >> 10
            );
            assert!(
                peak <= budget_mib * MIB + resident + SLACK_BYTES,
                "{setting}: peak growth {peak}, resident {resident}"
            );
            assert!(stayed <= RESIDUE_BYTES, "{setting}: {stayed} bytes stayed");
            // A check that cannot fail is none: the layers that were kept must show. Where pages are
            // small, the unused end of an arena is not touched.
            assert!(
                peak >= resident - resident / 16,
                "{setting}: peak {peak} below what was resident, {resident}"
            );
        }
    }
}

/// What a description costs counts too, and what is needed on the way from the headers to the plan:
/// here it is nearly all of the budget.
#[test]
fn many_tensors_stay_inside_the_smallest_budget() {
    let folder = tempfile::tempdir().unwrap();
    let names: [fn(usize) -> String; 2] = [
        |number| format!("every_tensor_a_layer_{number:06}"),
        |number| format!("model.layers.{}.experts.{}.weight", number / 5000, number % 5000),
    ];
    for (case, name) in (0..).zip(names) {
        let tensors: Vec<_> = (0..onelayer_testing::all_or(300_000, 100_000))
            .map(|number| TestTensor::random(name(number), 1, 1))
            .collect();
        let path = folder.path().join(format!("{case}.safetensors"));
        onelayer_testing::write_file(&path, &tensors, 0);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let loader = Loader::builder(Target::None).host_budget(MIB).build().unwrap();
        let refused = loader.plan(&checkpoint).unwrap_err();
        let LoadError::Plan(PlanError::BudgetTooSmall { smallest_bytes, .. }) = refused else {
            panic!("{refused}")
        };
        let (peak, _, _) = measure(&path, "buffered", "none", smallest_bytes, 2);
        println!("{}: peak +{} KiB, budget {} KiB", name(0), peak >> 10, smallest_bytes >> 10);
        assert!(
            peak <= smallest_bytes + SLACK_BYTES,
            "{}: peak growth {peak}, budget {smallest_bytes}",
            name(0)
        );
    }
}

#[test]
fn small_layers_take_little_more_than_their_bytes() {
    const LAYERS: u64 = 2000;
    const TENSOR_BYTES: usize = 1500;
    let folder = tempfile::tempdir().unwrap();
    let tensors = |layer| {
        ["mlp.weight", "norm.weight"]
            .map(|name| TestTensor::random(format!("model.layers.{layer}.{name}"), TENSOR_BYTES, layer))
    };
    onelayer_testing::write_file(
        &folder.path().join("model.safetensors"),
        &(0..LAYERS).flat_map(tensors).collect::<Vec<_>>(),
        0,
    );
    let (peak, stayed, resident) = measure(folder.path(), "buffered", "host", 8 * MIB, 0);
    println!("peak +{} KiB, resident {} KiB, stayed {} KiB", peak >> 10, resident >> 10, stayed >> 10);
    assert!(resident >= LAYERS * 3000);
    assert!(resident <= LAYERS * 64 * 1024, "a page a layer at most, on any machine: {resident}");
    assert!(peak <= 8 * MIB + resident + SLACK_BYTES, "peak growth {peak}, resident {resident}");
    assert!(stayed <= RESIDUE_BYTES, "{stayed} bytes stayed");
}
