//! Plans for devices: whatever way tensors land, and whatever is narrowed, copies and moves bring
//! every byte to its place.
//!
//! Each plan is carried out on an arena of tags: a cell says which byte of which tensor it holds.
//! Copies run in the reverse order, since nothing promises theirs; moves run when all of them are
//! over.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]
#![allow(clippy::cast_possible_truncation, reason = "sizes of small checkpoints")]

use crate::plan_arena;

use std::path::Path;

use onelayer::checkpoint::TensorId;
use onelayer::plan::{FloatType, Landing, LoadPlan, PlanLimits, PlannedLayer, ResidentKind, TermKind};
use onelayer::units::{Alignment, KIB, MIB};
use onelayer::{Checkpoint, DType, Layers};
use onelayer_testing::{TestTensor, write_file, write_sharded};
use proptest::prelude::*;

const LANDINGS: [Landing; 2] = [Landing::Exact, Landing::InPhase];
const DTYPES: [(&str, usize); 5] = [("U8", 1), ("BF16", 2), ("F32", 4), ("F64", 8), ("I64", 8)];

fn limits(landing: Landing, dtype: Option<FloatType>) -> PlanLimits {
    let mut limits = PlanLimits::new(9 * MIB);
    (limits.landing, limits.options.dtype, limits.resident) = (landing, dtype, ResidentKind::Device);
    limits
}

/// A plan of everything that is not said to be left out.
fn plan(checkpoint: &Checkpoint, limits: &PlanLimits) -> LoadPlan {
    let layers = Layers::group(checkpoint).unwrap();
    LoadPlan::build(checkpoint, &layers, limits, |tensor| is_wanted(checkpoint, tensor)).unwrap()
}

fn is_wanted(checkpoint: &Checkpoint, tensor: TensorId) -> bool {
    !checkpoint.tensor(tensor).name.contains("left_out")
}

/// Carries out a plan of them. Returns where the last byte lies in each arena.
fn check(checkpoint: &Checkpoint, plan: &LoadPlan) -> Vec<u64> {
    plan_arena::check(checkpoint, plan, &|tensor| is_wanted(checkpoint, tensor))
}

fn copy_count(plan: &LoadPlan, layer: &PlannedLayer) -> u64 {
    layer.reads.clone().map(|index| plan.copies(&plan.read(index)).count() as u64).sum()
}

/// Carries out both plans: what landing in phase may cost, and what it has to save.
fn compare(checkpoint: &Checkpoint, dtype: Option<FloatType>) -> [LoadPlan; 2] {
    let [exact, in_phase] = LANDINGS.map(|landing| plan(checkpoint, &limits(landing, dtype)));
    assert_eq!(exact.memory().ring(), in_phase.memory().ring(), "the budget leaves room for the moves");
    assert_eq!(exact.reads().len(), in_phase.reads().len());
    let ends = check(checkpoint, &exact).into_iter().zip(check(checkpoint, &in_phase));
    for ((before, after), (exact_end, end)) in exact.layers().iter().zip(in_phase.layers()).zip(ends) {
        assert_eq!(exact.moves(before), []);
        let copies = copy_count(&in_phase, after);
        assert!(copies <= copy_count(&exact, before), "never more copies");
        let appendix_bytes = (64 * KIB).max(after.tensor_bytes / 64);
        // There are as many copies as segments at least.
        assert!(end <= exact_end + 256 * (copies + 1) + appendix_bytes, "{end}, not {exact_end}");
        assert!(in_phase.moves(after).iter().all(|step| step.len_bytes <= 64 * KIB));
    }
    [exact, in_phase]
}

/// Shards of tensors (type, elements): many small ones of odd lengths between large ones.
fn shards() -> impl Strategy<Value = Vec<Vec<(usize, usize)>>> {
    let elements = prop_oneof![
        1 => Just(0_usize),
        4 => 1..40_usize,
        4 => 40..4000_usize,
        3 => (1..60_usize).prop_map(|count| count * 128),
        2 => 9_000..120_000_usize,
        1 => 140_000..200_000_usize,
    ];
    prop::collection::vec(prop::collection::vec((0..DTYPES.len(), elements), 0..30), 1..3)
}

fn checkpoint(folder: &Path, shards: &[Vec<(usize, usize)>]) -> Checkpoint {
    let mut number = 0;
    let tensor = |&(dtype, elements): &(usize, usize)| {
        number += 1;
        let (dtype, element_bytes) = DTYPES[dtype];
        TestTensor {
            // Stretches of neighbours, and now and then a tensor that is not wanted between them.
            name: match number % 13 {
                7 => format!("model.layers.{}.left_out.n{number}", number / 11 % 3),
                _ => format!("model.layers.{}.part.n{number}.weight", number / 11 % 3),
            },
            dtype,
            shape: vec![elements as u64],
            bytes: vec![1; elements * element_bytes],
        }
    };
    let mut tensor = tensor;
    let shards: Vec<Vec<TestTensor>> =
        shards.iter().map(|shard| shard.iter().map(&mut tensor).collect()).collect();
    write_sharded(folder, &shards);
    Checkpoint::open(folder).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(onelayer_testing::all_or(30, 10)))]

    #[test]
    fn every_byte_reaches_its_place(shards in shards(), dtype in 0..4_usize) {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = checkpoint(folder.path(), &shards);
        let dtype = [None, Some(FloatType::Bf16), Some(FloatType::F16), Some(FloatType::F32)][dtype];
        let [_, in_phase] = compare(&checkpoint, dtype);
        for tensor in checkpoint.tensors().filter(|tensor| !tensor.name.contains("left_out")) {
            let wide = match dtype {
                None => false,
                Some(FloatType::F32) => tensor.dtype == DType::F64,
                Some(_) => matches!(tensor.dtype, DType::F32 | DType::F64),
            };
            let mut placements = in_phase.layers().iter().flat_map(|layer| in_phase.placements(layer));
            let placement = placements.find(|placement| placement.tensor == tensor.id).unwrap();
            let expected = if wide { dtype.unwrap().into() } else { tensor.dtype };
            prop_assert_eq!(placement.delivered_dtype(tensor.dtype), expected);
            prop_assert_eq!(placement.len_bytes() * 8, tensor.shape[0] * expected.bits().unwrap());
        }
    }
}

/// One file with these tensors of a layer: name, type, elements.
fn one_layer(path: &Path, tensors: &[(String, &'static str, usize)]) -> Checkpoint {
    let tensor = |(name, dtype, elements): &(String, &'static str, usize)| {
        let element_bytes = DType::bits(dtype.parse().unwrap()).unwrap() as usize / 8;
        let name = format!("model.layers.0.{name}");
        TestTensor { name, dtype, shape: vec![*elements as u64], bytes: vec![1; elements * element_bytes] }
    };
    write_file(path, &tensors.iter().map(tensor).collect::<Vec<_>>(), 0);
    Checkpoint::open(path).unwrap()
}

/// Weights of one byte per element, each with two scales of four bytes behind it: every weight has
/// another phase.
fn quantized(path: &Path, weights: usize) -> Checkpoint {
    let linear = |number| {
        let tensor = |name: &str, dtype, elements| (format!("part{number}.{name}"), dtype, elements);
        [
            tensor("weight", "F8_E4M3", 1 << 17),
            tensor("weight_scale", "F32", 1),
            tensor("input_scale", "F32", 1),
        ]
    };
    one_layer(path, &(0..weights).flat_map(linear).collect::<Vec<_>>())
}

#[test]
fn scales_travel_with_their_weights() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = quantized(&folder.path().join("model.safetensors"), 7);
    let [exact, in_phase] = compare(&checkpoint, None);
    let count = |plan: &LoadPlan| (copy_count(plan, &plan.layers()[0]), plan.moves(&plan.layers()[0]).len());
    assert_eq!((count(&exact), count(&in_phase)), ((14, 0), (7, 7)));
    insta::assert_snapshot!(format!("{exact:#}\n{in_phase:#}"));
}

#[test]
fn what_belongs_to_a_quantized_weight_keeps_its_type() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [
        ("down.weight", "F8_E4M3", 256),
        ("down.weight_scale", "F32", 2),
        ("down.bias", "F32", 16),
        ("up.weight", "BF16", 256),
        ("up.weight_scale", "F32", 2),
        ("steps", "I64", 4),
        ("wide", "F64", 4),
    ];
    let tensors = tensors.map(|(name, dtype, elements)| (name.to_owned(), dtype, elements));
    let checkpoint = one_layer(&folder.path().join("model.safetensors"), &tensors);
    let plan = plan(&checkpoint, &limits(Landing::InPhase, Some(FloatType::F16)));
    check(&checkpoint, &plan);
    let placements = plan.layers().iter().flat_map(|layer| plan.placements(layer));
    let narrowed = placements.filter(|placement| placement.cast.is_some());
    let names: Vec<&str> = narrowed.map(|placement| checkpoint.tensor(placement.tensor).name).collect();
    let expected = ["down.bias", "up.weight_scale", "wide"].map(|name| format!("model.layers.0.{name}"));
    assert_eq!(names, expected);
}

/// Moving everything would double the arena: only as many are moved as the appendix may hold.
#[test]
fn a_layer_of_small_tensors_stays_small() {
    let folder = tempfile::tempdir().unwrap();
    let tensors: Vec<_> = (0..300).map(|n| (format!("part{n}.x"), "U8", 20_001 - n % 7 * 3000)).collect();
    let checkpoint = one_layer(&folder.path().join("model.safetensors"), &tensors);
    compare(&checkpoint, None);
}

/// Only what follows in the same file keeps the file's spacing: nothing is gained where it does
/// not.
#[test]
fn neighbours_are_those_of_one_file_without_a_gap() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = |name: &str, len: usize| TestTensor::random(format!("model.layers.{name}"), len, 1);
    // The second file's data begins where the first one's end. A small tensor there is no neighbour of
    // a large one here.
    let (large, small) = (tensor("0.a", 100_001), tensor("0.b", 300));
    let file = |number: u32| folder.path().join(format!("model-0000{number}-of-00002.safetensors"));
    let end = |path: &Path, tensors: &[TestTensor], padding| {
        write_file(path, tensors, padding);
        std::fs::metadata(path).unwrap().len()
    };
    let first_end = end(&file(1), std::slice::from_ref(&large), 0);
    let second_start = end(&file(2), std::slice::from_ref(&small), 0) - 300;
    end(&file(2), std::slice::from_ref(&small), (first_end - second_start) as usize);
    let index = serde_json::json!({ "weight_map": {
        large.name.clone(): "model-00001-of-00002.safetensors", small.name.clone(): "model-00002-of-00002.safetensors",
    }});
    std::fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(
        checkpoint.find(&large.name).unwrap().extent.end(),
        checkpoint.find(&small.name).unwrap().extent.start()
    );
    let [_, in_phase] = compare(&checkpoint, None);
    assert!(in_phase.layers().iter().all(|layer| in_phase.moves(layer).is_empty()));

    // A tensor between them that is not wanted takes no room in the arena.
    let path = folder.path().join("gap.safetensors");
    write_file(&path, &[tensor("0.a", 1024), tensor("0.left_out", 900_000), tensor("0.b", 1024)], 0);
    compare(&Checkpoint::open(&path).unwrap(), None);
}

#[test]
fn only_what_is_small_is_moved() {
    let folder = tempfile::tempdir().unwrap();
    for (len, moves) in [(65_536, 1), (65_537, 0)] {
        let tensors =
            [("a", 9_000_001), ("b", len), ("c", 3)].map(|(name, len)| (name.to_owned(), "U8", len));
        let checkpoint = one_layer(&folder.path().join("model.safetensors"), &tensors);
        let [_, in_phase] = compare(&checkpoint, None);
        let sizes: Vec<u64> =
            in_phase.moves(&in_phase.layers()[0]).iter().map(|step| step.len_bytes).collect();
        assert_eq!(sizes.iter().filter(|&&size| size == len as u64).count(), moves, "{sizes:?}");
    }
}

/// A cut of a read that would fall into an element goes down to its start, and every read still
/// fits its slot.
#[test]
fn elements_at_odd_places_are_not_cut() {
    let folder = tempfile::tempdir().unwrap();
    for (dtype, odd) in [("F32", 3), ("F64", 5), ("F64", 8)] {
        let tensors = [("odd", "U8", odd), ("wide.weight", dtype, 1_600_000)];
        let tensors = tensors.map(|(name, dtype, elements)| (name.to_owned(), dtype, elements));
        let checkpoint = one_layer(&folder.path().join("model.safetensors"), &tensors);
        for landing in LANDINGS {
            for alignment_bytes in [4 * KIB, 256 * KIB] {
                let narrower = if dtype == "F32" { FloatType::Bf16 } else { FloatType::F32 };
                let mut limits = limits(landing, Some(narrower));
                limits.alignment = Alignment::new(alignment_bytes).unwrap();
                let plan = plan(&checkpoint, &limits);
                assert!(plan.reads().len() > 3);
                check(&checkpoint, &plan);
            }
        }
    }
}

#[test]
fn layers_on_a_device_are_no_host_memory() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = quantized(&folder.path().join("model.safetensors"), 7);
    let mut limits = limits(Landing::InPhase, None);
    let plan_of = |limits: &PlanLimits| plan(&checkpoint, limits);
    let on_device = plan_of(&limits);
    let memory = on_device.memory();
    assert_eq!(
        (memory.resident_bytes(), memory.resident_host_bytes()),
        (on_device.layers()[0].arena_bytes, 0)
    );
    limits.resident = ResidentKind::Host;
    let on_host = plan_of(&limits);
    assert_eq!(on_host.memory().resident_host_bytes(), on_host.layers()[0].arena_bytes);
    assert_eq!(on_host.memory().terms(), memory.terms());
    // Moves are held, so they are counted.
    limits.landing = Landing::Exact;
    let plan_bytes = |plan: &LoadPlan| plan.memory().bytes_of(TermKind::Plan);
    let difference = plan_bytes(&on_host) - plan_bytes(&plan_of(&limits));
    let moves = on_host.moves(&on_host.layers()[0]);
    assert_eq!(difference, size_of_val(moves) as u64);
    assert!(difference > 0);
}
