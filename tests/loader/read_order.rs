//! A checkpoint that has one kind of weight after the other, so that each layer is scattered over
//! the file: a load that keeps everything reads it in one go.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use onelayer::plan::TermKind;
use onelayer::{Checkpoint, FloatType, IoMode, LayerId, Loader, ReadOrder, Target, Window};
use onelayer_testing::{TestTensor, write_file};

const LAYERS: u64 = 6;
const KINDS: [&str; 3] = ["mlp.up_proj.weight", "self_attn.k_proj.weight", "self_attn.q_proj.weight"];

fn by_kind(folder: &std::path::Path) -> (Checkpoint, Vec<TestTensor>) {
    let tensors: Vec<TestTensor> = (0..)
        .zip(KINDS)
        .flat_map(|(kind, name): (u32, _)| {
            (0..LAYERS).map(move |layer| {
                TestTensor::random(
                    format!("model.layers.{layer}.{name}"),
                    300_000 + usize::try_from(kind).unwrap(),
                    10 * u64::from(kind) + layer,
                )
            })
        })
        .collect();
    let path = folder.join("model.safetensors");
    write_file(&path, &tensors, 0);
    (Checkpoint::open(path).unwrap(), tensors)
}

#[test]
fn a_load_reads_in_one_go_what_a_stream_jumps_to_and_fro_for() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoint, _) = by_kind(folder.path());
    let builder = Loader::builder(Target::Host).window(Window::All);
    let by_layer = builder.clone().plan(&checkpoint).unwrap();
    // Each layer has one stretch of each kind.
    assert_eq!((by_layer.order(), by_layer.jumps()), (ReadOrder::Layers, 3 * LAYERS - 1));
    let by_file = builder.clone().read_order(ReadOrder::Files).plan(&checkpoint).unwrap();
    assert_eq!((by_file.order(), by_file.jumps()), (ReadOrder::Files, 0));
    assert!(by_file.to_string().contains("order    as the files have them, 0 jumps"), "{by_file}");
    // The permutation is counted: four bytes for each stretch.
    let plan_bytes = |plan: &onelayer::LoadPlan| plan.memory().bytes_of(TermKind::Plan);
    assert_eq!(plan_bytes(&by_file) - plan_bytes(&by_layer), 4 * 3 * LAYERS);

    // Who keeps two layers, or hashes on the way, needs one layer after the other.
    let windowed = builder.clone().window(Window::Layers(2)).read_order(ReadOrder::Files);
    assert_eq!(windowed.plan(&checkpoint).unwrap().order(), ReadOrder::Layers);
    let hashing = Loader::builder(Target::None).window(Window::All).hash(true).read_order(ReadOrder::Files);
    assert_eq!(hashing.plan(&checkpoint).unwrap().order(), ReadOrder::Layers);
    // What is kept nowhere is not bounded by the plan, but while it runs.
    let bounded = Loader::builder(Target::None).window(Window::All).device_budget(1 << 20);
    let bounded = bounded.read_order(ReadOrder::Files).plan(&checkpoint).unwrap();
    assert_eq!(bounded.order(), ReadOrder::Layers);
}

#[test]
fn a_load_ends_when_the_caller_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoint, _) = by_kind(folder.path());
    let loader = Loader::builder(Target::Host).host_budget(8 << 20).build().unwrap();
    let mut seen = 0;
    let error = loader.load_while(&checkpoint, |_| {
        seen += 1;
        seen < 3
    });
    assert!(matches!(error, Err(onelayer::LoadError::Cancelled)), "{error:?}");
    assert_eq!(seen, 3);
    assert_eq!(loader.load_while(&checkpoint, |_| true).unwrap().layers().count(), 6);
}

#[test]
fn layers_end_up_in_execution_order_with_the_right_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoint, tensors) = by_kind(folder.path());
    for io in [IoMode::Auto, IoMode::Buffered, IoMode::Direct, IoMode::Mmap] {
        let loader = Loader::builder(Target::Host).host_budget(8 << 20).io(io).build().unwrap();
        let mut seen = Vec::new();
        let model = loader.load_observed(&checkpoint, |layer| seen.push(layer.index())).unwrap();
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3, 4, 5], "{io}: each is seen once");
        let ids: Vec<String> = model.layers().map(|layer| layer.id().to_string()).collect();
        assert_eq!(ids, [0, 1, 2, 3, 4, 5].map(|layer| format!("model.layers.{layer}")), "{io}");
        for tensor in &tensors {
            let loaded = model.tensor(&tensor.name).unwrap();
            assert!(loaded.as_bytes().unwrap() == tensor.bytes, "{io}: {}", tensor.name);
        }
        assert_eq!(model.layer(&LayerId::parse("model.layers.4").unwrap()).unwrap().index(), 4);
    }
}

/// Casts and the order of files together, and a device that keeps nothing.
#[test]
fn streams_in_the_order_of_files_hand_out_every_layer() {
    let folder = tempfile::tempdir().unwrap();
    let (_, mut tensors) = by_kind(folder.path());
    for tensor in &mut tensors {
        // Three and a half pieces each, ordinary numbers.
        tensor.bytes =
            (0..450_000_u32).flat_map(|i| f32::from_bits(0x3F00_0000 | i << 3).to_le_bytes()).collect();
        (tensor.dtype, tensor.shape) = ("F32", vec![450_000]);
    }
    let path = folder.path().join("model.safetensors");
    write_file(&path, &tensors, 0);
    let checkpoint = Checkpoint::open(path).unwrap();
    for target in [Target::None, Target::Host] {
        let loader = Loader::builder(target).window(Window::All).prefetch(0).dtype(FloatType::Bf16);
        let loader = loader.read_order(ReadOrder::Files).build().unwrap();
        let mut stream = loader.stream(&checkpoint).unwrap();
        let mut found = Vec::new();
        for layer in stream.by_ref() {
            let layer = layer.unwrap();
            found.push(layer.index());
            for tensor in layer.tensors().filter(|_| target == Target::Host) {
                let narrow =
                    |i: u32| half::bf16::from_f32(f32::from_bits(0x3F00_0000 | i << 3)).to_le_bytes();
                let expected: Vec<u8> = (0..450_000).flat_map(narrow).collect();
                assert!(tensor.as_bytes().unwrap() == expected, "{}", tensor.name());
            }
        }
        found.sort_unstable();
        assert_eq!(found, [0, 1, 2, 3, 4, 5]);
        assert_eq!(stream.report().tensor_bytes, tensors.len() as u64 * 900_000);
    }
}
